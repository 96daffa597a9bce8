"""Checkpoints: written with a manifest last, verified before use, the newest sound one chosen, old ones removed."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from raytrain.errors import CheckpointError, StorageError
from raytrain.manifest import NAME, FileFacts, Manifest
from raytrain.pins import pin, pinned_for
from raytrain.storage import Storage

_PREFIX = "step-"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in storage.

    Attributes:
        storage: Its folder.
        manifest: What is in it.
    """

    storage: Storage
    manifest: Manifest

    @property
    def uri(self) -> str:
        """Where it is: a path, or a URI."""
        return self.storage.uri

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return self.manifest.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """Latest values at that step."""
        return self.manifest.metrics

    def load_state(self, part: str = "model", map_location: Any = "cpu") -> Any:
        """One part, verified, by ``torch.load(weights_only=True)``.

        Raises:
            CheckpointError: There is no such part, or its bytes are not those that were written.
        """
        name = f"{part}.pt"
        if name not in self.manifest.files:
            parts = ", ".join(sorted(n.removesuffix(".pt") for n in self.manifest.files))
            raise CheckpointError(f"{self.uri} has no part {part!r}. There are: {parts}.")
        data = self.storage.read(name)
        _compare(name, self.manifest.files[name], len(data), hashlib.sha256(data).hexdigest())
        return torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)

    def verify(self) -> None:
        """Read all files and compare them with the manifest.

        Raises:
            CheckpointError: One is missing, cut or changed; it is named.
        """
        for name, facts in self.manifest.files.items():
            try:
                with self.storage.open_input(name) as file:
                    digest, num_bytes = hashlib.sha256(), 0
                    while chunk := file.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        num_bytes += len(chunk)
            except StorageError as error:
                raise CheckpointError(f"{name} cannot be read ({error})") from None
            _compare(name, facts, num_bytes, digest.hexdigest())


def _compare(name: str, facts: FileFacts, num_bytes: int, sha256: str) -> None:
    if num_bytes != facts.num_bytes:
        raise CheckpointError(f"{name} has {num_bytes} bytes instead of {facts.num_bytes}")
    if sha256 != facts.sha256:
        raise CheckpointError(f"{name} was changed: its hash is not the one in the manifest")


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        storage: Their folder.
        keep: Newest ones to keep; the best is kept besides.
    """

    def __init__(self, storage: Storage, keep: int = 2) -> None:
        self._storage = storage
        self._keep = keep

    def uri_of(self, step: int) -> str:
        """Where the checkpoint of a step is, or would be."""
        return self._folder(step).uri

    def write(
        self,
        step: int,
        parts: Mapping[str, Any],
        *,
        epoch: int,
        index: int,
        world_size: int,
        attempt: int,
        metrics: Mapping[str, float],
    ) -> SavedCheckpoint:
        """Write all parts, then the manifest. What was left of an unfinished one at this step is removed first."""
        folder = self._folder(step)
        pinned = pinned_for(folder)
        self._storage.delete(folder_name(step))
        files = {f"{part}.pt": _write_part(folder, f"{part}.pt", state) for part, state in parts.items()}
        manifest = Manifest(
            step=step,
            epoch=epoch,
            index=index,
            world_size=world_size,
            attempt=attempt,
            created_s=time.time(),
            metrics=dict(metrics),
            files=files,
            versions={"raytrain": version("raytrain"), "torch": torch.__version__},
            averaged="num_updates" in parts.get("trainer", {}).get("parts", {}).get("ema", {}),
        )
        if pinned:
            pin(folder, pinned)
        folder.write(NAME, manifest.to_json())
        return SavedCheckpoint(folder, manifest)

    def all(self) -> list[SavedCheckpoint]:
        """Those with a readable manifest, by rising step. Nothing is verified and nothing is written."""
        return [checkpoint for checkpoint, _ in self._look() if checkpoint is not None]

    def choose(self) -> tuple[SavedCheckpoint | None, list[str]]:
        """The newest sound one, and why each newer one was passed over."""
        skipped: list[str] = []
        for checkpoint, problem in reversed(self._look()):
            if checkpoint is not None:
                try:
                    checkpoint.verify()
                    return checkpoint, skipped
                except CheckpointError as error:
                    problem = f"{checkpoint.uri}: {error}"
            skipped.append(f"checkpoint skipped: {problem}")
        return None, skipped

    def prune(self, best_step: int | None) -> None:
        """Remove all but the newest, the best and those that registered models point to; manifests go first: none is left half."""
        steps = sorted(s for s in map(_step_of, self._storage.names()) if s is not None)
        whole = [checkpoint.step for checkpoint in self.all()]
        kept = {*whole[-self._keep :], best_step}
        for step in steps:
            if step not in kept and not pinned_for(self._folder(step)):
                self._folder(step).delete(NAME)
                self._storage.delete(folder_name(step))

    def _look(self) -> list[tuple[SavedCheckpoint | None, str]]:
        found: list[tuple[SavedCheckpoint | None, str]] = []
        for name in self._storage.names():
            if _step_of(name) is None:
                continue
            folder = self._storage.child(name)
            try:
                found.append((SavedCheckpoint(folder, Manifest.from_json(folder.read(NAME))), ""))
            except StorageError:
                found.append((None, f"{folder.uri}: it has no manifest, so it was not finished"))
            except CheckpointError as error:
                found.append((None, f"{folder.uri}: {error}"))
        return found

    def _folder(self, step: int) -> Storage:
        return self._storage.child(folder_name(step))


def folder_name(step: int) -> str:
    """Name of a checkpoint's folder: sorted by name is sorted by step."""
    return f"{_PREFIX}{step:010d}"


def _step_of(name: str) -> int | None:
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isdigit() else None


class _Hashing(io.RawIOBase):
    """A stream that passes bytes on and remembers their number and hash."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._digest, self.num_bytes = stream, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self._digest.update(view)
        self.num_bytes += len(view)
        return len(view)

    def facts(self) -> FileFacts:
        return FileFacts(self.num_bytes, self._digest.hexdigest())


def _write_part(folder: Storage, name: str, state: Any) -> FileFacts:
    with folder.open_output(name) as file:
        stream = _Hashing(file)
        torch.save(state, stream)  # type: ignore[arg-type]
    return stream.facts()


def open_checkpoint(uri: str) -> SavedCheckpoint:
    """The checkpoint in a folder, or the best (else the newest sound) one of a run's folder.

    Raises:
        CheckpointError: There is none that is sound; with the reasons.
    """
    folder = Storage(uri)
    if folder.exists(NAME):
        return SavedCheckpoint(folder, Manifest.from_json(folder.read(NAME)))
    store = CheckpointStore(folder.child("checkpoints"))
    best_step = _best_step(folder)
    for checkpoint in store.all():
        if checkpoint.step == best_step:
            return checkpoint
    chosen, skipped = store.choose()
    if chosen is None:
        reasons = f" ({'; '.join(skipped)})" if skipped else ""
        raise CheckpointError(
            f"{folder.uri} holds no sound checkpoint{reasons}. Give the folder of a run or of a checkpoint."
        )
    return chosen


def _best_step(folder: Storage) -> int | None:
    from raytrain.identity import RunRecord

    record = RunRecord.load(folder)
    return record.best_step if record else None
