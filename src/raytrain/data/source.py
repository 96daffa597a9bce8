"""What the user gave as data, read: a dataset, the loader settings to keep, and the global batches."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from raytrain.data.samplers import (
    BatchSampledBatches,
    GlobalBatches,
    OrderedBatches,
    SampledBatches,
    known_batches,
    known_order,
)
from raytrain.errors import ConfigError, DataError

DEFAULT_BATCH_SIZE = 32

# Everything that a DataLoader was given besides its sampling; the rebuilt one gets it all.
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


@dataclass(frozen=True)
class DataPlan:
    """What will be trained on, or evaluated.

    Attributes:
        num_rows: Samples per epoch, before any remainder is dropped.
        batch_size: Samples per global batch (evaluation: per forward pass).
        steps_per_epoch: Global batches per epoch.
        dropped_rows: Samples left out of each epoch.
        shuffle: Whether each epoch has an order of its own.
        note: What the user should know about how the loader was understood; may be empty.
    """

    num_rows: int
    batch_size: int
    steps_per_epoch: int
    dropped_rows: int
    shuffle: bool
    note: str = ""

    def __str__(self) -> str:
        dropped = f", {self.dropped_rows} left out" if self.dropped_rows else ""
        order = "shuffled" if self.shuffle else "in order"
        note = f" ({self.note})" if self.note else ""
        return (
            f"{self.num_rows} samples {order} in {self.steps_per_epoch} global batches of {self.batch_size} "
            f"per epoch{dropped}{note}"
        )


@dataclass(frozen=True)
class Source:
    """A dataset with its global batches and the settings of its loader."""

    dataset: Any
    batches: GlobalBatches
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def plan(self) -> DataPlan:
        """What will be trained on."""
        batches, steps = self.batches, self.batches.steps_per_epoch()
        dropped = max(0, batches.num_rows - steps * batches.batch_size) if batches.drop_last else 0
        return DataPlan(batches.num_rows, batches.batch_size, steps, dropped, batches.shuffle, self.note)


def read_source(
    data: Any,
    *,
    batch_size: int | None,
    shuffle: bool | None,
    drop_last: bool | None,
    seed: int,
    loader_workers: int,
) -> Source:
    """Read training data: a map-style dataset, or a DataLoader over one.

    Raises:
        DataError: It cannot be trained on exactly once per epoch.
        ConfigError: The batch size is given twice and differs.
    """
    if isinstance(data, DataLoader):
        return _read_loader(data, batch_size, shuffle, drop_last, seed)
    check_dataset(data)
    batches = OrderedBatches(
        len(data), batch_size or DEFAULT_BATCH_SIZE, bool(drop_last), True if shuffle is None else shuffle, seed
    )
    return Source(data, batches, worker_settings(loader_workers))


def worker_settings(loader_workers: int) -> dict[str, Any]:
    """Settings of a loader that raytrain makes itself: its processes stay up between epochs."""
    return {"num_workers": loader_workers, "persistent_workers": True} if loader_workers else {"num_workers": 0}


def check_dataset(data: Any) -> None:
    """See that the data is a map-style dataset with samples.

    Raises:
        DataError: It is not; with its type and the cure.
    """
    if isinstance(data, IterableDataset):
        raise DataError(
            f"{type(data).__name__} is an IterableDataset: it has no order that could be cut into global batches, so its samples "
            "would be repeated on every worker. Use a map-style dataset (__getitem__ and __len__)."
        )
    if data is None or isinstance(data, (Mapping, str, bytes)) or not hasattr(data, "__getitem__"):
        raise DataError(
            f"the data is of type {type(data).__name__}. Allowed: a map-style dataset (__getitem__ and __len__) or a DataLoader."
        )
    if not isinstance(data, Sized):
        raise DataError(f"{type(data).__name__} has no length (__len__), so an epoch has no end. Give it one.")
    if len(data) == 0:
        raise DataError(
            f"{type(data).__name__} is empty: 0 samples. Check the path and the filters that it was made with."
        )


def _read_loader(
    loader: DataLoader[Any], batch_size: int | None, shuffle: bool | None, drop_last: bool | None, seed: int
) -> Source:
    check_dataset(loader.dataset)
    settings = kept_settings(loader)
    standard = known_batches(loader.batch_sampler)
    if standard is None:
        return _read_batch_sampler(loader, batch_size, seed, settings)
    sampler, own_size, own_drop = standard
    if batch_size is not None and batch_size != own_size:
        raise ConfigError(
            f"the DataLoader has batch_size={own_size}, but train.batch_size = {batch_size}. Both mean the global batch: "
            "give it in one place, or the same in both."
        )
    order = known_order(sampler)
    drop = own_drop if drop_last is None else drop_last
    if order is None:
        note = f"in the order of {type(sampler).__name__}, drawn anew in each epoch"
        return Source(loader.dataset, SampledBatches(sampler, own_size, drop, seed), settings, note)
    batches = OrderedBatches(
        len(loader.dataset),  # type: ignore[arg-type]
        own_size,
        drop or (order[1] and drop_last is None),
        order[0] if shuffle is None else shuffle,
        seed,
    )
    return Source(loader.dataset, batches, settings)


def _read_batch_sampler(
    loader: DataLoader[Any], batch_size: int | None, seed: int, settings: Mapping[str, Any]
) -> Source:
    if loader.batch_sampler is None:
        raise DataError(
            "the DataLoader has batch_size=None, so raytrain cannot tell how samples form global batches. Give it a batch_size, or "
            "return the dataset itself."
        )
    if batch_size is not None:
        raise ConfigError(
            f"train.batch_size = {batch_size}, but the DataLoader has a batch sampler of its own "
            f"({type(loader.batch_sampler).__name__}). Leave train.batch_size out."
        )
    note = f"batches of {type(loader.batch_sampler).__name__}, drawn anew in each epoch"
    return Source(loader.dataset, BatchSampledBatches(loader.batch_sampler, seed), settings, note)


def kept_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a DataLoader that a rebuilt one must have as well."""
    settings = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if not settings.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            settings.pop(name, None)
    if not settings.get("pin_memory_device"):
        settings.pop("pin_memory_device", None)  # an empty one is the default, and giving it is deprecated
    return settings
