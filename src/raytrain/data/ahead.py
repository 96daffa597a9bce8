"""An iterator that runs on a thread, one item ahead of who takes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_PATIENCE_S = 10.0  # for a thread that is within a read


class Stopped(Exception):
    """The items were not to be made any more."""


class Ahead(Generic[T]):
    """The items of an iterator. The next one is made while the last one is used; the one after it waits for ``next``.

    Args:
        make: Makes the iterator, from an event that is set when it should end. Called on the thread.
    """

    def __init__(self, make: Callable[[threading.Event], Iterator[T]], name: str) -> None:
        self._stopped = threading.Event()
        self._may_make = threading.Semaphore(1)
        self._made: queue.SimpleQueue[T | BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(make,), name=name, daemon=True)
        self._thread.start()

    def next(self) -> T:
        """The next item. Drop the last one before, so that there are no more than two.

        Raises:
            Stopped: There is none, or this was closed.
            Exception: What the iterator raised; again on each later call.
        """
        item = self._made.get()
        if item is None or isinstance(item, BaseException):
            self._made.put(item)
            raise Stopped if item is None else item
        self._may_make.release()
        return item

    def close(self, wait: bool = True) -> None:
        """End the thread, and wait for its end unless told otherwise."""
        self._stopped.set()
        self._may_make.release()
        if wait:
            self._thread.join(_PATIENCE_S)

    def _run(self, make: Callable[[threading.Event], Iterator[T]]) -> None:
        try:
            items = make(self._stopped)
            while self._may_make.acquire() and not self._stopped.is_set():
                self._made.put(next(items))  # without a name, which would keep the item
        except (StopIteration, Stopped):
            pass
        except BaseException as error:  # raised by ``next``, on the thread of who takes the items
            self._made.put(error)
        self._made.put(None)
