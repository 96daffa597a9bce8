"""A folder of prepared tables on the node: one writer each, whole or absent, the least recently used ones leave first."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from raytrain.errors import DataError

_POLL_S = 0.2
_TELL_AFTER_S = 2.0
_FREE_SHARE = 0.1  # of the disk, left to others when no limit is given


def default_folder() -> Path:
    """RAYTRAIN_CACHE, else raytrain below XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("RAYTRAIN_CACHE")
    return (
        Path(own).expanduser() if own else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "raytrain"
    )


class NodeCache:
    """Prepared tables by key. Any number of processes of the node may use it at once.

    Args:
        folder: Where; on a local disk.
        limit_bytes: At most so much in all; None: as much as leaves a tenth of the disk free.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self._folder, self._limit_bytes = folder.absolute(), limit_bytes

    def entry(self, key: str) -> Path | None:
        """The folder of a key's table, or None when it is not there."""
        folder = self._folder / key
        return folder if folder.is_dir() else None

    def open(self, key: str, make: Callable[[Path], None], expected_bytes: Callable[[], int], name: str) -> Held:
        """The key's table, made by the first process that comes while the others wait.

        Args:
            make: Writes it into the folder that it is given.
            expected_bytes: About how large it will be, to make room before.
            name: What it is called in messages.

        Raises:
            DataError: There is no room for it.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock = _Lock(self._folder / f"{key}.lock")
        except OSError as error:
            raise DataError(
                f"the cache folder {self._folder} cannot be used: {error}. Set cache= or RAYTRAIN_CACHE."
            ) from None
        waiting = _Patience(f"waiting for {name}: another process of this node prepares it")
        while not (self.entry(key) and lock.share() and self.entry(key)):
            if not lock.try_own():
                waiting.pause()
            elif self.entry(key) is None:
                self._make(key, make, expected_bytes, name)
        os.utime(self._folder / key)  # its last use
        return Held(self._folder / key, lock)

    def _make(self, key: str, make: Callable[[Path], None], expected_bytes: Callable[[], int], name: str) -> None:
        for left_behind in self._folder.glob(f"{key}.partial-*"):  # of a process that died: its lock is free
            shutil.rmtree(left_behind, ignore_errors=True)
        self._make_room(expected_bytes(), name)
        partial = self._folder / f"{key}.partial-{os.getpid()}"
        partial.mkdir()
        try:
            make(partial)
            partial.rename(self._folder / key)
        except OSError as error:
            raise DataError(
                f"{name} could not be prepared in {self._folder}: {error}. Set cache= or RAYTRAIN_CACHE to a local disk with room."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def _make_room(self, expected_bytes: int, name: str) -> None:
        room = self._room()
        for folder in sorted(self._entries(), key=lambda f: f.stat().st_mtime):
            if room >= expected_bytes:
                return
            room += self._remove(folder)
        room = self._room()
        if room < expected_bytes:
            limit = f"limited to {self._limit_bytes / 1e9:.2f} GB" if self._limit_bytes is not None else "on this disk"
            raise DataError(
                f"{name} needs about {expected_bytes / 1e9:.2f} GB in the cache {self._folder}, but only "
                f"{max(0, room) / 1e9:.2f} GB are free "
                f"there ({limit}, and what is in use stays). Choose fewer columns, a larger disk (cache=, RAYTRAIN_CACHE), or "
                "stream it: raytrain.data.parquet_stream."
            )

    def _room(self) -> int:
        disk = shutil.disk_usage(self._folder)
        if self._limit_bytes is None:
            return int(disk.free - _FREE_SHARE * disk.total)
        return min(disk.free, self._limit_bytes - sum(_size(folder) for folder in self._entries()))

    def _entries(self) -> list[Path]:
        return [p for p in self._folder.iterdir() if p.is_dir() and ".partial-" not in p.name]

    def _remove(self, folder: Path) -> int:
        """Remove a table that no process has open; returns the bytes that became free."""
        lock = _Lock(folder.with_name(f"{folder.name}.lock"))
        try:
            if not lock.try_own():
                return 0
            size = _size(folder)
            shutil.rmtree(folder, ignore_errors=True)
            return size
        finally:
            lock.close()


class Held:
    """A table that is in use: it is not removed as long as this object lives.

    Attributes:
        folder: Where it is.
    """

    def __init__(self, folder: Path, lock: _Lock) -> None:
        self.folder, self._lock = folder, lock


class _Lock:
    """A lock file. The system frees it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")

    def share(self) -> bool:
        """Hold it together with other readers; False when a writer has it."""
        return self._take(fcntl.LOCK_SH)

    def try_own(self) -> bool:
        """Hold it alone; False when anybody has it."""
        return self._take(fcntl.LOCK_EX)

    def close(self) -> None:
        """Let go of it."""
        self._file.close()

    def _take(self, kind: int) -> bool:
        try:
            fcntl.flock(self._file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class _Patience:
    """Waits in small steps, and says once for what."""

    def __init__(self, text: str) -> None:
        self._text, self._began, self._told = text, time.monotonic(), False

    def pause(self) -> None:
        """Wait a little."""
        if not self._told and time.monotonic() - self._began > _TELL_AFTER_S:
            print(f"raytrain: {self._text}", flush=True)
            self._told = True
        time.sleep(_POLL_S)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
