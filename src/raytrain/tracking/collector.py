"""From reports to trackers, on threads of the driver: in order, once, and never in the way of the training."""

from __future__ import annotations

import shlex
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from raytrain.errors import TrackingError
from raytrain.report import Report, Row
from raytrain.tracking.backlog import Backlog
from raytrain.tracking.base import AwayError, End, RunInfo, Status, Tracker
from raytrain.tracking.names import number
from raytrain.tracking.outlet import Outlet
from raytrain.tracking.provenance import without_secrets
from raytrain.tracking.spool import Spool

_AWAY_LIMIT_S = 5.0  # at the end of a run, for one that did not answer before


class Collector:
    """Takes reports, drops what was seen before, and gives rows and events to each tracker, on a thread of its own.

    A tracker that hangs holds up no other. One that raises is warned about once per kind of error; what it should get waits, in
    memory or in the spool, and is tried again after a pause, whether new reports come or not.

    Args:
        trackers: Who gets them.
        history: Rows of earlier starts: their (metric, step) pairs are not given out again.
        warn: Where warnings go.
        opening: The start, with which each tracker is opened first; None when they are open.
        opened: Gets what a tracker's ``open`` told, on that tracker's thread, whenever it comes.
        spool: Keeps on disk what a tracker cannot take; for the one that says ``may_be_away``.
        earlier: What earlier starts of the run left on disk; sent to that tracker first.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        *,
        history: Sequence[Row] = (),
        warn: Callable[[str], None] | None = None,
        opening: RunInfo | None = None,
        opened: Callable[[Mapping[str, str]], None] = lambda told: None,
        spool: Spool | None = None,
        earlier: Sequence[Spool] = (),
    ) -> None:
        self._warn = warn or (lambda text: print(f"raytrain: warning: {text}", flush=True))
        self._lock = threading.Lock()
        self._history = _History()
        self._seen: dict[str, int] = {}
        self._last: dict[str, float] = {}
        self._num_events = 0
        for row in history:
            self._keep(row)

        def outlet(tracker: Tracker) -> Outlet:
            kept = (spool, earlier) if getattr(tracker, "may_be_away", False) else (None, ())
            return Outlet(tracker, Backlog(opening, *kept), self._warn, opened, self._rows_from)

        self._outlets = [outlet(tracker) for tracker in trackers]

    def wait_open(self, limit_s: float | None, strict: bool) -> None:
        """Wait until the trackers have opened, or did not within the limit.

        Raises:
            TrackingError: One did not, and that is not a matter of waiting, or ``strict`` asks for all.
        """
        try:
            self._wait_open(limit_s, strict)
        except BaseException:
            for outlet in self._outlets:
                outlet.drop()
            raise

    def _wait_open(self, limit_s: float | None, strict: bool) -> None:
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        for outlet in self._outlets:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            answered, failure = outlet.has_answered.wait(left_s), outlet.failure
            if failure is not None and (strict or not isinstance(failure, AwayError)):
                raise failure if isinstance(failure, TrackingError) else TrackingError(_text(failure))
            if not answered:
                self._warn(
                    f"{outlet.name} was not ready within {limit_s:g} s. Training begins without it; what it should get is kept "
                    "and sent when it answers."
                )

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
                now_ms = int(time.time() * 1000)
                rows = [fresh for row in report.rows if (fresh := self._fresh(row, now_ms)) is not None]
                events = [replace(event, number=self._num_events + i) for i, event in enumerate(report.events, 1)]
                self._num_events += len(events)
                for outlet in self._outlets:
                    outlet.give([*rows, *events])
        except Exception as failure:
            self._warn(f"a report was not understood and is lost: {_text(failure)}")

    def catch_up(self, tracker: Tracker) -> None:
        """Give the rows of earlier starts to a tracker that takes each point once: it may have missed some."""
        now_ms = int(time.time() * 1000)
        with self._lock:
            rows = [replace(row, time_ms=now_ms) for row in self._history.rows()]
            for outlet in self._outlets:
                if outlet.tracker is tracker:
                    outlet.give(rows)

    def close(self, status: Status, error: str | None, limit_s: float = 15.0) -> None:
        """Give out what is left and close all trackers; gives up on what hangs after the limit, and says what to do then."""
        end = End(status, error, time.time())
        for outlet in self._outlets:
            outlet.give([end])
        for outlet in self._outlets:
            outlet.wait(min(limit_s, _AWAY_LIMIT_S) if outlet.is_away else limit_s)
            if outlet.unsent is not None:
                self._warn(
                    f"{outlet.name} did not get all of this run. The rest is in {outlet.unsent}; the next start of the run sends "
                    f"it, or this command:\n  raytrain runs --send {shlex.quote(str(outlet.unsent))}"
                )

    def _rows_from(self, step: int) -> list[Row]:
        return [row for row in self.history if row.step >= step]

    def _fresh(self, row: Row, now_ms: int) -> Row | None:
        """The part of a row that was not seen: steps that are replayed after a failure come a second time."""
        values = {name: value for name, value in row.values.items() if row.step > self._seen.get(name, -1)}
        if not values:
            return None
        fresh = Row(row.step, row.epoch, values, now_ms)
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


def _text(error: Exception) -> str:
    return without_secrets(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
