"""Where MLflow runs are kept: the store's URI, a client that does not wait long for it, and the experiment."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain.config import TrackingConfig
from raytrain.errors import TrackingError
from raytrain.tracking.provenance import without_secrets

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_PLAIN = ("sqlite", "databricks", "databricks-uc", "uc")  # URIs without "://" that are no folders

# MLflow's own defaults wait for minutes on a server that is away; the driver's thread must not. A user's values win.
# One retry comes at once; from the second on MLflow's client would wait for seconds, and the collector tries again anyway.
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MlflowStore:
    """A tracking store and the experiment in it.

    Args:
        config: Which store and experiment.
        storage: The runs' storage; a local one holds the default database.

    Attributes:
        experiment_id: Known after ``check``.
    """

    def __init__(self, config: TrackingConfig, storage: str) -> None:
        self._config = config
        self._folder = Path(storage if "://" not in storage else "runs").absolute()
        self._uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self._folder}/mlflow.db"
        self._lazy_client: MlflowClient | None = None
        self.experiment_id = ""

    @property
    def uri(self) -> str:
        """The tracking URI, without credentials."""
        return without_secrets(self._uri)

    @property
    def raw_uri(self) -> str:
        """The tracking URI as MLflow needs it; not to be shown."""
        return self._uri

    @property
    def client(self) -> MlflowClient:
        """MLflow takes a second to import: only the driver does it, and only when it is used."""
        if self._lazy_client is None:
            for name, value in _HTTP.items():
                os.environ.setdefault(name, value)
            for name in ("alembic", "mlflow.store.db.utils", "mlflow.tracking.fluent"):
                logging.getLogger(name).setLevel(logging.ERROR)
            from mlflow.tracking import MlflowClient

            self._lazy_client = MlflowClient(tracking_uri=self._uri)
        return self._lazy_client

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """Within the block MLflow waits as long as it does by itself: an upload of a model takes its time."""
        ours = {name: value for name, value in _HTTP.items() if os.environ.get(name) == value}
        for name in ours:
            del os.environ[name]
        try:
            yield
        finally:
            os.environ.update(ours)

    def check(self, experiment: str) -> None:
        """See that the store answers and the experiment can be used; made when it does not exist.

        Raises:
            TrackingError: It does not; with the reason and the cure.
        """
        self.check_uri()
        name = self._experiment_name(experiment)
        with self.refusals():
            if self._uri.startswith("sqlite:///"):
                Path(self._uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
            found = self.client.get_experiment_by_name(name)
            if found is not None and found.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"the MLflow experiment {name!r} was deleted. Restore it (mlflow experiments restore -x "
                    f"{found.experiment_id}), or choose another tracking.experiment."
                )
            self.experiment_id = found.experiment_id if found else self._create_experiment(name)

    def check_uri(self) -> None:
        """That the URI is of a kind that MLflow still keeps runs in.

        Raises:
            TrackingError: It is not; with the cure.
        """
        if self._uri.startswith("file:") or ("://" not in self._uri and self._uri.split(":")[0] not in _PLAIN):
            raise TrackingError(
                f"the MLflow URI {self.uri!r} is a folder; MLflow no longer keeps runs in folders. Use a database instead, such as "
                f"tracking.uri=sqlite:///{self._folder}/mlflow.db, or unset MLFLOW_TRACKING_URI for that default."
            )

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Whatever MLflow raises within becomes a TrackingError, with the cure."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            reason = without_secrets(f"{type(error).__name__}: {error}")[:300]
            raise TrackingError(
                f"MLflow at {self.uri} does not answer as it should: {reason}. Start the server, correct tracking.uri or "
                "MLFLOW_TRACKING_URI, or train without it (tracking.mlflow=false)."
            ) from None

    def _experiment_name(self, default: str) -> str:
        return self._config.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or default

    def _create_experiment(self, name: str) -> str:
        location = (self._folder / "mlartifacts").as_uri() if self._uri.startswith("sqlite:") else None
        return self.client.create_experiment(name, artifact_location=location)

    def browse(self, run_id: str) -> str:
        """The one command, or address, to look at a run."""
        if self._uri.startswith("http"):
            return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{run_id}"
        command = Path(sys.executable).parent / "mlflow"  # of this environment, whether it is activated or not
        return f"{command if command.exists() else 'mlflow'} ui --backend-store-uri '{self.uri}'"
