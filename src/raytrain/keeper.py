"""Keeps a run: its cursor, its registered parts and random streams, written in the background and restored on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from raytrain.checkpoint import CheckpointStore, SavedCheckpoint
from raytrain.data import get_rng_state, set_rng_state
from raytrain.errors import CheckpointError
from raytrain.history import append
from raytrain.journal import Journal
from raytrain.optim import bare
from raytrain.peers import Peers
from raytrain.report import Event, EventKind
from raytrain.snapshot import Snapshotter
from raytrain.storage import Storage
from raytrain.writer import BackgroundWriter


@dataclass
class Cursor:
    """Where the run stands: free of the number of workers.

    Attributes:
        epoch: Epochs finished.
        index: Global batches finished in the epoch under way.
        step: Optimizer steps finished in all.
        elapsed_s: Training time in all, over all attempts.
        length: Global batches of the epoch that ended last; None when none has.
    """

    epoch: int = 0
    index: int = 0
    step: int = 0
    elapsed_s: float = 0.0
    length: int | None = None

    def advance(self, ends_epoch: bool) -> None:
        """One more step."""
        self.step += 1
        self.index += 1
        if ends_epoch:
            self.length = self.index
            self.next_epoch()

    def next_epoch(self) -> None:
        """Leave the epoch under way."""
        self.epoch, self.index = self.epoch + 1, 0

    def at(self, elapsed_s: float) -> Cursor:
        """A copy with the training time."""
        return replace(self, elapsed_s=elapsed_s)


@dataclass
class Keeper:
    """Saves and restores; the same calls on all ranks, only rank 0 writes.

    Attributes:
        folder: The run's folder.
        keep: Checkpoints to keep besides the best.
        peers: The ranks.
        attempt: Number of this attempt, for the manifest.
    """

    folder: Storage
    keep: int
    peers: Peers
    attempt: int = 1
    cursor: Cursor = field(default_factory=Cursor)
    resumed: bool = False
    best_step: int | None = None
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._store = CheckpointStore(self.folder.child("checkpoints"), keep=self.keep)
        self._parts: dict[str, Any] = {}
        self._snapshotter = Snapshotter()
        self._writer = BackgroundWriter()
        self._chosen: SavedCheckpoint | None = None
        self._state: Mapping[str, Any] = {}
        self._published: deque[Event] = deque()
        self.uri = ""

    def restore(self) -> None:
        """Choose the newest sound checkpoint, the same on all ranks, and take its cursor. A collective."""
        self._chosen, skipped = self.peers.on_main(self._store.choose)
        self.skipped = tuple(skipped)
        if self._chosen is None:
            return
        self._state = self._chosen.load_state("trainer")
        self.cursor = Cursor(**self._state["cursor"])
        self.best_step = self._state["best_step"]
        self.resumed = True
        self.uri = self._chosen.uri

    @property
    def world_size_before(self) -> int | None:
        """Number of workers that the checkpoint was made with; None when the run is new."""
        return self._chosen.manifest.world_size if self._chosen else None

    def register(self, parts: Mapping[str, Any], device: torch.device) -> None:
        """Name parts of the state; each is restored at once when the run resumes.

        Raises:
            CheckpointError: A part has no state_dict, has a taken name, or does not fit the checkpoint.
        """
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise CheckpointError(
                    f"register({name}=...): a {type(part).__name__} has no state_dict and load_state_dict."
                )
            if name in self._parts or name in ("trainer", "rng"):
                raise CheckpointError(f"register({name}=...): the name is taken. Choose another.")
            self._parts[name] = part
            if self._chosen is not None:
                self._restore_part(name, part, device)

    def _restore_part(self, name: str, part: Any, device: torch.device) -> None:
        assert self._chosen is not None
        try:
            if isinstance(part, nn.Module):
                bare(part).load_state_dict(self._chosen.load_state(name, device))
            elif name in self._state["parts"]:
                part.load_state_dict(self._state["parts"][name])
            else:
                known = ", ".join(sorted(self._state["parts"])) or "none"
                raise CheckpointError(f"it holds no such part; there are: {known}.")
        except (RuntimeError, ValueError, KeyError, CheckpointError) as error:
            raise CheckpointError(
                f"{name!r} cannot be restored from {self._chosen.uri}: {error} The code changed since the run began: "
                "change it back, or start a run of another name."
            ) from error

    def restore_rng(self) -> bool:
        """Set this rank's random streams to the checkpoint's; False when there are none for this number of workers."""
        if self._chosen is None:
            return False
        streams = self._chosen.load_state("rng")
        if len(streams) != self.peers.world_size:
            return False
        set_rng_state(streams[self.peers.rank])
        return True

    def restore_journal(self, journal: Journal) -> None:
        """Give the journal its unfinished sums back, and tell where the run goes on."""
        for text in self.skipped:
            journal.event("warning", self.cursor.step, text=text)
        if self.resumed:
            journal.load_state_dict(self._state["journal"])
            journal.event("resumed", self.cursor.step, uri=self.uri)

    def save(self, cursor: Cursor, journal: Journal, metrics: Mapping[str, float], best: bool) -> None:
        """Snapshot all parts, then write them in the background on rank 0. A collective.

        One checkpoint is under way at a time: a second one waits for the first.
        """
        streams = self.peers.gather_objects(get_rng_state())
        if best:
            self.best_step = cursor.step
        rows = journal.take_unsaved()
        if self.peers.rank != 0:
            return
        self._writer.wait()
        modules = {n: bare(p) for n, p in self._parts.items() if isinstance(p, nn.Module)}
        others = {n: p for n, p in self._parts.items() if n not in modules}
        state = self._snapshotter.take(
            {
                **{name: module.state_dict() for name, module in modules.items()},
                "trainer": {
                    "cursor": vars(cursor),
                    "best_step": self.best_step,
                    "parts": {name: part.state_dict() for name, part in others.items()},
                    "journal": journal.state_dict(),
                },
                "rng": streams,
            }
        )

        def write() -> None:
            append(self.folder, cursor.step, rows)
            self._store.write(
                cursor.step,
                state,
                epoch=cursor.epoch,
                index=cursor.index,
                world_size=self.peers.world_size,
                attempt=self.attempt,
                metrics=metrics,
            )
            self._store.prune(self.best_step)
            kind: EventKind = "best" if best else "checkpoint"
            self._published.append(
                Event(kind, cursor.step, {"uri": self._store.uri_of(cursor.step), "metrics": metrics})
            )

        self._writer.submit(write)

    def take_published(self) -> list[Event]:
        """What was published since the last question."""
        return [self._published.popleft() for _ in range(len(self._published))]

    def keep_rows(self, step: int, journal: Journal) -> None:
        """Keep the rows since the last checkpoint, when the run ends."""
        rows = journal.take_unsaved()
        if self.peers.rank == 0 and rows:
            append(self.folder, step, rows)

    def failure(self) -> BaseException | None:
        """What failed in the background since the last question."""
        return self._writer.take_failure()

    def wait(self) -> None:
        """Wait for the checkpoint that is under way; what failed is told by ``failure``."""
        self._writer.wait()
