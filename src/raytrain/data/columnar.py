"""A table on the node's disk as Arrow lays it out: one file per buffer, mapped into memory, so that rows are taken in place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import torch

from raytrain.data.assemble import ragged
from raytrain.data.columns import Array, Codes, Rule, as_stored, numbers
from raytrain.data.order import Indices
from raytrain.errors import DataError

_HEAD = "table.json"


class TableWriter:
    """Writes record batches, one after the other, into a new folder.

    Args:
        categories: Values of each column with categories, in the order of their codes.
    """

    def __init__(self, folder: Path, rules: Sequence[Rule], categories: Mapping[str, Sequence[Any]]) -> None:
        self._folder = folder
        self._columns = [
            _ColumnWriter(folder, number, rule, categories.get(rule.name)) for number, rule in enumerate(rules)
        ]
        self._categories = categories
        self.num_rows = 0

    def write(self, batch: pa.RecordBatch, where: str) -> None:
        """Append a batch; ``where`` names its place in errors."""
        for column in self._columns:
            column.write(batch.column(column.rule.name), where)
        self.num_rows += batch.num_rows

    def close(self) -> None:
        """Make the folder whole: its head, written last, says what there is."""
        columns = [column.close() for column in self._columns]
        values = {name: [_plain(value) for value in values] for name, values in self._categories.items()}
        head = {"num_rows": self.num_rows, "columns": columns, "categories": values}
        (self._folder / _HEAD).write_text(json.dumps(head))


class _ColumnWriter:
    def __init__(self, folder: Path, number: int, rule: Rule, categories: Sequence[Any] | None) -> None:
        self.rule = rule
        self._codes = None if categories is None else Codes(categories, rule)
        self._values: BinaryIO = (folder / f"{number}.values").open("wb")
        self._offsets: BinaryIO | None = (folder / f"{number}.offsets").open("wb") if rule.is_ragged else None
        self._end = 0
        self._dtype: str | None = None
        self._shape: list[int] | None = None
        if self._offsets:
            self._offsets.write(np.zeros(1, np.int64).tobytes())

    def write(self, array: pa.Array, where: str) -> None:
        lengths: Array | None = None
        if self._codes is not None:
            values = self._codes.of(array, where)
        else:
            values, lengths = numbers(array, where, self.rule)
        stored = as_stored(values, self.rule)
        shape = list(stored.shape[1:])
        if self._shape is not None and shape != self._shape:
            raise DataError(
                f"{where}: the column {self.rule.name!r} has rows of shape {shape}, but {self._shape} before."
            )
        self._dtype, self._shape = str(stored.dtype).removeprefix("torch."), shape
        if stored.numel():
            stored.contiguous().view(-1).view(torch.uint8).numpy().tofile(self._values)
        if self._offsets is not None and lengths is not None:
            ends = self._end + np.cumsum(lengths, dtype=np.int64)
            self._offsets.write(ends.tobytes())
            self._end = int(ends[-1]) if len(ends) else self._end

    def close(self) -> dict[str, Any]:
        self._values.close()
        if self._offsets is not None:
            self._offsets.close()
        return {"name": self.rule.name, "dtype": self._dtype or "float32", "shape": self._shape or []}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, bool)) else str(value)


class StoredTable:
    """A table that a ``TableWriter`` wrote; rows are taken by whole batches, one gather per column.

    Memory is the page cache's, shared by all processes of the node.
    """

    def __init__(self, folder: Path, rules: Sequence[Rule]) -> None:
        head = json.loads((folder / _HEAD).read_text())
        self.num_rows = int(head["num_rows"])
        self.categories: Mapping[str, Sequence[Any]] = head["categories"]
        self._columns = [
            _Column(folder, number, rule, facts, self.num_rows)
            for number, (rule, facts) in enumerate(zip(rules, head["columns"], strict=True))
        ]

    def take(self, indices: Indices) -> dict[str, torch.Tensor]:
        """The rows at these places: name to ``[len(indices), ...]``, and what padding and packing add."""
        rows = torch.from_numpy(np.ascontiguousarray(indices, np.int64))
        batch: dict[str, torch.Tensor] = {}
        for column in self._columns:
            batch |= column.take(rows)
        return batch


class _Column:
    def __init__(self, folder: Path, number: int, rule: Rule, facts: Mapping[str, Any], num_rows: int) -> None:
        self._rule = rule
        dtype = getattr(torch, facts["dtype"])
        values = _mapped(folder / f"{number}.values", dtype)
        self._offsets = _mapped(folder / f"{number}.offsets", torch.int64) if rule.is_ragged else None
        self._values = values if rule.is_ragged else values.view(num_rows, *facts["shape"])

    def take(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        if self._offsets is None:
            return {self._rule.name: self._values.index_select(0, rows)}
        starts = self._offsets[rows]
        lengths = self._offsets[rows + 1] - starts
        return ragged(self._rule, self._values, starts, lengths, rows.tolist())


def _mapped(path: Path, dtype: torch.dtype) -> torch.Tensor:
    """A file's numbers, mapped privately: what is written to the tensor never reaches the file."""
    count = path.stat().st_size // dtype.itemsize
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
