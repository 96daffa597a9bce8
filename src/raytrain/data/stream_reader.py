"""Training rows streamed from Parquet files that fit neither memory nor disk, in the order of ``data/lanes.py``."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs

from raytrain.data.ahead import Ahead, Stopped
from raytrain.data.batch import Slot
from raytrain.data.blocks import Block, Blocks, LaneRows
from raytrain.data.lanes import BLOCK_ROWS, LANES, Lanes, Piece, Share
from raytrain.data.order import Indices
from raytrain.data.rowgroups import ParquetPart, RowGroups
from raytrain.errors import DataError

__all__ = ["ParquetPart", "ParquetStream"]


class ParquetStream:
    """Rows of Parquet files, read once per epoch, a block of each lane ahead of where it is needed.

    A rank holds, of each lane that it reads, the block in use and the next one: ``2 * block_rows`` rows, whatever the
    data's size, and one more block for the moment in which its pieces are joined. Beside these, an open row group takes up
    to 8 MiB if that holds all of its chosen columns; else, for each column, a buffer of up to 1 MiB (of many: 64 KiB) and
    two pages (as written; usually 1 MiB). Before pyarrow 19 it takes what its chosen columns take in the file. Every lane
    reads on a thread of its own.

    A lane that starts within a row group decodes what stands before it, without keeping it: with few, huge row groups
    the start takes long. With ``shuffle=False`` there is one lane, which every rank reads whole.

    Row filters and splits are not supported: every row of the files is a sample.

    Args:
        filesystem: Opens the paths.
        files: In an order that stays the same for the whole run.
        columns: The columns to read.
        schema: Has their types; every file must have them as well.
        num_lanes: Rows of a global batch come from this many places of the data at once. Part of the order.
        block_rows: Rows of a lane that are shuffled among themselves. Part of the order.

    Attributes:
        num_rows: Rows per epoch.

    Raises:
        DataError: There are no columns, or columns that are not in the schema.
    """

    def __init__(
        self,
        filesystem: pafs.FileSystem,
        files: Sequence[ParquetPart],
        columns: Sequence[str],
        schema: pa.Schema,
        *,
        num_lanes: int = LANES,
        block_rows: int = BLOCK_ROWS,
    ) -> None:
        missing = [name for name in columns if schema.get_field_index(name) < 0]
        if missing or not columns:
            raise DataError(f"no columns {missing} to read. Allowed: one or more of {', '.join(schema.names)}.")
        self._groups = RowGroups(filesystem, files, pa.schema([schema.field(name) for name in columns]))
        self._num_lanes, self._block_rows = num_lanes, block_rows
        self._run: _Run | None = None
        self.num_rows = sum(self._groups.num_rows)

    def open(
        self,
        *,
        seed: int,
        epoch: int,
        index: int,
        rank: int,
        world_size: int,
        accumulate: int,
        batch_size: int,
        drop_last: bool,
        shuffle: bool,
    ) -> Iterator[tuple[Slot, pa.Table]]:
        """This rank's micro-batches from a position on, over the ends of epochs, without end. Reading starts at once.

        A slot's ``indices`` are the rows' numbers in the stored data. A table has exactly these rows, in their order,
        and shares no memory with the reader. The iterators before this one end.

        Raises:
            DataError: An epoch would have no steps. The iterator raises it when a file cannot be read, with its name.
        """
        self.close()
        lanes = Lanes(
            self._groups.num_rows,
            batch_size,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
            num_lanes=self._num_lanes,
            block_rows=self._block_rows,
        )
        if lanes.steps_per_epoch == 0:
            raise DataError(
                f"{self.num_rows} rows make no batch of {batch_size}, so an epoch has 0 steps. Give it data, or a smaller "
                "train.batch_size, or train.drop_last=false."
            )
        self._run = _Run(self._groups, lanes, rank, world_size, accumulate)
        return self._run.slots(epoch, index)

    def close(self) -> None:
        """End the reading and its threads. ``open`` starts anew."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run:
    """One pass of a rank over the data. Lanes start some batches before they are needed, and end when they are not."""

    def __init__(self, groups: RowGroups, lanes: Lanes, rank: int, world_size: int, accumulate: int) -> None:
        self._lanes, self._rank, self._world_size, self._accumulate = lanes, rank, world_size, accumulate
        self._schema, self._blocks = groups.schema, Blocks(groups, lanes)
        self._readers: dict[int, tuple[Ahead[Block], LaneRows]] = {}
        self._needed: dict[int, int] = {}  # the last planned batch of each lane, counted from the start
        self._planned: deque[tuple[int, int, list[Share]]] = deque()
        self._closed, self._lock = False, threading.Lock()

    def slots(self, epoch: int, index: int) -> Iterator[tuple[Slot, pa.Table]]:
        """The micro-batches from a position on."""
        positions = self._positions(epoch, index)
        for number in range(self._lanes.num_lanes):
            self._plan(number, *next(positions))
        return self._slots(positions)

    def close(self) -> None:
        """End the threads, and with them the slots."""
        with self._lock:
            self._closed = True
            aheads = [ahead for ahead, _ in self._readers.values()]
            self._readers = {}
        for ahead in aheads:
            ahead.close(wait=False)
        for ahead in aheads:
            ahead.close()

    def _positions(self, epoch: int, index: int) -> Iterator[tuple[int, int]]:
        while True:
            if index >= self._lanes.steps_per_epoch:
                epoch, index = epoch + 1, 0
            yield epoch, index
            index += 1

    def _slots(self, positions: Iterator[tuple[int, int]]) -> Iterator[tuple[Slot, pa.Table]]:
        number = self._lanes.num_lanes  # which lanes a rank reads repeats after so many batches
        with contextlib.suppress(Stopped):
            for epoch, index in positions:
                self._plan(number, epoch, index)
                yield from self._batch(*self._planned.popleft())
                number += 1
                self._end_idle(number - 2 * self._lanes.num_lanes)

    def _plan(self, number: int, epoch: int, index: int) -> None:
        shares = self._lanes.shares(index, self._rank, self._world_size, self._accumulate)
        self._planned.append((epoch, index, shares))
        for piece in (piece for part in shares if part.num_rows for piece in part.pieces):
            self._needed[piece.lane] = number
            if piece.lane not in self._readers:
                self._start(piece, epoch)

    def _start(self, piece: Piece, epoch: int) -> None:
        block_rows = self._lanes.block_rows
        first = piece.first // block_rows
        with self._lock:
            if self._closed:
                raise Stopped
            ahead = Ahead(
                lambda stopped: self._blocks.of(piece.lane, epoch, first, stopped), f"raytrain-lane-{piece.lane}"
            )
            self._readers[piece.lane] = ahead, LaneRows(ahead.next, block_rows)

    def _end_idle(self, oldest: int) -> None:
        with self._lock:
            idle = [self._readers.pop(lane) for lane in list(self._readers) if self._needed[lane] < oldest]
        for ahead, _ in idle:
            ahead.close(wait=False)

    def _batch(self, epoch: int, index: int, shares: list[Share]) -> Iterator[tuple[Slot, pa.Table]]:
        num_rows, rank, world_size = self._lanes.rows_of(index), self._rank, self._world_size
        for micro, part in enumerate(shares):
            rows = self._own(epoch, part) if part.num_rows else self._borrowed(epoch, part)
            indices, table = _joined(list(rows))
            slot = Slot(indices, epoch, index, micro, len(shares), part.num_rows, num_rows, world_size, rank)
            yield slot, table
            if self._closed:
                raise Stopped

    def _own(self, epoch: int, part: Share) -> Iterator[tuple[Indices, pa.Table]]:
        for piece in part.pieces:
            reader = self._readers.get(piece.lane)
            if reader is None:
                raise Stopped
            yield from reader[1].rows(epoch, piece)

    def _borrowed(self, epoch: int, part: Share) -> Iterator[tuple[Indices, pa.Table]]:
        """Two rows at most, once at the end of an epoch: their lane need not be read on."""
        for piece in part.pieces:
            blocks = self._blocks.of(piece.lane, epoch, piece.first // self._lanes.block_rows, threading.Event())
            yield from LaneRows(blocks.__next__, self._lanes.block_rows).rows(epoch, piece)


def _joined(pieces: list[tuple[Indices, pa.Table]]) -> tuple[Indices, pa.Table]:
    """The rows of all pieces, copied, so that they keep no block alive."""
    indices = np.concatenate([numbers for numbers, _ in pieces])
    if len(pieces) == 1:
        return indices, pieces[0][1].take(pa.array(np.arange(len(indices))))
    return indices, pa.concat_tables([table for _, table in pieces]).combine_chunks()
