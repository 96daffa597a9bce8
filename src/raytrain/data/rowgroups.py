"""Rows of Parquet row groups, from front to back and in small pieces, in spite of a storage that stutters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from raytrain.data.ahead import Stopped
from raytrain.data.lanes import Fragment
from raytrain.errors import DataError

PAUSES_S = (0.5, 1.0, 2.0)  # before each new try
_WHOLE_BYTES = 8 << 20  # a row group whose columns are no larger is fetched at once: few requests, side by side
# Of a larger one, each column is fetched in pieces of this size, and less when there are many columns.
_BUFFER_BYTES = 1 << 20
_SMALL_BUFFER_BYTES = 1 << 16
# Before pyarrow 19 that can crash the process (apache/arrow#43949), so there a column of a row group is fetched whole.
_CAN_BUFFER = int(pa.__version__.split(".")[0]) >= 19
_FOOTERS = 16  # kept, so that files of many row groups are not asked for them again and again
# Errors that a new try does not cure.
_LASTING = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowKeyError,
    NotImplementedError,
    MemoryError,
    FileNotFoundError,
    PermissionError,
)


@dataclass(frozen=True)
class ParquetPart:
    """A file of the data.

    Attributes:
        path: As the filesystem knows it.
        row_group_rows: Rows of each of its row groups; may be empty.
    """

    path: str
    row_group_rows: tuple[int, ...]


class RowGroups:
    """The row groups of all files, numbered through. Threads may share it.

    Attributes:
        num_rows: Rows of each row group.
    """

    def __init__(self, filesystem: pafs.FileSystem, files: Sequence[ParquetPart], schema: pa.Schema) -> None:
        self._filesystem, self._files = filesystem, tuple(files)
        self._schema = pa.schema([pa.field(field.name, field.type) for field in schema])
        self.num_rows = [rows for part in self._files for rows in part.row_group_rows]
        self._first_groups = np.cumsum([0, *(len(part.row_group_rows) for part in self._files)])
        self._footers: dict[int, pq.FileMetaData] = {}
        self._lock = threading.Lock()
        self._buffer_bytes = min(_BUFFER_BYTES, max(_SMALL_BUFFER_BYTES, _WHOLE_BYTES // len(schema)))

    @property
    def schema(self) -> pa.Schema:
        """The columns that are read, in their order."""
        return self._schema

    def name(self, group: int) -> str:
        """Which row group of which file this is."""
        number, within = self._place(group)
        return f"row group {within} of {self._files[number].path}"

    def batches(self, group: int, first: int, batch_rows: int, stopped: threading.Event) -> Iterator[pa.RecordBatch]:
        """The rows of a row group from one on, at most ``batch_rows`` at a time; what is before them is decoded as well.

        Raises:
            DataError: The file is not what it was, or not like the others.
            Stopped: The event was set.
        """
        number, within = self._place(group)
        with self._filesystem.open_input_file(self._files[number].path) as source:
            footer = self._footer(number, source)
            whole = self._stored_bytes(footer.row_group(within)) <= _WHOLE_BYTES
            buffer_bytes = self._buffer_bytes if _CAN_BUFFER and not whole else 0
            file = pq.ParquetFile(
                source,
                metadata=footer,
                buffer_size=buffer_bytes,
                pre_buffer=whole,
                page_checksum_verification=True,
            )
            names = self._schema.names
            for batch in file.iter_batches(batch_rows, row_groups=[within], columns=names, use_threads=False):
                if stopped.is_set():
                    raise Stopped
                if first < batch.num_rows:
                    columns = [batch.column(name) for name in names]
                    yield pa.RecordBatch.from_arrays(columns, schema=self._schema).slice(first)
                first = max(0, first - batch.num_rows)

    def _place(self, group: int) -> tuple[int, int]:
        """The file of a row group, and its number within."""
        number = int(np.searchsorted(self._first_groups, group, side="right")) - 1
        return number, group - int(self._first_groups[number])

    def _stored_bytes(self, row_group: pq.RowGroupMetaData) -> int:
        """Bytes in the file of the columns that are read."""
        roots = {name.split(".")[0] for name in self._schema.names}
        columns = [row_group.column(number) for number in range(row_group.num_columns)]
        return sum(c.total_compressed_size for c in columns if c.path_in_schema.split(".")[0] in roots)

    def _footer(self, number: int, source: pa.NativeFile) -> pq.FileMetaData:
        footer = self._footers.get(number)
        if footer is None:
            file = pq.ParquetFile(source, pre_buffer=False)
            self._check(self._files[number], file)
            footer = file.metadata
            with self._lock:
                while len(self._footers) >= _FOOTERS:
                    del self._footers[next(iter(self._footers))]
                self._footers[number] = footer
        return footer

    def _check(self, part: ParquetPart, file: pq.ParquetFile) -> None:
        footer, found = file.metadata, file.schema_arrow
        rows = tuple(footer.row_group(group).num_rows for group in range(footer.num_row_groups))
        if rows != tuple(part.row_group_rows):
            raise DataError(
                f"{part.path} has changed since it was listed: {len(rows)} row groups with {sum(rows)} rows instead of "
                f"{len(part.row_group_rows)} with {sum(part.row_group_rows)}. Files must stay as they are during a run."
            )
        for field in self._schema:
            index = found.get_field_index(field.name)
            if index < 0:
                raise DataError(
                    f"{part.path} has no column {field.name!r}, or more than one, unlike the other files. It has: "
                    f"{', '.join(found.names)}."
                )
            if found.field(index).type != field.type:
                raise DataError(
                    f"column {field.name!r} of {part.path} is of type {found.field(index).type}, but {field.type} in the "
                    "other files. Write it anew with their type, or leave the file out."
                )


class RowReader:
    """Rows of one fragment after another. A row group stays open while the next fragment goes on where the last one ended.

    Args:
        batch_rows: Rows decoded at once.
        stopped: Set from another thread to make ``read`` raise ``Stopped``.
    """

    def __init__(self, groups: RowGroups, batch_rows: int, stopped: threading.Event) -> None:
        self._groups, self._batch_rows, self._stopped = groups, batch_rows, stopped
        self._group, self._row = -1, 0
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._rest: pa.RecordBatch | None = None

    def read(self, part: Fragment) -> Iterator[pa.RecordBatch]:
        """The rows of a fragment, in pieces.

        Raises:
            DataError: They cannot be read, also not after some pauses.
            Stopped: The reader was told to stop.
        """
        if (part.group, part.first) != (self._group, self._row):
            self.close()
            self._group, self._row = part.group, part.first
        while self._row < part.last:
            batch = self._tried(part.last - self._row)
            self._row += batch.num_rows
            yield batch

    def close(self) -> None:
        """Close the file. A later read opens it again."""
        self._batches = self._rest = None  # the generator closes its file when it goes

    def _tried(self, most: int) -> pa.RecordBatch:
        for pause_s in (*PAUSES_S, None):
            try:
                return self._pulled(most)
            except (DataError, Stopped):
                raise
            except Exception as error:
                self.close()
                if pause_s is None or isinstance(error, _LASTING):
                    tries = 1 if pause_s is not None else len(PAUSES_S) + 1
                    raise DataError(
                        f"{self._groups.name(self._group)} cannot be read at row {self._row} (tried {tries} times): "
                        f"{type(error).__name__}: {error}"
                    ) from error
                self._stopped.wait(pause_s)
        raise AssertionError("the last try returns or raises")

    def _pulled(self, most: int) -> pa.RecordBatch:
        if self._rest is None:
            if self._batches is None:
                self._batches = self._groups.batches(self._group, self._row, self._batch_rows, self._stopped)
            self._rest = next(self._batches, None)
            if self._rest is None:
                raise DataError(
                    f"{self._groups.name(self._group)} ends at row {self._row}, earlier than its footer says."
                )
        batch = self._rest.slice(0, most)
        self._rest = self._rest.slice(most) if most < self._rest.num_rows else None
        return batch
