"""The spool: all that a tracker could not take, in order, once, within its bound, and without secrets."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from raytrain.errors import TrackingError
from raytrain.report import Event, Report, Row
from raytrain.storage import Storage
from raytrain.tracking import Collector, RunInfo
from raytrain.tracking.backlog import Backlog
from raytrain.tracking.base import AwayError, End, RefusedError
from raytrain.tracking.spool import Spool, decoded, encoded, spool_folder

RUN = RunInfo("r", "T", 1, {"task.lr": 0.1}, "lr: 0.1\n", None, "/r", run_key="k", started_s=5.0)


def row(step: int, **values: float) -> Row:
    return Row(step, step / 10, values or {"loss": step + 0.1}, 1000 + step)


def until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "item",
    [
        row(3, a=0.1 + 0.2, inf=math.inf, low=-math.inf),
        Event("best", 7, {"uri": "/c/7", "metrics": {"a": 1.5}}, 4),
        End("FAILED", "ValueError: x", 12.5),
        End("FINISHED", None, 12.5),
    ],
)
def test_items_survive_the_way_to_disk(item: Any) -> None:
    again = decoded(encoded(item))
    assert again == item
    assert getattr(again, "time_ms", None) == getattr(item, "time_ms", None)
    assert getattr(again, "number", None) == getattr(item, "number", None)


def test_nan_stays_nan_and_what_is_no_number_is_left_out() -> None:
    odd: dict[str, Any] = {"a": math.nan, "note": "x", "none": None, "b": 1}
    again = decoded(encoded(Row(1, 0.1, odd)))
    assert isinstance(again, Row)
    assert math.isnan(again.values["a"])
    assert again.values.keys() == {"a", "b"}


def test_no_secret_reaches_the_disk() -> None:
    run = RunInfo("r", "T", 1, {"task.api_key": "hunter2"}, "api_key: hunter2\n", None, "s3://me:hunter2@b/r")
    assert b"hunter2" not in encoded(run) + encoded(End("FAILED", "at http://me:hunter2@host", 1.0))
    assert decoded(encoded(RUN)) == RunInfo(**{**vars(RUN), "params": {"task.lr": "0.1"}, "datasets": []})


def test_what_was_appended_comes_back_in_order_and_the_file_goes(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool" / "start-1.jsonl", RUN)
    assert not spool.path.parent.exists()  # nothing is written before it is needed
    spool.append([row(1), row(2)])
    spool.append([Event("note", 2), row(3)])
    assert spool.path.stat().st_mode & 0o077 == 0
    assert spool.peek(3) == [row(1), row(2), Event("note", 2)]
    spool.take(3)
    spool.append([row(4)])
    assert spool.peek(9) == [row(3), row(4)]
    spool.take(2)
    assert spool.is_empty
    assert spool.path.stat().st_size == 0
    spool.append([row(5)])  # a second outage
    assert spool.peek(9) == [row(5)]
    spool.take(1)
    assert spool.close() is None
    assert not spool.path.parent.exists()


def test_another_process_reads_it_from_its_start_on_with_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "start-1.jsonl"
    spool = Spool(path, RUN)
    spool.append([row(1), row(2)])
    spool.take(1)
    with pytest.raises(TrackingError, match="in use"):
        Spool(path)
    assert spool.close() == path
    path.write_bytes(path.read_bytes()[:-9])
    again = Spool(path)
    assert [type(item) for item in again.peek(9)] == [RunInfo, Row]
    again.take(2)
    again.close()
    assert not path.exists()
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(TrackingError, match="no run"):
        Spool(tmp_path / "other")


def test_at_the_bound_the_oldest_rows_and_all_else_are_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s.jsonl", RUN, max_bytes=300)
    left_out = spool.append([row(step) for step in range(1, 11)] + [Event("finished", 10)])
    kept = spool.peek(99)
    assert kept == [*(row(step) for step in range(1, len(kept))), Event("finished", 10)]
    assert left_out == [row(step) for step in range(len(kept), 11)]
    spool.close()


def test_a_full_disk_leaves_the_file_whole_and_the_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "s.jsonl", RUN)
    backlog = Backlog(None, spool)
    backlog.add([row(1)])
    backlog.spill()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    backlog.add([row(2)])
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            backlog.spill()
    assert len(backlog) == 1
    backlog.spill()
    assert backlog.head(9) == [row(1), row(2)]
    backlog.close()


def test_items_that_go_to_disk_while_they_are_sent_are_taken_from_there(tmp_path: Path) -> None:
    backlog = Backlog(None, Spool(tmp_path / "s.jsonl", RUN))
    backlog.add([row(1), row(2)])
    sending = backlog.head(1)
    backlog.spill()
    backlog.add([row(3)])
    backlog.take(len(sending))
    assert backlog.head(9) == [row(2)]
    backlog.take(1)
    assert backlog.head(9) == [row(3)]
    backlog.close()


def test_earlier_starts_come_first(tmp_path: Path) -> None:
    before = Spool(tmp_path / "start-1.jsonl", RUN)
    before.append([row(1)])
    before.close()
    now = RunInfo(**{**vars(RUN), "attempt": 2})
    backlog = Backlog(now, None, [Spool(tmp_path / "start-1.jsonl")])
    backlog.add([row(2)])
    order = []
    while items := backlog.head(1):
        order.append(items[0])
        backlog.take(1)
    assert [type(item) for item in order] == [RunInfo, Row, RunInfo, Row]
    assert not list(tmp_path.iterdir())


def test_runs_on_other_storages_spool_to_the_users_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert spool_folder(Storage(str(tmp_path / "r")), "key") == tmp_path / "r" / "spool"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    s3 = Storage("s3://bucket/r?region=us-east-1&endpoint_override=127.0.0.1:9&scheme=http")
    assert spool_folder(s3, "key") == tmp_path / "raytrain" / "key" / "spool"


class Away:
    """A tracker that may be away, keeps what it gets, and takes each row once as MLflow does."""

    may_be_away = True

    def __init__(self) -> None:
        self.away = threading.Event()
        self.got: list[Any] = []
        self.refused: set[int] = set()
        self.seen = 0

    def _answer(self, item: Any) -> None:
        if self.away.is_set():
            raise AwayError("nobody there.")
        self.got.append(item)

    def open(self, run: RunInfo) -> dict[str, str]:
        self._answer(run)
        return {"id": "1"}

    def log(self, rows: Sequence[Row]) -> None:
        if self.refused & {row.step for row in rows}:
            raise RefusedError("not this")
        for one in rows:
            if one.step > self.seen:
                self._answer(one)
                self.seen = one.step

    def event(self, event: Event) -> None:
        self._answer(event)

    def close(self, status: str, error: str | None, time_s: float | None = None) -> None:
        self._answer(status)

    @property
    def steps(self) -> list[int]:
        return [item.step for item in self.got if isinstance(item, Row)]


def collector_of(tracker: Away, path: Path, warnings: list[str], **options: Any) -> Collector:
    return Collector([tracker], opening=RUN, spool=Spool(path, RUN, **options), warn=warnings.append)


def test_rows_beyond_the_bound_come_from_the_runs_memory_when_the_tracker_is_back(tmp_path: Path) -> None:
    tracker, warnings, path = Away(), [], tmp_path / "s.jsonl"
    tracker.away.set()
    collector = collector_of(tracker, path, warnings, max_bytes=2000)
    collector.wait_open(5.0, strict=False)
    for step in range(1, 101):
        collector.put(Report((row(step),)))
    until(lambda: any("no room" in text for text in warnings))
    tracker.away.clear()
    until(lambda: tracker.steps == list(range(1, 101)))
    collector.put(Report((row(101),)))
    collector.close("FINISHED", None)
    assert tracker.steps == list(range(1, 102))
    assert tracker.got[-1] == "FINISHED"
    assert not path.exists()
    assert len(warnings) == 2


def test_normal_operation_writes_nothing(tmp_path: Path) -> None:
    tracker, warnings = Away(), []
    collector = collector_of(tracker, tmp_path / "s" / "s.jsonl", warnings)
    collector.wait_open(5.0, strict=False)
    for step in range(1, 1001):
        collector.put(Report((row(step),)))
    collector.close("FINISHED", None)
    assert len(tracker.steps) == 1000
    assert not (tmp_path / "s").exists()
    assert warnings == []


def test_what_is_left_at_the_end_is_one_file_and_one_command(tmp_path: Path) -> None:
    tracker, warnings, path = Away(), [], tmp_path / "s p" / "s.jsonl"
    tracker.away.set()
    collector = collector_of(tracker, path, warnings)
    collector.wait_open(5.0, strict=False)
    collector.put(Report((row(1),), (Event("finished", 1),)))
    collector.close("FINISHED", None)
    assert warnings[-1].splitlines()[-1] == f"  raytrain runs --send '{path}'"
    lines = [decoded(line) for line in path.read_bytes().splitlines(keepends=True)]
    assert [type(item) for item in lines] == [RunInfo, Row, Event, End]


def test_a_row_that_is_refused_for_good_loses_no_other(tmp_path: Path) -> None:
    tracker, warnings = Away(), []
    tracker.refused = {37}
    collector = collector_of(tracker, tmp_path / "s.jsonl", warnings)
    collector.put(Report(tuple(row(step) for step in range(1, 101))))
    collector.close("FINISHED", None)
    assert tracker.steps == [step for step in range(1, 101) if step != 37]
    assert len(warnings) == 1
    assert "not this" in warnings[0]


def test_strict_raises_and_leaves_nothing(tmp_path: Path) -> None:
    tracker = Away()
    tracker.away.set()
    collector = collector_of(tracker, tmp_path / "s" / "s.jsonl", [])
    with pytest.raises(TrackingError, match="nobody there"):
        collector.wait_open(None, strict=True)
    assert not (tmp_path / "s").exists()
