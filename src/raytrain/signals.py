"""Stopping on SIGTERM and Ctrl-C: the first asks all ranks for a checkpoint and an end, the second ends at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from raytrain.runtime import StopFlag


@contextlib.contextmanager
def stopping_on_signals(stop: StopFlag) -> Iterator[None]:
    """Within the block, signals set the flag. Only the main thread can have handlers; elsewhere nothing is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set(signal.Signals(number).name)
        print(
            f"raytrain: {signal.Signals(number).name}: saving a checkpoint, then stopping (again to stop at once)",
            flush=True,
        )

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
