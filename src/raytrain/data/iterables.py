"""Data that is iterated, as training and evaluation data: dealt out by raytrain, or left alone when it shards itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, default_collate

from raytrain.data.detect import brings_batches, shards_itself
from raytrain.data.ownrows import BatchRows, ItemRows
from raytrain.data.samplers import num_batches
from raytrain.data.shards import Rows, ShardEvalLoader, ShardLoader
from raytrain.data.shared import SharedEvalLoader, SharedLoader
from raytrain.data.source import DEFAULT_BATCH_SIZE, DataPlan, kept_settings, worker_settings
from raytrain.data.streamed import EvalBatches, Streamed, TrainBatches
from raytrain.errors import ConfigError, DataError


def iterable(data: Any, *, num_rows: int | None = None, own_shards: bool | None = None) -> IterableStream:
    """An IterableDataset, or a DataLoader over one, as data for raytrain. A task may also return it as it is.

    Args:
        num_rows: Samples per epoch over all workers. It is checked in each epoch. None: its ``__len__``, when all workers read the
            same; else, and without one, an epoch is as long as it turns out to be.
        own_shards: Whether the data gives each rank other samples by itself. None: found out for datasets of Hugging Face
            (``split_dataset_by_node``), LitData, MosaicML streaming and WebDataset (``split_by_node``), for torch's
            ``DistributedSampler``, and for what wraps them; False for others.

    Raises:
        DataError: It cannot be iterated, or yields batches that are not known to be of each rank's own.
    """
    own = shards_itself(data) if own_shards is None else own_shards
    brings = brings_batches(data)
    if not hasattr(data, "__iter__"):
        raise DataError(f"data of type {type(data).__name__} is not iterated: it has no __iter__.")
    if brings and not own:
        raise DataError(
            f"the {type(data).__name__} yields batches{_of_none(data)}, so raytrain cannot tell how samples form global batches. "
            "Give a DataLoader with a batch_size over a dataset of single samples, or the dataset itself; or, if it gives each "
            "rank batches of its own, say so by raytrain.data.own_shards(...)."
        )
    dataset = data.dataset if isinstance(data, DataLoader) and not brings else data
    return IterableStream(dataset, _length(dataset) if num_rows is None and not own else num_rows, own, _settings(data))


def own_shards(data: Any, *, num_rows: int | None = None) -> IterableStream:
    """Data that gives each rank samples of its own, so that raytrain leaves it alone.

    Args:
        data: An IterableDataset, a DataLoader over one, or any loader that yields collated batches: their rows are what counts.
        num_rows: Samples per epoch over all workers; None when that is not known.

    Raises:
        DataError: It cannot be iterated.
    """
    return iterable(data, num_rows=num_rows, own_shards=True)


def _of_none(data: Any) -> str:
    return " (batch_size=None)" if isinstance(data, DataLoader) and data.batch_size is None else ""


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _settings(data: Any) -> dict[str, Any]:
    if isinstance(data, DataLoader) and not brings_batches(data):
        return {"batch_size": data.batch_size, "drop_last": data.drop_last, **kept_settings(data)}
    size = getattr(data, "batch_size", None)
    return {"batch_size": size} if isinstance(size, int) and not isinstance(size, bool) and brings_batches(data) else {}


@dataclass(frozen=True)
class IterableStream(Streamed):
    """What ``iterable`` makes.

    Attributes:
        dataset: What is iterated: of single samples, or a loader that brings batches.
        num_rows: Samples per epoch over all workers; None when that is not known.
        own_shards: Whether each rank gets its own samples from the dataset.
        settings: Of the user's DataLoader.
    """

    dataset: Any
    num_rows: int | None
    own_shards: bool
    settings: Mapping[str, Any]

    def plan(self, *, batch_size: int | None, shuffle: bool | None, drop_last: bool | None) -> DataPlan:
        """What an epoch of it is.

        Raises:
            DataError: There are no samples.
            ConfigError: The batch size is given twice and differs, or an order is asked for.
        """
        own_size = self.settings.get("batch_size")
        if own_size is not None and batch_size is not None and batch_size != own_size:
            raise ConfigError(
                f"the DataLoader has batch_size={own_size}, but train.batch_size = {batch_size}. Both mean the global batch: "
                "give it in one place, or the same in both."
            )
        if shuffle:
            raise ConfigError(
                f"train.shuffle = true, but {type(self.dataset).__name__} is iterated, and its order is its own. Shuffle in its "
                "__iter__, from torch's global stream, which raytrain seeds by (seed, epoch)."
            )
        if self.num_rows is not None and self.num_rows < 1:
            raise DataError(f"{type(self.dataset).__name__} is empty: 0 samples. Check what it reads.")
        size = own_size or batch_size or DEFAULT_BATCH_SIZE
        drop = bool(self.settings.get("drop_last") if drop_last is None else drop_last)
        note = "each worker reads shards of its own" if self.own_shards else "each worker reads all and keeps its share"
        if self.num_rows is None:
            return DataPlan(None, size, None, 0, False, note, drop_last=drop)
        steps = num_batches(self.num_rows, size, drop)
        left_out = self.num_rows - steps * size if drop else 0
        return DataPlan(self.num_rows, size, steps, left_out, False, note, drop_last=drop)

    def train_loader(
        self, plan: DataPlan, *, accumulate: int, rank: int, world_size: int, seed: int, loader_workers: int
    ) -> TrainBatches:
        """This rank's training batches."""
        settings = self.settings or worker_settings(loader_workers)
        if self.own_shards:
            return ShardLoader(self._rows(seed, settings), plan, accumulate, rank, world_size)
        return SharedLoader(self, plan, accumulate, rank, world_size, seed, settings)

    def eval_loader(self, plan: DataPlan, *, rank: int, world_size: int, seed: int, loader_workers: int) -> EvalBatches:
        """This rank's evaluation batches."""
        if self.own_shards:
            rows = self._rows(seed, self.settings or worker_settings(loader_workers))
            return ShardEvalLoader(rows, plan, rank, world_size)
        return SharedEvalLoader(self, plan, rank, world_size, seed)

    def _rows(self, seed: int, settings: Mapping[str, Any]) -> Rows:
        if brings_batches(self.dataset):
            return BatchRows(self.dataset, self.num_rows, seed)
        return ItemRows(self, seed, settings)

    def describe(self) -> dict[str, Any]:
        """Plain facts."""
        return {"source": type(self.dataset).__name__}

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """From samples to a batch."""
        given: Callable[[list[Any]], Any] | None = self.settings.get("collate_fn")
        return given or default_collate
