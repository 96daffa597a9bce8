"""The contract between workers and the driver: what was measured, and at which step.

Plain values only: a report is pickled on rank 0 and read where neither torch nor Ray need be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

KEY = "raytrain"  # of a Report among the metrics of ray.train.report

EventKind = Literal["started", "resumed", "checkpoint", "best", "note", "warning", "finished", "tags", "params"]


@dataclass(frozen=True)
class Row:
    """Values that were true at one optimizer step, averaged over all workers.

    Attributes:
        step: Optimizer steps finished when the values were taken; rises strictly within a key.
        epoch: Epochs finished, with their fraction; NaN where that is not known.
        values: Metric name (``group/name``) to number. NaN and infinity are allowed.
        time_ms: Unix time at which the driver got it; None until then. Trackers show it, and know by it what they have already.
    """

    step: int
    epoch: float
    values: Mapping[str, float]
    time_ms: int | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Event:
    """Something that happened once: a checkpoint was published, an attempt began.

    Attributes:
        kind: ``started`` (world_size, device, attempt), ``resumed`` (step, uri), ``checkpoint`` and ``best``
            (step, uri, metrics), ``note`` and ``warning`` (text), ``finished`` (reason, step), ``tags`` and ``params`` (by name).
        step: Optimizer steps finished at that time.
        data: Plain values that belong to the kind.
        number: Its place among the events of one start of the driver, from 1; 0 until the driver has numbered it.
    """

    kind: EventKind
    step: int
    data: Mapping[str, object] = field(default_factory=dict)
    number: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Report:
    """One message of rank 0 to the driver: rows in rising order of steps, then events."""

    rows: tuple[Row, ...] = ()
    events: tuple[Event, ...] = ()

    def __repr__(self) -> str:
        """Short: Ray writes what is reported into its log files, on the workers' time."""
        return f"Report({len(self.rows)} rows, {len(self.events)} events)"
