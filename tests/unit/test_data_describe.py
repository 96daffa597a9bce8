"""Facts and digests of datasets."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from raytrain.data.describe import describe


def tensors(shift: float = 0.0, rows: int = 50) -> TensorDataset:
    return TensorDataset(torch.arange(rows * 3.0).reshape(rows, 3) + shift, torch.arange(rows))


def test_tensors_are_known_by_their_content() -> None:
    facts = describe(tensors())
    assert facts["schema"] == {"0": "float32[3]", "1": "int64[]"}
    assert facts["digest"] == describe(tensors())["digest"] == describe(DataLoader(tensors(), batch_size=4))["digest"]
    others = [tensors(0.5), tensors(rows=51), Subset(tensors(), range(50)), Subset(tensors(), range(49))]
    assert len({facts["digest"], *(describe(other)["digest"] for other in others)}) == 5


def test_bfloat16_and_empty_tensors_have_a_digest() -> None:
    assert describe(TensorDataset(torch.ones(3, dtype=torch.bfloat16)))["digest"]
    assert describe(TensorDataset(torch.ones(0, 2)))["digest"]


class Items(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an item may be slow or random: it is not asked for")


def test_items_are_known_by_type_and_length_alone() -> None:
    assert describe(Items(4))["source"] == "Items"
    assert describe(Items(4))["digest"] == describe(Items(4))["digest"] != describe(Items(5))["digest"]
