"""Data: the order of samples, each rank's share of it, tables and streams, and random streams that belong to samples."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raytrain.data.batch import Batch
from raytrain.data.batched import BatchDataset
from raytrain.data.device import move
from raytrain.data.iterables import iterable, own_shards
from raytrain.data.loader import EvalLoader, TrainLoader, eval_loader, plan_eval, plan_train, train_loader
from raytrain.data.order import Order
from raytrain.data.randomness import get_rng_state, sample_generator, seed_everything, set_rng_state
from raytrain.data.source import DataPlan
from raytrain.data.streamed import EvalBatches, Streamed, TrainBatches

if TYPE_CHECKING:
    from raytrain.data.columns import Categories, Image, Packed, Padded
    from raytrain.data.hashing import HashPart
    from raytrain.data.table import TableDataset, arrow, parquet
    from raytrain.data.table_stream import TableStream, parquet_stream

__all__ = [
    "Batch",
    "BatchDataset",
    "Categories",
    "DataPlan",
    "EvalBatches",
    "EvalLoader",
    "HashPart",
    "Image",
    "Order",
    "Packed",
    "Padded",
    "Streamed",
    "TableDataset",
    "TableStream",
    "TrainBatches",
    "TrainLoader",
    "arrow",
    "eval_loader",
    "get_rng_state",
    "iterable",
    "move",
    "own_shards",
    "parquet",
    "parquet_stream",
    "plan_eval",
    "plan_train",
    "sample_generator",
    "seed_everything",
    "set_rng_state",
    "train_loader",
]

# Loaded on first use: a worker that reads no tables need not import pyarrow's readers.
_LAZY = {
    "Categories": "columns",
    "HashPart": "hashing",
    "Image": "columns",
    "Packed": "columns",
    "Padded": "columns",
    "TableDataset": "table",
    "TableStream": "table_stream",
    "arrow": "table",
    "parquet": "table",
    "parquet_stream": "table_stream",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"raytrain.data.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'raytrain.data' has no attribute {name!r}")
