"""Data that comes to each rank in shards of its own, of whatever length: the ranks agree on every global batch.

Before a batch each rank has up to a whole global batch of rows ready, or all that it has left, and tells how many. A global batch
takes an even share from every rank, and what a rank lacks from the others: every batch but the last is full, an epoch has as many
steps as its number of rows says, and no rank can wait for one that has run out. The counts travel one batch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from raytrain.data.batch import Batch, Slot
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

    def batch(self, rows: Any, slot: Slot) -> Batch:
        """Rows as a batch."""

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


class Counts:
    """A number of each rank, told to all while the work goes on. Made and used in the same order on all ranks."""

    def __init__(self, world_size: int) -> None:
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None
        self._own = torch.zeros(1, dtype=torch.int64)
        self._all = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        self._under_way: Any = None

    def tell(self, number: int) -> None:
        """Send this rank's number; waits for nothing but what was told before and never heard."""
        if self._under_way is not None:
            self._under_way.wait()
        self._own = torch.tensor([number])
        self._all = [torch.zeros(1, dtype=torch.int64) for _ in self._all]
        if self._group is not None:
            self._under_way = dist.all_gather(self._all, self._own, group=self._group, async_op=True)

    def hear(self) -> list[int]:
        """The numbers of all ranks."""
        if self._under_way is None:
            return [int(self._own)]
        self._under_way.wait()
        return [int(number) for number in self._all]


class ShardLoader:
    """The micro-batches of one rank, whose rows come from a shard of its own.

    A position within an epoch is reached by going through the epoch from its start: the same rows follow when the shards are the
    same, on the same number of ranks.

    Attributes:
        plan: What is trained on.
        steps_per_epoch: Global batches per epoch.
    """

    def __init__(self, rows: Rows, plan: DataPlan, accumulate: int, rank: int, world_size: int) -> None:
        self.plan, self.steps_per_epoch = plan, plan.steps_per_epoch
        self._rows, self._accumulate, self._rank, self._world_size = rows, accumulate, rank, world_size
        self._counts = Counts(world_size)
        self._began = False
        self._lent: Any = None  # this rank's last rows: they count nothing when it has run out

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from a position on, over the ends of epochs.

        Args:
            epoch: Epoch of the first batch.
            index: Global batch within it.
            stop: End after this many global batches; None for never.

        Raises:
            DataError: An epoch has more or fewer rows than was said; on all ranks.
        """
        while stop is None or stop > 0:
            for at, rows, given in self._epoch(epoch):
                if at >= index:
                    yield from self._share(rows, given, epoch, at)
                    stop = stop if stop is None else stop - 1
                    if stop == 0:
                        return
            epoch, index = epoch + 1, 0

    def adopt(self, adopted_by: Callable[[Any], Any]) -> None:
        """Nothing to do: batches are made here."""

    def close(self) -> None:
        """Nothing is left running."""

    def _epoch(self, epoch: int) -> Iterator[tuple[int, Any, list[int]]]:
        """(place, this rank's rows, rows of each rank) of each global batch."""
        size, total = self.plan.batch_size, self.plan.num_rows
        self._rows.begin(epoch)
        self._counts.tell(self._rows.fill(size))
        for index in range(self.steps_per_epoch):
            ready = self._counts.hear()
            self._check_all_have_rows(ready)
            given = allotted(ready, min(size, total - index * size))
            if sum(given) < min(size, total - index * size):
                raise self._rows.wrong_length(f"only {index * size + sum(given)}", epoch)
            rows = self._rows.take(given[self._rank])
            self._lent = rows[:2] if len(rows) else self._lent
            self._counts.tell(self._rows.fill(size))
            yield index, rows, given
        left = sum(self._counts.hear())
        if left and not self.plan.dropped_rows:
            raise self._rows.wrong_length(f"at least {total + left}", epoch)

    def _share(self, rows: Any, given: list[int], epoch: int, index: int) -> Iterator[Batch]:
        num_micros = max(1, min(self._accumulate, max(given)))
        for micro in range(num_micros):
            first, last = share(len(rows), micro, num_micros)
            own = rows[first:last]
            slot = Slot(NO_INDICES, epoch, index, micro, num_micros, len(own), sum(given), self._world_size, self._rank)
            yield self._rows.batch(own if len(own) else self._lent, slot)

    def _check_all_have_rows(self, ready: Sequence[int]) -> None:
        """A rank that never had a row cannot even borrow one, so it could not pass the collectives of the others."""
        if self._began or 0 not in ready:
            self._began = True
            return
        raise DataError(
            f"rank {ready.index(0)} of {len(ready)} got no samples at all from its shard, so it cannot take part. Make at least as "
            "many shards (files) as there are workers, or use fewer workers."
        )


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
        """Nothing is left running."""
