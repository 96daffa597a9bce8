"""The collector: each (metric, step) once, in order, to every tracker, and never in the way."""

from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

from raytrain.report import Event, Report, Row
from raytrain.tracking import Collector, RunInfo, backlog, outlet


class Kept:
    """A tracker that keeps what it gets, and can be away."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.ended: list[tuple[str, str | None]] = []
        self.away = False

    def open(self, run: RunInfo) -> dict[str, str]:
        return {}

    def log(self, rows: Sequence[Row]) -> None:
        if self.away:
            raise ConnectionError("nobody there")
        self.rows += rows

    def event(self, event: Event) -> None:
        self.events.append(event)

    def close(self, status: str, error: str | None, time_s: float | None = None) -> None:
        self.ended.append((status, error))


def row(step: int, **values: float) -> Row:
    return Row(step, step / 10, values)


def test_replayed_steps_are_dropped_per_metric() -> None:  # case D1
    kept = Kept()
    collector = Collector([kept], history=[row(1, loss=1.0), row(2, loss=2.0)])
    collector.put(Report((row(2, loss=2.0, val=9.0), row(3, loss=3.0))))
    collector.put(Report((row(3, loss=3.0), row(4, loss=4.0)), (Event("finished", 4),)))
    collector.close("FINISHED", None)
    assert [(r.step, dict(r.values)) for r in kept.rows] == [(2, {"val": 9.0}), (3, {"loss": 3.0}), (4, {"loss": 4.0})]
    assert [(r.step, dict(r.values)) for r in collector.history] == [
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0, "val": 9.0}),
        (3, {"loss": 3.0}),
        (4, {"loss": 4.0}),
    ]
    assert collector.last == {"loss": 4.0, "val": 9.0}
    assert kept.ended == [("FINISHED", None)]
    assert [e.kind for e in kept.events] == ["finished"]


def test_an_outage_costs_nothing_and_loses_nothing() -> None:  # case D4
    kept, other, warnings = Kept(), Kept(), []
    collector = Collector([kept, other], warn=warnings.append)
    kept.away = True
    slowest_s = 0.0
    for step in range(1, 40):
        began = time.monotonic()
        collector.put(Report((row(step, loss=1.0),)))
        slowest_s = max(slowest_s, time.monotonic() - began)
        time.sleep(0.05)
    kept.away = False
    collector.close("FINISHED", None)
    assert [r.step for r in kept.rows] == [r.step for r in other.rows] == list(range(1, 40))
    assert len(warnings) == 1
    assert "nobody there" in warnings[0]
    assert slowest_s < 0.2


def test_what_hangs_at_the_end_is_given_up_and_told() -> None:
    release, warnings = threading.Event(), []

    class Hanging(Kept):
        def close(self, status: str, error: str | None, time_s: float | None = None) -> None:
            release.wait(20)

    collector = Collector([Hanging()], warn=warnings.append)
    collector.close("FINISHED", None, limit_s=0.2)
    release.set()
    assert "did not answer within 0.2 s" in warnings[0]


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Hanging(Kept):
    """A tracker whose first ``log`` waits for a sign."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.is_called = threading.Event()

    def log(self, rows: Sequence[Row]) -> None:
        self.is_called.set()
        self.go_on.wait(20)
        super().log(rows)


def test_one_that_hangs_holds_up_no_other_and_gets_each_row_once() -> None:  # case D4
    hanging, other, warnings = Hanging(), Kept(), []
    collector = Collector([hanging, other], warn=warnings.append)
    collector.put(Report((row(1, loss=1.0),), (Event("note", 1, {"text": "x"}),)))
    assert hanging.is_called.wait(10)
    collector.put(Report((row(2, loss=2.0),), (Event("note", 2, {"text": "y"}),)))
    until(lambda: [r.step for r in other.rows] == [1, 2])
    collector.close("FINISHED", None, limit_s=0.3)
    assert other.ended == [("FINISHED", None)]
    assert len(warnings) == 1
    assert "Hanging" in warnings[0]
    hanging.go_on.set()
    until(lambda: hanging.ended == [("FINISHED", None)])
    assert [r.step for r in hanging.rows] == [1, 2]


