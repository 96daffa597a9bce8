"""IterableDataset as training and evaluation data: dealt out by raytrain, or left alone when it shards itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate

from raytrain.data.batch import Batch, Slot
from raytrain.data.fetch import NO_INDICES, failure
from raytrain.data.order import share
from raytrain.data.randomness import Streams, fetching, iterating
from raytrain.data.samplers import num_batches
from raytrain.data.shards import ShardEvalLoader, ShardLoader
from raytrain.data.source import DEFAULT_BATCH_SIZE, DataPlan, kept_settings, worker_settings
from raytrain.data.streamed import EvalBatches, Streamed, TrainBatches
from raytrain.errors import ConfigError, DataError

# Where a dataset of these packages keeps that it deals to ranks by itself; None: all of them do.
_OWN: Mapping[str, str | None] = {"datasets": "_distributed", "litdata": None, "streaming": None, "webdataset": None}


def iterable(
    data: IterableDataset[Any] | DataLoader[Any], *, num_rows: int | None = None, own_shards: bool | None = None
) -> IterableStream:
    """An IterableDataset, or a DataLoader over one, as data for raytrain. A task may also return it as it is.

    Args:
        num_rows: Samples per epoch over all workers; None: its ``__len__``. It is checked at the end of each epoch.
        own_shards: Whether the dataset gives each rank other samples by itself. None: found out for datasets of Hugging Face
            (``split_dataset_by_node``), LitData, MosaicML streaming and WebDataset, and False for others.

    Raises:
        DataError: Its length is not known.
    """
    dataset: Any = data.dataset if isinstance(data, DataLoader) else data
    own = shards_itself(dataset) if own_shards is None else own_shards
    if num_rows is None:
        try:
            num_rows = len(dataset)
        except (TypeError, NotImplementedError):
            raise DataError(
                f"{type(dataset).__name__} is an IterableDataset without a length, so an epoch has no end that all workers "
                "could know beforehand. Give it __len__, or return raytrain.data.iterable(dataset, num_rows=...)."
            ) from None
    return IterableStream(dataset, num_rows, own, _settings(data))


def shards_itself(dataset: Any) -> bool:
    """Whether a dataset of a well-known package deals its samples to ranks by itself."""
    for kind in type(dataset).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _OWN:
            mark = _OWN[package]
            return mark is None or getattr(dataset, mark, None) is not None
    return False


def _settings(data: Any) -> dict[str, Any]:
    if not isinstance(data, DataLoader):
        return {}
    if data.batch_size is None:
        raise DataError(
            "the DataLoader over an IterableDataset has batch_size=None, so raytrain cannot tell how samples form global "
            "batches. Give it a batch_size, or return the dataset itself."
        )
    return {"batch_size": data.batch_size, "drop_last": data.drop_last, **kept_settings(data)}


@dataclass(frozen=True)
class IterableStream(Streamed):
    """What ``iterable`` makes.

    Attributes:
        own_shards: Whether each rank gets its own samples from the dataset.
        settings: Of the user's DataLoader.
    """

    dataset: Any
    num_rows: int
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
                f"train.shuffle = true, but {type(self.dataset).__name__} is an IterableDataset, whose order is its own."
            )
        if self.num_rows < 1:
            raise DataError(f"{type(self.dataset).__name__} is empty: 0 samples. Check what it reads.")
        size = own_size or batch_size or DEFAULT_BATCH_SIZE
        drop = bool(self.settings.get("drop_last") if drop_last is None else drop_last)
        steps = num_batches(self.num_rows, size, drop)
        note = "each worker reads shards of its own" if self.own_shards else "each worker reads all and keeps its share"
        return DataPlan(self.num_rows, size, steps, self.num_rows - steps * size if drop else 0, False, note)

    def train_loader(
        self, plan: DataPlan, *, accumulate: int, rank: int, world_size: int, seed: int, loader_workers: int
    ) -> TrainBatches:
        """This rank's training batches."""
        if self.own_shards:
            rows = ItemRows(self, seed, loader_workers)
            return ShardLoader(rows, plan, accumulate, rank, world_size)
        return SharedLoader(self, plan, accumulate, rank, world_size, seed, loader_workers)

    def eval_loader(self, plan: DataPlan, *, rank: int, world_size: int, seed: int, loader_workers: int) -> EvalBatches:
        """This rank's evaluation batches."""
        if self.own_shards:
            return ShardEvalLoader(ItemRows(self, seed, loader_workers), plan, rank, world_size)
        return SharedEvalLoader(self, plan, rank, world_size, seed)

    def describe(self) -> dict[str, Any]:
        """Plain facts."""
        return {"source": type(self.dataset).__name__}

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """From samples to a batch."""
        given: Callable[[list[Any]], Any] | None = self.settings.get("collate_fn")
        return given or default_collate

    def tell_epoch(self, epoch: int) -> None:
        """Call the dataset's ``set_epoch``, if it has one."""
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)

    def wrong_length(self, found: str, epoch: int) -> DataError:
        """The error for an epoch that is not as long as was said."""
        return DataError(
            f"{type(self.dataset).__name__} was said to have {self.num_rows} samples, but yielded {found} in epoch {epoch}. They "
            "must agree, in each epoch: correct __len__, or num_rows of raytrain.data.iterable."
        )


