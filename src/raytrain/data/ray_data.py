"""Ray Data as training and evaluation data: each worker reads the shard that Ray streams to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raytrain.data.batch import Batch, Slot
from raytrain.data.order import key_of
from raytrain.data.samplers import num_batches
from raytrain.data.shards import ShardEvalLoader, ShardLoader
from raytrain.data.source import DEFAULT_BATCH_SIZE, DataPlan
from raytrain.data.streamed import EvalBatches, Streamed, TrainBatches
from raytrain.errors import DataError

_SHUFFLE_BATCHES = 16  # global batches in the buffer that rows are shuffled in
_CHUNK_ROWS = 1024


def is_ray_dataset(data: Any) -> bool:
    """Whether this is a ``ray.data.Dataset``; found out without importing Ray."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == "ray.data.dataset.Dataset" for kind in type(data).__mro__)


def ray_stream(name: str, dataset: Any) -> RayStream:
    """What workers need to know of a Ray Dataset, as far as Ray knows it without running it.

    Args:
        name: Under which it is handed to the workers.
    """
    schema = dataset.schema(fetch_if_missing=False)
    types = dict(zip(schema.names, map(str, schema.types), strict=True)) if schema is not None else {}
    return RayStream(name, known_rows(dataset), types)


def known_rows(dataset: Any) -> int | None:
    """Rows of a Ray Dataset from the metadata of its files or blocks; None where Ray would have to run it."""
    count = getattr(dataset, "_meta_count", None)  # what Dataset.count() asks before it runs anything
    rows = count() if callable(count) else None
    return None if rows is None else int(rows)


@dataclass(frozen=True)
class RayStream(Streamed):
    """A Ray Dataset, without its data.

    Attributes:
        name: Under which the workers find their shard.
        num_rows: Rows per epoch over all workers; None when Ray does not know them without running it.
        schema: Type of each column, as Ray names it.
    """

    name: str
    num_rows: int | None
    schema: Mapping[str, str]

    def plan(self, *, batch_size: int | None, shuffle: bool | None, drop_last: bool | None) -> DataPlan:
        """What an epoch of it is.

        Raises:
            DataError: It has no rows.
        """
        if self.num_rows == 0:
            raise DataError(
                f"the Ray Dataset {self.name!r} is empty: 0 samples. Check the path and the filters that it was made with."
            )
        size = batch_size or DEFAULT_BATCH_SIZE
        drop, order = bool(drop_last), shuffle is not False
        if self.num_rows is None:
            return DataPlan(None, size, None, 0, order, "streamed by Ray Data", drop_last=drop)
        steps = num_batches(self.num_rows, size, drop)
        dropped = self.num_rows - steps * size if drop else 0
        return DataPlan(self.num_rows, size, steps, dropped, order, "streamed by Ray Data", drop_last=drop)

    def train_loader(
        self, plan: DataPlan, *, accumulate: int, rank: int, world_size: int, seed: int, loader_workers: int
    ) -> TrainBatches:
        """This rank's training batches."""
        return ShardLoader(RayRows(self, plan, seed), plan, accumulate, rank, world_size, any_world=True)

    def eval_loader(self, plan: DataPlan, *, rank: int, world_size: int, seed: int, loader_workers: int) -> EvalBatches:
        """This rank's evaluation batches."""
        return ShardEvalLoader(RayRows(self, plan, seed), plan, rank, world_size)

    def describe(self) -> dict[str, Any]:
        """Plain facts; the digest is of columns and rows' number, for the rows themselves are not read here."""
        digest = hashlib.sha256(repr((sorted(self.schema.items()), self.num_rows)).encode()).hexdigest()[:16]
        rows = {} if self.num_rows is None else {"num_rows": self.num_rows}
        return {"source": "Ray Data", **rows, "schema": dict(self.schema), "digest": digest}


class Columns:
    """Rows as a tensor per column; slices are views."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values()), ()))

    def __getitem__(self, rows: slice) -> Columns:
        return Columns({name: tensor[rows] for name, tensor in self.tensors.items()})


class RayRows:
    """The rows of this rank's shard, epoch by epoch."""

    def __init__(self, stream: RayStream, plan: DataPlan, seed: int) -> None:
        self._stream, self._plan, self._seed = stream, plan, seed
        self._iterator: Iterator[Mapping[str, torch.Tensor]] = iter(())
        self._waiting: list[Columns] = []
        self._empty = Columns({})

    def begin(self, epoch: int) -> None:
        """Start an epoch: the same number of times on all ranks, for Ray waits for all of them."""
        import ray.train

        shuffled: dict[str, Any] = {}
        if self._plan.shuffle:
            rows = _SHUFFLE_BATCHES * self._plan.batch_size
            seed = key_of(self._seed, epoch) >> 33  # Ray takes 31 bits
            shuffled = {"local_shuffle_buffer_size": rows, "local_shuffle_seed": seed}
        shard = ray.train.get_dataset_shard(self._stream.name)
        self._waiting = []
        self._iterator = iter(shard.iter_torch_batches(batch_size=_CHUNK_ROWS, device="cpu", **shuffled))

    def fill(self, count: int) -> int:
        """Have so many rows ready, or all that are left; returns how many there are."""
        ready = sum(map(len, self._waiting))
        while ready < count and (chunk := next(self._iterator, None)) is not None:
            self._waiting.append(Columns(chunk))
            self._empty = self._waiting[-1][:0]
            ready += len(self._waiting[-1])
        return ready

    def take(self, count: int) -> Columns:
        """So many of the rows that are ready."""
        parts = []
        while count:
            first = self._waiting[0]
            parts.append(first[:count])
            count -= len(parts[-1])
            if len(parts[-1]) < len(first):
                self._waiting[0] = first[len(parts[-1]) :]
            else:
                self._waiting.pop(0)
        if not parts:
            return self._empty
        return Columns({name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors})

    def peek(self) -> Columns:
        """One or two of the rows that are ready, which stay."""
        return Columns({name: tensor.clone() for name, tensor in self._waiting[0][:2].tensors.items()})

    def close(self) -> None:
        """Ray ends its iteration by itself."""

    def batch(self, rows: Columns, slot: Slot) -> Batch:
        """Rows as a batch: a dict of tensors."""
        return slot.filled(dict(rows.tensors))

    def wrong_length(self, found: str, epoch: int) -> DataError:
        """The error for an epoch that is not as long as was counted."""
        return DataError(
            f"the Ray Dataset {self._stream.name!r} has {self._stream.num_rows} rows by its metadata, but {found} came in epoch "
            f"{epoch}. Its rows must be as many in each epoch."
        )
