"""One tracker with its thread: it gets all in order, however long it is away, and holds up nobody."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from raytrain.errors import TrackingError
from raytrain.report import Row
from raytrain.tracking.backlog import Backlog
from raytrain.tracking.base import AwayError, End, Item, RefusedError, RunInfo, Tracker, first_batch, give
from raytrain.tracking.provenance import without_secrets

_FLUSH_S = 1.0  # rows wait for company at most this long; an event sends them at once
_FLUSH_ROWS = 500
_MAX_BATCH = 1000
_LONG = 5_000  # items in memory from which on they go to disk
_SLOW_S = 3.0  # a call that takes longer may take for ever: what comes meanwhile goes to disk
_LAST_TRIES = 3  # at the end of a run
_MAX_PAUSE_S = 30.0
_TOLD_AGAIN_S = 600.0  # the same kind of trouble
_FAULTS = (AttributeError, KeyError, TypeError)  # of a tracker's own code: trying again would not help


class Outlet:
    """Gives a backlog to a tracker, on a thread; a second thread moves the backlog to disk while the tracker is away.

    Args:
        tracker: Who gets it.
        backlog: What it gets.
        warn: Where warnings go.
        opened: Gets what the tracker's ``open`` told, on the outlet's thread.
        rows_from: All rows of the run from a step on, for those that found no room in the backlog.
    """

    def __init__(
        self,
        tracker: Tracker,
        backlog: Backlog,
        warn: Callable[[str], None],
        opened: Callable[[Mapping[str, str]], None] = lambda told: None,
        rows_from: Callable[[int], Sequence[Row]] = lambda step: (),
    ) -> None:
        self.tracker, self.backlog, self._warn = tracker, backlog, warn
        self._opened, self._rows_from = opened, rows_from
        self.name = type(tracker).__name__
        self.has_answered = threading.Event()  # whether it opened, or failed to: see ``failure``
        self.failure: Exception | None = None
        self.unsent: Path | None = None  # the file with what was not sent, known after ``wait``
        self._changed = threading.Condition()
        self._done = threading.Event()
        self._warned_s: dict[str, float] = {}
        self._num_given = self._num_failures = self._num_refused = 0
        self._flush_at_s = self._pause_until_s = self._busy_since_s = 0.0
        self._batch_limit = _MAX_BATCH
        self._gap_from: int | None = None
        self._is_ending = self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, name=f"raytrain-{self.name}", daemon=True)
        self._thread.start()
        if backlog.spool is not None:
            threading.Thread(target=self._keep_on_disk, name=f"raytrain-{self.name}-disk", daemon=True).start()

    @property
    def is_away(self) -> bool:
        """Whether it did not answer when it was asked last."""
        return self._num_failures > 1

    def give(self, items: Sequence[Item]) -> None:
        """Take what is to be sent; waits for nothing."""
        if not items:
            return
        with self._changed:
            if not self.backlog:
                self._flush_at_s = time.monotonic() + _FLUSH_S
            had_room = self.backlog.lost_from is None
            self.backlog.add(items)
            if len(self.backlog) >= _FLUSH_ROWS or not all(isinstance(item, Row) for item in items):
                self._flush_at_s = 0.0
            self._is_ending = self._is_ending or isinstance(items[-1], End)
            self._num_given += 1
            self._changed.notify()
        if had_room and self.backlog.lost_from is not None:
            self._complain_of_no_room()

    def wait(self, limit_s: float) -> bool:
        """Wait until all is sent, or nothing more can be; whether all was. What was not is on disk, or counted and told."""
        for _ in range(4):  # a tracker that gets on with it may take longer than one that does not
            before = self.backlog.num_taken
            self._thread.join(max(0.0, limit_s))
            if not self._thread.is_alive() or self.backlog.num_taken == before:
                break
        hangs = self._thread.is_alive()
        if self.backlog.spool is not None:  # otherwise it may go on as long as the process lives
            self._stop()
            self._spill()
        left, self.unsent = len(self.backlog), self.backlog.close()
        late = f"{self.name} did not answer within {limit_s:g} s at the end of the run. " if hangs else ""
        lost = f"{left} items did not reach {self.name}." if left else ""
        if late or lost:
            self._warn(f"{late}{lost}")
        return not hangs and not left

    def drop(self) -> None:
        """Stop and forget what was to be sent of this start: it has not begun."""
        self._stop()
        self.backlog.drop()

    def _stop(self) -> None:
        with self._changed:
            self._is_abandoned = True
            self._changed.notify()
        self._done.set()

    # -- the thread that sends ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._wait_until_due():
            self._deliver()
            if self._is_ending and (self._num_failures >= _LAST_TRIES or not self.backlog.head(1)):
                break
        self._done.set()

    def _wait_until_due(self) -> bool:
        """Wait until something is to be sent; False when nothing more shall be."""
        while not self._is_abandoned:
            seen, waiting = self._num_given, bool(self.backlog.head(1))
            with self._changed:
                now_s = time.monotonic()
                due_s = max(0.0 if self._is_ending else self._flush_at_s, self._pause_until_s) - now_s
                if (waiting and due_s <= 0) or (self._is_ending and not waiting):
                    return True
                if seen == self._num_given and not self._is_abandoned:
                    self._changed.wait(due_s if waiting else None)
        return False

    def _deliver(self) -> None:
        while not self._is_abandoned:
            batch = first_batch(self.backlog.head(self._batch_limit))
            if (not batch or isinstance(batch[0], End)) and not self._close_gap():
                return
            if not batch or not self._try(batch):
                return

    def _try(self, batch: Sequence[Item]) -> bool:
        """Give the tracker a batch and take it from the backlog; False when it is to be tried again later."""
        try:
            told = self._give(batch)
        except (RefusedError, *_FAULTS) as failure:
            if len(batch) > 1:
                self._batch_limit = len(batch) // 2  # find the one that is refused, and let the others pass
                return True
            text = f"{self.name} has a fault and leaves something out: {_text(failure)}"
            if isinstance(failure, RefusedError):
                text = f"{self.name} does not take something, and it is left out: {_text(failure)}"
            self._complain(repr(type(failure)), text)
            told = {}
        except Exception as failure:
            self._fail(failure, isinstance(batch[0], RunInfo))
            return False
        if self._is_abandoned:
            return False
        self.backlog.take(len(batch))
        self._num_failures, self._batch_limit = 0, min(_MAX_BATCH, 2 * self._batch_limit)
        if isinstance(batch[0], RunInfo):
            self._opened(told)
            if self.backlog.is_open:
                self.has_answered.set()
        return True

    def _give(self, batch: Sequence[Item]) -> dict[str, str]:
        self._busy_since_s = time.monotonic()
        try:
            return give(self.tracker, batch)
        finally:
            self._busy_since_s = 0.0

    def _close_gap(self) -> bool:
        """Send the rows that had found no room, from the run's own memory; False when that failed."""
        if self._gap_from is None:
            self._gap_from = self.backlog.found_again()
        if self._gap_from is None:
            return True
        rows = list(self._rows_from(self._gap_from))
        try:
            for start in range(0, len(rows), _MAX_BATCH):
                self._gap_from = rows[start].step
                self._give(rows[start : start + _MAX_BATCH])
        except Exception as failure:
            self._fail(failure, False)
            return False
        self._gap_from = None
        return True

    def _fail(self, failure: Exception, is_opening: bool) -> None:
        """Ever longer pauses: a server that hangs until its time limit must not be asked for each report."""
        self._num_failures += 1
        final = isinstance(failure, TrackingError) and not isinstance(failure, AwayError)
        if self._num_failures == 1 and not final:
            return  # tried again at once: an idle connection that was closed is no outage
        pause_s = 0.5 * 2 ** min(self._num_failures - 2, 10)
        self._pause_until_s = time.monotonic() + min(_MAX_PAUSE_S, 0.5 if self._is_ending else pause_s)
        if is_opening:
            self.failure = failure
            self.has_answered.set()
        spool = self.backlog.spool
        kept = "are kept and sent later" if spool is None else f"are kept in {spool.path} and sent when it is back"
        said = (
            without_secrets(str(failure)) if isinstance(failure, TrackingError) else f"{self.name}: {_text(failure)}."
        )
        text = f"{said} Training goes on; the rows and all else for it {kept}."
        self._complain(repr(type(failure)), text)

    # -- the thread that keeps it on disk -------------------------------------------------------------------------

    def _keep_on_disk(self) -> None:
        while not self._done.wait(_FLUSH_S):
            busy_since_s = self._busy_since_s
            hangs = busy_since_s > 0 and time.monotonic() - busy_since_s > _SLOW_S
            if self.is_away or hangs or len(self.backlog) > _LONG:
                self._spill()

    def _spill(self) -> None:
        try:
            if self.backlog.spill():
                self._complain_of_no_room()
        except (OSError, TrackingError) as failure:
            self._complain("disk", f"what {self.name} should get cannot be kept on disk: {_text(failure)}")

    def _complain_of_no_room(self) -> None:
        step = self.backlog.lost_from
        self._complain(
            "full",
            f"{self.name} was away for too long: there is no room to keep more rows for it, from step {step} on. The older ones "
            "stay; the others are sent from the run's history",
        )

    def _complain(self, kind: str, text: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s.get(kind, -math.inf) > _TOLD_AGAIN_S:
            self._warned_s[kind] = now_s
            self._warn(text)


def _text(error: Exception) -> str:
    return without_secrets(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
