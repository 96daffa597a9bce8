"""Streaming from Parquet: each row once, in the order of the lanes, ahead of need, in constant memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

from raytrain.data.lanes import Lanes
from raytrain.data.stream_reader import ParquetStream
from raytrain.errors import DataError
from tests.unit.stream_kit import (
    COLUMNS,
    OPEN,
    global_batches,
    lane_threads,
    no_lanes_left,
    part_of,
    stream_of,
    table_of,
    take,
    until,
    watched,
    write,
)

SHAPES = {
    "one huge row group": [[500]],
    "tiny row groups": [[1, 2, 1, 3, 1] * 6, [1] * 40],
    "files without rows": [[], [30, 20], [], [0, 25, 0], []],
    "mixed": [[40, 7], [100], [1, 1, 60]],
}


@pytest.fixture(autouse=True)
def _no_lanes_left() -> Iterator[None]:
    with no_lanes_left():
        yield


def expected(group_rows: list[int], steps: int, epoch: int = 0, index: int = 0, **options: int) -> list[list[int]]:
    """The global batches as the definition has them: position p is row p // L of lane p % L."""
    lanes = Lanes(group_rows, OPEN["batch_size"], seed=OPEN["seed"], **options)
    batches = []
    for _ in range(steps):
        if index == lanes.steps_per_epoch:
            epoch, index = epoch + 1, 0
        start = index * OPEN["batch_size"]
        places = sorted((p % lanes.num_lanes, p // lanes.num_lanes) for p in range(start, start + lanes.rows_of(index)))
        order, size = lanes.order(epoch), lanes.block_rows
        batches.append([int(order.rows(lane, o // size)[o % size]) for lane, o in places])
        index += 1
    return batches


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (3, 2)])
def test_the_order_is_that_of_the_lanes_and_each_row_comes_once(
    tmp_path: Path, shape: str, world_size: int, accumulate: int
) -> None:
    parts = write(tmp_path, SHAPES[shape])
    group_rows = [rows for part in parts for rows in part.row_group_rows]
    num_rows, steps = sum(group_rows), -(-sum(group_rows) // 16)
    options = {"num_lanes": 4, "block_rows": 10}
    batches = global_batches(lambda: stream_of(parts, **options), 2 * steps, world_size, accumulate=accumulate)
    assert [ids for _, _, ids in batches] == expected(group_rows, 2 * steps, **options)
    assert [place[:2] for place in batches] == list(itertools.product(range(2), range(steps)))
    for epoch in range(2):
        assert sorted(sum((ids for e, _, ids in batches if e == epoch), [])) == list(range(num_rows))


def test_a_resume_in_mid_epoch_on_other_workers(tmp_path: Path) -> None:
    parts = write(tmp_path, SHAPES["mixed"])

    def make() -> ParquetStream:
        return stream_of(parts, num_lanes=4, block_rows=9)

    undisturbed = global_batches(make, 30, world_size=2)
    resumed = [
        *global_batches(make, 5, world_size=2),
        *global_batches(make, 13, world_size=5, accumulate=2, index=5),
        *global_batches(make, 12, world_size=1, epoch=1, index=4),
    ]
    assert len(undisturbed) == 30
    assert resumed == undisturbed


def test_workers_without_a_row_borrow_and_all_have_as_many_micro_batches(tmp_path: Path) -> None:
    parts = write(tmp_path, [[17]])
    for rank in range(4):
        slots = take(stream_of(parts, num_lanes=4, block_rows=3), 3, rank=rank, world_size=4, accumulate=2)
        assert [(slot.epoch, slot.index, slot.micro) for slot, _ in slots] == [
            (0, 0, 0),
            (0, 0, 1),
            (0, 1, 0),
            (1, 0, 0),
            (1, 0, 1),
        ]
        (slot, table) = slots[2]
        assert slot.num_rows == (rank == 0)
        assert table["id"].to_pylist() == slot.indices.tolist()
        assert table.num_rows == 1


def test_tables_have_the_chosen_columns_whole(tmp_path: Path) -> None:
    parts = write(tmp_path, SHAPES["mixed"])
    for slot, table in take(stream_of(parts, num_lanes=3, block_rows=8), 14):
        assert table.schema.names == COLUMNS
        assert table.equals(table_of(0, 300).select(COLUMNS).take(pa.array(slot.indices)))
        assert all(column.num_chunks == 1 for column in table.columns)


def test_as_stored_without_shuffling_and_the_rest_dropped(tmp_path: Path) -> None:
    parts = write(tmp_path, SHAPES["mixed"])
    batches = global_batches(lambda: stream_of(parts, block_rows=10), 14, world_size=2, shuffle=False, drop_last=True)
    assert [ids for _, _, ids in batches] == [list(range(k * 16, k * 16 + 16)) for k in [*range(13), 0]]


def test_no_step_is_told(tmp_path: Path) -> None:
    stream = stream_of(write(tmp_path, [[], [5, 4]]))
    assert stream.num_rows == 9
    with pytest.raises(DataError, match="9 rows make no batch of 16"):
        stream.open(**{**OPEN, "drop_last": True})
    with pytest.raises(DataError, match=r"no columns \['nope'\] to read. Allowed: one or more of id, unread"):
        ParquetStream(None, [], ["nope"], table_of(0, 0).schema)


def test_a_new_iterator_ends_the_one_before_and_close_ends_the_threads(tmp_path: Path) -> None:
    stream = stream_of(write(tmp_path, SHAPES["mixed"]), num_lanes=2, block_rows=10)
    first = stream.open(**OPEN)
    next(first)
    assert len(lane_threads()) == 2
    second = stream.open(**OPEN)
    assert list(first) == []
    assert next(second)[0].index == 0
    stream.close()
    assert list(second) == []
    assert lane_threads() == []
    stream.close()


def test_lanes_that_a_rank_reads_no_more_are_closed(tmp_path: Path) -> None:
    """Rank 1 of 2 needs one row of lane 1 in the last batch of an epoch, and that lane in no other batch."""
    stream = stream_of(write(tmp_path, [[16 * 20 + 10]]), num_lanes=4, block_rows=10)
    slots = stream.open(**{**OPEN, "rank": 1, "world_size": 2, "index": 20})
    assert len(lane_threads()) == 3
    for _ in range(12):
        next(slots)
    until(lambda: lane_threads() == ["raytrain-lane-2", "raytrain-lane-3"])
    stream.close()


def test_the_next_block_is_read_while_the_last_one_is_used(tmp_path: Path) -> None:
    """A storage of 50 ms per read that then stands still: the rows of two blocks come all the same."""
    parts = write(tmp_path, [[100] * 6])
    readers: list[str] = []
    goes_on = threading.Event()
    goes_on.set()

    def slow(path: str, num_bytes: int) -> None:
        readers.append(threading.current_thread().name)
        time.sleep(0.05)
        goes_on.wait(30)

    def at_rest() -> bool:
        before = len(readers)
        time.sleep(0.3)
        return len(readers) == before

    stream = stream_of(parts, watched(slow), num_lanes=2, block_rows=50)
    slots = stream.open(**{**OPEN, "batch_size": 20})
    until(lambda: len(readers) > 0)  # before the first rows are asked for
    next(slots)
    until(at_rest)
    goes_on.clear()
    num_reads = len(readers)
    for _ in range(9):  # ten batches of 20 are two blocks of 50 in two lanes
        next(slots)
    until(lambda: len(readers) > num_reads)  # the third blocks are under way
    goes_on.set()
    assert next(slots)[0].index == 10
    assert threading.current_thread().name not in readers
    stream.close()


def test_no_more_than_one_block_is_read_ahead(tmp_path: Path) -> None:
    parts = write(tmp_path, [[100]] * 12)
    opened: list[str] = []
    stream = stream_of(parts, watched(lambda path, num_bytes: opened.append(path)), num_lanes=1, block_rows=100)
    slots = stream.open(**{**OPEN, "batch_size": 100})
    for step in range(3):
        next(slots)
        until(lambda: len(set(opened)) == step + 2)  # noqa: B023
        time.sleep(0.1)
        assert len(set(opened)) == step + 2
    stream.close()


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 19, reason="columns are fetched whole before pyarrow 19")
@pytest.mark.parametrize("group_rows", [400_000, 4_000], ids=["one row group", "many row groups"])
def test_memory_does_not_grow_with_the_data(tmp_path: Path, group_rows: int) -> None:
    """51 MB of rows, of which two lanes hold two blocks of 0.64 MB each: a twentieth."""
    num_rows, width, block_rows = 400_000, 16, 5_000
    path = tmp_path / "large.parquet"
    values = pa.array(np.random.default_rng(0).random(num_rows * width))
    table = pa.table({"vector": pa.FixedSizeListArray.from_arrays(values, width)})
    pq.write_table(table, path, row_group_size=group_rows, use_dictionary=False, data_page_size=2**16)
    schema, num_read = table.schema, 0
    del table, values
    stream = ParquetStream(
        pa.fs.LocalFileSystem(), [part_of(path)], ["vector"], schema, num_lanes=2, block_rows=block_rows
    )
    with contextlib.closing(stream), highest_arrow_bytes() as highest:
        for slot, rows in stream.open(**{**OPEN, "batch_size": 1000}):
            if slot.epoch == 1:
                break
            num_read += rows.num_rows
            highest.append(pa.total_allocated_bytes())
    assert num_read == num_rows
    # Four blocks, one that is joined, and of each lane a column's buffer of 1 MiB and its pages.
    assert max(highest) - highest[0] < 5 * block_rows * width * 8 + 2 * 1.9 * 2**20 < path.stat().st_size / 7


@contextlib.contextmanager
def highest_arrow_bytes() -> Iterator[list[int]]:
    """Arrow's memory as it is at first, and then all the time, from a thread that looks."""
    seen, ended = [pa.total_allocated_bytes()], threading.Event()

    def look() -> None:
        while not ended.wait(0.0005):
            seen.append(pa.total_allocated_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    yield seen
    ended.set()
    thread.join()
