"""Files of tabular data: found by path, folder, glob or URI, in a stable order, and seen to belong together."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
from pyarrow import fs

from raytrain.errors import DataError, StorageError
from raytrain.storage import locate

_SUFFIXES = {
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather", ".ipc"),
}  # of a folder; without any, all count
_STREAM_BYTES = 4 << 20  # read at once of each column
_READERS = 16  # footers read at once: on object stores each costs a round trip


@dataclass(frozen=True)
class DataFile:
    """A file and what its footer says.

    Attributes:
        row_groups: Rows of each row group (Parquet) or record batch (Arrow).
        schema: Of the file alone, without partition columns.
        stamp: Size and time of change, and a hash of the footer.
        content: A hash of the footer alone: schema, rows, and in Parquet the place and range of each column.
        column_bytes: Uncompressed bytes of each column; empty where the footer does not tell.
    """

    path: str
    row_groups: tuple[int, ...]
    schema: pa.Schema
    stamp: str
    content: str
    column_bytes: Mapping[str, int]

    @property
    def num_rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_groups)


@dataclass(frozen=True)
class Files:
    """Files of one table, by rising path."""

    filesystem: fs.FileSystem
    root: str
    files: tuple[DataFile, ...]
    format: str

    @property
    def uri(self) -> str:
        """The root as a path, or with its scheme where it is not local."""
        return (
            self.root
            if isinstance(self.filesystem, fs.LocalFileSystem)
            else f"{self.filesystem.type_name}://{self.root}"
        )

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        return sum(file.num_rows for file in self.files)

    def bytes_per_row(self, columns: Collection[str]) -> float:
        """Uncompressed bytes of a row's columns, on average; 0 where the footers do not tell."""
        known = sum(size for file in self.files for name, size in file.column_bytes.items() if name in columns)
        return known / max(1, self.num_rows)

    def dataset(self) -> pads.Dataset:
        """The table as pyarrow reads it; folders named key=value add a column each."""
        try:
            return pads.dataset(
                [file.path for file in self.files],
                schema=self._schema(),
                format=self._read_format(),
                filesystem=self.filesystem,
                partitioning=self._partitioning(),
                partition_base_dir=self.root,
            )
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"the files below {self.root} make no table: {error}") from None

    def _read_format(self) -> pads.FileFormat:
        if self.format == "arrow":
            return pads.IpcFileFormat()
        # Without pre-buffering: it holds all of a file's bytes until the last of them is decoded.
        options = pads.ParquetFragmentScanOptions(
            pre_buffer=False, use_buffered_stream=True, buffer_size=_STREAM_BYTES, page_checksum_verification=True
        )
        return pads.ParquetFileFormat(default_fragment_scan_options=options)

    def _partitioning(self) -> pads.Partitioning:
        return pads.partitioning(self._partition_schema(), flavor="hive")

    def _partition_schema(self) -> pa.Schema:
        """Columns of the folders' names: whole numbers where all values are, else strings."""
        values: dict[str, list[str]] = {}
        for file in self.files:
            for part in PurePosixPath(file.path).relative_to(self.root).parts[:-1]:
                key, equals, value = part.partition("=")
                if equals:
                    values.setdefault(key, []).append(value)
        whole = re.compile(r"-?\d{1,18}").fullmatch
        return pa.schema([(key, pa.int64() if all(map(whole, vs)) else pa.string()) for key, vs in values.items()])

    def _schema(self) -> pa.Schema:
        own = self.files[0].schema
        extra = [field for field in self._partition_schema() if field.name not in own.names]
        return pa.schema([*own, *extra])


