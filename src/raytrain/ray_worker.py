"""A worker of Ray Train: its runtime, and the thread that keeps ``ray.train.report`` off the training thread.

``ray.train.report`` is a barrier over all ranks and waits for the controller's poll. Each rank therefore calls it
from a thread of its own, in an order that all ranks share; the training thread only puts a report into a queue.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from raytrain.report import KEY, Report
from raytrain.runtime import Placement


class RayRuntime:
    """The runtime inside a Ray Train worker."""

    def __init__(self, mailbox: Any) -> None:
        import ray.train
        import ray.train.torch

        context = ray.train.get_context()
        device = ray.train.torch.get_device()
        self.placement = Placement(
            context.get_world_rank(), context.get_world_size(), context.get_local_rank(), torch.device(device)
        )
        self._mailbox = mailbox
        self._stop_answer: Any = None
        self._stopped = False
        self._reporter = _Reporter()
        _quiet_reports()

    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        """Through ``ray.train.torch.prepare_model``: moved to the device, DDP when there are several workers."""
        from ray.train.torch import prepare_model

        wrapped: nn.Module = prepare_model(
            model, move_to_device=self.placement.device, parallel_strategy_kwargs=dict(ddp_options)
        )
        return wrapped

    def adopt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Through ``ray.train.torch.prepare_data_loader``, which may neither sample, pad nor rebuild here.

        Its transfer to the device turns named tuples into tuples; ours keeps them.
        """
        from ray.train.torch import prepare_data_loader

        adopted: DataLoader[Any] = prepare_data_loader(loader, add_dist_sampler=False, move_to_device=False)
        return adopted

    def ready_to_report(self) -> bool:
        """Whether the report before this one has gone through."""
        return self._reporter.idle()

    def report(self, report: Report, means: Mapping[str, float]) -> None:
        """Queue ``ray.train.report``: the same means on all ranks, and rank 0's report beside them."""
        metrics: dict[str, Any] = dict(means)
        if self.placement.rank == 0:
            metrics[KEY] = report
        self._reporter.put(metrics)

    def stop_requested(self) -> bool:
        """Ask the driver's mailbox without waiting: the answer is read at the next call. Rank 0 asks for all."""
        if self.placement.rank != 0 or self._stopped:
            return self._stopped
        import ray

        if self._stop_answer is None:
            self._stop_answer = self._mailbox.stop_requested.remote()
            return False
        ready, _ = ray.wait([self._stop_answer], timeout=0)
        if ready:
            self._stopped = bool(ray.get(self._stop_answer))
            self._stop_answer = None
        return self._stopped

    def close(self) -> None:
        """Wait until all reports went through; raise what failed on the way."""
        self._reporter.close()


def _quiet_reports() -> None:
    """Ray logs the whole content of each report at INFO, on this process's standard error."""
    from ray.train.v2._internal.execution import context

    context.logger.setLevel(logging.WARNING)


class _Reporter:
    """Calls ``ray.train.report`` in order on a thread. A failure is kept and raised at the next call."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._under_way = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="raytrain-report", daemon=True)
        self._thread.start()

    def put(self, metrics: dict[str, Any]) -> None:
        self._raise()
        with self._lock:
            self._under_way += 1
        self._queue.put(metrics)

    def idle(self) -> bool:
        with self._lock:
            return self._under_way == 0

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        import ray.train

        while (metrics := self._queue.get()) is not None:
            try:
                ray.train.report(metrics)
            except BaseException as error:
                self._error = error
                return
            finally:
                with self._lock:
                    self._under_way -= 1


@contextlib.contextmanager
def printing_through(say: Callable[[str], object]) -> Iterator[None]:
    """What this worker prints goes to the driver line by line; Ray's own log lines stay in its files."""
    lines = _Lines(say)
    with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
        try:
            yield
        finally:
            lines.end()


class _Lines(io.TextIOBase):
    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._begun = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._say(line.rsplit("\r", 1)[-1])
        return len(text)

    def end(self) -> None:
        if self._begun:
            self._say(self._begun)
            self._begun = ""
