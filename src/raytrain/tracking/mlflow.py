"""One truthful MLflow run per experiment, written from the driver alone."""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain.config import TrackingConfig
from raytrain.errors import TrackingError
from raytrain.report import Event, Row
from raytrain.tracking.base import RunInfo, Status
from raytrain.tracking.names import clean_all, param_values
from raytrain.tracking.provenance import facts, without_secrets

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_MAX_METRICS = 1000  # per request, MLflow's own limit
_MAX_PARAMS = 100
_ERROR_CHARS = 4000

# MLflow's own defaults wait for minutes on a server that is away; the driver's thread must not. A user's values win.
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MlflowTracker:
    """Writes a run to MLflow by ``MlflowClient`` only: nothing is active in the process, nothing ends a run by itself.

    Args:
        config: Where and under which names.
        storage: The runs' storage; a local one holds the default database.

    Attributes:
        uri: The tracking URI.
    """

    def __init__(self, config: TrackingConfig, storage: str) -> None:
        self._config = config
        folder = Path(storage) if "://" not in storage else Path("runs").absolute()
        self._folder = folder
        self.uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.absolute()}/mlflow.db"
        self._lazy_client: MlflowClient | None = None
        self._run_id = ""
        self._experiment_id = ""
        self._seen: dict[str, int] = {}
        self._names: dict[str, str] = {}
        self._told: set[str] = set()

    @property
    def _client(self) -> MlflowClient:
        """MLflow takes a second to import: only the driver does it, and only when it is used."""
        if self._lazy_client is None:
            for name, value in _HTTP.items():
                os.environ.setdefault(name, value)
            for name in ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent"):
                logging.getLogger(name).setLevel(logging.ERROR)
            from mlflow.tracking import MlflowClient

            self._lazy_client = MlflowClient(tracking_uri=self.uri)
        return self._lazy_client

    def check(self, experiment: str = "raytrain") -> None:
        """See that the store answers and the experiment can be used; made when it does not exist.

        Raises:
            TrackingError: It does not; with the reason and the cure.
        """
        if self.uri.startswith("file:") or ("://" not in self.uri and not self.uri.startswith("sqlite:")):
            raise TrackingError(
                f"the MLflow URI {without_secrets(self.uri)!r} is a folder; MLflow no longer keeps runs in folders. Use a "
                f"database instead, such as tracking.uri=sqlite:///{self._folder.absolute()}/mlflow.db, or unset "
                "MLFLOW_TRACKING_URI for that default."
            )
        name = self._experiment_name(experiment)
        try:
            if self.uri.startswith("sqlite:///"):
                Path(self.uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            found = self._client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"the MLflow experiment {name!r} was deleted. Restore it (mlflow experiments restore -x "
                    f"{found.experiment_id}), or choose another tracking.experiment."
                )
            self._experiment_id = found.experiment_id if found else self._create_experiment(name)
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(
                f"MLflow at {without_secrets(self.uri)} does not answer: {type(error).__name__}: {str(error)[:300]}. Start the "
                "server, correct tracking.uri or MLFLOW_TRACKING_URI, or train without it (tracking.mlflow=false)."
            ) from None

    def _experiment_name(self, default: str) -> str:
        return self._config.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or default

    def _create_experiment(self, name: str) -> str:
        location = (self._folder / "mlartifacts").absolute().as_uri() if self.uri.startswith("sqlite:") else None
        return self._client.create_experiment(name, artifact_location=location)

    def open(self, run: RunInfo) -> dict[str, str]:
        """Begin the run, or go on with the one of the start before."""
        if not self._experiment_id:
            self.check(run.task)
        self._run_id = self._existing(run) or self._create(run)
        self._log_params(run)
        self._upload(run)
        return {"mlflow_run_id": self._run_id, "mlflow_uri": without_secrets(self.uri)}

    def _existing(self, run: RunInfo) -> str | None:
        run_id = run.previous.get("mlflow_run_id")
        if not run_id:
            return None
        try:
            found = self._client.get_run(run_id)
        except Exception:
            self._tell(
                f"the MLflow run {run_id} of the earlier start is not at {without_secrets(self.uri)}; a new one begins."
            )
            return None
        self._client.update_run(run_id, status="RUNNING")
        self._client.set_tag(run_id, "raytrain.attempt", str(run.attempt))
        for name in found.data.metrics:
            self._seen[name] = max(point.step for point in self._client.get_metric_history(run_id, name))
        return run_id

    def _create(self, run: RunInfo) -> str:
        tags = {
            **facts(run.job_source),
            "raytrain.attempt": str(run.attempt),
            "raytrain.folder": without_secrets(run.folder),
            **{f"raytrain.data.{d['name']}.num_rows": str(d["num_rows"]) for d in run.datasets},
            **run.tags,
        }
        created = self._client.create_run(self._experiment_id, run_name=run.name, tags=tags)
        run_id: str = created.info.run_id
        return run_id

    def _log_params(self, run: RunInfo) -> None:
        """Params cannot change in MLflow: what a later start changed becomes a tag."""
        from mlflow.entities import Param

        present = self._client.get_run(self._run_id).data.params
        wanted = param_values(run.params)
        new = [Param(name, value) for name, value in wanted.items() if name not in present]
        for start in range(0, len(new), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=new[start : start + _MAX_PARAMS])
        for name, value in wanted.items():
            if name in present and present[name] != value and not name.startswith("run."):
                self._client.set_tag(self._run_id, f"raytrain.changed.{name}", f"{present[name]} -> {value}")

    def _upload(self, run: RunInfo) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder, "config.yaml")
            config.write_text(run.config_yaml)
            files = [config, *([Path(run.job_source)] if run.job_source else [])]
            for file in files:
                try:
                    self._client.log_artifact(self._run_id, str(file), "job")
                except Exception as error:
                    self._tell(f"MLflow did not take the artifact {file.name}: {str(error)[:200]}")

    def log(self, rows: Sequence[Row]) -> None:
        """Write rows in few requests. A later start never writes a (metric, step) twice."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = []
        for row in rows:
            for name, value in {**row.values, "epoch": row.epoch}.items():
                key = self._name(name)
                number = self._number(name, value)
                if number is not None and row.step > self._seen.get(key, -1):
                    points.append(Metric(key, number, now_ms, row.step))
        for start in range(0, len(points), _MAX_METRICS):
            batch = points[start : start + _MAX_METRICS]
            self._client.log_batch(self._run_id, metrics=batch)
            for point in batch:
                self._seen[point.key] = point.step

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names = clean_all([*self._names, name])
            if self._names[name] != name:
                self._tell(f"MLflow does not allow the metric name {name!r}; it is written as {self._names[name]!r}.")
        return self._names[name]

    def _number(self, name: str, value: Any) -> float | None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            self._tell(f"the metric {name!r} is {value!r}, not a number; MLflow does not get it.")
            return None
        if math.isinf(number):
            # MLflow's database gives infinity back as 1.8e308, a number that never was: NaN shows that there was none.
            self._tell(f"the metric {name!r} was infinite; MLflow shows it as NaN.")
            return math.nan
        return number

    def event(self, event: Event) -> None:
        """Keep what happened as tags."""
        tags: Mapping[str, str] = {}
        if event.kind in ("checkpoint", "best"):
            tags = {"raytrain.checkpoint.last": f"{event.data['uri']}"}
            if event.kind == "best":
                tags = {**tags, "raytrain.checkpoint.best": f"{event.data['uri']}"}
        elif event.kind == "started":
            tags = {"raytrain.world_size": f"{event.data['world_size']}", "raytrain.device": f"{event.data['device']}"}
        elif event.kind == "finished":
            tags = {"raytrain.end": f"{event.data['reason']}"}
        for name, value in tags.items():
            self._client.set_tag(self._run_id, name, value)

    def close(self, status: Status, error: str | None) -> None:
        """End the run with its true status, and the error's text."""
        if error:
            self._client.set_tag(self._run_id, "raytrain.error", without_secrets(error)[:_ERROR_CHARS])
        self._client.set_terminated(self._run_id, status)

    def browse(self) -> str:
        """The one command, or address, to look at the run."""
        if self.uri.startswith("http"):
            return f"{without_secrets(self.uri)}/#/experiments/{self._experiment_id}/runs/{self._run_id}"
        command = Path(sys.executable).parent / "mlflow"  # of this environment, whether it is activated or not
        return f"{command if command.exists() else 'mlflow'} ui --backend-store-uri '{without_secrets(self.uri)}'"

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            print(f"raytrain: warning: {text}", flush=True)
