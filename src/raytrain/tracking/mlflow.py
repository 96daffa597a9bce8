"""One truthful MLflow run per experiment, written from the driver alone."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.config import TrackingConfig
from raytrain.errors import ConfigError
from raytrain.report import Event, Row
from raytrain.tracking.base import RefusedError, RunInfo, Status
from raytrain.tracking.mlflow_models import REFERRED, Kept, ModelBook, kept_in, reason
from raytrain.tracking.mlflow_start import MlflowStart, Opened
from raytrain.tracking.mlflow_store import MlflowStore
from raytrain.tracking.names import INFINITE, Cleaner, fit, tag_values
from raytrain.tracking.provenance import without_secrets

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_MAX_METRICS = 1000  # per request, MLflow's own limit
_ERROR_CHARS = 4000


class MlflowTracker:
    """Writes a run to MLflow by ``MlflowClient`` only: nothing is active in the process, nothing ends a run by itself.

    Sets short limits for MLflow's HTTP client in the environment of this process, where they are not set.

    Args:
        config: Where and under which names.
        storage: The runs' storage; a local one holds the default database.

    Attributes:
        store: The tracking store and its experiment.
    """

    may_be_away = True  # what it cannot send is kept on disk

    def __init__(self, config: TrackingConfig, storage: str) -> None:
        self.store = MlflowStore(config, storage)
        self._strict = config.strict
        self._now = Opened("")
        self._attempt = 0
        self._start: MlflowStart | None = None
        self._had_trouble = False
        self._folder = ""
        self._refers = config.log_model == "none"
        self._kept: dict[str, Kept] = {}  # the best and the last checkpoint
        self._cleaner = Cleaner(self._tell)
        self._told: set[str] = set()

    @classmethod
    def at(cls, place: Mapping[str, str]) -> MlflowTracker:
        """The tracker that writes where another one did, in another process.

        Raises:
            ConfigError: The place had credentials, which are not written down; with the cure.
        """
        uri: str | None = place["uri"]
        if "***@" in place["uri"]:
            if without_secrets(os.environ.get("MLFLOW_TRACKING_URI", "")) != uri:
                raise ConfigError(
                    f"MLflow at {uri} was used with credentials. Set MLFLOW_TRACKING_URI to it, with them."
                )
            uri = None
        return cls(TrackingConfig(uri=uri, experiment=place["experiment"]), place["folder"])

    @property
    def may_hang(self) -> bool:
        """Whether an answer may take for ever."""
        return not self.store.is_sqlite

    def load(self) -> None:
        """Import MLflow now, a matter of seconds, so that no time limit for its server counts that."""
        import mlflow.tracking  # noqa: F401

    def place(self, experiment: str) -> dict[str, str]:
        """Where it writes, for ``at``; an experiment that is not set is named after the task."""
        return self.store.place(experiment)

    @property
    def uri(self) -> str:
        """The tracking URI, without credentials."""
        return self.store.uri

    @property
    def _client(self) -> MlflowClient:
        return self.store.client

    def check(self, experiment: str = "raytrain") -> None:
        """See that the store answers and the experiment can be used; made when it does not exist.

        Raises:
            TrackingError: It does not; with the reason and the cure. An ``AwayError`` if it may do so later.
        """
        self.store.check(experiment)

    def open(self, run: RunInfo) -> dict[str, str]:
        """Begin the run, or go on with the one of the start before.

        Raises:
            TrackingError: MLflow refuses; an ``AwayError`` if it is away.
        """
        if not self.store.experiment_id:
            self.check(run.task)
        self._attempt, self._folder, self._cleaner = run.attempt, run.folder, Cleaner(self._tell)
        with self.store.refusals():
            self._start = MlflowStart(self.store, run, self._tell)
            try:
                self._now = self._start.open()
                self._kept = kept_in(self._now.tags)
            except Exception as error:
                self._had_trouble = True
                self._give_up(error)
                raise
        return {"mlflow_run_id": self._now.run_id, "mlflow_uri": self.uri, "mlflow_browse": self.browse()}

    def _give_up(self, error: Exception) -> None:
        """No run that will not be opened again stays RUNNING; the error itself matters more."""
        run_id = self._start.run_id if self._start is not None else ""
        if run_id and (self._strict or not self.store.is_outage(error)):
            with contextlib.suppress(Exception):
                self._client.set_terminated(run_id, "FAILED")

    def log(self, rows: Sequence[Row]) -> None:
        """Write rows in few requests. A later start never writes a (metric, step) twice."""
        from mlflow.entities import Metric

        if self._now.is_past:
            return
        now_ms, points = int(time.time() * 1000), []
        infinite: dict[str, str] = {}
        for row in rows:
            epoch = {} if math.isnan(row.epoch) else {"epoch": row.epoch}
            for name, value in {**row.values, **epoch}.items():
                key, as_number = self._cleaner.name(name), self._cleaner.number(name, value)
                if as_number is not None and math.isinf(as_number):
                    infinite.setdefault(f"{INFINITE}{key}", f"{as_number} at step {row.step}")
                    as_number = math.nan
                if as_number is not None and row.step > self._now.seen.get(key, -1):
                    # A batch whose answer got lost is sent again; only with the same time stamps does MLflow drop it as known.
                    points.append(Metric(key, as_number, row.time_ms or now_ms, row.step))
        with self._refused_items():
            for start in range(0, len(points), _MAX_METRICS):
                batch = points[start : start + _MAX_METRICS]
                self._client.log_batch(self._now.run_id, metrics=batch)
                self._now.seen.update({point.key: point.step for point in batch})
            first = {name: text for name, text in infinite.items() if name not in self._now.infinite}
            self._set_tags(first)
            self._now.infinite |= first.keys()

    def event(self, event: Event) -> None:
        """Keep what happened as tags."""
        if self._now.is_past:
            return
        data = event.data
        with self._refused_items():
            if event.kind in ("checkpoint", "best"):
                self._keep(event)
            elif event.kind == "started":
                self._count_start(event)
            elif event.kind == "finished":
                self._set_tags({"raytrain.end": data["reason"]})
            elif event.kind == "tags":
                self._set_tags(data)
            elif event.kind == "params" and self._start is not None:
                self._start.add_params(data)

    def _keep(self, event: Event) -> None:
        data: Any = event.data
        kept = Kept(data["uri"], event.step, data.get("metrics", {}))
        kinds = ("last", "best") if event.kind == "best" else ("last",)
        self._set_tags({name: value for kind in kinds for name, value in kept.tags(kind).items()})
        self._kept |= dict.fromkeys(kinds, kept)

    def _count_start(self, event: Event) -> None:
        """An event may come again, after an outage or from a spool: its number tells whether it was counted."""
        number = f"{self._attempt}.{event.number}" if event.number else ""
        if number and _as_pair(number) <= _as_pair(self._now.last_start):
            return
        starts = self._now.num_starts + 1
        place = {f"raytrain.{name}": event.data[name] for name in ("world_size", "device") if name in event.data}
        self._set_tags({"raytrain.worker_starts": starts, "raytrain.worker_starts.last": number, **place})
        self._now.num_starts, self._now.last_start = starts, number

    def close(self, status: Status, error: str | None, time_s: float | None = None) -> None:
        """End the run with its true status, and the error's text; then refer to its checkpoints as models."""
        if self._now.is_past:
            return
        try:
            if error:
                self._set_tags({"raytrain.error": fit(error, _ERROR_CHARS)})
            if self._had_trouble and self._start is not None:
                for run_id in self._start.twins(self._now.run_id):
                    self._client.delete_run(run_id)
        finally:
            end_ms = None if time_s is None else int(time_s * 1000)
            self._client.set_terminated(self._now.run_id, status, end_ms)
        try:
            self._refer()
        except Exception as failure:
            self._tell(f"MLflow did not take the checkpoints as models: {reason(failure)}", "models")

    def _refer(self) -> None:
        """A reference for each checkpoint that is not logged whole; MLflow shows them as the run's models."""
        best, last = self._kept.get("best"), self._kept.get("last")
        if self._refers and last is not None and self._folder:
            extra = {f"{REFERRED}-last": last} if best and best.step != last.step else {}
            self.book.refer({REFERRED: best or last, **extra}, self._folder)

    @property
    def is_open(self) -> bool:
        """Whether the run is known."""
        return bool(self._now.run_id)

    @property
    def book(self) -> ModelBook:
        """The models of the run."""
        return ModelBook(self._client, self._now.run_id, self.store.experiment_id)

    @contextlib.contextmanager
    def uploading(self) -> Iterator[ModelBook]:
        """The models of the run, within a block that gives MLflow time for large files; whether it answers is seen first."""
        self._client.get_run(self._now.run_id)
        with self.store.patient():
            yield self.book

    def attach(self, run_id: str) -> None:
        """Stand on a run that has ended.

        Raises:
            TrackingError: MLflow does not answer, or has no such run.
        """
        with self.store.refusals():
            self.store.experiment_id = self._client.get_run(run_id).info.experiment_id
        self._now = Opened(run_id)

    def mend(self, run: RunInfo, status: Status, error: str, time_s: float) -> bool:
        """Give a run that was left open its end; False when there is none, or it has one.

        Raises:
            TrackingError: MLflow is away or refuses.
        """
        self.check(run.task)
        with self.store.refusals():
            found = MlflowStart(self.store, run, self._tell).existing()
            if found is None or found.info.status != "RUNNING":
                return False
            self._now = Opened(found.info.run_id)
            self.close(status, error, time_s)
            return True

    def browse(self) -> str:
        """The one command, or address, to look at the run."""
        return self.store.browse(self._now.run_id)

    def _set_tags(self, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        if tags:
            wanted = [RunTag(name, value) for name, value in tag_values(tags).items()]
            self._client.log_batch(self._now.run_id, tags=wanted)

    @contextlib.contextmanager
    def _refused_items(self) -> Iterator[None]:
        """What MLflow will not take, however often it is asked, becomes a RefusedError. A run that is deleted may come back."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code == "INVALID_PARAMETER_VALUE" and "state" not in str(error):
                raise RefusedError(str(error)) from None
            raise

    def _tell(self, text: str, once_for: str = "") -> None:
        if (once_for or text) not in self._told:
            self._told.add(once_for or text)
            print(f"raytrain: warning: {without_secrets(text)}", flush=True)


def _as_pair(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split(".")) if number else ()