def find_files(
    paths: str | Path | Sequence[str | Path],
    filesystem: fs.FileSystem | None,
    format: str,
    columns: Sequence[str] | None,
) -> Files:
    """Find the files and read their footers.

    Args:
        paths: A file, a folder (all below it, but for names that begin with ``_`` or ``.``), a glob with ``*``, ``**`` or ``[]``,
            or a list of these; local or as URIs, or as paths on ``filesystem``.
        format: "parquet" or "arrow" (IPC files, also called Feather).
        columns: Those that must be there and of one type in all files; None for all.

    Raises:
        DataError: There are none, one is not whole, or one is unlike the first; the file is named.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    found: list[fs.FileInfo] = []
    roots: list[str] = []
    for place in given:
        filesystem, root, infos = _expand(str(place), filesystem, format)
        found += infos
        roots.append(root)
    if not found or filesystem is None:
        raise DataError(
            f"no {format} files at {', '.join(map(str, given)) or 'an empty list of paths'}. Check the path."
        )
    unique = {info.path: info for info in found}
    infos = [unique[path] for path in sorted(unique)]
    read = _READ[format]

    def footer(info: fs.FileInfo) -> DataFile:
        return _footer(filesystem, info, read)

    with ThreadPoolExecutor(_READERS) as pool:
        files = tuple(pool.map(footer, infos))
    check_alike(files, columns)
    return Files(filesystem, _common(roots), files, format)


def check_alike(files: Sequence[DataFile], columns: Sequence[str] | None) -> None:
    """See that all files have the columns of the first, of the same types.

    Raises:
        DataError: One has not; with the file, the column and both types.
    """
    first = files[0]
    for file in files[1:]:
        for field in first.schema:
            if columns is not None and field.name not in columns:
                continue
            place = file.schema.get_field_index(field.name)
            if place < 0:
                raise DataError(
                    f"{file.path} has no column {field.name!r}, which {first.path} has. It has: {', '.join(file.schema.names)}."
                )
            if file.schema.field(place).type != field.type:
                raise DataError(
                    f"{file.path} has the column {field.name!r} as {file.schema.field(place).type}, but {first.path} as "
                    f"{field.type}. All files of a dataset need the same types."
                )


def _expand(place: str, filesystem: fs.FileSystem | None, format: str) -> tuple[fs.FileSystem, str, list[fs.FileInfo]]:
    """(filesystem, root, files) of one path; the root is the part before folders that may be partitions."""
    if filesystem is None or "://" in place:
        try:
            filesystem, path, _ = locate(place, "the path of the data")
        except StorageError as error:
            raise DataError(str(error)) from None
    else:
        path = place.rstrip("/")
    try:
        if re.search(r"[*\[]", path):
            root = str(PurePosixPath(*_before_glob(path)))
            fits = _glob(path)
            found = [i for i in _below(filesystem, root) if (rest := fits(i.path)) is not None and not _hidden(rest)]
            return filesystem, root, _of_format(found, format)
        info = filesystem.get_file_info(path)
        if info.type == fs.FileType.NotFound:
            raise DataError(f"{place} does not exist.")
        if info.type == fs.FileType.File:
            return filesystem, str(PurePosixPath(path).parent), [info]
        found = [i for i in _below(filesystem, path) if not _hidden(i.path.removeprefix(path))]
        return filesystem, path, _of_format(found, format)
    except OSError as error:
        raise DataError(f"{place} cannot be read: {error}") from None


def _below(filesystem: fs.FileSystem, root: str) -> list[fs.FileInfo]:
    infos = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
    return [info for info in infos if info.type == fs.FileType.File]


def _hidden(below: str) -> bool:
    return any(part.startswith(("_", ".")) for part in below.split("/"))


def _of_format(infos: list[fs.FileInfo], format: str) -> list[fs.FileInfo]:
    """Those with the format's suffix; without any, all."""
    return [info for info in infos if info.path.endswith(_SUFFIXES[format])] or infos


def _before_glob(path: str) -> Iterable[str]:
    for part in PurePosixPath(path).parts:
        if re.search(r"[*\[]", part):
            return
        yield part


def _glob(pattern: str) -> Callable[[str], str | None]:
    """What of a path lies below the files or folders that fit, or None: ``*`` within a name, ``**`` over any number of folders."""
    parts = ["(?:[^/]+/)*" if part == "**" else _one_name(part) + "/" for part in pattern.split("/")]
    compiled = re.compile("".join(parts)[:-1] + r"(/.+)?\Z")

    def below(path: str) -> str | None:
        match = compiled.match(path)
        return None if match is None else match[1] or ""

    return below


def _one_name(part: str) -> str:
    pieces = re.split(r"(\*|\[[^\]]+\])", part)
    return "".join(
        "[^/]*" if p == "*" else p if p.startswith("[") and p.endswith("]") else re.escape(p) for p in pieces
    )


def _common(roots: Sequence[str]) -> str:
    common = PurePosixPath(roots[0])
    for root in roots[1:]:
        while not PurePosixPath(root).is_relative_to(common):
            common = common.parent
    return str(common)


def _footer(filesystem: fs.FileSystem, info: fs.FileInfo, read: Callable[[Any], _Footer]) -> DataFile:
    try:
        if info.size == 0:
            raise OSError("it has 0 bytes")
        with filesystem.open_input_file(info.path) as source:
            groups, schema, facts, column_bytes = read(source)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{info.path} ({info.size} bytes) cannot be read, perhaps because it was cut off: {reason}. Write it again, or leave "
            "it out of the path."
        ) from None
    content = hashlib.sha256(facts).hexdigest()
    return DataFile(info.path, groups, schema, f"{info.size} {info.mtime_ns} {content}", content, column_bytes)


_Footer = tuple[tuple[int, ...], pa.Schema, bytes, dict[str, int]]


def _read_parquet(source: Any) -> _Footer:
    file = pq.ParquetFile(source)
    meta = file.metadata
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    facts = repr([group.to_dict() for group in groups])
    schema = file.schema_arrow.remove_metadata()
    sizes: dict[str, int] = {}
    for column in (group.column(number) for group in groups for number in range(group.num_columns)):
        name = column.path_in_schema.partition(".")[0]
        sizes[name] = sizes.get(name, 0) + column.total_uncompressed_size
    return tuple(group.num_rows for group in groups), schema, f"{schema}{facts}".encode(), sizes


def _read_arrow(source: Any) -> _Footer:
    reader = pa.ipc.open_file(source)
    rows = tuple(reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
    schema = reader.schema.remove_metadata()
    return rows, schema, f"{schema}{rows}".encode(), {}


_READ = {"parquet": _read_parquet, "arrow": _read_arrow}
