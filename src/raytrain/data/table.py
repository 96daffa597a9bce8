"""Arrow and Parquet as a map-style dataset: random access by whole batches, from a table prepared once per node."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from pyarrow import fs

from raytrain.data.batched import BatchDataset
from raytrain.data.columnar import StoredTable, TableWriter
from raytrain.data.columns import Categories, Encoding, Rule, decoded, rule_for
from raytrain.data.files import Files, find_files
from raytrain.data.hashing import HashPart
from raytrain.data.nodecache import Held, NodeCache, default_folder
from raytrain.data.order import Indices
from raytrain.errors import DataError

_VERSION = 1  # of the prepared tables' layout
_BATCH_ROWS = 1 << 16
_BATCH_BYTES = 64 << 20
_TELL_EVERY_S = 5.0


class TableDataset(BatchDataset):
    """Rows of Parquet or Arrow files as batches of tensors, by column name.

    Made by ``parquet`` and ``arrow``. It travels as a description: each node prepares its own table, at the first batch.
    """

    def __init__(
        self,
        files: Files,
        rules: Sequence[Rule],
        where: pc.Expression | None,
        part: HashPart | None,
        cache: NodeCache,
        functions: tuple[Callable[[Any], Any], ...] = (),
    ) -> None:
        self._files, self._rules, self._where, self._part = files, tuple(rules), where, part
        self._cache, self._functions = cache, functions
        self._table: StoredTable | None = None
        self._held: Held | None = None
        self._num_rows: int | None = None

    @property
    def draws(self) -> bool:
        """Only functions of the user's may draw random numbers."""
        return bool(self._functions)

    def __len__(self) -> int:
        if self._num_rows is None:
            self._num_rows = self._count()
        return self._num_rows

    def take(self, indices: Indices) -> Any:
        """The rows at these places, as a dict of tensors, through the functions of ``map``."""
        batch: Any = self.prepare().take(indices)
        for function in self._functions:
            batch = function(batch)
        return batch

    def map(self, function: Callable[[Any], Any]) -> TableDataset:
        """The same rows with a function over whole batches: from a dict of tensors to what the loss takes."""
        functions = (*self._functions, function)
        return TableDataset(self._files, self._rules, self._where, self._part, self._cache, functions)

    def categories(self, column: str) -> list[Any]:
        """The values of a column with categories, in the order of their codes."""
        values = self.prepare().categories
        if column not in values:
            raise DataError(f"the column {column!r} has no categories. Those that have: {', '.join(values) or 'none'}.")
        return list(values[column])

    def describe(self) -> dict[str, Any]:
        """Plain facts: source, rows, schema, and a digest of what decides the rows."""
        schema = {rule.name: str(self._files.dataset().schema.field(rule.name).type) for rule in self._rules}
        facts = {"source": self._files.uri, "num_rows": len(self), "schema": schema}
        return {**facts, "digest": self._key([file.content for file in self._files.files])[:16]}

    def prepare(self) -> StoredTable:
        """See that the table is on this node; made by the first process that asks.

        Raises:
            DataError: A value that makes no tensor, or no room; the file, column and row are named.
        """
        if self._table is None:
            key = self._key([file.stamp for file in self._files.files])
            self._held = self._cache.open(key, self._write, self._expected_bytes, f"the table of {self._files.root}")
            self._table = StoredTable(self._held.folder, self._rules)
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_table": None, "_held": None}

    # -- inside ---------------------------------------------------------------------------------------------------

    def _key(self, files: Sequence[str]) -> str:
        """Of all that decides the bytes of the prepared table."""
        facts = [_VERSION, files, [repr(rule) for rule in self._rules], str(self._where), repr(self._part)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]

    def _count(self) -> int:
        if self._where is None and self._part is None:
            return self._files.num_rows
        folder = self._cache.entry(self._key([file.stamp for file in self._files.files]))
        if folder is not None:
            return self.prepare().num_rows
        if self._part is None:
            return int(self._files.dataset().count_rows(filter=self._where))
        return sum(batch.num_rows for _, batch in self._batches([self._part.by]))

    def _expected_bytes(self) -> int:
        """From the sizes in the footers; strings and images are counted as they are stored."""
        return int(self._files.bytes_per_row({rule.name for rule in self._rules}) * len(self))

    def _batches(self, columns: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Batches of all files in their order, filtered, with the file's name."""
        dataset = self._files.dataset()
        needed = list(dict.fromkeys([*columns, *([self._part.by] if self._part else [])]))
        rows = self._rows_per_batch()
        for fragment in dataset.get_fragments():
            name = fragment.path
            try:
                scan = fragment.scanner(
                    schema=dataset.schema, columns=needed, filter=self._where, batch_size=rows, batch_readahead=2
                )
                for batch in scan.to_batches():
                    kept = batch if self._part is None else self._part.of(batch)
                    yield name, kept
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{name} cannot be read: {error}") from None

    def _rows_per_batch(self) -> int:
        """Few rows at once where they are wide: memory stays the same."""
        sizes = [int(file.stamp.partition(" ")[0]) for file in self._files.files]
        return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES * self._files.num_rows / max(1, sum(sizes)))))

    def _write(self, folder: Path) -> None:
        names = [rule.name for rule in self._rules]
        progress = _Progress(f"preparing the table of {self._files.root}", self._files.num_rows)
        writer = TableWriter(folder, self._rules, self._find_categories())
        for file, batch in self._batches(names):
            writer.write(batch, f"{file}, from row {writer.num_rows} of the table")
            progress.tell(writer.num_rows)
        writer.close()

    def _find_categories(self) -> dict[str, list[Any]]:
        """The values of each column with categories: those that were given, or a pass over the data."""
        encodings = {rule.name: rule.encoding for rule in self._rules if isinstance(rule.encoding, Categories)}
        found = {name: list(e.values) for name, e in encodings.items() if e.values is not None}
        wanted = [name for name in encodings if name not in found]
        seen: dict[str, set[Any]] = {name: set() for name in wanted}
        for _, batch in self._batches(wanted) if wanted else ():
            for name in wanted:
                seen[name].update(pc.unique(decoded(batch.column(name))).to_pylist())
        fills = {rule.name: rule.fill for rule in self._rules if rule.fill is not None}
        for name in wanted:
            values = seen[name] - {None} | ({fills[name]} if None in seen[name] and name in fills else set())
            found[name] = sorted(values)
        return found


