"""How far a run came and how it ended, seen from its reports."""

from __future__ import annotations

from raytrain.report import Report


class Watch:
    """Remembers how far the run came and how it ended."""

    def __init__(self) -> None:
        self.stopped = False
        self.step: int | None = None
        self.best_step: int | None = None

    def see(self, report: Report) -> None:
        """Take note of a report."""
        steps = [row.step for row in report.rows] + [event.step for event in report.events]
        if steps:
            self.step = max(self.step or 0, *steps)
        for event in report.events:
            if event.kind == "best":
                self.best_step = event.step
            if event.kind == "finished":
                self.stopped = event.data.get("reason") == "stopped"
