"""One thing at a time in the background; failures are kept until somebody asks."""

from __future__ import annotations

import threading
from collections.abc import Callable


class BackgroundWriter:
    """Runs one job at a time on a thread of its own. Its owner waits before it gives the next one.

    A job that is under way ends before the process does: the thread is no daemon.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, job: Callable[[], None]) -> None:
        """Start a job; the one before must have ended (``wait``)."""
        assert self._thread is None, "wait() before the next job"

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="raytrain-write")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job under way. What failed is told by ``take_failure``."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_failure(self) -> BaseException | None:
        """What failed since the last question, once."""
        failure, self._failure = self._failure, None
        return failure
