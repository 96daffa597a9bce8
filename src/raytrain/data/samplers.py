"""Which samples make up each global batch: from our own order, or from a sampler of the user's."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from raytrain.data.draws import Draws, length_of
from raytrain.data.order import Indices, Order
from raytrain.errors import DataError


class GlobalBatches(Protocol):
    """The samples of every global batch, the same on all ranks and at any time."""

    num_rows: int
    batch_size: int
    drop_last: bool
    shuffle: bool

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""

    def samples(self, epoch: int, index: int) -> Indices:
        """The samples of one global batch."""


class OrderedBatches:
    """Slices of raytrain's own order."""

    def __init__(self, num_rows: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self.num_rows, self.batch_size, self.drop_last, self.shuffle = num_rows, batch_size, drop_last, shuffle
        self._order = Order(num_rows, seed, shuffle)

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return num_batches(self.num_rows, self.batch_size, self.drop_last)

    def samples(self, epoch: int, index: int) -> Indices:
        """The index-th slice of the epoch's order."""
        start = index * self.batch_size
        stop = min(start + self.batch_size, self.num_rows)
        return self._order.slice(epoch, start, stop)


class SampledBatches:
    """Slices of what a user's sampler yields: its distribution stays as it is.

    Every rank runs the sampler under streams seeded by (seed, epoch), gets the same list and takes its share of it.
    """

    shuffle = True

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, num_samples: int, seed: int) -> None:
        self.batch_size, self.drop_last = batch_size, drop_last
        self.num_rows = length_of(sampler)
        self._draws = Draws(sampler, num_samples, seed)
        self._drawn: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return num_batches(self.num_rows, self.batch_size, self.drop_last)

    def samples(self, epoch: int, index: int) -> Indices:
        """The index-th slice of what the sampler yields in this epoch."""
        if self._drawn[0] != epoch:
            self._drawn = (epoch, self._draws.samples(epoch, self.num_rows))
        start = index * self.batch_size
        return self._drawn[1][start : start + self.batch_size]


class BatchSampledBatches:
    """The batches of a user's batch sampler: each one is a global batch, of which every rank takes its share."""

    shuffle = True
    drop_last = False

    def __init__(self, batch_sampler: Any, num_samples: int, seed: int) -> None:
        self._steps = length_of(batch_sampler)
        self._draws = Draws(batch_sampler, num_samples, seed)
        self._drawn: tuple[int, list[Indices]] = (-1, [])
        first = self._all(0)
        self.num_rows = sum(len(batch) for batch in first)
        self.batch_size = max((len(batch) for batch in first), default=0)

    def steps_per_epoch(self) -> int:
        """Batches that the sampler says it has."""
        return self._steps

    def samples(self, epoch: int, index: int) -> Indices:
        """The index-th batch that the sampler yields in this epoch."""
        return self._all(epoch)[index]

    def _all(self, epoch: int) -> list[Indices]:
        if self._drawn[0] != epoch:
            self._drawn = (epoch, self._draws.batches(epoch, self._steps))
        return self._drawn[1]


def num_batches(num_rows: int, batch_size: int, drop_last: bool) -> int:
    """Batches that so many rows make."""
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def known_order(sampler: Any, num_samples: int) -> tuple[int, bool, bool] | None:
    """(samples, shuffle, drop_last) of a sampler that means nothing but an order of the dataset; None for any other.

    Raises:
        DataError: It orders more samples than the dataset has.
    """
    known = _known_order(sampler)
    if known is not None and known[0] > num_samples:
        raise DataError(
            f"the sampler {type(sampler).__name__} was made for {known[0]} samples, but the dataset has {num_samples}. Make it "
            "for the same dataset as the DataLoader."
        )
    return known


def _known_order(sampler: Any) -> tuple[int, bool, bool] | None:
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        return len(sampler.dataset), bool(sampler.shuffle), bool(sampler.drop_last)  # type: ignore[arg-type]
    if type(sampler) is SequentialSampler:
        return len(sampler.data_source), False, False
    if type(sampler) is RandomSampler and not sampler.replacement:
        num_rows = len(sampler.data_source)
        return (num_rows, True, False) if sampler.num_samples == num_rows else None
    return None


def known_batches(batch_sampler: Any) -> tuple[Any, int, bool] | None:
    """(sampler, batch size, drop_last) of torch's own BatchSampler; None for any other."""
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler, int(batch_sampler.batch_size), bool(batch_sampler.drop_last)
    return None
