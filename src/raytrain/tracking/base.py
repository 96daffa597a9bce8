"""What a tracker is: four methods, called on the driver, in order; after ``open`` by one thread of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from raytrain.report import Event, Row

Status = Literal["FINISHED", "FAILED", "KILLED"]


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


class Tracker(Protocol):
    """A place where runs are written down. What it raises in ``log`` and ``event`` never ends a training."""

    def open(self, run: RunInfo) -> dict[str, str]:
        """Begin or go on with a run; what it returns is kept and comes back as ``previous``."""

    def log(self, rows: Sequence[Row]) -> None:
        """Write rows, by rising step; each (metric, step) comes once."""

    def event(self, event: Event) -> None:
        """Write down something that happened once."""

    def close(self, status: Status, error: str | None) -> None:
        """End the run as it really ended."""
