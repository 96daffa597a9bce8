"""The record of a run on its storage, kept true while the driver lives: how far it came, and that it lives."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from raytrain.errors import StorageError
from raytrain.identity import RunRecord
from raytrain.liveness import HEARTBEAT_S, this_process
from raytrain.report import Report
from raytrain.storage import Storage


class Ledger:
    """Writes ``run.json``: at the start, when a tracker has told of itself, each minute, and at the end.

    Args:
        folder: The run's folder.
        record: The record so far.

    Attributes:
        stopped: Whether the run told that it was stopped.
    """

    def __init__(self, folder: Storage, record: RunRecord) -> None:
        self._folder, self.record = folder, record
        self.stopped = False
        self._step: int | None = None  # of this start: it may have begun at an earlier step than the last one ended at
        self._changing = threading.Lock()  # held for moments only
        self._saving = threading.Lock()  # held while the storage works
        self._ended = threading.Event()

    def begin(self, facts: Mapping[str, Any], trackers: Mapping[str, str]) -> None:
        """One more start, of this process."""
        self.record = self.record.started(facts, this_process()).with_trackers(trackers)
        self.record.save(self._folder)
        threading.Thread(target=self._beat, name="raytrain-heartbeat", daemon=True).start()

    def told(self, trackers: Mapping[str, str]) -> None:
        """Keep what a tracker told of itself. Any thread may call it."""
        with self._changing:
            self.record = self.record.with_trackers(trackers)
        self._save()

    def see(self, report: Report) -> None:
        """Take note of a report: nothing is written."""
        steps = [row.step for row in report.rows] + [event.step for event in report.events]
        best_step = next(
            (event.step for event in reversed(report.events) if event.kind == "best"), self.record.best_step
        )
        with self._changing:
            if steps:
                self._step = max(self._step or 0, *steps)
                self.record = self.record.at(self._step, best_step)
        for event in report.events:
            if event.kind == "finished":
                self.stopped = event.data.get("reason") == "stopped"

    def end(self, status: str, error: str | None, total_steps: int | None) -> None:
        """The end of this start."""
        self._ended.set()
        with self._saving:
            early = status == "FINISHED" and total_steps is not None and self.record.step < total_steps
            self.record = self.record.ended(status, stopped_early=early, error=error)
            self.record.save(self._folder)

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            self._save()

    def _save(self) -> None:
        # A storage that is away for a moment is no reason to end; the end of the run is written in any case.
        with self._saving, contextlib.suppress(StorageError):
            if not self._ended.is_set():
                self.record.save(self._folder)
