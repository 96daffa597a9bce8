"""What the tests of streaming share: Parquet files, a storage that is slow or fails, and what all ranks get."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from raytrain.data.batch import Slot
from raytrain.data.stream_reader import ParquetPart, ParquetStream

COLUMNS = ["text", "id", "vector"]  # not in the files' order


def table_of(first: int, num_rows: int) -> pa.Table:
    """Rows with the ids from ``first`` on."""
    ids = np.arange(first, first + num_rows)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 2).astype(np.float32)), 2)
    return pa.table(
        {
            "id": ids,
            "unread": ids * 2.0,
            "vector": vectors,
            "text": pa.array([f"row {row}" * (row % 3) for row in ids], "string"),
        }
    )


def write(folder: Path, files: Sequence[Sequence[int]], **options: Any) -> list[ParquetPart]:
    """Files with row groups of these sizes; ids count on over all files."""
    parts, first = [], 0
    for number, group_rows in enumerate(files):
        path = folder / f"part-{number:03}.parquet"
        with pq.ParquetWriter(path, table_of(0, 0).schema, **options) as writer:
            for num_rows in group_rows:
                writer.write_table(table_of(first, num_rows), row_group_size=max(1, num_rows))
                first += num_rows
        parts.append(part_of(path))
    return parts


def part_of(path: Path) -> ParquetPart:
    footer = pq.read_metadata(path)
    groups = range(footer.num_row_groups)
    return ParquetPart(str(path), tuple(footer.row_group(group).num_rows for group in groups))


def stream_of(parts: Sequence[ParquetPart], filesystem: pafs.FileSystem | None = None, **options: Any) -> ParquetStream:
    return ParquetStream(filesystem or pafs.LocalFileSystem(), parts, COLUMNS, table_of(0, 0).schema, **options)


OPEN: dict[str, Any] = {
    "seed": 3,
    "epoch": 0,
    "index": 0,
    "rank": 0,
    "world_size": 1,
    "accumulate": 1,
    "batch_size": 16,
    "drop_last": False,
    "shuffle": True,
}


def take(stream: ParquetStream, steps: int, **options: Any) -> list[tuple[Slot, pa.Table]]:
    """The micro-batches of some global batches; the stream is closed after them."""
    taken = []
    with contextlib.closing(stream):
        for slot, table in stream.open(**{**OPEN, **options}):
            taken.append((slot, table))
            steps -= slot.micro == slot.num_micros - 1
            if steps == 0:
                break
    return taken


def global_batches(
    make: Callable[[], ParquetStream], steps: int, world_size: int, **options: Any
) -> list[tuple[int, int, list[int]]]:
    """Epoch, index and the ids of each global batch, put together from all ranks and micro-batches in order."""
    together: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        for slot, table in take(make(), steps, rank=rank, world_size=world_size, **options):
            ids = table["id"].to_pylist()
            assert ids == slot.indices.tolist()
            together.setdefault((slot.epoch, slot.index), []).extend(ids[: slot.num_rows])
    return [(*place, together[place]) for place in sorted(together)]


others: set[threading.Thread] = set()  # threads that were there before this test


def lane_threads() -> list[str]:
    own = set(threading.enumerate()) - others
    return sorted(thread.name for thread in own if thread.name.startswith("raytrain-lane"))


class Watched(pafs.FSSpecHandler):  # type: ignore[misc]
    """A storage of local files that calls back before each read of a file, with its path and the bytes asked for."""

    def __init__(self, before_read: Callable[[str, int], None]) -> None:
        super().__init__(LocalFileSystem())
        self._before_read = before_read

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(_WatchedFile(path, self._before_read), mode="r")


class _WatchedFile:
    def __init__(self, path: str, before_read: Callable[[str, int], None]) -> None:
        self._path, self._file, self._before_read = path, Path(path).open("rb"), before_read  # noqa: SIM115

    def read(self, num_bytes: int = -1) -> bytes:
        self._before_read(self._path, num_bytes)
        return self._file.read(num_bytes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def watched(before_read: Callable[[str, int], None]) -> pafs.PyFileSystem:
    return pafs.PyFileSystem(Watched(before_read))


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    """Wait for something that happens on another thread."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@contextlib.contextmanager
def no_lanes_left() -> Iterator[None]:
    """See that the threads that were started within have ended."""
    before = set(threading.enumerate())
    yield
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("raytrain-lane") and t not in before])
