"""Files of a run, on any pyarrow filesystem: written whole, read back, retried a little, errors that name the place."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from raytrain.errors import StorageError

T = TypeVar("T")

_TRIES = 3
_PAUSE_S = 0.2
_WINDOWS = os.name == "nt"


class Storage:
    """A folder on a filesystem.

    Args:
        place: A local folder (relative ones are below the current folder, ``~`` is the home) or a URI
            (``s3://bucket/path?endpoint_override=...``); with ``filesystem``, a path on that one.
        filesystem: A pyarrow filesystem, or None to find it by the place.

    Raises:
        StorageError: The URI is not understood.
    """

    def __init__(self, place: str, filesystem: fs.FileSystem | None = None) -> None:
        self._sleep: Callable[[float], None] = time.sleep
        if filesystem is not None:
            self.filesystem, self.path, self._prefix = filesystem, place.rstrip("/") or "/", ""
        else:
            self.filesystem, self.path, self._prefix = locate(place)

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine's own tree."""
        return isinstance(self.filesystem, fs.LocalFileSystem)

    @property
    def uri(self) -> str:
        """The place as text: the path of a local folder, the URI elsewhere."""
        path, _, query = self._prefix.partition("?")
        return f"{path}{self.path}{'?' + query if query else ''}"

    def child(self, *names: str) -> Storage:
        """A folder (or file) below this one; nothing is made yet."""
        below = Storage.__new__(Storage)
        below.__dict__.update(self.__dict__)
        below.path = str(PurePosixPath(self.path, *names))
        return below

    def parent(self) -> Storage:
        """The folder that this one is in."""
        above = self.child()
        above.path = str(PurePosixPath(self.path).parent)
        return above

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole: it is there with all its bytes, or not at all."""
        with self.open_output(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def open_output(self, name: str) -> Iterator[Any]:
        """A stream into a new file, which appears when the block ends well."""
        target = self.child(name).path
        # Object stores show a file when it is closed; on a local folder a rename does that.
        written = f"{target}.{uuid.uuid4().hex[:8]}.tmp" if self.is_local else target
        with self._told("write", name):
            self._retried(lambda: self.filesystem.create_dir(self.path, recursive=True))
            stream = self._retried(lambda: self.filesystem.open_output_stream(written))
            try:
                with stream:
                    yield stream
                if written != target:
                    _to_disk(written)
                    os.replace(written, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.filesystem.delete_file(written)
                raise

    def read(self, name: str) -> bytes:
        """All bytes of a file."""

        def read() -> bytes:
            with self.filesystem.open_input_stream(self.child(name).path, compression=None) as file:
                data: bytes = file.read()
                return data

        with self._told("read", name):
            return self._retried(read)

    def open_input(self, name: str) -> Any:
        """A seekable file, open for reading."""
        with self._told("read", name):
            return self._retried(lambda: self.filesystem.open_input_file(self.child(name).path))

    def names(self) -> list[str]:
        """Names of files and folders in it, sorted; none when it does not exist."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        with self._told("list", ""):
            return sorted(info.base_name for info in self._retried(lambda: self.filesystem.get_file_info(selector)))

    def exists(self, name: str) -> bool:
        """Whether there is a file or folder of this name."""
        with self._told("look for", name):
            info = self._retried(lambda: self.filesystem.get_file_info(self.child(name).path))
        return bool(info.type != fs.FileType.NotFound)

    def delete(self, name: str) -> None:
        """Remove a file, or a folder with all in it; one that is not there is fine."""
        path = self.child(name).path

        def delete() -> None:
            kind = self.filesystem.get_file_info(path).type
            if kind == fs.FileType.Directory:
                self.filesystem.delete_dir(path)
            elif kind != fs.FileType.NotFound:
                self.filesystem.delete_file(path)

        with self._told("delete", name), contextlib.suppress(FileNotFoundError):
            self._retried(delete)

    def check_writable(self) -> None:
        """Write, read back and delete a small file.

        Raises:
            StorageError: That failed; with the place and the cure.
        """
        name, data = f".raytrain-{uuid.uuid4().hex[:8]}", b"raytrain"
        self.write(name, data)
        if self.read(name) != data:
            raise StorageError(f"{self.uri} gave back other bytes than were written. Set run.storage to another place.")
        self.delete(name)

    def _retried(self, work: Callable[[], T]) -> T:
        for attempt in range(1, _TRIES + 1):
            try:
                return work()
            except (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError):
                raise
            except OSError:
                if attempt == _TRIES:
                    raise
                self._sleep(_PAUSE_S * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _told(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = self.child(name).uri if name else self.uri
            raise StorageError(
                f"cannot {verb} {where}: {type(error).__name__}: {error}. Check the path, its permissions and the free space, or "
                "set run.storage to another place."
            ) from error


def locate(place: str, setting: str = "run.storage") -> tuple[fs.FileSystem, str, str]:
    """(filesystem, path on it, what stands before the path in a URI) of a folder or URI.

    Raises:
        StorageError: The URI is not understood; the text names the setting.
    """
    if "://" not in place:
        path = Path(place).expanduser().absolute()
        return fs.LocalFileSystem(), path.as_posix().rstrip("/") or "/", ""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return fs.LocalFileSystem(), unquote(parts.path).rstrip("/") or "/", ""
    try:
        filesystem, path = fs.FileSystem.from_uri(place)
    except (ValueError, OSError) as error:
        raise StorageError(
            f"{setting} = {_without_secrets(place)!r} is not understood: {error}. Allowed: a folder, file://, s3://, gs:// or "
            "another URI that pyarrow knows."
        ) from None
    query = f"?{parts.query}" if parts.query else ""
    return filesystem, path.rstrip("/"), _without_secrets(f"{parts.scheme}://{query}")


def _without_secrets(uri: str) -> str:
    """A URI without user information, to be shown."""
    scheme, sep, rest = uri.partition("://")
    head, slash, tail = rest.partition("/")
    return f"{scheme}{sep}{head.rpartition('@')[2]}{slash}{tail}"


def _to_disk(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
