"""Fetching the samples of a slot: whole tensors where that is the same, the user's own code otherwise."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import StackDataset, Subset, TensorDataset, default_collate

from raytrain.data.batch import Slot
from raytrain.data.batched import BatchDataset
from raytrain.data.order import Indices
from raytrain.data.randomness import current, fetching
from raytrain.errors import DataError

NO_INDICES = np.empty(0, np.int64)
_MANY = 8  # samples that an error names


class Fetcher:
    """A dataset as torch's loader wants it: one call per slot gives the batch, collated as well.

    The user's dataset and collate function run under random streams that belong to the slot.

    Args:
        tell_epoch: Call the dataset's ``set_epoch``, if it has one, when the epoch changes (in loader processes too).
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int, tell_epoch: bool) -> None:
        self._dataset, self._collate_fn, self._seed = dataset, collate_fn, seed
        self._whole = tensor_rows(dataset, collate_fn) or batch_rows(dataset)
        self._by_batch = fetches_batches(dataset)
        self._tell_epoch = tell_epoch and callable(getattr(dataset, "set_epoch", None))
        self._epoch = -1

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, slot: Slot) -> tuple[Slot, Any]:
        """The slot, without its indices, and its batch."""
        return dataclasses.replace(slot, indices=NO_INDICES), self.fetch(slot)

    def fetch(self, slot: Slot) -> Any:
        """The collated batch of a slot.

        Raises:
            DataError: The user's code failed; with its line and the samples.
        """
        if self._whole is not None and not self._whole.draws:
            return self._whole(slot.indices)
        if self._tell_epoch and slot.epoch != self._epoch:
            self._dataset.set_epoch(slot.epoch)
            self._epoch = slot.epoch
        indices = slot.indices.tolist()
        with fetching(self._seed, slot.epoch, slot.index, slot.rank, slot.micro):
            if self._whole is not None:
                return self._taken(slot.indices)
            samples = self._at_once(indices) if self._by_batch else self._one_by_one(slot.epoch, indices)
            try:
                return self._collate_fn(samples)
            except Exception as error:
                raise failure(f"collating {_named(indices)} of {type(self._dataset).__name__}", error) from error

    def _taken(self, indices: Indices) -> Any:
        assert self._whole is not None
        try:
            return self._whole(indices)
        except DataError:
            raise
        except Exception as error:
            raise failure(f"{_named(indices.tolist())} of {type(self._dataset).__name__}", error) from error

    def _at_once(self, indices: list[int]) -> list[Any]:
        try:
            samples: list[Any] = self._dataset.__getitems__(indices)
        except Exception as error:
            raise failure(f"{_named(indices)} of {type(self._dataset).__name__}", error) from error
        return samples

    def _one_by_one(self, epoch: int, indices: list[int]) -> list[Any]:
        dataset, samples, index = self._dataset, [], -1
        current.seed, current.epoch = self._seed, epoch
        try:
            for index in indices:  # the error below names it
                current.sample, current.generator = index, None
                samples.append(dataset[index])
            return samples
        except Exception as error:
            raise failure(f"sample {index} of {type(dataset).__name__}", error) from error
        finally:
            current.sample, current.generator = None, None


def passed(fetched: Any) -> Any:
    """For torch's loader, which need not collate any more."""
    return fetched


def _named(indices: Sequence[int]) -> str:
    more = f" and {len(indices) - _MANY} more" if len(indices) > _MANY else ""
    return f"samples {', '.join(map(str, indices[:_MANY]))}{more}"


def failure(what: str, error: Exception) -> DataError:
    """An error of the user's code in the data, with its last lines."""
    lines = "".join(traceback.format_tb(error.__traceback__)[-3:])
    return DataError(f"{what} failed: {type(error).__name__}: {error}\n{lines}")


def fetches_batches(dataset: Any) -> bool:
    """Whether the user's own code fetches many samples in one call.

    torch's wrappers always can, but fall back to single items when what they wrap cannot; then we take the items.
    """
    if type(dataset) is Subset:
        return fetches_batches(dataset.dataset)
    if type(dataset) is StackDataset:
        parts = dataset.datasets
        return any(fetches_batches(part) for part in (parts.values() if isinstance(parts, dict) else parts))
    return callable(getattr(dataset, "__getitems__", None))


class TensorRows:
    """Rows of tensors by one ``index_select`` each.

    Args:
        chosen: Rows that a subset chose, ``[num_samples]``, or None for all.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], chosen: torch.Tensor | None) -> None:
        self._tensors, self._chosen = tensors, chosen

    draws = False

    def __call__(self, indices: Indices) -> list[torch.Tensor]:
        """The rows of each tensor: ``[len(indices), ...]``."""
        rows = torch.from_numpy(indices)
        if self._chosen is not None:
            rows = self._chosen.index_select(0, rows)
        return [tensor.index_select(0, rows.to(tensor.device)).contiguous() for tensor in self._tensors]


def tensor_rows(dataset: Any, collate_fn: Callable[..., Any]) -> TensorRows | None:
    """A TensorDataset's rows (or those of subsets of one), whole.

    They are what the default collate function makes of the single items, bit for bit; None where that is not sure.
    """
    if collate_fn is not default_collate:
        return None
    dataset, chosen, known = below_subsets(dataset)
    if not known or type(dataset) is not TensorDataset or not all(_plain(tensor) for tensor in dataset.tensors):
        return None
    return TensorRows(dataset.tensors, chosen)


class BatchRows:
    """Rows of a dataset that makes whole batches itself.

    Args:
        chosen: Rows that a subset chose, ``[num_samples]``, or None for all.
    """

    def __init__(self, dataset: BatchDataset, chosen: torch.Tensor | None) -> None:
        self._dataset = dataset
        self._chosen = None if chosen is None else chosen.numpy()

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return self._dataset.draws

    def __call__(self, indices: Indices) -> Any:
        """The batch of these rows."""
        return self._dataset.take(indices if self._chosen is None else self._chosen[indices])


def batch_rows(dataset: Any) -> BatchRows | None:
    """A BatchDataset's rows, or those of subsets of one; None for other datasets."""
    dataset, chosen, known = below_subsets(dataset)
    return BatchRows(dataset, chosen) if known and isinstance(dataset, BatchDataset) else None


def below_subsets(dataset: Any) -> tuple[Any, torch.Tensor | None, bool]:
    """(what torch's subsets choose from, the rows they choose or None for all, whether these are sure to be there)."""
    chosen: torch.Tensor | None = None
    while type(dataset) is Subset:
        subset = _places(dataset)
        if subset is None:
            return dataset, None, False
        chosen = subset if chosen is None else subset[chosen]
        dataset = dataset.dataset
    return dataset, chosen, True


def _places(subset: Subset[Any]) -> torch.Tensor | None:
    """The subset's indices, from 0 on; None when one is out of range, which the single item then says."""
    places = torch.as_tensor(subset.indices, dtype=torch.int64)
    length = len(subset.dataset)  # type: ignore[arg-type]
    places = torch.where(places < 0, places + length, places)
    return places if len(places) == 0 or (places.min() >= 0 and places.max() < length) else None


def _plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.requires_grad
