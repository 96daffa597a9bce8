"""The same job under torchrun: its processes are the ranks, rank 0 is the driver as well."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from raytrain.adopt import Adopted
from raytrain.config import TrackingConfig
from raytrain.driver import Driver
from raytrain.peers import Peers
from raytrain.preflight import inspect
from raytrain.result import Result
from raytrain.runtime import LocalRuntime, StopFlag
from raytrain.signals import stopping_on_signals
from raytrain.storage import Storage
from raytrain.task import Task
from raytrain.work import Job, work


def is_active() -> bool:
    """Whether this process was started by torchrun, or has a process group already."""
    if dist.is_available() and dist.is_initialized():
        return True
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


@contextlib.contextmanager
def process_group(use_gpu: bool) -> Iterator[None]:
    """The process group of torchrun's environment; an existing one is left as it is."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if use_gpu else "gloo")
    try:
        yield
        dist.barrier()  # a rank that leaves while another still talks to it may abort in gloo's threads
    finally:
        dist.destroy_process_group()


def fit(task: Task, options: Adopted, tracking: TrackingConfig) -> Result:
    """Train on torchrun's ranks. Rank 0 checks, tracks and keeps the run; all return the same result."""
    peers = Peers()
    driver: Driver | None = None

    def prepare() -> tuple[Job, Result | None]:
        nonlocal driver
        storage = Storage(options.run.storage, options.filesystem)
        driver = Driver(
            task, options, tracking, storage, inspect(task, options.train, options.scaling, options.run, storage)
        )
        return driver.job, driver.complete()

    job, done = peers.on_main(prepare)
    if done is not None:
        return done  # type: ignore[no-any-return]
    stop = StopFlag()
    use_gpu = options.scaling.use_gpu
    with stopping_on_signals(stop):
        if driver is None:
            work(job, LocalRuntime(lambda report: None, stop, use_gpu))
        else:
            with driver.running() as deliver:
                work(job, LocalRuntime(deliver, stop, use_gpu))
    result: Result = peers.from_main(driver.result() if driver else None)
    return result
