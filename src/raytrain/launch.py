"""``fit``: from a task and its settings to a Result. Runs on the driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from raytrain import torchrun
from raytrain.adopt import Adopted, adopt
from raytrain.config import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.driver import Driver
from raytrain.errors import ConfigError
from raytrain.options import Options, action
from raytrain.preflight import inspect
from raytrain.ray_connection import ray_of_our_own
from raytrain.result import Result
from raytrain.runtime import LocalRuntime, StopFlag
from raytrain.signals import stopping_on_signals
from raytrain.storage import Storage
from raytrain.task import LoopTask, Task
from raytrain.work import work


def fit(
    task: Task | Callable[..., None],
    *,
    train: TrainConfig | None = None,
    scaling: Any = None,
    run: Any = None,
    tracking: TrackingConfig | None = None,
    config: object | None = None,
) -> Result:
    """Train, and return when the run has ended.

    The number of workers decides where: 0 is this process; 1 or more are Ray workers, on the cluster of RAY_ADDRESS or on an
    embedded Ray. Under torchrun the ranks are torchrun's, whatever ``scaling.num_workers`` says.

    Args:
        task: A Task, or a function over a Session: ``loop(session)`` or ``loop(session, config)``.
        train: How to train.
        scaling: Where: raytrain's or Ray Train's ScalingConfig.
        run: Which run: raytrain's or Ray Train's RunConfig, with its CheckpointConfig and FailureConfig.
        tracking: Where the metrics go.
        config: Second argument of a loop function.

    Raises:
        ConfigError: A setting that cannot work (before anything was started).
        DataError: Data that cannot be trained on.
        StorageError: A storage that cannot be read or written.
        WorkerError: The training failed: which rank, which step, which line.
    """
    if not isinstance(task, Task):
        if not callable(task) or isinstance(task, type):
            raise ConfigError(f"fit() takes a Task object or a function over a Session, not {task!r}.")
        task = LoopTask(task, config)
    options = adopt(train or TrainConfig(), scaling, run)
    tracking = tracking or TrackingConfig()
    if (other := action.get()) is not None:  # the `raytrain` command wants to know the settings, not to train
        sys.exit(other(Options(task, options.train, options.scaling, options.run, tracking)))
    if torchrun.is_active():
        with torchrun.process_group(options.scaling.use_gpu):
            return torchrun.fit(task, options, tracking)
    return drive(task, options, tracking)


def drive(task: Task, options: Adopted, tracking: TrackingConfig) -> Result:
    """The driver's part where this process is no rank of torchrun."""
    with ray_of_our_own():
        return _drive(task, options, tracking)


def _drive(task: Task, options: Adopted, tracking: TrackingConfig) -> Result:
    storage = Storage(options.run.storage, options.filesystem)
    findings = inspect(task, options.train, options.scaling, options.run, storage)
    driver = Driver(task, options, tracking, storage, findings)
    if (done := driver.complete()) is not None:
        return done
    stop = StopFlag()
    with driver.running() as deliver:
        if options.scaling.worker_range[1] == 0:
            with stopping_on_signals(stop):
                work(driver.job, LocalRuntime(deliver, stop, options.scaling.use_gpu))
        else:
            from raytrain.ray_launch import train_on_ray

            sets = findings.ray_sets
            train_on_ray(driver.job, options.scaling, options.run, deliver, stop, options.callbacks, sets)
    return driver.result()


def check(
    task: Task,
    train: TrainConfig | None = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    tracking: TrackingConfig | None = None,
) -> list[str]:
    """Everything that can be known before workers are held; one line for each thing that was checked.

    Raises:
        As ``fit`` does, before it starts.
    """
    options = adopt(train or TrainConfig(), scaling, run)
    with ray_of_our_own():
        storage = Storage(options.run.storage, options.filesystem)
        findings = inspect(task, options.train, options.scaling, options.run, storage)
        driver = Driver(task, options, tracking or TrackingConfig(), storage, findings)
        return [*findings.lines, *driver.check()]
