"""The endless batches of one loader on their way to the device, with the position of the next one."""

from __future__ import annotations

import torch

from raytrain.data import Batch, TrainLoader, move
from raytrain.errors import RaytrainError
from raytrain.keeper import Cursor


class Stream:
    """The endless batches of one loader, with the position of the next one."""

    def __init__(self, loader: TrainLoader, cursor: Cursor, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._next = (cursor.epoch, cursor.index)
        self._batches = loader.batches(cursor.epoch, cursor.index)

    def stands_at(self, loader: TrainLoader, cursor: Cursor) -> bool:
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
        return move_batch(batch, self._device)

    def steps_in(self, epoch: int) -> int:
        """Global batches in an epoch."""
        return self._loader.steps_per_epoch

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()


def move_batch(batch: Batch, device: torch.device) -> Batch:
    """The same batch with its data on the device; nothing to do on a CPU."""
    return batch if device.type == "cpu" else batch.with_data(move(batch.data, device, non_blocking=True))
