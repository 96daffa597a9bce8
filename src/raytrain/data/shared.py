"""An iterable dataset that all ranks read: each keeps its share of every global batch, and they see that they read the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raytrain.data.batch import Batch, Slot
from raytrain.data.counts import Counts, Table
from raytrain.data.fetch import NO_INDICES, failure, passed
from raytrain.data.order import share
from raytrain.data.passes import Pass
from raytrain.data.randomness import fetching
from raytrain.data.rows import fingerprint
from raytrain.data.source import DataPlan
from raytrain.errors import DataError

if TYPE_CHECKING:
    from raytrain.data.iterables import IterableStream

Made = tuple[int, list[Batch]]  # a fingerprint of a global batch, and this rank's micro-batches of it
_NOT_KEPT = ("batch_size", "drop_last", "collate_fn", "persistent_workers", "worker_init_fn", "num_workers")


class SharedLoader:
    """Every rank reads all samples, and collates its share of each global batch.

    Attributes:
        plan: What is trained on.
        steps_per_epoch: Global batches per epoch; None when it is not known beforehand.
    """

    def __init__(
        self,
        stream: IterableStream,
        plan: DataPlan,
        accumulate: int,
        rank: int,
        world_size: int,
        seed: int,
        settings: Mapping[str, Any],
    ) -> None:
        self.plan, self.steps_per_epoch = plan, plan.steps_per_epoch
        self._stream, self._seed, self._settings = stream, seed, settings
        self._accumulate, self._rank, self._world_size = accumulate, rank, world_size
        self._counts = Counts(world_size, alone=not dist.is_initialized())
        self._running: Any = None

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from a position on, over the ends of epochs. What stands before it in the epoch is read and left out.

        Args:
            epoch: Epoch of the first batch.
            index: Global batch within it.
            stop: End after this many global batches; None for never.

        Raises:
            DataError: An epoch has more or fewer samples than was said, or none; or the ranks read different ones.
        """
        making = Making(self._stream, self.plan, self._accumulate, self._rank, self._world_size, self._seed)
        self._end_process()
        if not self._settings.get("num_workers"):
            return self._same(making.made(epoch, index, stop))
        self._running = in_one_process(making, (epoch, index, stop), self._settings)
        return self._same(self._running)

    def adopt(self, adopted_by: Callable[[Any], Any]) -> None:
        """Nothing to do: batches are made here."""

    def close(self) -> None:
        """End the process that reads, and wait for what is under way between the ranks."""
        self._counts.settle()
        self._end_process()

    def _end_process(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running._shutdown_workers()

    def _same(self, made: Iterator[Made]) -> Iterator[Batch]:
        """The micro-batches, once all ranks are known to have read the same; what they read next is told meanwhile."""
        coming = self._told(made)
        while coming:
            first = coming[0]
            check_same(self._counts.hear(), f"as global batch {first.index} of epoch {first.epoch}")
            after = [] if first.ends_epoch else self._told(made)  # the next epoch is not begun before it is asked for
            yield from coming
            coming = after or self._told(made)

    def _told(self, made: Iterator[Made]) -> list[Batch]:
        mark, batches = next(made, (0, []))
        if batches:
            first = batches[0]
            self._counts.tell([first.global_rows, mark, int(first.ends_epoch)])
        return batches


class Making:
    """Makes a rank's micro-batches, in whatever process it runs."""

    def __init__(
        self, stream: IterableStream, plan: DataPlan, accumulate: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.stream, self._plan, self._seed = stream, plan, seed
        self._accumulate, self._rank, self._world_size = accumulate, rank, world_size

    def made(self, epoch: int, index: int, stop: int | None) -> Iterator[Made]:
        """The global batches from a position on."""
        while stop is None or stop > 0:
            samples = Pass(self.stream.dataset, self.stream.num_rows, self._seed, epoch)
            at = 0
            for at, (rows, ends) in enumerate(samples.chunks(self._plan.batch_size, self._plan.drop_last)):
                if at < index:
                    continue
                mark = fingerprint(rows[0]) if self._world_size > 1 else 0
                yield mark, list(self._share(rows, epoch, at, ends))
                stop = stop if stop is None else stop - 1
                if stop == 0:
                    return
            if at < index:
                raise DataError(
                    f"{type(self.stream.dataset).__name__} yielded {at + 1} batches in epoch {epoch}, but the run had trained "
                    f"on {index} of that epoch when its checkpoint was made. The data must be the same when a run goes on."
                )
            epoch, index = epoch + 1, 0

    def _share(self, samples: list[Any], epoch: int, index: int, ends: bool) -> Iterator[Batch]:
        rows, world_size = len(samples), self._world_size
        start, stop = share(rows, self._rank, world_size)
        num_micros = min(self._accumulate, -(-rows // world_size))
        for micro in range(num_micros):
            first, last = share(stop - start, micro, num_micros)
            own = samples[start + first : start + last]
            slot = Slot(NO_INDICES, epoch, index, micro, num_micros, len(own), rows, world_size, self._rank, ends)
            yield collated(self.stream, slot, own or samples[:2], self._seed)


class SharedEvalLoader:
    """Every rank reads all samples, and collates every world_size-th batch.

    Attributes:
        plan: What is evaluated.
    """

    def __init__(self, stream: IterableStream, plan: DataPlan, rank: int, world_size: int, seed: int) -> None:
        self.plan = plan
        self._stream, self._rank, self._world_size, self._seed = stream, rank, world_size, seed
        self._counts = Counts(world_size, alone=not dist.is_initialized())
        self._seen = [0, 0]

    def batches(self) -> Iterator[Batch]:
        """This rank's batches; ``index`` is the batch's place in the whole set."""
        self._seen = [0, 0]
        samples = Pass(self._stream.dataset, self._stream.num_rows, self._seed, 0)
        for index, (rows, _) in enumerate(samples.chunks(self.plan.batch_size, drop_last=False)):
            mark = fingerprint(rows[0]) if self._world_size > 1 else 0
            self._seen = [self._seen[0] + len(rows), (self._seen[1] * 31 + mark) % (1 << 62)]
            if index % self._world_size == self._rank:
                slot = Slot(NO_INDICES, 0, index, 0, 1, len(rows), len(rows), 1, 0)
                yield collated(self._stream, slot, rows, self._seed)

    def check(self) -> None:
        """See that all ranks have read the same, once they have read it. A collective.

        Raises:
            DataError: They have not.
        """
        self._counts.tell([*self._seen, 1])
        check_same(self._counts.hear(), "for evaluation")

    def close(self) -> None:
        """Nothing is left running."""


def check_same(table: Table, what: str) -> None:
    """See that all ranks have read the same.

    Raises:
        DataError: They have not; on all ranks.
    """
    if all(numbers == table[0] for numbers in table):
        return
    each = "; ".join(
        f"rank {rank}: {rows} samples, fingerprint {mark & 0xFFFFFFFF:08x}{', the last' if ends else ''}"
        for rank, (rows, mark, ends) in enumerate(table)
    )
    raise DataError(
        f"the ranks read different samples {what} ({each}), so that some would count twice and others never. Either the dataset "
        "gives each rank samples of its own: then say so by raytrain.data.own_shards(dataset). Or it draws random numbers from a "
        "source of its own: then use torch's, numpy's or random's global streams, which raytrain seeds by (seed, epoch), or have "
        "a set_epoch()."
    )


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


def in_one_process(making: Making, place: tuple[int, int, int | None], settings: Mapping[str, Any]) -> Any:
    """torch's iterator over what is made in a single loader process: more of them would each read the whole stream."""
    kept = {name: value for name, value in settings.items() if name not in _NOT_KEPT}
    begun = _Begun(settings.get("worker_init_fn"))
    return iter(
        DataLoader(
            _Made(making, place), batch_size=None, num_workers=1, collate_fn=passed, worker_init_fn=begun, **kept
        )
    )


class _Made(IterableDataset[Made]):
    """What is made, for torch's loader process."""

    def __init__(self, making: Making, place: tuple[int, int, int | None]) -> None:
        self.making, self._place = making, place

    def __iter__(self) -> Iterator[Made]:
        return self.making.made(*self._place)


class _Begun:
    """The user's worker_init_fn, which finds the user's dataset where torch says that it is."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, _Made):
            object.__setattr__(info, "dataset", info.dataset.making.stream.dataset)
        if self._user is not None:
            self._user(worker)
