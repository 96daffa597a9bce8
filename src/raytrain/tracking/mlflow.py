"""One truthful MLflow run per experiment, written from the driver alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.config import TrackingConfig
from raytrain.report import Event, Row
from raytrain.tracking.base import RunInfo, Status
from raytrain.tracking.mlflow_inputs import log_datasets, log_job, send_params
from raytrain.tracking.mlflow_models import REFERRED, Kept, ModelBook, kept_in, reason
from raytrain.tracking.mlflow_store import MlflowStore
from raytrain.tracking.names import Cleaner, clean, fit, param_values, tag_values
from raytrain.tracking.provenance import facts, without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_MAX_METRICS = 1000  # per request, MLflow's own limit
_MAX_PARAMS = 100
_ERROR_CHARS = 4000
_CHANGE_CHARS = 500


class MlflowTracker:
    """Writes a run to MLflow by ``MlflowClient`` only: nothing is active in the process, nothing ends a run by itself.

    Sets short limits for MLflow's HTTP client in the environment of this process, where they are not set.

    Args:
        config: Where and under which names.
        storage: The runs' storage; a local one holds the default database.
    """

    def __init__(self, config: TrackingConfig, storage: str) -> None:
        self._store = MlflowStore(config, storage)
        self._run_id = ""
        self._folder = ""
        self._refers = config.log_model == "none"
        self._kept: dict[str, Kept] = {}  # the best and the last checkpoint
        self._num_starts = 0
        self._seen: dict[str, int] = {}
        self._cleaner = Cleaner(self._tell)
        self._first_try_ms: dict[int, int] = {}
        self._told: set[str] = set()

    @property
    def uri(self) -> str:
        """The tracking URI, without credentials."""
        return self._store.uri

    @property
    def _client(self) -> MlflowClient:
        return self._store.client

    def check(self, experiment: str = "raytrain") -> None:
        """See that the store answers and the experiment can be used; made when it does not exist.

        Raises:
            TrackingError: It does not; with the reason and the cure.
        """
        self._store.check(experiment)

    def open(self, run: RunInfo) -> dict[str, str]:
        """Begin the run, or go on with the one of the start before.

        Raises:
            TrackingError: MLflow refuses, or went away since ``check``.
        """
        if not self._store.experiment_id:
            self.check(run.task)
        self._folder = run.folder
        with self._store.refusals():
            before = self._existing(run)
            try:
                if before is None:
                    self._create(run)
                else:
                    self._go_on(run, before)
                self._log_params(run, before.data.params if before else {})
                log_datasets(self._client, self._run_id, run, self._tell)
                log_job(self._client, self._run_id, run, self._tell)
            except Exception:
                with contextlib.suppress(Exception):  # no run stays RUNNING; the error itself matters more
                    if self._run_id:
                        self._client.set_terminated(self._run_id, "FAILED")
                raise
        return {"mlflow_run_id": self._run_id, "mlflow_uri": self.uri}

    def _existing(self, run: RunInfo) -> Run | None:
        from mlflow.exceptions import MlflowException

        run_id = run.previous.get("mlflow_run_id")
        if not run_id:
            return None
        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise  # a server in trouble must not make a second run of one experiment
            self._tell(f"the MLflow run {run_id} of the earlier start is not at {self.uri}; a new one begins.")
            return None
        if found.info.lifecycle_stage == "deleted":
            self._tell(f"the MLflow run {run_id} of the earlier start was deleted; a new one begins.")
            return None
        return found

    def _go_on(self, run: RunInfo, before: Run) -> None:
        self._run_id = before.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        # MLflow's latest point of a metric is the one with the highest step; its public view drops the step.
        self._seen = {point.key: point.step for point in before.data.to_proto().metrics}
        tags, now = before.data.tags, facts(run.job_source)
        self._kept = kept_in(tags)
        self._num_starts = int(tags.get("raytrain.worker_starts", "0"))
        self._set_tags({"raytrain.attempt": run.attempt})
        if "raytrain.error" in tags:
            self._set_tags({"raytrain.error.before": tags["raytrain.error"]})
            self._client.delete_tag(self._run_id, "raytrain.error")
        commit = "mlflow.source.git.commit"
        if tags.get(commit) != now.get(commit):
            self._set_tags({"raytrain.changed.commit": f"{tags.get(commit)} -> {now.get(commit)}"})

    def _create(self, run: RunInfo) -> None:
        data = {f"raytrain.data.{d['name']}.num_rows": d["num_rows"] for d in run.datasets if "num_rows" in d}
        own = {**facts(run.job_source), "raytrain.attempt": run.attempt, "raytrain.folder": run.folder, **data}
        tags = tag_values({**own, **run.tags})
        self._run_id = self._client.create_run(self._store.experiment_id, run_name=run.name, tags=tags).info.run_id

    def _log_params(self, run: RunInfo, present: Mapping[str, str]) -> None:
        """Params cannot change in MLflow: what a later start changed becomes a tag."""
        from mlflow.entities import Param

        wanted = param_values(run.params)
        new = [Param(name, value) for name, value in wanted.items() if name not in present]
        for start in range(0, len(new), _MAX_PARAMS):
            send_params(self._client, self._run_id, new[start : start + _MAX_PARAMS], self._tell)
        changes = {
            clean(f"raytrain.changed.{name}"): f"{fit(present[name], _CHANGE_CHARS)} -> {fit(value, _CHANGE_CHARS)}"
            for name, value in wanted.items()
            if present.get(name, value) != value and not name.startswith("run.")
        }
        self._set_tags(changes)

    def _set_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        if tags:
            self._client.log_batch(self._run_id, tags=[RunTag(name, value) for name, value in tag_values(tags).items()])

    def log(self, rows: Sequence[Row]) -> None:
        """Write rows in few requests. A later start never writes a (metric, step) twice."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        points = []
        for row in rows:
            # A batch whose answer got lost is sent again; only with its first time stamps does MLflow drop it as known.
            first_ms = self._first_try_ms.setdefault(row.step, now_ms)
            for name, value in {**row.values, "epoch": row.epoch}.items():
                key, as_number = self._cleaner.name(name), self._cleaner.number(name, value)
                if as_number is not None and row.step > self._seen.get(key, -1):
                    points.append(Metric(key, as_number, first_ms, row.step))
        for start in range(0, len(points), _MAX_METRICS):
            batch = points[start : start + _MAX_METRICS]
            self._client.log_batch(self._run_id, metrics=batch)
            self._seen.update({point.key: point.step for point in batch})
        self._first_try_ms.clear()

    def event(self, event: Event) -> None:
        """Keep what happened as tags."""
        data = event.data
        if event.kind in ("checkpoint", "best"):
            self._keep(event)
        elif event.kind == "started":
            starts = self._num_starts + 1  # counted when it is written: an event may come again after an outage
            place = {"raytrain.world_size": data["world_size"], "raytrain.device": data["device"]}
            self._set_tags({"raytrain.worker_starts": starts, **place})
            self._num_starts = starts
        elif event.kind == "finished":
            self._set_tags({"raytrain.end": data["reason"]})

    def _keep(self, event: Event) -> None:
        data: Any = event.data
        kept = Kept(data["uri"], event.step, data.get("metrics", {}))
        kinds = ("last", "best") if event.kind == "best" else ("last",)
        self._set_tags({name: value for kind in kinds for name, value in kept.tags(kind).items()})
        self._kept |= dict.fromkeys(kinds, kept)

    def close(self, status: Status, error: str | None) -> None:
        """End the run with its true status, and the error's text; then refer to its checkpoints as models."""
        try:
            if error:
                self._set_tags({"raytrain.error": fit(error, _ERROR_CHARS)})
        finally:
            self._client.set_terminated(self._run_id, status)
        try:
            self._refer()
        except Exception as failure:
            self._tell(f"MLflow did not take the checkpoints as models: {reason(failure)}", "models")

    def _refer(self) -> None:
        """A reference for each checkpoint that is not logged whole; MLflow shows them as the run's models."""
        best, last = self._kept.get("best"), self._kept.get("last")
        if self._refers and last is not None:
            extra = {f"{REFERRED}-last": last} if best and best.step != last.step else {}
            self.book.refer({REFERRED: best or last, **extra}, self._folder)

    @property
    def book(self) -> ModelBook:
        """The models of the run."""
        return ModelBook(self._client, self._run_id, self._store.experiment_id)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[ModelBook]:
        """The models of the run, within a block that gives MLflow time for large files; whether it answers is seen first."""
        self._client.get_run(self._run_id)
        with self._store.patient():
            yield self.book

    def attach(self, run_id: str) -> None:
        """Stand on a run that has ended.

        Raises:
            TrackingError: MLflow does not answer, or has no such run.
        """
        with self._store.refusals():
            self._store.experiment_id = self._client.get_run(run_id).info.experiment_id
        self._run_id = run_id

    def browse(self) -> str:
        """The one command, or address, to look at the run."""
        return self._store.browse(self._run_id)

    def _tell(self, text: str, once_for: str = "") -> None:
        if (once_for or text) not in self._told:
            self._told.add(once_for or text)
            print(f"raytrain: warning: {without_secrets(text)}", flush=True)