def test_rows_are_sent_again_without_new_reports() -> None:  # case D4
    kept = Kept()
    kept.away = True
    collector = Collector([kept], warn=lambda text: setattr(kept, "away", False))
    collector.put(Report((row(1, loss=1.0),)))
    until(lambda: [r.step for r in kept.rows] == [1])
    collector.close("FINISHED", None)


def test_rows_of_quick_reports_travel_together_and_events_at_once() -> None:
    calls: list[int] = []

    class Counting(Kept):
        def log(self, rows: Sequence[Row]) -> None:
            calls.append(len(rows))

    counting = Counting()
    collector = Collector([counting])
    began = time.monotonic()
    for step in range(1, 101):
        collector.put(Report((row(step, loss=1.0),)))
    collector.put(Report((), (Event("note", 100, {"text": "x"}),)))
    until(lambda: len(counting.events) == 1)
    assert time.monotonic() - began < outlet._FLUSH_S
    assert sum(calls) == 100
    assert len(calls) < 10
    collector.close("FINISHED", None)


def test_a_tracker_with_a_fault_loses_that_alone() -> None:
    warnings: list[str] = []

    class Faulty(Kept):
        def event(self, event: Event) -> None:
            raise KeyError("world_size")

    faulty = Faulty()
    collector = Collector([faulty], warn=warnings.append)
    collector.put(Report((row(1, loss=1.0),), (Event("started", 0), Event("started", 0))))
    collector.put(Report((row(2, loss=1.0),)))
    collector.close("FINISHED", None)
    assert [r.step for r in faulty.rows] == [1, 2]
    assert len(warnings) == 1
    assert "world_size" in warnings[0]


def test_a_report_that_is_none_is_told_and_the_next_one_taken() -> None:
    kept, warnings = Kept(), []
    collector = Collector([kept], warn=warnings.append)
    broken: Any = None
    collector.put(broken)
    collector.put(Report((row(1, loss=1.0),)))
    collector.close("FAILED", "x")
    assert [r.step for r in kept.rows] == [1]
    assert len(warnings) == 1
    assert kept.ended == [("FAILED", "x")]


def test_rows_that_are_given_up_are_counted(monkeypatch: Any) -> None:
    monkeypatch.setattr(backlog, "MAX_WAITING", 10)
    kept, warnings = Kept(), []
    kept.away = True
    collector = Collector([kept], warn=warnings.append)
    collector.put(Report(tuple(row(step, loss=1.0) for step in range(1, 16))))
    collector.put(Report((), (Event("finished", 15),)))
    collector.close("FINISHED", None)
    assert "no room to keep more rows for it, from step 11 on" in warnings[0]
    assert "12 items did not reach Kept" in warnings[-1]
    assert len(collector.history) == 15


def test_warnings_hold_no_credentials() -> None:
    warnings: list[str] = []

    class Leaky(Kept):
        def log(self, rows: Sequence[Row]) -> None:
            raise OSError("API request to http://me:hunter2@host/api failed")

    collector = Collector([Leaky()], warn=warnings.append)
    collector.put(Report((row(1, loss=1.0),)))
    collector.close("FINISHED", None)
    assert "http://***@host" in warnings[0]
    assert "hunter2" not in " ".join(warnings)


def test_a_long_history_is_small() -> None:
    collector = Collector([])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in range(1, 100_001):
            collector.put(Report((Row(step, step / 1e4, {"a": step + 0.1, "b": step + 0.2, "c": 1.5, "d": 2.5}),)))
        used_bytes = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used_bytes < 10e6
    rows = collector.history
    assert len(rows) == 100_000
    assert (rows[-1].step, rows[-1].values["a"]) == (100_000, 100_000.1)
    collector.close("FINISHED", None)


def test_nothing_stays_behind() -> None:
    before = threading.active_count()
    collector = Collector([Kept(), Kept()])
    collector.put(Report((row(1, loss=1.0),)))
    collector.close("FINISHED", None)
    assert threading.active_count() == before
