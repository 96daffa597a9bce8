"""Which samples make up each global batch: from our own order, or from a sampler of the user's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sized
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from raytrain.data.order import Indices, Order
from raytrain.data.randomness import sampler_generator, sampling
from raytrain.errors import DataError


class GlobalBatches(Protocol):
    """The samples of every global batch, the same on all ranks and at any time."""

    num_rows: int
    batch_size: int
    drop_last: bool
    shuffle: bool

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""

    def samples(self, epoch: int, index: int) -> list[int] | Indices:
        """The samples of one global batch."""


class OrderedBatches:
    """Slices of raytrain's own order."""

    def __init__(self, num_rows: int, batch_size: int, drop_last: bool, shuffle: bool, seed: int) -> None:
        self.num_rows, self.batch_size, self.drop_last, self.shuffle = num_rows, batch_size, drop_last, shuffle
        self._order = Order(num_rows, seed, shuffle)

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return self.num_rows // self.batch_size if self.drop_last else -(-self.num_rows // self.batch_size)

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

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, seed: int) -> None:
        self._sampler, self._seed = sampler, seed
        self.batch_size, self.drop_last = batch_size, drop_last
        self.num_rows = _length(sampler)
        self._drawn: tuple[int, list[int]] = (-1, [])

    def steps_per_epoch(self) -> int:
        """Global batches in an epoch."""
        return self.num_rows // self.batch_size if self.drop_last else -(-self.num_rows // self.batch_size)

    def samples(self, epoch: int, index: int) -> list[int]:
        """The index-th slice of what the sampler yields in this epoch."""
        if self._drawn[0] != epoch:
            self._drawn = (epoch, [int(i) for i in drawn(self._sampler, self._seed, epoch)])
            _check_count(self._sampler, len(self._drawn[1]), self.num_rows)
        start = index * self.batch_size
        return self._drawn[1][start : start + self.batch_size]


class BatchSampledBatches:
    """The batches of a user's batch sampler: each one is a global batch, of which every rank takes its share."""

    shuffle = True
    drop_last = False

    def __init__(self, batch_sampler: Any, seed: int) -> None:
        self._sampler, self._seed = batch_sampler, seed
        self._steps = _length(batch_sampler)
        self._drawn: tuple[int, list[list[int]]] = (-1, [])
        first = self._all(0)
        self.num_rows = sum(len(batch) for batch in first)
        self.batch_size = max((len(batch) for batch in first), default=0)

    def steps_per_epoch(self) -> int:
        """Batches that the sampler says it has."""
        return self._steps

    def samples(self, epoch: int, index: int) -> list[int]:
        """The index-th batch that the sampler yields in this epoch."""
        return self._all(epoch)[index]

    def _all(self, epoch: int) -> list[list[int]]:
        if self._drawn[0] != epoch:
            self._drawn = (epoch, [[int(i) for i in batch] for batch in drawn(self._sampler, self._seed, epoch)])
            _check_count(self._sampler, len(self._drawn[1]), self._steps)
        return self._drawn[1]


def known_order(sampler: Any) -> tuple[bool, bool] | None:
    """(shuffle, drop_last) of a sampler that means nothing but an order of the whole dataset; None for any other."""
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle), bool(sampler.drop_last)
    if type(sampler) is SequentialSampler:
        return False, False
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return True, False
    return None


def known_batches(batch_sampler: Any) -> tuple[Any, int, bool] | None:
    """(sampler, batch size, drop_last) of torch's own BatchSampler; None for any other."""
    if type(batch_sampler) is BatchSampler:
        return batch_sampler.sampler, int(batch_sampler.batch_size), bool(batch_sampler.drop_last)
    return None


def drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """All that a sampler yields in an epoch, the same on every rank."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sampling(seed, epoch))
        _seed_generators(sampler, seed, epoch)
        return list(sampler)


def _seed_generators(sampler: Any, seed: int, epoch: int) -> None:
    """Give the sampler, and those that it wraps, a generator of this epoch."""
    seen: set[int] = set()
    while isinstance(sampler, (Sampler, Iterable)) and id(sampler) not in seen:
        seen.add(id(sampler))
        if hasattr(sampler, "generator") and isinstance(sampler.generator, (torch.Generator, type(None))):
            sampler.generator = sampler_generator(seed, epoch)
        sampler = getattr(sampler, "sampler", None)


def _length(sampler: Any) -> int:
    if not isinstance(sampler, Sized):
        raise DataError(
            f"the sampler {type(sampler).__name__} has no length (__len__), so an epoch has no end that all ranks could agree on. "
            "Give it __len__, or return the dataset and let raytrain shuffle it."
        )
    return len(sampler)


def _check_count(sampler: Any, count: int, said: int) -> None:
    if count != said:
        raise DataError(
            f"the sampler {type(sampler).__name__} says that it has {said} entries (__len__) but yielded {count}. They must agree."
        )
