"""What a worker tells: values per step made global, rows in order, events; sent when it costs no step anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from raytrain.errors import RaytrainError
from raytrain.meter import Means, Meter
from raytrain.peers import Peers
from raytrain.report import Event, EventKind, Report, Row
from raytrain.runtime import Runtime
from raytrain.weighted import Value

_WINDOW_S = 0.5  # about this long between two agreements of the ranks: how late a stop or a report may be
_MAX_WINDOW = 4096


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a flush.

    Attributes:
        stop: Some rank was asked to stop.
        clock_s: Rank 0's training time, over all attempts.
    """

    stop: bool
    clock_s: float


class _StepEnd(NamedTuple):
    step: int
    epoch: float
    epoch_ends: bool
    num_rows: int
    constants: Mapping[str, float]


class Journal:
    """Rows and events of one run, on their way from the workers to the driver.

    The same calls on all ranks; only rank 0's rows and events travel.
    """

    def __init__(self, peers: Peers, runtime: Runtime, log_every: int) -> None:
        self._peers = peers
        self._runtime = runtime
        self._log_every = log_every
        self._meter = Meter(peers)
        self._row, self._epoch = Means(), Means()
        self._row_samples = self._row_steps = 0
        self._ends: list[_StepEnd] = []
        self._latest: _StepEnd | None = None
        self._constants: dict[str, float] = {}
        self._window = 1
        self._window_began = time.perf_counter()
        self._unsent_rows: list[Row] = []
        self._unsent_events: list[Event] = []
        self._unsaved: list[Row] = []
        self.last: dict[str, float] = {}

    def log(self, values: Mapping[str, Value]) -> None:
        """Values of this rank for the step under way: averaged over ranks and steps by weight."""
        self._meter.add(values)

    def constant(self, name: str, value: float) -> None:
        """A value that is the same on all ranks, such as the learning rate: a row shows its latest."""
        self._constants[name] = value

    def end_step(self, step: int, epoch: float, epoch_ends: bool, num_rows: int) -> None:
        """Close the step under way. ``num_rows`` are the samples of the whole global batch."""
        self._meter.end_step()
        shown = step % self._log_every == 0
        self._ends.append(
            _StepEnd(step, epoch, epoch_ends, num_rows, dict(self._constants) if shown else self._constants)
        )

    def full(self) -> bool:
        """Whether the window that all ranks agreed on is over."""
        return len(self._ends) >= self._window

    def flush(self, clock_s: float, failure: BaseException | None = None, final: bool = False) -> Agreed:
        """Make the finished steps global, agree on stopping, and send what is ready. A collective.

        Args:
            clock_s: Training time on this rank so far.
            failure: What failed in the background of this rank; all ranks then end together.
            final: Nothing follows: also write the last, shorter row, and send in any case.

        Raises:
            RaytrainError: Something failed in the background, on this rank (it is the cause) or on another.
        """
        words = [
            float(self._runtime.stop_requested()),
            float(self._runtime.ready_to_report()),
            float(failure is not None),
            clock_s,
            float(self._next_window()),
        ]
        steps, controls = self._meter.reduce(words)
        failed = [rank for rank, words in enumerate(controls) if words[2]]
        if failure is not None:
            raise failure
        if failed:
            raise RaytrainError(f"rank {failed[0]} failed while saving or reporting; this rank ends with it.")
        for end, sums in zip(self._ends, steps, strict=True):
            self._add_step(end, sums)
            self._latest = end
        if final and self._latest is not None:
            self._add_row(self._latest)
        self._ends = []
        self._window = int(controls[0][4])
        self._window_began = time.perf_counter()
        if final or controls[0][1]:
            self._send()
        return Agreed(any(words[0] for words in controls), controls[0][3])

    def add_row(self, row: Row) -> None:
        """A row that is global already, such as an evaluation's."""
        if row.values:
            self._unsent_rows.append(row)
            self._unsaved.append(row)
            self.last.update(row.values)

    def event(self, kind: EventKind, step: int, **data: object) -> None:
        """Something that happened once."""
        self.add_event(Event(kind, step, data))

    def add_event(self, event: Event) -> None:
        """The same, made already."""
        self._unsent_events.append(event)

    def take_unsaved(self) -> list[Row]:
        """Rows since the last checkpoint, to be kept beside the next one."""
        rows, self._unsaved = self._unsaved, []
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Sums of rows and epochs that are not over: plain values, after a flush."""
        return {
            "row": self._row.state_dict(),
            "epoch": self._epoch.state_dict(),
            "counts": [self._row_samples, self._row_steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._row.load_state_dict(state["row"])
        self._epoch.load_state_dict(state["epoch"])
        self._row_samples, self._row_steps = (int(n) for n in state["counts"])

    def _next_window(self) -> int:
        """Rank 0's proposal: as many steps as fit the window's time, growing carefully."""
        num_steps = len(self._ends)
        if not num_steps:
            return self._window
        per_step_s = (time.perf_counter() - self._window_began) / num_steps
        return max(1, min(int(_WINDOW_S / max(per_step_s, 1e-9)), 4 * num_steps, _MAX_WINDOW))

    def _add_step(self, end: _StepEnd, sums: dict[str, tuple[float, float]]) -> None:
        self._row.add(sums)
        self._row_samples += end.num_rows
        self._row_steps += 1
        self._epoch.add({name: pair for name, pair in sums.items() if not name.startswith("time/")})
        if end.step % self._log_every == 0:
            self._add_row(end)
        if end.epoch_ends:
            means = {f"{name}_epoch": value for name, value in self._epoch.take().items()}
            self.add_row(Row(end.step, end.epoch, means))

    def _add_row(self, end: _StepEnd) -> None:
        values = self._row.take()
        if not values:
            return
        spent_s = values.get("time/step_s", 0.0) * self._row_steps
        if spent_s > 0:
            values["time/samples_per_s"] = self._row_samples / spent_s
        self._row_samples = self._row_steps = 0
        self.add_row(Row(end.step, end.epoch, {**values, **end.constants}))

    def _send(self) -> None:
        report = Report(tuple(self._unsent_rows), tuple(self._unsent_events))
        self._unsent_rows, self._unsent_events = [], []
        self._runtime.report(report, self.last)
