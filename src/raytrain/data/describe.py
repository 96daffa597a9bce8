"""What a dataset is, in plain facts for the run's record, with a digest that changes when the data does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from raytrain.data.batched import BatchDataset
from raytrain.data.fetch import below_subsets
from raytrain.data.streamed import Streamed

_SAMPLED = 1000  # rows that go into a digest


def describe(data: Any) -> dict[str, Any]:
    """``source``, ``schema`` and ``digest``, as far as they can be had without reading everything.

    A digest covers schema and length, and of tensors a thousand rows spread evenly; of tables the files' footers. Datasets that
    only give items are known by their type and length: an item may be random, or slow.
    """
    dataset = data.dataset if isinstance(data, DataLoader) else data
    below, chosen, _ = below_subsets(dataset)
    facts: dict[str, Any] = {"source": type(below).__name__}
    if isinstance(below, (BatchDataset, Streamed)):
        facts |= below.describe()
    elif type(below) is TensorDataset:
        facts |= _tensors(below.tensors)
    own = facts.get("digest") or f"{facts['source']} {_length(below)}"
    subset = "all" if chosen is None else hashlib.sha256(chosen.numpy().tobytes()).hexdigest()
    digest = hashlib.sha256(f"{own} {subset}".encode()).hexdigest()[:16]
    return {**facts, "digest": digest}


def _tensors(tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
    schema = {str(n): f"{str(t.dtype).removeprefix('torch.')}{list(t.shape[1:])}" for n, t in enumerate(tensors)}
    hashed = hashlib.sha256(repr((schema, len(tensors[0]))).encode())
    rows = torch.from_numpy(np.unique(np.linspace(0, len(tensors[0]) - 1, _SAMPLED).astype(np.int64)))
    for tensor in tensors:
        if tensor.layout is torch.strided and len(tensor):
            sample = tensor.detach()[rows.to(tensor.device)].cpu().contiguous()
            hashed.update(sample.view(-1).view(torch.uint8).numpy().tobytes())
    return {"schema": schema, "digest": hashed.hexdigest()[:16]}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
