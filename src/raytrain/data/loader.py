"""Loaders: each rank's share of every global batch for training, whole batches dealt to ranks for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from raytrain.data.batch import Batch, Slot
from raytrain.data.detect import is_iterable
from raytrain.data.engine import Engine
from raytrain.data.iterables import IterableStream, iterable
from raytrain.data.order import share
from raytrain.data.source import DataPlan, Source, read_eval_source, read_source
from raytrain.data.streamed import EvalBatches, Streamed, TrainBatches
from raytrain.errors import ConfigError, DataError


class TrainLoader:
    """The micro-batches of one rank, epoch after epoch, from any position.

    Attributes:
        plan: What is trained on.
        steps_per_epoch: Global batches per epoch.
    """

    def __init__(self, source: Source, accumulate: int, rank: int, world_size: int, seed: int) -> None:
        self.plan = source.plan
        self.steps_per_epoch = source.batches.steps_per_epoch()
        self._batches = source.batches
        self._accumulate, self._rank, self._world_size = accumulate, rank, world_size
        self._engine = Engine(source, seed, rank, tell_epoch=True)

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from a position on, over the ends of epochs: what follows an epoch is fetched before it is asked for.

        Args:
            epoch: Epoch of the first batch.
            index: Global batch within it.
            stop: End after this many global batches; None for never.
        """
        return self._engine.run(self._slots(epoch, index, stop))

    def close(self) -> None:
        """End the loader processes."""
        self._engine.close()

    @property
    def inner(self) -> DataLoader[Any] | None:
        """torch's loader, when there are loader processes."""
        return self._engine.inner

    def adopt(self, adopted_by: Callable[[DataLoader[Any]], DataLoader[Any]]) -> None:
        """Let the surroundings see torch's loader, whose sampling is settled, before its first batch."""
        if self._engine.inner is not None:
            self._engine.inner = adopted_by(self._engine.inner)

    def _slots(self, epoch: int, index: int, stop: int | None) -> Iterator[Slot]:
        while stop is None or stop > 0:
            if index >= self.steps_per_epoch:
                epoch, index = epoch + 1, 0
            yield from self._share(epoch, index)
            index += 1
            stop = stop if stop is None else stop - 1

    def _share(self, epoch: int, index: int) -> Iterator[Slot]:
        """This rank's micro-batches of a global batch: as many on all ranks, borrowed where rows do not suffice."""
        samples = self._batches.samples(epoch, index)
        rows = len(samples)
        largest = -(-rows // self._world_size)
        num_micros = min(self._accumulate, largest)
        start, stop = share(rows, self._rank, self._world_size)
        for micro in range(num_micros):
            first, last = share(stop - start, micro, num_micros)
            own = samples[start + first : start + last]
            yield Slot(
                own if len(own) else samples[:2],
                epoch,
                index,
                micro,
                num_micros,
                len(own),
                rows,
                self._world_size,
                self._rank,
            )


class EvalLoader:
    """Whole batches in the order of the dataset, dealt to the ranks in turn: every sample once, none repeated.

    A batch is the same on any number of workers, and so are the bits of its forward pass.
    """

    def __init__(self, source: Source, rank: int, world_size: int, seed: int) -> None:
        self.plan = source.plan
        self._batches, self._rank, self._world_size = source.batches, rank, world_size
        self._engine = Engine(source, seed, rank, tell_epoch=False)

    def batches(self) -> Iterator[Batch]:
        """This rank's batches; ``index`` is the batch's place in the whole set."""
        return self._engine.run(self._slots())

    def close(self) -> None:
        """End the loader processes."""
        self._engine.close()

    def _slots(self) -> Iterator[Slot]:
        for index in range(self._rank, self._batches.steps_per_epoch(), self._world_size):
            samples = self._batches.samples(0, index)
            # rank 0 and world size 1: a batch's random streams and scale do not depend on who evaluates it
            yield Slot(samples, 0, index, 0, 1, len(samples), len(samples), 1, 0)


def train_loader(
    data: Any,
    *,
    batch_size: int | None = None,
    accumulate: int = 1,
    seed: int = 0,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    rank: int = 0,
    world_size: int = 1,
    loader_workers: int = 0,
) -> TrainBatches:
    """This rank's training batches of a map-style dataset, a DataLoader, whose settings are kept, or a stream.

    Args:
        batch_size: Global batch size: samples per optimizer step over all ranks and micro-batches.

    Raises:
        DataError: The data cannot be trained on exactly once per epoch.
        ConfigError: The batch size does not fit the loader or the number of ranks.
    """
    if (stream := streamed(data)) is not None:
        plan = _stream_plan(stream, batch_size, shuffle, drop_last, world_size)
        return stream.train_loader(
            plan,
            accumulate=accumulate,
            rank=rank,
            world_size=world_size,
            seed=seed,
            loader_workers=loader_workers,
        )
    source = _checked(data, batch_size, accumulate, seed, shuffle, drop_last, world_size, loader_workers)
    return TrainLoader(source, accumulate, rank, world_size, seed)


def plan_train(
    data: Any,
    *,
    batch_size: int | None = None,
    accumulate: int = 1,
    shuffle: bool | None = None,
    drop_last: bool | None = None,
    world_size: int = 1,
) -> DataPlan:
    """What ``train_loader`` would train on, found without starting anything. Raises as it does."""
    if (stream := streamed(data)) is not None:
        return _stream_plan(stream, batch_size, shuffle, drop_last, world_size)
    return _checked(data, batch_size, accumulate, 0, shuffle, drop_last, world_size, 0).plan


def _stream_plan(
    data: Streamed, batch_size: int | None, shuffle: bool | None, drop_last: bool | None, world_size: int
) -> DataPlan:
    plan = data.plan(batch_size=batch_size, shuffle=shuffle, drop_last=drop_last)
    _check_plan(plan, world_size)
    return plan


def _checked(
    data: Any,
    batch_size: int | None,
    accumulate: int,
    seed: int,
    shuffle: bool | None,
    drop_last: bool | None,
    world_size: int,
    loader_workers: int,
) -> Source:
    source = read_source(
        data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed, loader_workers=loader_workers
    )
    _check_plan(source.plan, world_size)
    return source


def _check_plan(plan: DataPlan, world_size: int) -> None:
    if plan.batch_size < world_size:
        raise ConfigError(
            f"a global batch of {plan.batch_size} samples cannot be shared by {world_size} workers: each needs at least one. "
            f"Set train.batch_size to {world_size} or more, or use fewer workers."
        )
    if plan.steps_per_epoch == 0:
        raise DataError(
            f"{plan.num_rows} samples make no full batch of {plan.batch_size} (drop_last is on), so an epoch on {world_size} "
            f"workers has 0 steps. Set train.batch_size to {plan.num_rows} or less, or train.drop_last=false."
        )


def eval_loader(
    data: Any, *, batch_size: int, rank: int = 0, world_size: int = 1, loader_workers: int = 0, seed: int = 0
) -> EvalBatches:
    """This rank's evaluation batches. A DataLoader's settings are kept.

    Order does not matter to a mean: shuffled data is evaluated as it is stored. A sampler that picks samples picks the
    same ones in every evaluation. ``drop_last`` is not followed: every sample counts.

    Args:
        batch_size: Samples per forward pass, for a dataset that came without a DataLoader.

    Raises:
        DataError: The data is no map-style dataset, or empty.
    """
    if (stream := streamed(data)) is not None:
        plan = plan_eval(stream, batch_size=batch_size)
        return stream.eval_loader(plan, rank=rank, world_size=world_size, seed=seed, loader_workers=loader_workers)
    source = read_eval_source(data, batch_size=batch_size, seed=seed, loader_workers=loader_workers)
    return EvalLoader(source, rank, world_size, seed)


def plan_eval(data: Any, *, batch_size: int) -> DataPlan:
    """What ``eval_loader`` would evaluate on. Raises as it does."""
    if (stream := streamed(data)) is not None:
        own_size = stream.settings.get("batch_size") if isinstance(stream, IterableStream) else None
        return stream.plan(batch_size=own_size or batch_size, shuffle=False, drop_last=False)
    return read_eval_source(data, batch_size=batch_size, seed=0, loader_workers=0).plan


def streamed(data: Any) -> Streamed | None:
    """Data that forms its batches itself; None for what has random access."""
    if isinstance(data, Streamed):
        return data
    return iterable(data) if is_iterable(data) else None
