"""Training on Ray: connect or start it, see that it has what is asked for, run a TorchTrainer, listen meanwhile."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raytrain.config import RunConfig, ScalingConfig
from raytrain.errors import WorkerError
from raytrain.mailbox import Mailbox, forward_to
from raytrain.ray_connection import as_ray_scaling, check_resources, ray_running
from raytrain.report import Report
from raytrain.runtime import StopFlag
from raytrain.signals import stopping_on_signals
from raytrain.work import Job

_DEAD = {"WorkerHealthCheckFailedError", "RayActorError", "ActorDiedError", "ActorUnavailableError"}
_POLL_S = "0.5"  # Ray's default of 2 s delays the end of a run and the notice of a failure by as much


def train_on_ray(
    job: Job,
    scaling: ScalingConfig,
    run: RunConfig,
    deliver: Callable[[Report], None],
    stop: StopFlag,
    callbacks: Sequence[Any] = (),
    sets: Mapping[str, Any] | None = None,
) -> None:
    """Train on a Ray cluster, or on an embedded one when there is none; returns when all workers have ended.

    Raises:
        ConfigError: The cluster does not have the resources that are asked for.
        WorkerError: The training failed; the text is that of the worker that failed first.
    """
    with ray_running():
        check_resources(scaling, reads_ray_data=bool(sets))
        import ray

        node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=node).remote()
        # Only now: ray.init sets signal handlers of its own.
        with listening(mailbox, deliver, stop), stopping_on_signals(stop):
            try:
                _aside(trainer(job, scaling, run, mailbox, callbacks, sets or {}).fit)
            except Exception as error:
                raise WorkerError(_cause(error, ray.get(mailbox.failures.remote()))) from None


def _aside(work: Callable[[], Any]) -> None:
    """Do it on a thread, so that the main thread is free for signals: Ray Train's own handler would end at once on Ctrl-C."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="raytrain-fit", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise failures[0]


def trainer(
    job: Job, scaling: ScalingConfig, run: RunConfig, mailbox: Any, callbacks: Sequence[Any], sets: Mapping[str, Any]
) -> Any:
    """The TorchTrainer of a job."""
    from ray.train import FailureConfig, LoggingConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train.torch import TorchTrainer

    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", _POLL_S)
    return TorchTrainer(
        _worker_main,
        train_loop_config={"job": job, "mailbox": mailbox},
        scaling_config=as_ray_scaling(scaling),
        datasets=dict(sets) or None,
        dataset_config=whole_shards() if sets else None,
        run_config=RayRunConfig(
            name="ray",
            storage_path=job.folder.path,
            storage_filesystem=job.folder.filesystem,
            failure_config=FailureConfig(max_failures=run.max_failures),
            callbacks=[forward_to(mailbox), *callbacks],
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


def whole_shards() -> Any:
    """How Ray Data is dealt to workers: all rows, where Ray's default leaves some out to make shards of equal length."""
    from ray.train import DataConfig

    class WholeShards(DataConfig):  # type: ignore[misc]
        def configure(
            self, datasets: Any, world_size: int, worker_handles: Any, worker_node_ids: Any, **more: Any
        ) -> list[dict[str, Any]]:
            shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
            for name, dataset in datasets.items():
                copied = dataset.copy(dataset)
                copied.context.execution_options = self._resolve_execution_options(name)
                split = copied.streaming_split(world_size, equal=False, locality_hints=worker_node_ids)
                for rank, shard in enumerate(split):
                    shards[rank][name] = shard
            return shards

    return WholeShards()


def _worker_main(config: Mapping[str, Any]) -> None:
    import ray

    from raytrain.mlflow_guard import refuse_mlflow
    from raytrain.ray_worker import RayRuntime, printing_through
    from raytrain.work import is_secondary, work

    refuse_mlflow()
    mailbox = config["mailbox"]
    runtime = RayRuntime(mailbox)
    if runtime.placement.rank == 0:
        ray.get(mailbox.begin.remote())
    try:
        with printing_through(lambda line: mailbox.say.remote(runtime.placement.rank, line)):
            work(config["job"], runtime)
    except WorkerError as error:
        ray.get(mailbox.fail.remote(is_secondary(error.__cause__ or error), str(error)))
        raise WorkerError(str(error), error.rank, error.step) from None


@contextlib.contextmanager
def listening(mailbox: Any, deliver: Callable[[Report], None], stop: StopFlag) -> Iterator[None]:
    """Carry reports from the mailbox to the driver, and the wish to stop to the mailbox, while the block runs."""
    import ray

    done = threading.Event()

    def carry() -> None:
        told = False
        while True:
            last_round = done.is_set()
            if stop.is_set() and not told:
                ray.get(mailbox.stop.remote())
                told = True
            reports, lines = ray.get(mailbox.take.remote(0.0 if last_round else 0.2))
            for rank, line in lines:
                print(f"[rank {rank}] {line}", flush=True)
            for report in reports:
                deliver(report)
            if last_round and not reports:
                return

    thread = threading.Thread(target=carry, name="raytrain-listen", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=30)


def _cause(error: Exception, said: Sequence[tuple[bool, str]]) -> str:
    """What really happened: a worker's own error, else a worker that died without a word, else what others noticed."""
    for secondary, text in said:
        if not secondary:
            return text
    failures: Mapping[int, Exception] = getattr(error, "worker_failures", {})
    dead = [
        rank for rank, failure in failures.items() if _DEAD & {type(failure).__name__, type(failure.__cause__).__name__}
    ]
    if dead:
        ranks = ", ".join(f"rank {rank}" for rank in sorted(dead))
        return (
            f"{ranks} died without a word: the process was killed (signal 9, often because the machine ran out of memory) or "
            "crashed in native code. Set run.max_failures to start again from the last checkpoint after such a loss; use a "
            "smaller train.batch_size or more train.accumulate if memory is short."
        )
    if said:
        return said[0][1]
    return f"the training failed outside of the workers' code: {type(error).__name__}: {error}"
