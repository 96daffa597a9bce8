"""One pass over a dataset that is iterated: under random streams of its own, checked against the length that was said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

from raytrain.data.detect import parts_of
from raytrain.data.draws import seed_streams
from raytrain.data.fetch import failure
from raytrain.data.randomness import Streams, iterating
from raytrain.errors import DataError


def tell_epoch(data: Any, epoch: int) -> None:
    """Call ``set_epoch``, where there is one."""
    if callable(getattr(data, "set_epoch", None)):
        data.set_epoch(epoch)


def wrong_length(name: str, said: int, found: str, epoch: int) -> DataError:
    """The error for an epoch that is not as long as was said."""
    return DataError(
        f"{name} was said to have {said} samples, but yielded {found} in epoch {epoch}. They must agree, in each epoch: correct "
        "__len__, or num_rows of raytrain.data.iterable."
    )


class Pass:
    """An epoch of a dataset that all ranks read: under streams seeded by (seed, epoch), as are those that it keeps to itself.

    Args:
        num_rows: Samples that it must have; None when that is not known.
    """

    def __init__(self, dataset: Any, num_rows: int | None, seed: int, epoch: int) -> None:
        self._num_rows, self._epoch = num_rows, epoch
        self._name = type(dataset).__name__
        self._streams = Streams(iterating(seed, epoch))
        self._count = 0
        with self._guarded():
            tell_epoch(dataset, epoch)
            seed_streams(parts_of(dataset), seed, epoch)
            self._iterator = iter(dataset)

    def chunks(self, size: int, drop_last: bool) -> Iterator[tuple[list[Any], bool]]:
        """``size`` samples at a time, and whether the epoch ends with them.

        Raises:
            DataError: There are more or fewer samples than was said, or none that make a chunk; or the user's code failed.
        """
        here = self._upto(size)
        if not here:
            raise DataError(
                f"{self._name} is empty in epoch {self._epoch}: 0 samples. Check what it reads; __iter__ must begin anew each time "
                "that it is called."
            )
        if drop_last and len(here) < size:
            raise DataError(
                f"{self._name} yielded {len(here)} samples in epoch {self._epoch}, which make no full batch of {size} (drop_last "
                f"is on). Set train.batch_size to {len(here)} or less, or train.drop_last=false."
            )
        while here:
            after = self._upto(size) if len(here) == size else []
            after = after if not drop_last or len(after) == size else []
            yield here, not after
            here = after

    def _upto(self, size: int) -> list[Any]:
        with self._guarded():
            samples = []
            for sample in islice(self._iterator, size):
                samples.append(sample)
                self._count += 1
        said = self._num_rows
        if said is not None and self._count > said:
            raise wrong_length(self._name, said, f"at least {self._count}", self._epoch)
        if said is not None and len(samples) < size and self._count < said:
            raise wrong_length(self._name, said, f"only {self._count}", self._epoch)
        return samples

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            with self._streams:
                yield
        except DataError:
            raise
        except Exception as error:
            raise failure(f"sample {self._count} of {self._name} in epoch {self._epoch}", error) from error
