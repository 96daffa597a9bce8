"""Running the fetches: in this process, or in torch's loader processes, which stay up over the ends of epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from raytrain.data.batch import Batch, Slot
from raytrain.data.batched import BatchDataset
from raytrain.data.fetch import Fetcher, below_subsets, passed
from raytrain.data.order import key_of
from raytrain.data.source import Source


class Engine:
    """Turns slots into batches: in this process, or by torch's loader processes.

    Attributes:
        inner: torch's loader, when there are loader processes.
    """

    def __init__(self, source: Source, seed: int, rank: int, tell_epoch: bool) -> None:
        below = below_subsets(source.dataset)[0]
        if isinstance(below, BatchDataset):
            below.prepare()  # here, so that loader processes find it done
        settings = dict(source.settings)
        collate_fn = settings.pop("collate_fn", None) or default_collate
        self._fetcher = Fetcher(source.dataset, collate_fn, seed, tell_epoch)
        self._pin = bool(settings.get("pin_memory")) and torch.cuda.is_available()
        self._slots = _Slots()
        self._started: _Started | None = None
        self.inner: DataLoader[Any] | None = None
        if settings.get("num_workers"):
            generator = torch.Generator().manual_seed(key_of(seed, rank) >> 1)  # leaves the global stream alone
            self.inner = self._started = _Started(
                self._fetcher,  # type: ignore[arg-type]
                batch_sampler=self._slots,  # type: ignore[arg-type]
                collate_fn=passed,
                generator=generator,
                **settings,
            )

    def run(self, slots: Iterator[Slot]) -> Iterator[Batch]:
        """The batches of these slots, in their order. One run at a time: a new one ends the one before."""
        if self.inner is None:
            return self._from_here(slots)
        self._slots.slots = slots
        return self._from_processes(iter(self.inner))

    def _from_processes(self, iterator: Iterator[Any]) -> Iterator[Batch]:
        for slot, data in iterator:
            yield slot.filled(data)

    def _from_here(self, slots: Iterator[Slot]) -> Iterator[Batch]:
        fetch = self._fetcher.fetch
        for slot in slots:
            data = fetch(slot)
            yield slot.filled(pin_memory(data) if self._pin else data)

    def close(self) -> None:
        """End the loader processes; a later run starts new ones."""
        if self._started is not None:
            self._started.shut_down()


class _Started(DataLoader[Any]):
    """torch's loader, which knows the processes that it started, whoever iterates over it."""

    _running: Any = None

    def _get_iterator(self) -> Any:
        self._running = super()._get_iterator()
        return self._running

    def shut_down(self) -> None:
        """End its processes; the next iteration starts new ones."""
        running, self._running, self._iterator = self._running, None, None
        if running is not None:
            running._shutdown_workers()


class _Slots:
    """What torch's loader takes for its batch sampler: the slots that were set last."""

    def __init__(self) -> None:
        self.slots: Iterator[Slot] = iter(())

    def __iter__(self) -> Iterator[Slot]:
        return self.slots
