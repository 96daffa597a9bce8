"""From reports to trackers, on a thread of the driver: in order, once, and never in the way of the training."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from raytrain.report import Event, Report, Row
from raytrain.tracking.base import Status, Tracker

_MAX_WAITING = 200_000  # rows that a tracker may owe before the oldest are given up, about 50 MB


class Collector:
    """Takes reports, drops what was seen before, and gives rows and events to each tracker.

    A tracker that raises is warned about once per kind of error; its rows wait and are tried again at the next turn.

    Args:
        trackers: Already opened.
        history: Rows of earlier starts: their (metric, step) pairs are not given out again.
        warn: Where warnings go.
    """

    def __init__(
        self, trackers: Sequence[Tracker], *, history: Sequence[Row] = (), warn: Callable[[str], None] | None = None
    ) -> None:
        self._warn = warn or (lambda text: print(f"raytrain: warning: {text}", flush=True))
        self._outlets = [_Outlet(tracker, self._warn) for tracker in trackers]
        self._history = list(history)
        self._seen: dict[str, int] = {}
        for row in self._history:
            self._note(row)
        self._queue: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="raytrain-collect", daemon=True)
        self._thread.start()

    @property
    def history(self) -> list[Row]:
        """All rows so far, of this start and the earlier ones, by rising step."""
        return list(self._history)

    def put(self, report: Report) -> None:
        """Take a report. Never waits, never raises; any thread may call it."""
        self._queue.put(report)

    def close(self, status: Status, error: str | None, limit_s: float = 15.0) -> None:
        """Give out what is left and close all trackers; gives up on what hangs after the limit, and says so."""
        self._queue.put(None)
        self._thread.join(limit_s)
        closing = threading.Thread(target=self._close, args=(status, error), name="raytrain-close", daemon=True)
        closing.start()
        closing.join(limit_s)
        if self._thread.is_alive() or closing.is_alive():
            self._warn(
                f"tracking did not answer within {limit_s:g} s at the end of the run; some of it may be missing."
            )

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            rows = [fresh for row in report.rows if (fresh := self._fresh(row)) is not None]
            self._history += rows
            for outlet in self._outlets:
                outlet.give(rows, report.events)

    def _close(self, status: Status, error: str | None) -> None:
        for outlet in self._outlets:
            outlet.close(status, error)

    def _fresh(self, row: Row) -> Row | None:
        """The part of a row that was not seen: steps that are replayed after a failure come a second time."""
        values = {name: value for name, value in row.values.items() if row.step > self._seen.get(name, -1)}
        if not values:
            return None
        fresh = Row(row.step, row.epoch, values)
        self._note(fresh)
        return fresh

    def _note(self, row: Row) -> None:
        for name in row.values:
            self._seen[name] = max(row.step, self._seen.get(name, -1))


class _Outlet:
    """One tracker, with the rows and events that it still has to get."""

    def __init__(self, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._tracker, self._warn = tracker, warn
        self._waiting: list[Row | Event] = []
        self._warned: set[str] = set()
        self._pause_until = 0.0
        self._pause_s = 0.5

    def give(self, rows: Sequence[Row], events: Sequence[Event]) -> None:
        self._waiting += [*rows, *events]
        if len(self._waiting) > _MAX_WAITING:
            lost = len(self._waiting) - _MAX_WAITING
            self._waiting = self._waiting[lost:]
            self._complain(f"{type(self._tracker).__name__} was away for too long: {lost} rows are lost")
        if time.monotonic() >= self._pause_until:
            self._deliver()

    def close(self, status: Status, error: str | None) -> None:
        self._deliver()
        if self._waiting:
            self._complain(f"{len(self._waiting)} rows did not reach {type(self._tracker).__name__}")
        try:
            self._tracker.close(status, error)
        except Exception as failure:
            self._complain(f"{type(self._tracker).__name__} could not end the run as {status}: {_text(failure)}")

    def _deliver(self) -> None:
        try:
            while self._waiting:
                batch = self._next_batch()
                if isinstance(batch[0], Row):
                    self._tracker.log([row for row in batch if isinstance(row, Row)])
                else:
                    self._tracker.event(batch[0])
                del self._waiting[: len(batch)]
            self._pause_s = 0.5
        except Exception as failure:
            # Ever longer pauses: a server that hangs until its time limit must not be asked for each report.
            self._pause_until = time.monotonic() + self._pause_s
            self._pause_s = min(30.0, 2 * self._pause_s)
            self._complain(
                f"{type(self._tracker).__name__}: {_text(failure)}. Training goes on; the rows are kept and sent later"
            )

    def _next_batch(self) -> list[Row | Event]:
        if isinstance(self._waiting[0], Event):
            return self._waiting[:1]
        end = next((i for i, item in enumerate(self._waiting) if isinstance(item, Event)), len(self._waiting))
        return self._waiting[: min(end, 1000)]

    def _complain(self, text: str) -> None:
        kind = text[:60]
        if kind not in self._warned:
            self._warned.add(kind)
            self._warn(text)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
