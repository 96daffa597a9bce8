"""What a tracker still has to get, in order: earlier starts first, then the disk, then the memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from raytrain.report import Row
from raytrain.tracking.base import Item, RunInfo
from raytrain.tracking.spool import Spool

MAX_WAITING = 200_000  # items in memory, about 100 MB


class Backlog:
    """A queue that many threads fill without waiting, and one empties.

    Args:
        opening: The start, which comes before all that is put; None when the tracker is open already.
        spool: Where the queue goes on disk when ``spill`` is called; None to keep it in memory.
        earlier: Spools that earlier starts left, the oldest first.

    Attributes:
        num_taken: Items taken so far.
        lost_from: Step of the first row that found no room, or None.
    """

    def __init__(
        self, opening: RunInfo | None = None, spool: Spool | None = None, earlier: Sequence[Spool] = ()
    ) -> None:
        self._opening, self.spool, self._earlier = opening, spool, list(earlier)
        self._memory: list[Item] = []
        self._adding = threading.Lock()  # held for moments only
        self._ordering = threading.RLock()  # may be held while the disk works
        self.num_taken = 0
        self.lost_from: int | None = None

    def __len__(self) -> int:
        """Items in memory."""
        return len(self._memory)

    @property
    def is_open(self) -> bool:
        """Whether this start has been taken."""
        return self._opening is None and not self._earlier

    def add(self, items: Sequence[Item]) -> None:
        """Put items at the end. Never waits; rows for which the memory has no room are left out."""
        with self._adding:
            for item in items:
                if isinstance(item, Row) and (len(self._memory) >= MAX_WAITING or self.lost_from is not None):
                    self._lose(item)
                else:
                    self._memory.append(item)

    def _lose(self, row: Row) -> None:
        self.lost_from = row.step if self.lost_from is None else min(row.step, self.lost_from)

    def found_again(self) -> int | None:
        """The step from which on rows were left out, once; None if none were. From now on there is room again."""
        with self._adding:
            step, self.lost_from = self.lost_from, None
            return step

    def head(self, limit: int) -> list[Item]:
        """The first items."""
        with self._ordering:
            if self._earlier:
                return self._earlier[0].peek(limit)
            if self._opening is not None:
                return [self._opening]
            if self.spool is not None and (found := self.spool.peek(limit)):
                return found
            with self._adding:
                return self._memory[:limit]

    def take(self, num: int) -> None:
        """Take the first items away, which ``head`` has shown; they may have gone to disk since."""
        with self._ordering:
            self.num_taken += num
            if self._earlier:
                self._earlier[0].take(num)
                if self._earlier[0].is_empty:
                    self._earlier.pop(0).close()
            elif self._opening is not None:
                self._opening = None
            elif self.spool is not None and not self.spool.is_empty:
                self.spool.take(num)
            else:
                with self._adding:
                    del self._memory[:num]

    def spill(self) -> int:
        """Move the memory to disk; how many rows did not fit there.

        Raises:
            OSError: The disk does not take it; all stays in memory.
        """
        with self._ordering:
            with self._adding:
                items = self._memory[:]
            if self.spool is None or not items:
                return 0
            left_out = self.spool.append(items)
            with self._adding:
                del self._memory[: len(items)]
                for item in left_out:
                    if isinstance(item, Row):
                        self._lose(item)
            return len(left_out)

    def drop(self) -> None:
        """Forget all of this start."""
        with self._ordering:
            if self.spool is not None:
                self.spool.take_all()
            self.close()

    def close(self) -> Path | None:
        """Let the files go; those with something in them stay. Returns the file of this start, if it stays."""
        with self._ordering:
            for spool in self._earlier:
                spool.close()
            self._earlier.clear()
            return self.spool.close() if self.spool is not None else None
