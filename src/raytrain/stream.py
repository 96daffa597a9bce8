"""The endless batches of one loader on their way to the device, with the position of the next one."""

from __future__ import annotations

import torch

from raytrain.data import Batch, TrainBatches
from raytrain.data.device import ahead
from raytrain.errors import RaytrainError
from raytrain.keeper import Cursor


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
            ends = batch.index + 1 == self.steps_in(batch.epoch)
            self._next = (batch.epoch + 1, 0) if ends else (batch.epoch, batch.index + 1)
        return batch

    def steps_in(self, epoch: int) -> int:
        """Global batches in an epoch."""
        return self._loader.steps_per_epoch

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()
