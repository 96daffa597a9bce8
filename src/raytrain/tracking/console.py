"""Progress for a person: few lines, each worth reading."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

from raytrain.report import Event, Row
from raytrain.tracking.base import RunInfo, Status

_EVERY_S = 2.0
_OWN = ("train/", "time/", "rank/", "system/")


class ConsoleTracker:
    """Prints a line at most every two seconds; evaluations come first, and the last one is always shown."""

    def __init__(self, out: TextIO | None = None, every_s: float = _EVERY_S) -> None:
        self._out = out or sys.stdout
        self._every_s = every_s
        self._next_s = 0.0
        self._latest: dict[str, float] = {}
        self._next_score_s = 0.0
        self._pending = ""

    def open(self, run: RunInfo) -> dict[str, str]:
        """Say which run begins, and where it is."""
        again = f", start {run.attempt}" if run.attempt > 1 else ""
        self._say(f"run {run.name}{again} in {run.folder}")
        for data in run.datasets:
            self._say(f"  {data['name']}: {data['num_rows']} samples")
        return {}

    def log(self, rows: Sequence[Row]) -> None:
        """Print the latest values when it is time, and each evaluation."""
        for row in rows:
            self._latest.update(row.values)
            scores = {name: value for name, value in row.values.items() if not name.startswith(_OWN)}
            now = time.monotonic()
            if scores and not _only_counts(scores):
                self._pending = self._line(row, scores)
                if now >= self._next_score_s:
                    self._say_pending()
            elif now >= self._next_s and "train/loss" in row.values:
                self._say(self._line(row, {}))
                self._next_s = now + self._every_s

    def event(self, event: Event) -> None:
        """Print what a person should know."""
        if event.kind == "started":
            count = event.data["world_size"]
            self._say(f"  {count} worker{'s' if count != 1 else ''} on {event.data['device']}")
        elif event.kind == "resumed":
            self._say(f"  goes on after step {event.step}, from {event.data['uri']}")
        elif event.kind in ("note", "warning"):
            prefix = "warning: " if event.kind == "warning" else ""
            self._say(f"  {prefix}{event.data['text']}")

    def close(self, status: Status, error: str | None, time_s: float | None = None) -> None:
        """Print an evaluation that is still to be shown; the summary is the driver's."""
        self._say_pending()

    def _say_pending(self) -> None:
        if self._pending:
            self._say(self._pending)
        self._pending = ""
        self._next_score_s = self._next_s = time.monotonic() + self._every_s

    def _line(self, row: Row, scores: Mapping[str, float]) -> str:
        parts = [f"epoch {row.epoch:6.2f}  step {row.step:7d}"]
        if "train/loss" in self._latest:
            parts.append(f"train/loss {self._latest['train/loss']:.4f}")
        parts += [f"{name} {value:.4f}" for name, value in scores.items() if not name.endswith("/samples")]
        if "time/samples_per_s" in self._latest:
            parts.append(f"{self._latest['time/samples_per_s']:,.0f} samples/s")
        return "  ".join(parts)

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _only_counts(scores: Mapping[str, float]) -> bool:
    return all(name.endswith("/samples") for name in scores)
