"""What a tracker could not take, on the driver's disk: one file per run and start, one JSON line per item, in order.

The first line is the start itself (``RunInfo``), so that a file alone is enough to send it from another process. Lines are
appended in batches, about one each second, and each batch is fsynced before the next: a driver that is killed loses what came in
its last second. When all is sent the file goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from raytrain.errors import TrackingError
from raytrain.manifest import decode, encode
from raytrain.report import Event, Row
from raytrain.storage import Storage
from raytrain.tracking.base import End, Item, RunInfo
from raytrain.tracking.names import number, param_values, tag_values
from raytrain.tracking.provenance import without_secrets

try:
    import fcntl
except (
    ImportError
):  # Windows: two processes that send one file at once are not kept apart there; nothing is written twice
    fcntl = None  # type: ignore[assignment]

# Some five million rows of four metrics: more than most runs ever log, and less than a few checkpoints take.
MAX_BYTES = 1_000_000_000
FORMAT_VERSION = 1
_FOLDER = "spool"


def spool_folder(folder: Storage, run_key: str) -> Path:
    """Where the spools of a run are: in its folder if that is local, else below the user's data folder on this machine."""
    if folder.is_local:
        return Path(folder.path) / _FOLDER
    home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    if not os.access(home if home.exists() else Path.home(), os.W_OK):
        home = Path(tempfile.gettempdir())
    return home / "raytrain" / run_key / _FOLDER


def spools_in(folder: Path) -> list[Path]:
    """Spools that are still to be sent, the oldest first."""
    return sorted(path for path in folder.glob("start-*.jsonl") if path.stat().st_size)


def left_by_earlier_starts(folder: Path) -> list[Spool]:
    """What earlier starts of a run left, the oldest first; what another process has is left to it."""
    found = []
    for path in spools_in(folder):
        with contextlib.suppress(TrackingError):
            found.append(Spool(path))
    return found


class Spool:
    """A queue of items in a file. One process has it at a time; its methods are called by one thread at a time.

    Args:
        path: The file; made when the first item is appended.
        head: The start that it belongs to; None to read a file that is there, its head being the first item.
        max_bytes: Rows that do not fit any more are left out; what is not a row always fits.

    Raises:
        TrackingError: Another process has it, or it is no spool.
    """

    def __init__(self, path: Path, head: RunInfo | None = None, max_bytes: int = MAX_BYTES) -> None:
        self.path, self._head, self._max_bytes = path, head, max_bytes
        self._file: IO[bytes] | None = None
        self._ahead: deque[Item] = deque()
        self._read_at = self._size = 0
        if head is None:
            self._file = _locked(path)
            self._size = path.stat().st_size
            if not isinstance(next(iter(self.peek(1)), None), RunInfo):
                self._file.close()
                raise TrackingError(f"{path} holds no run that could be sent.")

    @property
    def is_empty(self) -> bool:
        """Whether all that was appended has been taken."""
        return not self.peek(1)

    def append(self, items: Sequence[Item]) -> list[Item]:
        """Write items to disk, for good; returns the rows that did not fit.

        Raises:
            OSError: The disk is full or gone; then nothing of it was written.
        """
        lines: list[bytes] = []
        left_out: list[Item] = []
        size = self._size
        if self._size == 0 and self._head is not None:
            lines.append(encoded(self._head))
        for item in items:
            line = encoded(item)
            if isinstance(item, Row) and (left_out or size + len(line) > self._max_bytes):
                left_out.append(item)
            else:
                lines.append(line)
                size += len(line)
        self._write(lines)
        return left_out

    def _write(self, lines: Sequence[bytes]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _locked(self.path, make=True)
        try:
            self._file.seek(self._size)
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(self._size)
            raise
        if self._size == 0 and self._head is not None:
            self._read_at = len(lines[0])  # who wrote the head needs not read it
        self._size += sum(len(line) for line in lines)

    def peek(self, limit: int) -> list[Item]:
        """The first items that were not taken yet."""
        while len(self._ahead) < limit and self._read_at < self._size and self._file is not None:
            self._file.seek(self._read_at)
            line = self._file.readline()
            self._read_at += len(line)
            if not line or (item := decoded(line)) is None:
                continue  # a line that was cut when its writer was killed
            self._ahead.append(item)
        return [self._ahead[i] for i in range(min(limit, len(self._ahead)))]

    def take(self, num: int) -> None:
        """Take the first items away. The file keeps them until it is empty: who sends them again does no harm."""
        for _ in self.peek(num):
            self._ahead.popleft()
        if self._file is not None and self._head is not None and self.is_empty:
            self._file.truncate(0)
            self._read_at = self._size = 0

    def take_all(self) -> None:
        """As if all had been sent."""
        self._ahead.clear()
        self._read_at = self._size

    def close(self) -> Path | None:
        """Let others have it; an empty one goes. Returns the file if it stays."""
        if self._file is None:
            return None
        stays = not self.is_empty
        if not stays:
            self.path.unlink(missing_ok=True)
            if self.path.parent.name == _FOLDER and not any(self.path.parent.iterdir()):
                self.path.parent.rmdir()
        self._file.close()
        self._file = None
        return self.path if stays else None


def _locked(path: Path, make: bool = False) -> IO[bytes]:
    """The file, open for reading and writing by this process alone, and readable by its owner alone."""
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if make else 0)
    file = os.fdopen(os.open(path, flags, 0o600), "r+b")
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise TrackingError(
                f"{path} is in use: the driver that writes it lives, or somebody sends it now."
            ) from None
    return file


def encoded(item: Item) -> bytes:
    """An item as one line of strict JSON, without secrets."""
    if isinstance(item, Row):
        values = {name: encode(x) for name, value in item.values.items() if (x := number(value)) is not None}
        data = {"kind": "row", "step": item.step, "epoch": item.epoch, "time_ms": item.time_ms, "values": values}
    elif isinstance(item, Event):
        data = {
            "kind": "event",
            "event": item.kind,
            "step": item.step,
            "number": item.number,
            "data": _plain(item.data),
        }
    elif isinstance(item, End):
        error = None if item.error is None else without_secrets(item.error)
        data = {"kind": "end", "status": item.status, "error": error, "time_s": item.time_s}
    else:
        hidden = {
            "params": param_values(item.params),
            "tags": tag_values(item.tags),
            "config_yaml": without_secrets(item.config_yaml),
            "folder": without_secrets(item.folder),
        }
        data = {"kind": "run", "version": FORMAT_VERSION, **_plain({**vars(item), **hidden})}
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decoded(line: bytes) -> Item | None:
    """The item of a line; None for what is none."""
    try:
        data: dict[str, Any] = json.loads(line)
        kind = data.pop("kind")
        if kind == "row":
            values = {name: decode(value) for name, value in data["values"].items()}
            return Row(data["step"], data["epoch"], values, data["time_ms"])
        if kind == "event":
            return Event(data["event"], data["step"], data["data"], data["number"])
        if kind == "end":
            return End(**data)
        if data.pop("version") == FORMAT_VERSION and kind == "run":
            return RunInfo(**data)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(below) for name, below in value.items()}
    if isinstance(value, float):
        return encode(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return [_plain(below) for below in value] if isinstance(value, Iterable) else str(value)
