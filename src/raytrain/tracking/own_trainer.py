"""MLflow for anybody's own TorchTrainer: one truthful run, in three lines, with the loop unchanged."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from raytrain.config import TrackingConfig
from raytrain.errors import ConfigError, TrackingError
from raytrain.storage import Storage
from raytrain.tracking.base import RunInfo, Status
from raytrain.tracking.collector import Collector
from raytrain.tracking.listen import Listener
from raytrain.tracking.mlflow import MlflowTracker
from raytrain.tracking.provenance import job_source
from raytrain.tracking.reported import settings
from raytrain.tracking.steps import Steps
from raytrain.tracking.translate import FOLDER, NAME, Translator

if TYPE_CHECKING:
    from mlflow.entities import Run


class MlflowTracking:
    """The MLflow run of a ``TorchTrainer``, from the first line of the block to its end.

        with MlflowTracking(experiment="cifar", name="cifar-1") as tracking:
            TorchTrainer(train_loop, run_config=RunConfig(name="cifar-1", callbacks=[tracking.callback]), ...).fit()

    The loop only calls ``ray.train.report(metrics)``. Each number is the mean over the workers, weighted by ``weight`` where they
    report it. The run ends as FINISHED, as FAILED with the error when an exception leaves the block, or as KILLED after Ctrl-C or
    SIGTERM. Only the driver speaks to MLflow.

    Args:
        experiment: MLflow experiment. Default: MLFLOW_EXPERIMENT_NAME, else ``TorchTrainer``.
        name: The name of RunConfig. The same name again goes on with the same MLflow run, as Ray goes on with the training,
            unless that run is FINISHED and had no checkpoint to go on from. Default: a new run each time.
        storage: The storage path of RunConfig, to tell runs of one name apart; a local one holds the default database.
        run_id: Go on with this MLflow run, whatever its name.
        uri: MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else ``<storage, or runs>/mlflow.db``.
        params: Params of the run. The trainer's ``train_loop_config`` is written by itself, when the first report comes.
        tags: Tags of the run.
        weight: Key of the count of samples (or tokens) behind a worker's numbers.
        per_rank: Keys of which each worker's own value is written too, as ``rank/0/loss``.
        step_key: Key that holds the step. Default: ``step``, ``global_step``, ``training_iteration`` or ``epoch``, the first that
            is reported and rises; else reports are counted.
        guard: Whether ``mlflow.log_metric`` and the like raise in workers, where they would write to a store of their own.

    Attributes:
        run_id: The MLflow run; known within the block.
    """

    def __init__(
        self,
        experiment: str | None = None,
        *,
        name: str | None = None,
        storage: str | None = None,
        run_id: str | None = None,
        uri: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        weight: str = "num_samples",
        per_rank: Sequence[str] = (),
        step_key: str | None = None,
        guard: bool = True,
    ) -> None:
        if isinstance(per_rank, str):
            raise ConfigError(
                f"per_rank = {per_rank!r} is not possible. Allowed: a list of keys, such as [{per_rank!r}]."
            )
        self.run_id = run_id or ""
        self._name, self._guard, self._per_rank, self._weight = name, guard, per_rank, weight
        self._step_key = step_key
        self._params, self._user_tags = settings(params or {}), dict(tags or {})
        self._known = {NAME: name} if name else {}
        if storage and name:
            self._known[FOLDER] = Storage(storage).child(name).uri
        self._tracker = MlflowTracker(TrackingConfig(uri=uri, experiment=experiment), storage or "runs")
        self._callback: Any = None
        self._listener: Listener | None = None

    def __enter__(self) -> MlflowTracking:
        """Open the run.

        Raises:
            TrackingError: MLflow refuses, or there is no run of ``run_id``.
        """
        self._tracker.check("TorchTrainer")
        before = self._before()
        before_tags = before.data.tags if before else {}
        steps = Steps(self._step_key, before_tags)
        self._translator = Translator(steps, self._weight, self._per_rank, self._known, _warn)
        self.run_id = self._tracker.open(self._info(before))["mlflow_run_id"]
        self._collector = Collector([self._tracker])
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the run as it really ended."""
        status, text = outcome(error)
        if self._listener is not None:
            self._listener.end(stop_training=status == "KILLED")
        _end_active(self.run_id, status)
        if status == "FINISHED" and not self._translator.num_reports:
            _warn(
                "no report came: give tracking.callback to RunConfig(callbacks=[...]), and call ray.train.report in the loop."
            )
        self._collector.close(status, text)
        print(f"MLflow run {self.run_id} is {status}: {self._tracker.browse()}", flush=True)

    @property
    def callback(self) -> Any:
        """For ``RunConfig(callbacks=[...])``: a ``ray.train.UserCallback``. Starts or joins Ray if that was not done yet."""
        if self._callback is None:
            if not self.run_id:
                raise TrackingError(
                    "the callback of MlflowTracking is there within its block: with MlflowTracking(...) as t: ..."
                )
            self._listener = Listener(self._translator, self._collector.put, _warn)
            from raytrain.tracking.forward import Forward

            self._callback = Forward(self._listener.mailbox, self._guard)
        return self._callback

    def _before(self) -> Run | None:
        """The run to go on with, if there is one."""
        store = self._tracker.store
        if self.run_id:
            with store.refusals():
                return store.client.get_run(self.run_id)
        if self._name is None:
            return None
        found = store.newest_run(self._known)
        if found and found.info.status == "FINISHED" and "raytrain.checkpoint.last" not in found.data.tags:
            return None  # Ray has nothing to go on from either: it is another training
        return found

    def _info(self, before: Run | None) -> RunInfo:
        source = job_source()
        return RunInfo(
            name=self._name or f"trainer-{datetime.datetime.now():%Y%m%d-%H%M%S}",
            task="TorchTrainer",
            attempt=1 + int(before.data.tags.get("raytrain.attempt", "1")) if before else 1,
            params=self._params,
            config_yaml=yaml.safe_dump(self._params) if self._params else "",
            job_source=str(source) if source else None,
            folder=self._known.get(FOLDER, ""),
            tags={**self._user_tags, **self._known},
            previous={"mlflow_run_id": before.info.run_id} if before else {},
        )


def outcome(error: BaseException | None) -> tuple[Status, str | None]:
    """How a block ended that was left by an exception, or by none."""
    if error is None:
        return "FINISHED", None
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", "interrupted"
    if isinstance(error, SystemExit):
        if _raised_by_ray(error):  # its handlers of Ctrl-C (with code 0) and SIGTERM end the process so
            return "KILLED", "stopped by a signal"
        return ("FINISHED", None) if not error.code else ("FAILED", f"SystemExit: {error.code}")
    by_rank = getattr(error, "worker_failures", None)
    if by_rank:
        from raytrain.tracking.forward import failures

        return "FAILED", failures(by_rank)
    return "FAILED", f"{type(error).__name__}: {error}"


def _end_active(run_id: str, status: Status) -> None:
    """A run that the user's code made MLflow's active one would be ended as FINISHED when this process ends."""
    import mlflow

    with contextlib.suppress(Exception):
        active = mlflow.active_run()
        if active is not None and active.info.run_id == run_id:
            mlflow.end_run(status)


def _raised_by_ray(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).split(".")[0] == "ray"


def _warn(text: str) -> None:
    print(f"raytrain: warning: {text}", flush=True)
