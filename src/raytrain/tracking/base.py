"""What a tracker is: four methods, called in order by one thread of the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from raytrain.errors import TrackingError
from raytrain.report import Event, Row

Status = Literal["FINISHED", "FAILED", "KILLED"]


class AwayError(TrackingError):
    """The tracker cannot be reached or does not let us in now; the same may work later."""


class RefusedError(TrackingError):
    """The tracker will never take this; without it the others may pass."""


@dataclass(frozen=True)
class RunInfo:
    """One start of a run, as trackers see it.

    Attributes:
        name: Name of the run.
        task: Name of the task's class.
        attempt: Starts of this run so far, this one included.
        params: Settings by dotted name.
        config_yaml: The effective configuration, which alone repeats the run.
        job_source: Path of the job's file, or None.
        folder: URI of the run's folder.
        tags: The user's tags.
        previous: What ``open`` returned at the start before; empty at the first.
        datasets: Plain facts of each dataset: ``name``, ``num_rows``, and what else is known.
        run_key: What this run alone has, in all its starts: by it a run is found whose making was not answered.
        started_s: Unix time of this start.
        origin: Facts of where it comes from, taken at the start; none to take them when the tracker opens.
        job_text: Text of the job's file at the start.
        place: Where the tracker writes, as plain text without credentials: enough to find it from another process.
    """

    name: str
    task: str
    attempt: int
    params: Mapping[str, Any]
    config_yaml: str
    job_source: str | None
    folder: str
    tags: Mapping[str, str] = field(default_factory=dict)
    previous: Mapping[str, str] = field(default_factory=dict)
    datasets: Sequence[Mapping[str, Any]] = ()
    run_key: str = ""
    started_s: float = 0.0
    origin: Mapping[str, str] = field(default_factory=dict)
    job_text: str = ""
    place: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """How and when a start ended."""

    status: Status
    error: str | None
    time_s: float


Item: TypeAlias = RunInfo | Row | Event | End  # all that a tracker gets, in this order


class Tracker(Protocol):
    """A place where runs are written down. What it raises in ``log`` and ``event`` never ends a training.

    Every method may be called again with the same, after an answer that was lost: nothing may then be there twice.
    """

    def open(self, run: RunInfo) -> dict[str, str]:
        """Begin or go on with a run; what it returns is kept and comes back as ``previous``."""

    def log(self, rows: Sequence[Row]) -> None:
        """Write rows, by rising step; each (metric, step) comes once."""

    def event(self, event: Event) -> None:
        """Write down something that happened once."""

    def close(self, status: Status, error: str | None, time_s: float | None = None) -> None:
        """End the run as it really ended, at the time when it did (default: now)."""


def give(tracker: Tracker, batch: Sequence[Item]) -> dict[str, str]:
    """Give a tracker items of one kind: many rows, or one of the others. Returns what ``open`` tells."""
    head = batch[0]
    if isinstance(head, RunInfo):
        return tracker.open(head)
    if isinstance(head, Event):
        tracker.event(head)
    elif isinstance(head, End):
        tracker.close(head.status, head.error, head.time_s)
    else:
        tracker.log([row for row in batch if isinstance(row, Row)])
    return {}


def first_batch(items: Sequence[Item]) -> list[Item]:
    """The rows before the first item of another kind, or that item alone."""
    end = next((i for i, item in enumerate(items) if not isinstance(item, Row)), len(items))
    return list(items[: max(1, end)])
