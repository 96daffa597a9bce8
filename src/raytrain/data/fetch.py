"""Fetching the samples of a slot: whole tensors where that is the same, the user's own code otherwise."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from raytrain.data.batch import Slot
from raytrain.data.order import Indices
from raytrain.data.randomness import current, fetching
from raytrain.errors import DataError


class Fetcher:
    """A dataset as torch's loader wants it: one call per slot, under random streams that belong to the slot."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._by_batch = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, slot: Slot) -> tuple[Slot, list[Any]]:
        """The samples of a slot."""
        with fetching(self._seed, slot.epoch, slot.index, slot.rank, slot.micro):
            indices = slot.indices if isinstance(slot.indices, list) else slot.indices.tolist()
            return slot, self._dataset.__getitems__(indices) if self._by_batch else self._items(slot.epoch, indices)

    def _items(self, epoch: int, indices: list[int]) -> list[Any]:
        dataset, seed, items, sample = self._dataset, self._seed, [], -1
        try:
            for sample in indices:  # the error below names it
                current.place = (seed, epoch, sample)
                items.append(dataset[sample])
            return items
        except Exception as error:
            raise DataError(
                f"sample {sample} of {type(dataset).__name__} failed: {type(error).__name__}: {error}\n"
                f"{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
            ) from error
        finally:
            current.place = None


class Collate:
    """The user's collate function, with the slot kept beside the batch."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, fetched: tuple[Slot, list[Any]]) -> tuple[dict[str, Any], Any]:
        slot, samples = fetched
        return vars(slot), self._collate_fn(samples)  # plain values: pinning memory goes through them unharmed


TensorFetch = Callable[[Sequence[int] | Indices], list[torch.Tensor]]


def tensor_fetch(dataset: Any, collate_fn: Callable[..., Any]) -> TensorFetch | None:
    """Rows of a TensorDataset (or of subsets of one) as one ``index_select`` per tensor.

    It gives what the default collate function makes of the single items, bit for bit; None where that is not sure.
    """
    if collate_fn is not default_collate:
        return None
    path: list[torch.Tensor] = []
    while type(dataset) is Subset:
        path.append(torch.as_tensor(dataset.indices, dtype=torch.int64))
        dataset = dataset.dataset
    if type(dataset) is not TensorDataset or any(t.is_sparse or t.requires_grad for t in dataset.tensors):
        return None
    tensors = dataset.tensors

    def fetch(indices: Sequence[int] | Indices) -> list[torch.Tensor]:
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        for subset in path:
            rows = subset.index_select(0, rows)
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in tensors]

    return fetch
