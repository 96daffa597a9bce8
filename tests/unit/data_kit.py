"""What the tests of data share: a dataset that shows which samples came, and the global batches of all ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset

from raytrain.data import Batch, train_loader


class Ids(Dataset[int]):
    """Its items are their own indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def ids(batch: Batch) -> list[int]:
    return batch.data.tolist() if batch.num_rows else []


def take(loader: Any, steps: int, epoch: int = 0, index: int = 0) -> list[Batch]:
    return list(loader.batches(epoch, index, steps))


def global_batches(
    data: Any, world_size: int, steps: int, epoch: int = 0, index: int = 0, **options: Any
) -> list[list[int]]:
    """The ids of each global batch, put together from all ranks and micro-batches in order."""
    together: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        loader = train_loader(data, rank=rank, world_size=world_size, **options)
        for batch in take(loader, steps, epoch, index):
            together.setdefault((batch.epoch, batch.index), []).extend(ids(batch))
    return [together[place] for place in sorted(together)]
