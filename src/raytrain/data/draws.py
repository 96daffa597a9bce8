"""What a user's sampler yields: the same on all ranks, after a resume, and whatever it draws its numbers from."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from raytrain.data.order import Indices, key_of
from raytrain.data.randomness import sampling
from raytrain.errors import DataError

# Random streams that a sampler may keep for itself, and how to make one from a key.
_STREAMS: dict[type, Callable[[int], Any]] = {
    torch.Generator: lambda key: torch.Generator().manual_seed(key >> 1),
    np.random.Generator: np.random.default_rng,
    np.random.RandomState: lambda key: np.random.RandomState(key & 0xFFFFFFFF),
    random.Random: random.Random,
}


class Draws:
    """A sampler of the user's, run epoch by epoch.

    Every stream it may draw from (the global ones, and those that it and the samplers within it hold) is seeded by
    (seed, epoch). A sampler that counts its epochs by itself is run through the earlier ones first.

    Raises:
        DataError: It deals samples to ranks by itself.
    """

    def __init__(self, sampler: Any, num_samples: int, seed: int) -> None:
        _refuse_sharding(sampler)
        self._sampler, self._num_samples, self._seed = sampler, num_samples, seed
        self._name = type(sampler).__name__
        self._next = 0

    def samples(self, epoch: int, num_rows: int) -> Indices:
        """The samples of an epoch: ``[num_rows]``.

        Raises:
            DataError: They are not as many as the sampler said, or not in the dataset.
        """
        return self._indices(self._run(epoch, num_rows))

    def batches(self, epoch: int, num_batches: int) -> list[Indices]:
        """The batches of an epoch. Raises as ``samples`` does, and for an empty batch."""
        batches = [self._indices(batch) for batch in self._run(epoch, num_batches)]
        if any(len(batch) == 0 for batch in batches):
            raise DataError(f"the batch sampler {self._name} yielded an empty batch in epoch {epoch}. Leave it out.")
        return batches

    def _run(self, epoch: int, said: int) -> list[Any]:
        if not _places_itself(self._sampler):
            for earlier in range(self._next, epoch):
                self._once(earlier, said)
        self._next = epoch + 1
        entries = self._once(epoch, said)
        if len(entries) != said:
            count = f"{len(entries)}" if len(entries) < said else "more"
            raise DataError(
                f"the sampler {self._name} says that it has {said} entries (__len__) but yielded {count} in epoch {epoch}. "
                "They must agree, and be as many in each epoch."
            )
        return entries

    def _once(self, epoch: int, said: int) -> list[Any]:
        for part in _parts(self._sampler):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
        with sampling(self._seed, epoch):
            seed_streams(_parts(self._sampler), self._seed, epoch)
            return list(itertools.islice(self._sampler, said + 1))  # one more than there may be: an endless one ends

    def _indices(self, entries: Iterable[Any]) -> Indices:
        try:
            indices = np.fromiter(map(operator.index, entries), np.int64)
        except TypeError as error:
            raise DataError(
                f"the sampler {self._name} yielded something other than whole numbers: {error}. Samples are known by their index."
            ) from None
        if len(indices) and not (indices.min() >= 0 and indices.max() < self._num_samples):
            wrong = indices[(indices < 0) | (indices >= self._num_samples)][0]
            raise DataError(
                f"the sampler {self._name} yielded {wrong}, but the dataset has {self._num_samples} samples. Allowed: 0 to "
                f"{self._num_samples - 1}."
            )
        return indices


def length_of(sampler: Any) -> int:
    """How many entries a sampler says that it has.

    Raises:
        DataError: It does not say.
    """
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"the sampler {type(sampler).__name__} has no length (__len__), so an epoch has no end that all ranks could agree on. "
            "Give it __len__, or return the dataset and let raytrain shuffle it."
        ) from None


def _places_itself(sampler: Any) -> bool:
    """Whether an epoch's draw depends on no earlier one: torch's own samplers, and those that are told the epoch."""
    return all(
        type(part).__module__.startswith("torch.utils.data")
        or hasattr(part, "set_epoch")
        or not hasattr(part, "__dict__")
        for part in _parts(sampler)
    )


def _parts(sampler: Any) -> Iterator[Any]:
    """The sampler and the samplers within it."""
    seen: list[Any] = []
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if any(part is other for other in seen):
            continue
        seen.append(part)
        yield part
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
                waiting.append(value)


def seed_streams(parts: Iterable[Any], seed: int, epoch: int) -> None:
    """Seed the random streams that objects keep to themselves by (seed, epoch)."""
    for number, part in enumerate(parts):
        for name, value in list(getattr(part, "__dict__", {}).items()):
            make = _STREAMS.get(type(value))
            if make is not None:
                setattr(part, name, make(key_of(seed, epoch, number, *name.encode())))


def _refuse_sharding(sampler: Any) -> None:
    for part in _parts(sampler):
        replicas = getattr(part, "num_replicas", 1)
        if isinstance(replicas, int) and replicas > 1:
            raise DataError(
                f"the sampler {type(part).__name__} deals samples to {replicas} ranks by itself (num_replicas), but raytrain "
                "shares out each global batch. Give it a sampler of the whole dataset: num_replicas=1, rank=0."
            )
