"""Streaming in spite of failing reads, and errors that name the file."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain.data import rowgroups
from raytrain.data.stream_reader import ParquetPart
from raytrain.errors import DataError
from tests.unit.stream_kit import (
    OPEN,
    global_batches,
    lane_threads,
    no_lanes_left,
    stream_of,
    table_of,
    take,
    until,
    watched,
    write,
)


@pytest.fixture(autouse=True)
def _quick_pauses_and_no_lanes_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rowgroups, "PAUSES_S", (0.01, 0.01, 0.01))
    with no_lanes_left():
        yield


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    parts = write(tmp_path, [[20], [20]])
    cut = Path(parts[1].path)
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"row group 0 of .*part-001.parquet cannot be read at row 0 \(tried 1 times\)"):
        take(stream_of(parts), 3)


def test_a_file_with_another_schema_is_named(tmp_path: Path) -> None:
    parts = write(tmp_path, [[20], [20], [20]])
    good = table_of(20, 20)
    path = Path(parts[1].path)
    pq.write_table(good.set_column(0, "id", good["id"].cast(pa.int32())), path)
    with pytest.raises(DataError, match=r"column 'id' of .*part-001.parquet is of type int32, but int64 in the other"):
        take(stream_of(parts), 4)
    pq.write_table(good.drop_columns(["text"]), path)
    with pytest.raises(DataError, match=r"part-001.parquet has no column 'text', .* It has: id, unread, vector"):
        take(stream_of(parts), 4)


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:
    parts = write(tmp_path, [[20], [20]])
    pq.write_table(table_of(20, 19), parts[1].path)
    with pytest.raises(
        DataError, match=r"part-001.parquet has changed .* 1 row groups with 19 rows instead of 1 with 20"
    ):
        take(stream_of(parts), 3)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    parts = [*write(tmp_path, [[20]]), ParquetPart(str(tmp_path / "gone.parquet"), (20,))]
    with pytest.raises(DataError, match=r"row group 0 of .*gone.parquet .*FileNotFoundError"):
        take(stream_of(parts), 3)


def test_damaged_pages_are_an_error_of_the_row_group(tmp_path: Path) -> None:
    parts = write(tmp_path, [[3000, 3000]], compression="zstd", use_dictionary=False)
    path = Path(parts[0].path)
    content = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    start = column.data_page_offset + 40
    content[start : start + 400] = bytes(400)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"row group 1 of .*part-000.parquet cannot be read") as caught:
        take(stream_of(parts), 400)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


class Failing:
    """Reads fail from the n-th on, so many times."""

    def __init__(self, first: int, times: int) -> None:
        self.first, self.times, self.count, self.failed = first, times, 0, 0
        self.lock = threading.Lock()

    def __call__(self, path: str, num_bytes: int) -> None:
        with self.lock:
            self.count += 1
            if self.count >= self.first and self.failed < self.times:
                self.failed += 1
                raise OSError("connection reset by peer")


@pytest.mark.parametrize("whole_bytes", [0, 2**20], ids=["by column", "whole row groups"])
@pytest.mark.parametrize("first", [1, 5, 9, 12])
def test_a_read_that_fails_is_tried_again_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, whole_bytes: int
) -> None:
    monkeypatch.setattr(rowgroups, "_WHOLE_BYTES", whole_bytes)
    monkeypatch.setattr(rowgroups, "_SMALL_BUFFER_BYTES", 2**15)  # so that reads fall within row groups
    parts = write(tmp_path, [[20_000, 3000], [1000]], data_page_size=2000, compression="none")
    failing = Failing(first, 3)
    options = {"num_lanes": 2, "block_rows": 3000}
    batches = global_batches(lambda: stream_of(parts, watched(failing), **options), 40, world_size=1, batch_size=800)
    assert failing.failed == 3
    assert batches == global_batches(lambda: stream_of(parts, **options), 40, world_size=1, batch_size=800)


def test_a_read_that_keeps_failing_ends_with_file_row_group_and_cause(tmp_path: Path) -> None:
    parts = write(tmp_path, [[50]])
    failing = Failing(1, 1000)
    stream = stream_of(parts, watched(failing), num_lanes=1)
    message = r"row group 0 of .*part-000.parquet cannot be read at row 0 \(tried 4 times\): OSError: connection reset"
    with pytest.raises(DataError, match=message):
        take(stream, 1)
    stream.close()


def test_close_does_not_wait_for_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowgroups, "PAUSES_S", (3600.0,) * 3)
    failing = Failing(1, 10**6)
    stream = stream_of(write(tmp_path, [[50]]), watched(failing), num_lanes=1)
    stream.open(**OPEN)
    until(lambda: failing.failed == 1)
    stream.close()
    assert lane_threads() == []
