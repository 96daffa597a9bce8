"""The data faults of docs/concepts.md on every kind of map-style and streamed source: padding, frozen orders, short data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raytrain.data import Batch, BatchDataset, eval_loader, parquet, parquet_stream, plan_train, train_loader
from raytrain.errors import ConfigError, DataError


class Items(Dataset[dict[str, int]]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


class Rows(BatchDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def take(self, indices: Any) -> dict[str, torch.Tensor]:
        return {"id": torch.from_numpy(np.asarray(indices).copy())}


def table(length: int, folder: Path) -> Path:
    path = folder / f"{length}.parquet"
    pq.write_table(pa.table({"id": pa.array(range(length), pa.int64())}), path, row_group_size=3)
    return path


SOURCES: dict[str, Callable[[int, Path], Any]] = {
    "tensors": lambda n, folder: TensorDataset(torch.arange(n)),
    "items": lambda n, folder: Items(n),
    "batches": lambda n, folder: Rows(n),
    "loader": lambda n, folder: DataLoader(Items(n), batch_size=4, shuffle=True),
    "table": lambda n, folder: parquet(table(n, folder), cache=folder / "cache"),
    "stream": lambda n, folder: parquet_stream(table(n, folder), num_lanes=2, block_rows=4),
}
each_source = pytest.mark.parametrize("source", SOURCES)


def ids(batch: Batch) -> list[int]:
    data = batch.data["id"] if isinstance(batch.data, dict) else batch.data[0]
    return [int(n) for n in data[: batch.num_rows]]


@each_source
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 5, 7])
def test_evaluation_has_no_padding(source: str, world: int, length: int, tmp_path: Path) -> None:  # case A1
    data = SOURCES[source](length, tmp_path)
    loaders = [eval_loader(data, batch_size=2, rank=rank, world_size=world) for rank in range(world)]
    seen = sorted(n for loader in loaders for batch in loader.batches() for n in ids(batch))
    assert seen == list(range(length))


@each_source
@pytest.mark.parametrize("world", [1, 2])
def test_epochs_reshuffle_without_a_call(source: str, world: int, tmp_path: Path) -> None:  # case A2
    def epochs(seed: int) -> list[list[int]]:
        size = None if source == "loader" else 4
        orders: list[list[int]] = [[], [], []]
        loaders = [
            train_loader(SOURCES[source](16, tmp_path), batch_size=size, seed=seed, rank=rank, world_size=world)
            for rank in range(world)
        ]
        for batches in zip(*(loader.batches(0, 0, stop=12) for loader in loaders), strict=True):
            orders[batches[0].epoch] += [n for batch in batches for n in ids(batch)]
        for loader in loaders:
            loader.close()
        return orders

    first = epochs(1)
    assert [sorted(order) for order in first] == [list(range(16))] * 3
    assert len({tuple(order) for order in first}) == 3
    assert epochs(1) == first
    assert epochs(2) != first


@each_source
def test_data_smaller_than_workers_times_batch(source: str, tmp_path: Path) -> None:  # case A7
    data = SOURCES[source](3, tmp_path)
    size = None if source == "loader" else 8
    with pytest.raises(
        DataError, match=r"3 samples make no full batch of (8|4).*2 workers has 0 steps.*drop_last=false"
    ):
        plan_train(data, batch_size=size, drop_last=True, world_size=2)
    one = SOURCES[source](1, tmp_path)
    parts = [next(train_loader(one, batch_size=size, rank=r, world_size=2).batches(0, 0, stop=1)) for r in range(2)]
    assert sum(batch.scale for batch in parts) == 2  # DDP's mean over two ranks is then the one sample's gradient
    assert [batch.num_rows for batch in parts] == [1, 0]
    with pytest.raises(DataError, match="is empty: 0 samples"):
        plan_train(SOURCES[source](0, tmp_path) if source != "loader" else Items(0), batch_size=8)


@each_source
def test_a_batch_that_the_workers_cannot_share(source: str, tmp_path: Path) -> None:  # case A7
    size = None if source == "loader" else 4
    with pytest.raises(ConfigError, match=r"global batch of 4 samples cannot be shared by 5 workers"):
        plan_train(SOURCES[source](20, tmp_path), batch_size=size, world_size=5)
