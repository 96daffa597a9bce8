"""Data that comes to each rank in shards of its own, of whatever length: the ranks agree on every global batch.

Before a batch each rank has up to a whole global batch of rows ready and a little more, or all that it has left, and tells how
many. A global batch takes an even share from every rank, and what a rank lacks from the others: every batch but the last is full,
all ranks know which one is the last, and none can wait for one that has run out. The counts travel one batch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from raytrain.data.batch import Batch, Slot
from raytrain.data.counts import Counts
from raytrain.data.fetch import NO_INDICES
from raytrain.data.order import share
from raytrain.data.source import DataPlan
from raytrain.errors import DataError


class Rows(Protocol):
    """The rows of one rank."""

    def begin(self, epoch: int) -> None:
        """Start an epoch."""

    def fill(self, count: int) -> int:
        """Have so many rows ready, or all that are left; returns how many there are."""

    def take(self, count: int) -> Any:
        """So many of the rows that are ready; something that ``len`` and slices work on."""

    def peek(self) -> Any:
        """One or two of the rows that are ready, which stay; of something that can be pickled."""

    def batch(self, rows: Any, slot: Slot) -> Batch:
        """Rows as a batch."""

    def close(self) -> None:
        """End what reads."""

    def wrong_length(self, found: str, epoch: int) -> Exception:
        """The error for an epoch that is not as long as was said."""


def allotted(ready: Sequence[int], batch_size: int) -> list[int]:
    """How many rows each rank gives to a global batch: even shares, and what is lacking from those that have more."""
    parts = [share(batch_size, rank, len(ready)) for rank in range(len(ready))]
    given = [min(have, stop - start) for have, (start, stop) in zip(ready, parts, strict=True)]
    lacking = batch_size - sum(given)
    while lacking > 0 and (more := [rank for rank, have in enumerate(ready) if have > given[rank]]):
        for number, rank in enumerate(more):
            start, stop = share(lacking, number, len(more))
            given[rank] += min(ready[rank] - given[rank], stop - start)
        lacking = batch_size - sum(given)
    return given


class ShardLoader:
    """The micro-batches of one rank, whose rows come from a shard of its own.

    A position within an epoch is reached by going through the epoch from its start: the same rows follow when the shards are the
    same, on the same number of ranks.

    Args:
        any_world: The rows that follow differ anyway, so an epoch may go on with another number of ranks.

    Attributes:
        plan: What is trained on.
        steps_per_epoch: Global batches per epoch; None when it is not known beforehand.
    """

    def __init__(
        self, rows: Rows, plan: DataPlan, accumulate: int, rank: int, world_size: int, any_world: bool = False
    ) -> None:
        self.plan, self.steps_per_epoch, self.any_world = plan, plan.steps_per_epoch, any_world
        self._rows, self._accumulate, self._rank, self._world_size = rows, accumulate, rank, world_size
        self._counts = Counts(world_size)
        self._borrowed: Any = None  # earlier rows, of this rank or lent: they count nothing when it has run out

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from a position on, over the ends of epochs.

        Args:
            epoch: Epoch of the first batch.
            index: Global batch within it.
            stop: End after this many global batches; None for never.

        Raises:
            DataError: An epoch has more or fewer rows than was said, or none; on all ranks.
        """
        while stop is None or stop > 0:
            for at, rows, given, ends in self._epoch(epoch):
                if at >= index:
                    yield from self._share(rows, given, epoch, at, ends)
                    stop = stop if stop is None else stop - 1
                    if stop == 0:
                        return
            epoch, index = epoch + 1, 0

    def adopt(self, adopted_by: Callable[[Any], Any]) -> None:
        """Nothing to do: batches are made here."""

    def close(self) -> None:
        """Wait for the counts that are under way, and end what reads."""
        self._counts.settle()
        self._rows.close()

    def _epoch(self, epoch: int) -> Iterator[tuple[int, Any, list[int], bool]]:
        """(place, this rank's rows, rows of each rank, whether it is the last) of each global batch."""
        size, fewest = self.plan.batch_size, self.plan.batch_size if self.plan.drop_last else 1
        ahead = size + fewest  # so many rows show whether another batch follows
        self._rows.begin(epoch)
        self._tell(ahead)
        index, ends = 0, False
        while not ends:
            table = self._counts.hear()
            ready = [numbers[0] for numbers in table]
            given = allotted(ready, size)
            left = sum(ready) - sum(given)
            ends = left < fewest
            self._check(epoch, index, sum(given), left if ends else None)
            self._lend(table, ready)
            rows = self._rows.take(given[self._rank])
            self._borrowed = rows[:2] if len(rows) else self._borrowed
            if not ends:
                self._tell(ahead)
            yield index, rows, given, ends
            index += 1

    def _tell(self, ahead: int) -> None:
        ready = self._rows.fill(ahead)
        self._counts.tell([ready, int(ready == 0 and self._borrowed is None)])

    def _check(self, epoch: int, index: int, rows: int, left: int | None) -> None:
        """See that the rows are as many as was said, as far as that is known.

        Args:
            epoch: Epoch.
            index: Place of the global batch.
            rows: Its rows.
            left: Rows that follow, when it is the last one; else None.
        """
        size, said = self.plan.batch_size, self.plan.num_rows
        if index == 0 and rows < (size if self.plan.drop_last else 1):
            raise DataError(
                f"epoch {epoch} has {rows} samples on all {self._world_size} workers together, which make no batch of {size}. "
                "Check what the data reads, train.batch_size and train.drop_last."
            )
        seen = index * size + rows + (left or 0)
        if said is not None and (seen > said or (left is not None and seen < said)):
            raise self._rows.wrong_length(f"at least {seen}" if seen > said else f"only {seen}", epoch)

    def _lend(self, table: Sequence[Sequence[int]], ready: Sequence[int]) -> None:
        """A rank that never had a row is lent one, so that it can pass the collectives of the others."""
        if not any(needs for _, needs in table):
            return
        source = max(range(len(ready)), key=lambda rank: ready[rank])
        value = self._rows.peek() if source == self._rank else None
        lent = self._counts.lent(source, value)
        self._borrowed = self._borrowed if self._borrowed is not None else lent

    def _share(self, rows: Any, given: list[int], epoch: int, index: int, ends: bool) -> Iterator[Batch]:
        total, num_micros = sum(given), max(1, min(self._accumulate, max(given)))
        for micro in range(num_micros):
            first, last = share(len(rows), micro, num_micros)
            own = rows[first:last]
            slot = Slot(
                NO_INDICES, epoch, index, micro, num_micros, len(own), total, self._world_size, self._rank, ends
            )
            yield self._rows.batch(own if len(own) else self._borrowed, slot)


class ShardEvalLoader:
    """The evaluation batches of one rank, whose rows come from a shard of its own.

    Attributes:
        plan: What is evaluated.
    """

    def __init__(self, rows: Rows, plan: DataPlan, rank: int, world_size: int) -> None:
        self.plan = plan
        self._rows, self._rank, self._world_size = rows, rank, world_size

    def batches(self) -> Iterator[Batch]:
        """This rank's batches, as many as its shard has."""
        self._rows.begin(0)
        number = 0
        while count := min(self._rows.fill(self.plan.batch_size), self.plan.batch_size):
            index = number * self._world_size + self._rank
            yield self._rows.batch(self._rows.take(count), Slot(NO_INDICES, 0, index, 0, 1, count, count, 1, 0))
            number += 1

    def close(self) -> None:
        """End what reads."""
        self._rows.close()
