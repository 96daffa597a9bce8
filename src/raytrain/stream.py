"""The endless batches of one loader on their way to the device, with the position of the next one."""

from __future__ import annotations

import torch

from raytrain.data import Batch, TrainBatches
from raytrain.data.device import ahead
from raytrain.data.shards import ShardLoader
from raytrain.errors import ConfigError, RaytrainError
from raytrain.keeper import Cursor


def check_world(loader: TrainBatches, cursor: Cursor, before: int | None, now: int) -> None:
    """See that an epoch that is under way can go on with this number of workers.

    Raises:
        ConfigError: Each worker has samples of its own, and there were more or fewer workers.
    """
    if cursor.index and before not in (None, now) and isinstance(loader, ShardLoader) and not loader.any_world:
        raise ConfigError(
            f"the checkpoint was made by {before} workers in the middle of epoch {cursor.epoch}, and the training data gives each "
            f"worker samples of its own: {now} workers cannot tell which samples of that epoch are left. Go on with "
            f"scaling.num_workers = {before}; at the end of an epoch any number will do."
        )


class Stream:
    """The endless batches of one loader, with the position of the next one."""

    def __init__(self, loader: TrainBatches, cursor: Cursor, device: torch.device) -> None:
        self._loader = loader
        self._next = (cursor.epoch, cursor.index)
        self._batches = ahead(loader.batches(cursor.epoch, cursor.index), device)

    def stands_at(self, loader: TrainBatches, cursor: Cursor) -> bool:
        """Whether its next batch is the loader's at this position."""
        return loader is self._loader and self._next == (cursor.epoch, cursor.index)

    def next(self) -> Batch:
        """The next micro-batch, on the device.

        Raises:
            RaytrainError: There is none.
        """
        batch = next(self._batches, None)
        if batch is None:
            raise RaytrainError("the training data ended inside an epoch; its length must not change during the run.")
        if batch.is_last:
            self._next = (batch.epoch + 1, 0) if self.ends(batch) else (batch.epoch, batch.index + 1)
        return batch

    def ends(self, batch: Batch) -> bool:
        """Whether an epoch ends with this global batch."""
        steps = self._loader.steps_per_epoch
        return batch.ends_epoch if steps is None else batch.index + 1 == steps

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches in an epoch, where the data says so beforehand."""
        return self._loader.steps_per_epoch

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()
