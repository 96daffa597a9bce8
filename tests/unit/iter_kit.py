"""Iterable datasets that the tests share."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info


class Count(IterableDataset[int]):
    """0, 1, ... in an order drawn from the global streams (``shuffle``) or as they are."""

    def __init__(self, num_rows: int, shuffle: bool = False) -> None:
        self.num_rows, self.shuffle = num_rows, shuffle

    def order(self) -> list[int]:
        rows = list(range(self.num_rows))
        if self.shuffle:
            rows = torch.randperm(self.num_rows).tolist()
            random.shuffle(rows)
            np.random.shuffle(rows)
        return rows

    def __iter__(self) -> Iterator[int]:
        yield from self.order()


class Sized(Count):
    """The same, and says how many."""

    says: int | None = None

    def __len__(self) -> int:
        return self.num_rows if self.says is None else self.says


class Lying(Sized):
    """Says another number than it yields."""

    def __init__(self, num_rows: int, says: int) -> None:
        super().__init__(num_rows)
        self.says = says


class PerWorker(Count):
    """Deals to the loader processes, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from self.order()[first::step]


class Told(Count):
    """Yields its epoch, which it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for row in range(self.num_rows):
            yield 100 * self.epoch + row
