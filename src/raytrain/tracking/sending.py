"""Sending what a driver left on disk, from another process. Sent twice it changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from raytrain.errors import StorageError
from raytrain.history import read
from raytrain.report import Row
from raytrain.storage import Storage
from raytrain.tracking.base import End, Item, RefusedError, RunInfo, Tracker, first_batch, give
from raytrain.tracking.mlflow import MlflowTracker
from raytrain.tracking.spool import Spool, spools_in

_MAX_BATCH = 1000


@dataclass(frozen=True)
class Sent:
    """What was sent of one file.

    Attributes:
        path: The file, which is now called ``*.sent``.
        run: Name of the run.
        num_items: Lines that were sent.
        where: The command or address to look at the run.
        has_end: Whether the run has an end; without one ``raytrain runs --repair`` gives it one.
    """

    path: Path
    run: str
    num_items: int
    where: str
    has_end: bool


def send(path: Path, warn: Callable[[str], None]) -> list[Sent]:
    """Send a spool, and before it those that earlier starts of its run left beside it; a folder stands for all in it.

    Raises:
        TrackingError: It is no spool, or is in use; MLflow is away or refuses. What was sent by then does no harm when it is
            sent again.
    """
    paths = spools_in(path) if path.is_dir() else [p for p in spools_in(path.parent) if p.name < path.name] + [path]
    return [_send(one, warn) for one in paths]


def _send(path: Path, warn: Callable[[str], None]) -> Sent:
    spool = Spool(path)
    try:
        (run,) = spool.peek(1)
        assert isinstance(run, RunInfo)
        tracker = MlflowTracker.at(run.place)
        tracker.check(run.task)
        num_items, has_end = 0, False
        while batch := first_batch(spool.peek(_MAX_BATCH)):
            _give(tracker, batch, warn)
            spool.take(len(batch))
            num_items, has_end = num_items + len(batch), isinstance(batch[-1], End)
        tracker.log(_history(run))  # rows that found no room in the spool
        where = tracker.browse()
        path.rename(path.with_suffix(".sent"))
        return Sent(path.with_suffix(".sent"), run.name, num_items, where, has_end)
    finally:
        spool.close()


def _give(tracker: Tracker, batch: Sequence[Item], warn: Callable[[str], None]) -> None:
    """As ``give``; what the tracker refuses is told, and the others pass."""
    try:
        give(tracker, batch)
    except RefusedError as refusal:
        if len(batch) == 1:
            return warn(f"MLflow does not take something, and it is left out: {str(refusal)[:300]}")
        half = len(batch) // 2
        _give(tracker, batch[:half], warn)
        _give(tracker, batch[half:], warn)


def _history(run: RunInfo) -> list[Row]:
    try:
        return read(Storage(run.folder))
    except StorageError:  # a storage that this machine does not reach
        return []
