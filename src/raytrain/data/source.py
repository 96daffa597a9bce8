"""What the user gave as data, read: a dataset, the loader settings to keep, and the global batches."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, default_collate

from raytrain.data.batched import BatchDataset
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

# Everything that a DataLoader was given besides its sampling; the rebuilt one gets it all. But for in_order: a global
# batch is a sum over its micro-batches, so they may not overtake each other.
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
)


@dataclass(frozen=True)
class DataPlan:
    """What will be trained on, or evaluated.

    Attributes:
        num_rows: Samples per epoch, before any remainder is dropped; None when it is not known beforehand.
        batch_size: Samples per global batch (evaluation: per forward pass); 0 when the data brings batches of its own.
        steps_per_epoch: Global batches per epoch; None when it is not known beforehand.
        dropped_rows: Samples left out of each epoch.
        shuffle: Whether each epoch has an order of its own.
        note: What the user should know about how the loader was understood; may be empty.
        order: What the order depends on besides seed and batch size; a run that goes on must have the same.
        drop_last: Whether a last short batch is left out.
    """

    num_rows: int | None
    batch_size: int
    steps_per_epoch: int | None
    dropped_rows: int
    shuffle: bool
    note: str = ""
    order: str = ""
    drop_last: bool = False

    def __str__(self) -> str:
        dropped = f", {self.dropped_rows} left out" if self.dropped_rows else ""
        order = "shuffled" if self.shuffle else "in order"
        note = f" ({self.note})" if self.note else ""
        size = f"of {self.batch_size} " if self.batch_size else ""
        rows, steps = _known(self.num_rows), _known(self.steps_per_epoch)
        return f"{rows} samples {order} in {steps} global batches {size}per epoch{dropped}{note}"


def _known(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number}"


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
    if data is None or isinstance(data, (Mapping, str, bytes)) or not hasattr(data, "__getitem__"):
        raise DataError(
            f"the data is of type {type(data).__name__}. Allowed: a map-style dataset (__getitem__ and __len__), an "
            "IterableDataset, a DataLoader, or what raytrain.data.own_shards() has marked."
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
    check_loader(loader)
    settings, num_samples = kept_settings(loader), len(loader.dataset)  # type: ignore[arg-type]
    standard = known_batches(loader.batch_sampler)
    if standard is None:
        _refuse(loader.batch_sampler, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
        note = f"batches of {type(loader.batch_sampler).__name__}, drawn anew in each epoch"
        batches = BatchSampledBatches(loader.batch_sampler, num_samples, seed)
        return Source(loader.dataset, batches, settings, _notes(note, loader))
    sampler, own_size, own_drop = standard
    if batch_size is not None and batch_size != own_size:
        raise ConfigError(
            f"the DataLoader has batch_size={own_size}, but train.batch_size = {batch_size}. Both mean the global batch: "
            "give it in one place, or the same in both."
        )
    order = known_order(sampler, num_samples)
    drop = own_drop if drop_last is None else drop_last
    if order is None:
        _refuse(sampler, shuffle=shuffle)
        note = f"in the order of {type(sampler).__name__}, drawn anew in each epoch"
        sampled = SampledBatches(sampler, own_size, drop, num_samples, seed)
        return Source(loader.dataset, sampled, settings, _notes(note, loader))
    num_rows, own_shuffle, even = order
    drop = drop or (even and drop_last is None)
    ordered = OrderedBatches(num_rows, own_size, drop, own_shuffle if shuffle is None else shuffle, seed)
    return Source(loader.dataset, ordered, settings, _notes("", loader))


def read_eval_source(data: Any, *, batch_size: int, seed: int, loader_workers: int) -> Source:
    """Read evaluation data: all of it in the order of the dataset, or what a sampler of the user's picks.

    Raises:
        DataError: It cannot be evaluated exactly once.
    """
    if not isinstance(data, DataLoader):
        check_dataset(data)
        return Source(data, OrderedBatches(len(data), batch_size, False, False, seed), worker_settings(loader_workers))
    check_loader(data)
    settings, num_samples = kept_settings(data), len(data.dataset)  # type: ignore[arg-type]
    standard = known_batches(data.batch_sampler)
    if standard is None:
        return Source(data.dataset, BatchSampledBatches(data.batch_sampler, num_samples, seed), settings)
    sampler, size, drops = standard
    note = "the last short batch is evaluated as well" if drops else ""
    order = known_order(sampler, num_samples)
    if order is None:
        picked = f"the samples of {type(sampler).__name__}"
        sampled = SampledBatches(sampler, size, False, num_samples, seed)
        return Source(data.dataset, sampled, settings, _notes(f"{picked}; {note}" if note else picked, data))
    return Source(data.dataset, OrderedBatches(order[0], size, False, False, seed), settings, _notes(note, data))


def check_loader(loader: DataLoader[Any]) -> None:
    """See that a DataLoader is one whose batches raytrain can form itself.

    Raises:
        DataError: It is not; with the reason and the cure.
    """
    check_dataset(loader.dataset)
    if loader.batch_sampler is None:
        raise DataError(
            "the DataLoader has batch_size=None, so raytrain cannot tell how samples form global batches. Give it a batch_size, or "
            "return the dataset itself."
        )
    if isinstance(loader.dataset, BatchDataset) and loader.collate_fn is not default_collate:
        raise DataError(
            f"the DataLoader has a collate_fn, but {type(loader.dataset).__name__} makes whole batches itself: there is nothing "
            "to collate. Do it in take(), or in the function that is given to map()."
        )
    if own := own_iteration(loader):
        raise DataError(
            f"{type(loader).__name__} changes what a DataLoader yields ({own}), and raytrain, which fetches by itself, would pass "
            "it by. Do that in the dataset or the collate function, and return a plain DataLoader."
        )


def own_iteration(loader: DataLoader[Any]) -> str:
    """The method by which a class of the user's changes what a DataLoader yields; empty when there is none."""
    kind = type(loader)
    if kind.__module__.startswith(("torch.", "torchdata.", "ray.")):
        return ""
    names = ("__iter__", "_get_iterator")
    return next((name for name in names if getattr(kind, name) is not getattr(DataLoader, name)), "")


def _refuse(sampler: Any, **settings: Any) -> None:
    """Settings that the user's sampler decides must not be given beside it."""
    given = {name: value for name, value in settings.items() if value is not None}
    for name, value in given.items():
        raise ConfigError(
            f"train.{name} = {value}, but the DataLoader has a sampler of its own ({type(sampler).__name__}) that decides it. "
            f"Leave train.{name} out."
        )


def _notes(note: str, loader: DataLoader[Any]) -> str:
    if getattr(loader, "in_order", True):
        return note
    kept = "batches keep their order, in spite of in_order=False"
    return f"{note}; {kept}" if note else kept


def kept_settings(loader: DataLoader[Any]) -> dict[str, Any]:
    """The settings of a DataLoader that a rebuilt one must have as well."""
    settings = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if not settings.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            settings.pop(name, None)
    if not settings.get("pin_memory_device"):
        settings.pop("pin_memory_device", None)  # an empty one is the default, and giving it is deprecated
    return settings