class _Progress:
    """A line every few seconds while a table is prepared."""

    def __init__(self, what: str, rows: int) -> None:
        self._what, self._rows, self._next_s = what, rows, time.monotonic() + _TELL_EVERY_S

    def tell(self, done: int) -> None:
        """Say how far it is, when it is time."""
        if time.monotonic() >= self._next_s:
            print(f"raytrain: {self._what}: {done} of at most {self._rows} rows", flush=True)
            self._next_s = time.monotonic() + _TELL_EVERY_S


def parquet(
    paths: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    where: pc.Expression | Sequence[Any] | None = None,
    part: HashPart | None = None,
    encode: Mapping[str, Encoding] | None = None,
    cast: Mapping[str, str | torch.dtype] | None = None,
    fill: Mapping[str, Any] | None = None,
    filesystem: fs.FileSystem | None = None,
    cache: str | Path | None = None,
    cache_limit_bytes: int | None = None,
    format: Literal["parquet", "arrow"] = "parquet",
) -> TableDataset:
    """Parquet files as a map-style dataset whose batches are dicts of tensors, one gather per column.

    Each node turns the chosen columns once into a memory-mapped table in its cache; later runs find it there.

    Args:
        paths: A file, folder, glob (``*``, ``**``) or list of them; local, or URIs such as ``s3://bucket/data``. Folders named
            ``key=value`` add a column.
        columns: Those to read; None for all.
        where: Rows to keep: a pyarrow expression, or a list of ``(column, "==", value)``.
        part: A stable part of the rows, by a hash of a column: a split into training and validation.
        encode: What becomes of columns that are no plain numbers: ``Padded``, ``Packed``, ``Categories``, ``Image``.
        cast: Types of tensors, such as ``{"x": "bfloat16"}``.
        fill: Values that stand for null; without one a null is an error.
        filesystem: A pyarrow filesystem that ``paths`` are on.
        cache: Folder of prepared tables. Default: RAYTRAIN_CACHE, else raytrain in the user's cache folder.
        format: What the files are.
        cache_limit_bytes: What was not used for longest leaves the cache to stay below it. Default: a tenth of the disk stays free.

    Raises:
        DataError: No file, one that is not whole or unlike the others, a column that makes no tensor; with names and cure.
    """
    files = find_files(paths, filesystem, format, columns)
    schema = files.dataset().schema
    rules = column_rules(schema, columns, encode or {}, cast or {}, fill or {})
    if where is not None and not isinstance(where, pc.Expression):
        where = pq.filters_to_expression(list(where))
    if part is not None:
        part.check(schema)
    folder = Path(cache).expanduser() if cache is not None else default_folder()
    return TableDataset(files, rules, where, part, NodeCache(folder, cache_limit_bytes))


def arrow(paths: str | Path | Sequence[str | Path], **options: Any) -> TableDataset:
    """Arrow IPC files (Feather version 2) as ``parquet`` takes Parquet files. Options and errors are the same."""
    return parquet(paths, format="arrow", **options)


def column_rules(
    schema: pa.Schema,
    columns: Sequence[str] | None,
    encode: Mapping[str, Encoding],
    cast: Mapping[str, str | torch.dtype],
    fill: Mapping[str, Any],
) -> list[Rule]:
    """The rule of each column.

    Raises:
        DataError: A name that is not there, or a type that makes no tensor.
    """
    names = list(columns) if columns is not None else schema.names
    for what, given in (("columns", names), ("encode", encode), ("cast", cast), ("fill", fill)):
        for name in given:
            if name not in names or name not in schema.names:
                known = ", ".join(schema.names if what == "columns" else names)
                raise DataError(f"{what} names {name!r}, which is no column here. There are: {known}.")
    if not names:
        raise DataError("columns is empty: a batch needs at least one column.")
    return [
        rule_for(schema.field(name), encode.get(name), _dtype(name, cast.get(name)), fill.get(name)) for name in names
    ]


def _dtype(name: str, given: str | torch.dtype | None) -> torch.dtype | None:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and not isinstance(dtype, torch.dtype):
        raise DataError(
            f"cast={{{name!r}: {given!r}}} is no type of torch. Allowed: 'float32', 'float16', 'bfloat16', 'int64' ..."
        )
    return dtype
