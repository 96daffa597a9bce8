"""The rows of data that gives each rank samples of its own: single samples of a dataset, or batches of another loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from raytrain.data.batch import Batch, Slot
from raytrain.data.fetch import failure, passed
from raytrain.data.order import key_of
from raytrain.data.passes import tell_epoch, wrong_length
from raytrain.data.randomness import Streams, iterating
from raytrain.data.rows import Rows, joined
from raytrain.data.shared import collated
from raytrain.errors import DataError

if TYPE_CHECKING:
    from raytrain.data.iterables import IterableStream

_NOT_KEPT = ("batch_size", "drop_last", "collate_fn", "persistent_workers")


class _Passing:
    """What is iterated anew in each epoch, under streams seeded by (seed, epoch), alike on all ranks.

    Alike, because a dataset may draw one order from them and take every n-th of it.
    """

    def __init__(self, source: Any, told: Any, seed: int) -> None:
        self._source, self._told, self._seed = source, told, seed
        self._iterator: Iterator[Any] = iter(())
        self._streams = Streams(0)
        self._ended = True

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._ended, self._streams = False, Streams(iterating(self._seed, epoch))
        with self._streams:
            tell_epoch(self._told, epoch)
            self._iterator = iter(self._source)

    def next(self) -> Any:
        """What comes next; None at the end."""
        if self._ended:
            return None
        try:
            with self._streams:
                for value in self._iterator:
                    return (value,)
        except Exception as error:
            raise failure(f"a sample of {type(self._told).__name__}", error) from error
        self._ended = True
        return None

    def close(self) -> None:
        """End loader processes."""
        running, self._iterator = self._iterator, iter(())
        if callable(getattr(running, "_shutdown_workers", None)):
            running._shutdown_workers()  # type: ignore[attr-defined]


class ItemRows:
    """This rank's own samples, in torch's loader processes where there are any: the dataset deals to them as well."""

    def __init__(self, stream: IterableStream, seed: int, settings: Mapping[str, Any]) -> None:
        self._stream, self._seed = stream, seed
        kept = {name: value for name, value in settings.items() if name not in _NOT_KEPT}
        self._generator = torch.Generator()
        source: Any = stream.dataset
        if kept.get("num_workers"):
            source = DataLoader(stream.dataset, batch_size=None, collate_fn=passed, generator=self._generator, **kept)
        self._passing = _Passing(source, stream.dataset, seed)
        self._waiting: list[Any] = []

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._waiting = []
        self._generator.manual_seed(key_of(self._seed, epoch) >> 1)
        self._passing.begin(epoch)

    def fill(self, count: int) -> int:
        """Have so many rows ready, or all that are left; returns how many there are."""
        while len(self._waiting) < count and (sample := self._passing.next()) is not None:
            self._waiting.append(sample[0])
        return len(self._waiting)

    def take(self, count: int) -> list[Any]:
        """So many of the rows that are ready."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        return taken

    def peek(self) -> list[Any]:
        """One or two of the rows that are ready, which stay."""
        return self._waiting[:2]

    def batch(self, rows: list[Any], slot: Slot) -> Batch:
        """Rows as a batch."""
        return collated(self._stream, slot, rows, self._seed)

    def wrong_length(self, found: str, epoch: int) -> DataError:
        """The error for an epoch that is not as long as was said."""
        return wrong_length(type(self._stream.dataset).__name__, self._stream.num_rows or 0, found, epoch)

    def close(self) -> None:
        """End loader processes."""
        self._passing.close()


class BatchRows:
    """The rows of batches that another loader makes for this rank; how many it puts into one does not matter."""

    def __init__(self, loader: Any, num_rows: int | None, seed: int) -> None:
        self._name, self._num_rows = type(loader).__name__, num_rows
        self._passing = _Passing(loader, loader, seed)
        self._waiting: list[Rows] = []
        self._empty: Any = ()

    def begin(self, epoch: int) -> None:
        """Start an epoch."""
        self._waiting = []
        self._passing.begin(epoch)

    def fill(self, count: int) -> int:
        """Have so many rows ready, or all that are left; returns how many there are."""
        ready = sum(map(len, self._waiting))
        while ready < count and (batch := self._passing.next()) is not None:
            rows = Rows(batch[0])
            if len(rows):
                self._waiting.append(rows)
            ready += len(rows)
        return ready

    def take(self, count: int) -> Any:
        """So many of the rows that are ready."""
        parts = []
        while count:
            first = self._waiting.pop(0)
            parts.append(first[:count])
            if len(first) > count:
                self._waiting.insert(0, first[count:])
            count -= len(parts[-1])
        return joined(parts) if parts else self._empty

    def peek(self) -> Rows:
        """One or two of the rows that are ready, which stay."""
        return self._waiting[0][:2]

    def batch(self, rows: Rows, slot: Slot) -> Batch:
        """Rows as a batch."""
        return slot.filled(rows.data)

    def wrong_length(self, found: str, epoch: int) -> DataError:
        """The error for an epoch that is not as long as was said."""
        return wrong_length(self._name, self._num_rows or 0, found, epoch)

    def close(self) -> None:
        """It is the user's."""
