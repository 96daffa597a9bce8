"""Random streams as values: of the model (seeded once per rank), of a fetch, of a sample."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from raytrain.data.order import key_of
from raytrain.errors import DataError

_MODEL, _FETCH, _SAMPLE, _SAMPLER, _ITERABLE = 1, 2, 3, 4, 5  # so that streams of different use never coincide


def seed_everything(seed: int, rank: int | None = None) -> None:
    """Seed torch (with CUDA), numpy and random: alike on all ranks, or with a stream per rank."""
    _seed_streams(key_of(_MODEL, seed, 0 if rank is None else rank + 1))


def _seed_streams(key: int) -> None:
    torch.manual_seed(key >> 1)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def get_rng_state() -> dict[str, Any]:
    """The random streams of this process, as tensors and plain values (loadable with ``weights_only=True``)."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "rest": [position, has_gauss, float(gauss)],
        },
        "random": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss_next},
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the streams to what ``get_rng_state`` gave."""
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):  # there may be fewer than there were
        torch.cuda.set_rng_state(cuda, device)
    position, has_gauss, gauss = state["numpy"]["rest"]
    np.random.set_state(("MT19937", state["numpy"]["keys"].numpy().astype(np.uint32), position, has_gauss, gauss))
    internal = tuple(int(word) for word in state["random"]["internal"])
    random.setstate((state["random"]["version"], internal, state["random"]["gauss"]))


@contextlib.contextmanager
def apart(*place: int) -> Iterator[None]:
    """Random streams seeded by a place, for user code that samples or fetches; the model's streams stay untouched."""
    key = key_of(*place)
    torch_state, random_state = torch.get_rng_state(), random.getstate()
    numpys_own = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(_numpy_apart())  # type: ignore[attr-defined]  # its state is slow to copy, and fast to swap
    torch.default_generator.manual_seed(key >> 1)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_bit_generator(numpys_own)  # type: ignore[attr-defined]
        random.setstate(random_state)


@functools.cache
def _numpy_apart() -> np.random.BitGenerator:
    return np.random.MT19937(0)


def fetching(seed: int, epoch: int, index: int, rank: int, micro: int) -> contextlib.AbstractContextManager[None]:
    """The streams of one fetch: the same whenever and in whatever process it happens."""
    return apart(_FETCH, seed, epoch, index, rank, micro)


def sampling(seed: int, epoch: int) -> contextlib.AbstractContextManager[None]:
    """The streams of a user's sampler in one epoch: the same on all ranks."""
    return apart(_SAMPLER, seed, epoch)


def iterating(seed: int, epoch: int) -> int:
    """The key of the streams under which an IterableDataset runs in one epoch: the same on all ranks."""
    return key_of(_ITERABLE, seed, epoch)


class Streams:
    """Random streams that begin at a key and go on from one use to the next, beside the process's own.

    ``with streams:`` around each use; the process's own streams are as before after it.
    """

    def __init__(self, key: int) -> None:
        self._key: int | None = key
        self._inside: tuple[Any, ...] = ()
        self._outside: tuple[Any, ...] = ()

    def __enter__(self) -> None:
        self._outside = _streams_now()
        if self._key is not None:
            torch.default_generator.manual_seed(self._key >> 1)
            np.random.seed(self._key & 0xFFFFFFFF)
            random.seed(self._key)
            self._key = None
        else:
            _set_streams(self._inside)

    def __exit__(self, *error: object) -> None:
        self._inside = _streams_now()
        _set_streams(self._outside)


def _streams_now() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state(legacy=True), random.getstate()


def _set_streams(states: tuple[Any, ...]) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


class _Current:
    """The sample that is being fetched in this process, if any, and its stream once it was asked for."""

    seed, epoch = 0, 0
    sample: int | None = None
    generator: torch.Generator | None = None


current = _Current()


def sample_generator() -> torch.Generator:
    """A generator for random augmentation, to be called inside a dataset's ``__getitem__``.

    It depends on (seed, epoch, sample) only: not on rank, loader worker, batch or number of workers. Within one
    ``__getitem__`` every call gives the same generator, so that two augmentations draw different numbers.

    Raises:
        DataError: It was called elsewhere.
    """
    if current.sample is None:
        raise DataError(
            "sample_generator() works inside __getitem__ of a dataset that raytrain fetches item by item. In __getitems__ and "
            "collate functions there is no single sample: use torch's own streams, which are seeded per batch there."
        )
    if current.generator is None:
        key = key_of(_SAMPLE, current.seed, current.epoch, current.sample)
        current.generator = torch.Generator().manual_seed(key >> 1)
    return current.generator
