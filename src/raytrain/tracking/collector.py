"""From reports to trackers, on threads of the driver: in order, once, and never in the way of the training."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence

from raytrain.report import Event, Report, Row
from raytrain.tracking.base import Status, Tracker
from raytrain.tracking.names import number
from raytrain.tracking.provenance import without_secrets

_MAX_WAITING = 200_000  # rows that a tracker may owe before new ones are given up, about 100 MB
_FLUSH_S = 1.0  # rows wait for company at most this long; an event sends them at once
_FLUSH_ROWS = 500
_MAX_BATCH = 1000
_FAULTS = (AttributeError, KeyError, TypeError)  # of a tracker's own code: trying again would not help


class Collector:
    """Takes reports, drops what was seen before, and gives rows and events to each tracker, on a thread of its own.

    A tracker that hangs holds up no other. One that raises is warned about once per kind of error; its rows wait and are tried
    again after a pause, whether new reports come or not.

    Args:
        trackers: Already opened.
        history: Rows of earlier starts: their (metric, step) pairs are not given out again.
        warn: Where warnings go.
    """

    def __init__(
        self, trackers: Sequence[Tracker], *, history: Sequence[Row] = (), warn: Callable[[str], None] | None = None
    ) -> None:
        self._warn = warn or (lambda text: print(f"raytrain: warning: {text}", flush=True))
        self._lock = threading.Lock()
        self._history = _History()
        self._seen: dict[str, int] = {}
        self._last: dict[str, float] = {}
        for row in history:
            self._keep(row)
        self._outlets = [_Outlet(tracker, self._warn) for tracker in trackers]

    @property
    def history(self) -> list[Row]:
        """All rows so far, of this start and the earlier ones: one per step, by rising step."""
        with self._lock:
            return self._history.rows()

    @property
    def last(self) -> dict[str, float]:
        """The latest value of each metric."""
        with self._lock:
            return dict(self._last)

    def put(self, report: Report) -> None:
        """Take a report. Never waits for a tracker, never raises; any thread may call it."""
        try:
            with self._lock:
                rows = [fresh for row in report.rows if (fresh := self._fresh(row)) is not None]
                for outlet in self._outlets:
                    outlet.give(rows, report.events)
        except Exception as failure:
            self._warn(f"a report was not understood and is lost: {_text(failure)}")

    def catch_up(self, tracker: Tracker) -> None:
        """Give the rows of earlier starts to a tracker that takes each point once: it may have missed some."""
        with self._lock:
            rows = self._history.rows()
            for outlet in self._outlets:
                if outlet.tracker is tracker:
                    outlet.give(rows, ())

    def close(self, status: Status, error: str | None, limit_s: float = 15.0) -> None:
        """Give out what is left and close all trackers; gives up on what hangs after the limit, and says so."""
        deadline = time.monotonic() + limit_s
        for outlet in self._outlets:
            outlet.end(status, error)
        late = [outlet.name for outlet in self._outlets if not outlet.wait(deadline - time.monotonic())]
        if late:
            self._warn(
                f"tracking ({', '.join(late)}) did not answer within {limit_s:g} s at the end of the run; some of it may be "
                "missing."
            )

    def _fresh(self, row: Row) -> Row | None:
        """The part of a row that was not seen: steps that are replayed after a failure come a second time."""
        values = {name: value for name, value in row.values.items() if row.step > self._seen.get(name, -1)}
        if not values:
            return None
        fresh = Row(row.step, row.epoch, values)
        self._keep(fresh)
        return fresh

    def _keep(self, row: Row) -> None:
        self._last.update(self._history.add(row))
        for name in row.values:
            self._seen[name] = max(row.step, self._seen.get(name, -1))


class _History:
    """Rows as columns of plain numbers: a row of four metrics takes some 60 bytes, so 100,000 of them 6 MB."""

    def __init__(self) -> None:
        self._steps, self._epochs, self._values, self._kinds = array("q"), array("d"), array("d"), array("l")
        self._names: dict[tuple[str, ...], int] = {}  # each set of metric names once

    def add(self, row: Row) -> dict[str, float]:
        """Keep a row; returns its numbers. What is no number is left out."""
        values = {name: value for name, given in row.values.items() if (value := number(given)) is not None}
        self._steps.append(row.step)
        self._epochs.append(row.epoch)
        self._kinds.append(self._names.setdefault(tuple(values), len(self._names)))
        self._values.extend(values.values())
        return values

    def rows(self) -> list[Row]:
        """One row per step, by rising step; of two values for one metric and step the first stays."""
        by_step: dict[int, Row] = {}
        for row in self._all():
            before = by_step.setdefault(row.step, row)
            if before is not row:
                by_step[row.step] = Row(row.step, before.epoch, {**row.values, **before.values})
        return [by_step[step] for step in sorted(by_step)]

    def _all(self) -> Iterator[Row]:
        kinds, start = list(self._names), 0
        for step, epoch, kind in zip(self._steps, self._epochs, self._kinds, strict=True):
            names = kinds[kind]
            yield Row(step, epoch, dict(zip(names, self._values[start : start + len(names)], strict=True)))
            start += len(names)


class _Outlet:
    """One tracker with its thread, and the rows and events that it still has to get."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self.tracker, self._warn = tracker, warn
        self.name = type(tracker).__name__
        self._waiting: list[Row | Event] = []
        self._changed = threading.Condition()
        self._end: tuple[Status, str | None] | None = None
        self._warned: set[str] = set()
        self._num_lost = 0
        self._flush_at_s = 0.0
        self._pause_until_s = 0.0
        self._pause_s = 0.5
        self._thread = threading.Thread(target=self._run, name=f"raytrain-{self.name}", daemon=True)
        self._thread.start()

    def give(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        """Take what is to be sent; waits for nothing."""
        with self._changed:
            if not self._waiting:
                self._flush_at_s = time.monotonic() + _FLUSH_S
            room = max(0, _MAX_WAITING - len(self._waiting))
            self._waiting += [*rows[:room], *events]
            self._num_lost += len(rows[room:])
            if events or len(self._waiting) >= _FLUSH_ROWS:
                self._flush_at_s = 0.0
            self._changed.notify()
        if rows[room:]:
            self._complain(
                "full", f"{self.name} was away for too long: rows are lost to it from step {rows[room].step} on"
            )

    def end(self, status: Status, error: str | None) -> None:
        """Send what is left and close the tracker."""
        with self._changed:
            self._end = (status, error)
            self._changed.notify()

    def wait(self, limit_s: float) -> bool:
        """Whether the tracker was closed within the limit."""
        self._thread.join(max(0.0, limit_s))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (end := self._wait_until_due()) is None:
            self._deliver()
        self._deliver()
        lost = self._num_lost + sum(isinstance(item, Row) for item in self._waiting)
        if lost or self._waiting:
            self._complain("lost", f"{lost} rows and what happened since did not reach {self.name}")
        try:
            self.tracker.close(*end)
        except Exception as failure:
            self._complain("close", f"{self.name} could not end the run as {end[0]}: {_text(failure)}")

    def _wait_until_due(self) -> tuple[Status, str | None] | None:
        with self._changed:
            while self._end is None:
                due_s = max(self._flush_at_s, self._pause_until_s) - time.monotonic()
                if self._waiting and due_s <= 0:
                    return None
                self._changed.wait(due_s if self._waiting else None)
            return self._end

    def _deliver(self) -> None:
        while batch := self._next_batch():
            try:
                self._send(batch)
            except _FAULTS as failure:
                self._num_lost += sum(isinstance(item, Row) for item in batch)
                self._complain(
                    repr(type(failure)), f"{self.name} has a fault and leaves something out: {_text(failure)}"
                )
            except Exception as failure:
                # Ever longer pauses: a server that hangs until its time limit must not be asked for each report.
                self._pause_until_s = time.monotonic() + self._pause_s
                self._pause_s = min(30.0, 2 * self._pause_s)
                text = f"{self.name}: {_text(failure)}. Training goes on; the rows are kept and sent later"
                return self._complain(repr(type(failure)), text)
            with self._changed:
                del self._waiting[: len(batch)]
        self._pause_s = 0.5

    def _send(self, batch: Sequence[Row | Event]) -> None:
        if isinstance(batch[0], Event):
            self.tracker.event(batch[0])
        else:
            self.tracker.log([row for row in batch if isinstance(row, Row)])

    def _next_batch(self) -> list[Row | Event]:
        """One event, or the rows before the next one."""
        with self._changed:
            head = self._waiting[:_MAX_BATCH]
        end = next((i for i, item in enumerate(head) if isinstance(item, Event)), len(head))
        return head[: max(1, end)]

    def _complain(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)


def _text(error: Exception) -> str:
    return without_secrets(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
