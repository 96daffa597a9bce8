"""The blocks of lanes: read, joined, and given out row by row in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from raytrain.data.lanes import Lanes, Piece
from raytrain.data.order import Indices
from raytrain.data.rowgroups import RowGroups, RowReader


@dataclass(frozen=True)
class Block:
    """Rows of a lane in their order, and their numbers in the stored data."""

    epoch: int
    number: int
    stored: Indices
    table: pa.Table

    def rows(self, first: int, last: int) -> tuple[Indices, pa.Table]:
        """Some of the rows, without a copy."""
        return self.stored[first:last], self.table.slice(first, last - first)


class Blocks:
    """Makes the blocks of lanes, epoch after epoch. Threads share it."""

    def __init__(self, groups: RowGroups, lanes: Lanes) -> None:
        self._groups, self._lanes = groups, lanes
        self._batch_rows = min(lanes.block_rows, max(1024, lanes.block_rows // 8))
        self._joining = threading.Lock()

    def of(self, lane: int, epoch: int, number: int, stopped: threading.Event) -> Iterator[Block]:
        """The blocks of a lane from one on, over the ends of epochs."""
        reader = RowReader(self._groups, self._batch_rows, stopped)
        while True:
            for block in range(number, self._lanes.num_blocks(lane)):
                yield self._block(reader, lane, epoch, block)
            epoch, number = epoch + 1, 0

    def _block(self, reader: RowReader, lane: int, epoch: int, number: int) -> Block:
        order = self._lanes.order(epoch)
        places = order.permutation(lane, number)
        pieces = [batch for part in order.fragments(lane, number) for batch in reader.read(part)]
        with self._joining:  # each of the two copies takes the block's memory once more: one lane at a time
            table = pa.Table.from_batches(pieces, self._groups.schema).combine_chunks()
            pieces.clear()
            table = table.take(pa.array(places))
        return Block(epoch, number, order.stored(lane, number)[places], table)


class LaneRows:
    """The rows of one lane, from front to back; holds the block in use."""

    def __init__(self, next_block: Callable[[], Block], block_rows: int) -> None:
        self._next_block, self._block_rows = next_block, block_rows
        self._block: Block | None = None

    def rows(self, epoch: int, piece: Piece) -> Iterator[tuple[Indices, pa.Table]]:
        """The rows of a piece, block by block. Pieces come from front to back."""
        first = piece.first
        while first < piece.last:
            number = first // self._block_rows
            start, last = number * self._block_rows, min((number + 1) * self._block_rows, piece.last)
            yield self._at(epoch, number).rows(first - start, last - start)
            first = last

    def _at(self, epoch: int, number: int) -> Block:
        while self._block is None or (self._block.epoch, self._block.number) != (epoch, number):
            self._block = None  # before the next one is made
            self._block = self._next_block()
        return self._block
