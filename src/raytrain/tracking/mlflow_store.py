"""Where MLflow runs are kept: the store's URI, a client that does not wait long for it, and the experiment."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from raytrain.config import TrackingConfig
from raytrain.errors import TrackingError
from raytrain.tracking.base import AwayError
from raytrain.tracking.provenance import without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

_PLAIN = ("sqlite", "databricks", "databricks-uc", "uc")  # URIs without "://" that are no folders

# MLflow's own defaults wait for minutes on a server that is away; the driver's thread must not. A user's values win.
# No retries in the client: the outlet tries again, and it knows what may be sent twice.
_HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
_LET_IN_LATER = (401, 403, 407, 408, 425, 429)  # besides all from 500 on


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
        self._uri = _absolute(
            config.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{self._folder}/mlflow.db"
        )
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

    def place(self, experiment: str) -> dict[str, str]:
        """Where it is, without credentials."""
        return {"uri": self.uri, "experiment": self._experiment_name(experiment), "folder": str(self._folder)}

    @property
    def is_sqlite(self) -> bool:
        """Whether it is a file, which answers or not, but never hangs."""
        return self._uri.startswith("sqlite:")

    def check(self, experiment: str) -> None:
        """See that the store answers and the experiment can be used; made when it does not exist.

        Raises:
            TrackingError: It does not; with the reason and the cure. An ``AwayError`` if it may do so later.
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

    def newest_run(self, tags: Mapping[str, str]) -> Run | None:
        """The newest run of the experiment that has these tags, or None."""
        wanted = " and ".join(f"tags.`{name}` = {_quoted(value)}" for name, value in tags.items())
        with self.refusals():
            found = self.client.search_runs(
                [self.experiment_id], filter_string=wanted, max_results=1, order_by=["attributes.start_time DESC"]
            )
        return found[0] if found else None

    def check_uri(self) -> None:
        if self._uri.startswith("file:") or ("://" not in self._uri and self._uri.split(":")[0] not in _PLAIN):
            raise TrackingError(
                f"the MLflow URI {self.uri!r} is a folder; MLflow no longer keeps runs in folders. Use a database instead, such as "
                f"tracking.uri=sqlite:///{self._folder}/mlflow.db, or unset MLFLOW_TRACKING_URI for that default."
            )
        if self._uri.startswith("http"):
            try:
                parts = urlsplit(self._uri)
                whole = bool(parts.hostname) and parts.port != 0
            except ValueError:
                whole = False
            if not whole:
                raise TrackingError(
                    f"the MLflow URI {self.uri!r} is not whole. Allowed: http(s)://host[:port][/path]. Correct tracking.uri or "
                    "MLFLOW_TRACKING_URI."
                )

    def is_outage(self, error: Exception) -> bool:
        """Whether the same may work later: nobody there, no answer in time, a fault of the server, credentials refused."""
        from mlflow.exceptions import MlflowException

        if isinstance(error, AwayError):
            return True
        if type(error).__name__ == "InvalidUrlException":
            return False
        response = getattr(error, "response", None)
        if response is not None or (self._uri.startswith("http") and isinstance(error, MlflowException)):
            status: int = error.get_http_status_code() if response is None else response.status_code  # type: ignore[attr-defined]
            was_cut = "Response body: ''" in str(error)  # an answer that was cut within its first lines
            return status >= 500 or status in _LET_IN_LATER or was_cut
        if self.is_sqlite:
            return "database is locked" in str(error)
        kinds = {kind.__name__ for kind in type(error).__mro__}
        unavailable = getattr(error, "error_code", "") == "TEMPORARILY_UNAVAILABLE"
        return unavailable or bool(kinds & {"OSError", "OperationalError", "InterfaceError"})

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Whatever MLflow raises within becomes a TrackingError, with the cure; an ``AwayError`` if it may work later."""
        try:
            yield
        except TrackingError:
            raise
        except Exception as error:
            reason = _reason(error)
            kind = AwayError if self.is_outage(error) else TrackingError
            raise kind(
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


def _quoted(value: str) -> str:
    """A value in MLflow's filter language, which knows no escapes but two kinds of quotes."""
    return f'"{value}"' if "'" in value else f"'{value}'"


def _reason(error: Exception) -> str:
    """What went wrong, without the names of the calls that it went through."""
    text = f"{type(error).__name__}: {error}"
    cause = re.search(r"\(Caused by (.+)\)", text, re.DOTALL)
    return without_secrets(cause.group(1) if cause else text)[:300]


def _absolute(uri: str) -> str:
    """A sqlite URI with the whole path of its file, so that it means the same in another folder."""
    scheme, found, path = uri.partition("sqlite:///")
    return f"sqlite:///{Path(path).absolute()}" if found and not scheme and path else uri
