"""Parquet that fits neither memory nor disk, as training and evaluation batches of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pyarrow import fs

from raytrain.data.assemble import to_tensors
from raytrain.data.batch import Batch, Slot
from raytrain.data.columns import Categories, Encoding, Rule
from raytrain.data.fetch import failure
from raytrain.data.files import Files, find_files
from raytrain.data.lanes import BLOCK_ROWS, LANES
from raytrain.data.randomness import fetching
from raytrain.data.rowgroups import ParquetPart
from raytrain.data.samplers import num_batches
from raytrain.data.source import DEFAULT_BATCH_SIZE, DataPlan
from raytrain.data.stream_reader import ParquetStream
from raytrain.data.streamed import Streamed
from raytrain.data.table import column_rules
from raytrain.errors import DataError

_BLOCK_BYTES = 16 << 20
_FEWEST_ROWS = 16  # of a block, however wide its rows


class TableStream(Streamed):
    """Rows of Parquet files, read in passing. Made by ``parquet_stream``; it has no random access.

    Attributes:
        num_rows: Rows per epoch.
    """

    def __init__(
        self,
        files: Files,
        rules: Sequence[Rule],
        num_lanes: int,
        block_rows: int,
        functions: tuple[Callable[[Any], Any], ...] = (),
    ) -> None:
        self._files, self._rules, self._functions = files, tuple(rules), functions
        self._num_lanes, self._block_rows = num_lanes, block_rows
        self.num_rows = files.num_rows

    def map(self, function: Callable[[Any], Any]) -> TableStream:
        """The same rows with a function over whole batches: from a dict of tensors to what the loss takes."""
        functions = (*self._functions, function)
        return TableStream(self._files, self._rules, self._num_lanes, self._block_rows, functions)

    def describe(self) -> dict[str, Any]:
        """Plain facts: source, rows, schema, and a digest of what decides the rows."""
        schema = {rule.name: str(self._files.files[0].schema.field(rule.name).type) for rule in self._rules}
        known = [[file.content for file in self._files.files], [repr(rule) for rule in self._rules]]
        digest = hashlib.sha256(repr(known).encode()).hexdigest()[:16]
        return {"source": self._files.uri, "num_rows": self.num_rows, "schema": schema, "digest": digest}

    def plan(self, *, batch_size: int | None, shuffle: bool | None, drop_last: bool | None) -> DataPlan:
        """What an epoch of it is.

        Raises:
            DataError: It has no rows.
        """
        if self.num_rows == 0:
            raise DataError(
                f"the stream of {self._files.uri} is empty: 0 samples. Check the path that it was made with."
            )
        batch_size, shuffle = batch_size or DEFAULT_BATCH_SIZE, shuffle is not False
        steps = num_batches(self.num_rows, batch_size, bool(drop_last))
        dropped = self.num_rows - steps * batch_size if drop_last else 0
        order = f"{self._num_lanes} lanes of blocks of {self._block_rows} rows" if shuffle else ""
        note = f"streamed in {order}" if order else "streamed"
        return DataPlan(self.num_rows, batch_size, steps, dropped, shuffle, note, order)

    def train_loader(
        self, plan: DataPlan, *, accumulate: int, rank: int, world_size: int, seed: int, loader_workers: int
    ) -> StreamLoader:
        """This rank's training batches."""
        return StreamLoader(self, plan, accumulate, rank, world_size, seed)

    def eval_loader(
        self, plan: DataPlan, *, rank: int, world_size: int, seed: int, loader_workers: int
    ) -> StreamEvalLoader:
        """This rank's evaluation batches."""
        return StreamEvalLoader(self, plan, rank, world_size, seed)

    def reader(self) -> ParquetStream:
        """Something that reads it; each holds blocks and threads of its own."""
        parts = [ParquetPart(file.path, file.row_groups) for file in self._files.files]
        names, schema = [rule.name for rule in self._rules], self._files.files[0].schema
        return ParquetStream(
            self._files.filesystem, parts, names, schema, num_lanes=self._num_lanes, block_rows=self._block_rows
        )

    def batch(self, slot: Slot, table: Any, seed: int) -> Batch:
        """A slot's rows as tensors, through the functions of ``map``.

        Raises:
            DataError: A value that makes no tensor, or a function that failed.
        """
        where = f"{self._files.uri}, epoch {slot.epoch}, batch {slot.index}"
        given = {r.name: list(r.encoding.values or ()) for r in self._rules if isinstance(r.encoding, Categories)}
        data: Any = to_tensors(table, self._rules, given, where)
        if self._functions:
            with fetching(seed, slot.epoch, slot.index, slot.rank, slot.micro):
                data = self._mapped(data, where)
        return slot.filled(data)

    def _mapped(self, data: Any, where: str) -> Any:
        for function in self._functions:
            try:
                data = function(data)
            except Exception as error:
                raise failure(f"{where}: the function given to map()", error) from error
        return data