class _Samples:
    """The samples of one epoch, drawn under streams of their own."""

    def __init__(self, stream: IterableStream, seed: int, epoch: int) -> None:
        self._stream, self._epoch = stream, epoch
        self._streams = Streams(iterating(seed, epoch))
        self.count = 0
        stream.tell_epoch(epoch)
        with self._guarded():
            self._iterator = iter(stream.dataset)

    def take(self, count: int) -> list[Any]:
        """So many more samples.

        Raises:
            DataError: There are fewer, or the user's code failed.
        """
        samples = []
        with self._guarded():
            for _ in range(count):
                try:
                    samples.append(next(self._iterator))
                except StopIteration:
                    raise self._stream.wrong_length(f"only {self.count + len(samples)}", self._epoch) from None
        self.count += count
        return samples

    def end(self) -> None:
        """See that there is no sample left.

        Raises:
            DataError: There is one.
        """
        with self._guarded():
            for _ in self._iterator:
                raise self._stream.wrong_length(f"at least {self.count + 1}", self._epoch)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with self._streams:
                yield
        except DataError:
            raise
        except Exception as error:
            name = type(self._stream.dataset).__name__
            raise failure(f"sample {self.count} and on of {name} in epoch {self._epoch}", error) from error


class SharedLoader:
    """Every rank reads all samples, and collates its share of each global batch.

    Attributes:
        plan: What is trained on.
        steps_per_epoch: Global batches per epoch.
    """

    def __init__(
        self,
        stream: IterableStream,
        plan: DataPlan,
        accumulate: int,
        rank: int,
        world_size: int,
        seed: int,
        loader_workers: int,
    ) -> None:
        self.plan, self.steps_per_epoch = plan, plan.steps_per_epoch
        self._stream, self._seed = stream, seed
        self._accumulate, self._rank, self._world_size = accumulate, rank, world_size
        self._process = one_process(stream.settings or worker_settings(loader_workers))

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from a position on, over the ends of epochs. What stands before it in the epoch is read and left out.

        Args:
            epoch: Epoch of the first batch.
            index: Global batch within it.
            stop: End after this many global batches; None for never.
        """
        if self._process is None:
            return self.made(epoch, index, stop)
        return iter(DataLoader(_Made(self, epoch, index, stop), batch_size=None, collate_fn=_as_it_is, **self._process))

    def adopt(self, adopted_by: Callable[[Any], Any]) -> None:
        """Nothing to do: batches are made here."""

    def close(self) -> None:
        """Nothing is left running: torch ends a loader's process with its iterator."""

    def made(self, epoch: int, index: int, stop: int | None) -> Iterator[Batch]:
        """``batches``, in whatever process this runs."""
        size, steps = self.plan.batch_size, self.steps_per_epoch
        while stop is None or stop > 0:
            samples = _Samples(self._stream, self._seed, epoch)
            samples.take(index * size)
            while index < steps and (stop is None or stop > 0):
                yield from self._share(samples.take(min(size, self.plan.num_rows - index * size)), epoch, index)
                index += 1
                stop = stop if stop is None else stop - 1
            if index == steps and not self.plan.dropped_rows:
                samples.end()
            epoch, index = epoch + 1, 0

    def _share(self, samples: list[Any], epoch: int, index: int) -> Iterator[Batch]:
        rows, world_size = len(samples), self._world_size
        start, stop = share(rows, self._rank, world_size)
        num_micros = min(self._accumulate, -(-rows // world_size))
        for micro in range(num_micros):
            first, last = share(stop - start, micro, num_micros)
            own = samples[start + first : start + last]
            slot = Slot(NO_INDICES, epoch, index, micro, num_micros, len(own), rows, world_size, self._rank)
            yield collated(self._stream, slot, own or samples[:2], self._seed)


class SharedEvalLoader:
    """Every rank reads all samples, and collates every world_size-th batch.

    Attributes:
        plan: What is evaluated.
    """

    def __init__(self, stream: IterableStream, plan: DataPlan, rank: int, world_size: int, seed: int) -> None:
        self.plan = plan
        self._stream, self._rank, self._world_size, self._seed = stream, rank, world_size, seed

    def batches(self) -> Iterator[Batch]:
        """This rank's batches; ``index`` is the batch's place in the whole set."""
        samples = _Samples(self._stream, self._seed, 0)
        for index in range(self.plan.steps_per_epoch):
            rows = samples.take(min(self.plan.batch_size, self.plan.num_rows - samples.count))
            if index % self._world_size == self._rank:
                slot = Slot(NO_INDICES, 0, index, 0, 1, len(rows), len(rows), 1, 0)
                yield collated(self._stream, slot, rows, self._seed)
        samples.end()

    def close(self) -> None:
        """Nothing is left running."""


class ItemRows:
    """This rank's own samples of a dataset that shards itself, in torch's loader processes where there are any."""

    def __init__(self, stream: IterableStream, seed: int, loader_workers: int) -> None:
        self._stream, self._seed = stream, seed
        settings = dict(stream.settings or worker_settings(loader_workers))
        for name in ("batch_size", "drop_last", "collate_fn"):
            settings.pop(name, None)
        self._source = DataLoader(stream.dataset, batch_size=None, collate_fn=_as_it_is, **settings)
        self._iterator: Iterator[Any] = iter(())
        self._streams = Streams(0)
        self._waiting: list[Any] = []
        self._ended = False
        self.num_rows = stream.num_rows

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._stream.tell_epoch(epoch)
        self._waiting, self._ended = [], False
        self._streams = Streams(iterating(self._seed, epoch))
        with self._streams:
            self._iterator = iter(self._source)

    def fill(self, count: int) -> int:
        """Have so many rows ready, or all that are left; returns how many there are."""
        with self._streams:
            while not self._ended and len(self._waiting) < count:
                try:
                    self._waiting.append(next(self._iterator))
                except StopIteration:
                    self._ended = True
                except Exception as error:
                    raise failure(f"a sample of {type(self._stream.dataset).__name__}", error) from error
        return len(self._waiting)

    def take(self, count: int) -> list[Any]:
        """So many of the rows that are ready."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def batch(self, rows: list[Any], slot: Slot) -> Batch:
        """Rows as a batch."""
        return collated(self._stream, slot, rows, self._seed)

    def wrong_length(self, found: str, epoch: int) -> DataError:
        """The error for an epoch that is not as long as was said."""
        return self._stream.wrong_length(found, epoch)


def collated(stream: IterableStream, slot: Slot, samples: list[Any], seed: int) -> Batch:
    """Samples as the batch of a slot.

    Raises:
        DataError: The user's collate function failed.
    """
    with fetching(seed, slot.epoch, slot.index, slot.rank, slot.micro):
        try:
            return slot.filled(stream.collate(samples))
        except Exception as error:
            what = f"collating batch {slot.index} of epoch {slot.epoch} of {type(stream.dataset).__name__}"
            raise failure(what, error) from error


def one_process(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Settings for a single loader process, or None for none: more of them would each read the whole stream."""
    if not settings.get("num_workers"):
        return None
    left_out = ("batch_size", "drop_last", "collate_fn", "persistent_workers")
    return {**{name: value for name, value in settings.items() if name not in left_out}, "num_workers": 1}


class _Made(IterableDataset[Batch]):
    """The batches of a loader, for torch's loader process."""

    def __init__(self, loader: SharedLoader, epoch: int, index: int, stop: int | None) -> None:
        self._loader, self._place = loader, (epoch, index, stop)

    def __iter__(self) -> Iterator[Batch]:
        return self._loader.made(*self._place)


def _as_it_is(sample: Any) -> Any:
    return sample
