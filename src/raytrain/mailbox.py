"""The meeting point of driver and workers on Ray: reports one way, the wish to stop the other way."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from raytrain.report import KEY

if TYPE_CHECKING:
    import ray.train


class Mailbox:
    """An async actor on the driver's node. It holds plain data only, no client and no secret."""

    def __init__(self) -> None:
        self._reports: list[Any] = []
        self._lines: list[tuple[int, str]] = []
        self._failures: list[tuple[bool, str]] = []
        self._news = asyncio.Event()
        self._stop = False

    async def put(self, report: Any) -> None:
        """Keep a report for the driver."""
        self._reports.append(report)
        self._news.set()

    async def say(self, rank: int, line: str) -> None:
        """Keep a line that a worker printed."""
        self._lines.append((rank, line))
        self._news.set()

    async def take(self, wait_s: float) -> tuple[list[Any], list[tuple[int, str]]]:
        """All reports and printed lines so far; waits a little for the first."""
        if not (self._reports or self._lines):
            self._news.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), wait_s)
        taken = self._reports, self._lines
        self._reports, self._lines = [], []
        return taken

    async def fail(self, secondary: bool, text: str) -> None:
        """Keep what a worker said when it failed."""
        self._failures.append((secondary, text))

    async def begin(self) -> None:
        """A new attempt: what failed before was mended."""
        self._failures = []

    async def failures(self) -> list[tuple[bool, str]]:
        """What the workers of this attempt said: (it is a consequence of another failure, text)."""
        return self._failures

    async def stop(self) -> None:
        """Ask the workers to stop at an agreed step."""
        self._stop = True

    async def stop_requested(self) -> bool:
        """Whether they were asked."""
        return self._stop


def forward_to(mailbox: Any) -> ray.train.UserCallback:
    """A Ray Train callback that hands the reports of raytrain's workers on; it holds no client and never waits."""
    from ray.train import UserCallback

    class Forward(UserCallback):  # type: ignore[misc]
        def __init__(self, mailbox: Any) -> None:
            self._mailbox = mailbox

        def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
            for values in metrics:
                if KEY in values:
                    self._mailbox.put.remote(values[KEY])

    return Forward(mailbox)