class StreamLoader:
    """The micro-batches of one rank of a stream, epoch after epoch, from any position. As ``TrainLoader`` for datasets.

    Attributes:
        plan: What is trained on.
        steps_per_epoch: Global batches per epoch.
    """

    def __init__(
        self,
        stream: TableStream,
        plan: DataPlan,
        accumulate: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self.plan, self.steps_per_epoch = plan, plan.steps_per_epoch
        self._stream, self._reader, self._seed = stream, stream.reader(), seed
        self._options = {
            "rank": rank,
            "world_size": world_size,
            "accumulate": accumulate,
            "batch_size": plan.batch_size,
            "drop_last": plan.dropped_rows > 0,
            "shuffle": plan.shuffle,
        }

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from a position on, over the ends of epochs; what follows is read ahead.

        Args:
            epoch: Epoch of the first batch.
            index: Global batch within it.
            stop: End after this many global batches; None for never.
        """
        if stop is not None and stop <= 0:
            return
        for slot, table in self._reader.open(seed=self._seed, epoch=epoch, index=index, **self._options):  # type: ignore[arg-type]
            yield self._stream.batch(slot, table, self._seed)
            if stop is not None and slot.micro == slot.num_micros - 1:
                stop -= 1
                if stop == 0:
                    return

    def adopt(self, adopted_by: Callable[[Any], Any]) -> None:
        """Nothing to do: torch's loader has no part in it."""

    def close(self) -> None:
        """End the threads that read."""
        self._reader.close()


class StreamEvalLoader:
    """Whole batches of a stream in its stored order, dealt to the ranks in turn. Every rank reads all of it.

    Attributes:
        plan: What is evaluated.
    """

    def __init__(self, stream: TableStream, plan: DataPlan, rank: int, world_size: int, seed: int) -> None:
        self.plan = plan
        self._stream, self._reader, self._seed = stream, stream.reader(), seed
        self._rank, self._world_size = rank, world_size

    def batches(self) -> Iterator[Batch]:
        """This rank's batches; ``index`` is the batch's place in the whole set."""
        opened = self._reader.open(
            seed=self._seed, epoch=0, index=0, rank=0, world_size=1, accumulate=1, batch_size=self.plan.batch_size,
            drop_last=False, shuffle=False,
        )  # fmt: skip
        for slot, table in opened:
            if slot.epoch > 0:
                break
            if slot.index % self._world_size == self._rank:
                yield self._stream.batch(slot, table, self._seed)
        self._reader.close()

    def close(self) -> None:
        """End the threads that read."""
        self._reader.close()


def parquet_stream(
    paths: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    encode: Mapping[str, Encoding] | None = None,
    cast: Mapping[str, str | torch.dtype] | None = None,
    fill: Mapping[str, Any] | None = None,
    filesystem: fs.FileSystem | None = None,
    num_lanes: int = LANES,
    block_rows: int | None = None,
) -> TableStream:
    """Parquet files as a stream of training batches: constant memory, nothing is written to the disk.

    Each epoch is shuffled by (seed, epoch): row groups as a whole, and rows within blocks; see ``data/lanes.py`` for how good that
    is. Each row comes exactly once, on any number of workers, and a run resumes at any step.

    Args:
        paths: As for ``parquet``. Folders named ``key=value`` add no column here.
        columns: Those to read; None for all.
        encode: As for ``parquet``; ``Categories`` need their ``values``.
        cast: Types of tensors.
        fill: Values that stand for null.
        filesystem: A pyarrow filesystem that ``paths`` are on.
        num_lanes: Places of the data that a global batch is mixed from.
        block_rows: Rows of a place that are shuffled among themselves; a worker holds about two blocks of each of its lanes.
            Default: 16,384, or as many as take 16 MB.

    Raises:
        DataError: As ``parquet``, and for categories without values.
    """
    for name, value in (("num_lanes", num_lanes), ("block_rows", block_rows)):
        if value is not None and value < 1:
            raise DataError(f"{name} = {value} is not possible. Allowed: 1 or more.")
    files = find_files(paths, filesystem, "parquet", columns)
    rules = column_rules(files.files[0].schema, columns, encode or {}, cast or {}, fill or {})
    for rule in rules:
        if isinstance(rule.encoding, Categories) and rule.encoding.values is None:
            raise DataError(
                f"the column {rule.name!r} has categories, and a stream cannot look through all rows for them first. Give "
                f"Categories(values=[...])."
            )
    row_bytes = files.bytes_per_row({rule.name for rule in rules})
    fitting = max(_FEWEST_ROWS, min(BLOCK_ROWS, int(_BLOCK_BYTES / max(1.0, row_bytes))))
    return TableStream(files, rules, num_lanes, block_rows or fitting)
