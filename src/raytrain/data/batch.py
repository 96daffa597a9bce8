"""A micro-batch with its place in the run and its share of the gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from raytrain.data.order import Indices


@dataclass(frozen=True)
class Batch:
    """Rows of one rank, one micro-batch of one global batch.

    Attributes:
        data: What the dataset and collate function made.
        epoch: Epoch, from 0.
        index: Global batch within the epoch, from 0.
        micro: Micro-batch within this rank's share, from 0.
        num_micros: Micro-batches per global batch, the same on all ranks.
        num_rows: Samples in ``data``; 0 when they are borrowed so that all ranks pass the same collectives.
        global_rows: Samples of the global batch over all ranks and micro-batches.
        world_size: Number of ranks.
        ends_epoch: The epoch ends with this global batch; told by data whose number of steps is not known beforehand.
    """

    data: Any
    epoch: int
    index: int
    micro: int
    num_micros: int
    num_rows: int
    global_rows: int
    world_size: int
    ends_epoch: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the optimizer steps after this micro-batch."""
        return self.micro == self.num_micros - 1

    @property
    def scale(self) -> float:
        """Multiply the mean loss by this before the backward pass: DDP's average over ranks is then exact."""
        return self.num_rows * self.world_size / self.global_rows

    def with_data(self, data: Any) -> Batch:
        """The same place with other data (on a device, say)."""
        return replace(self, data=data)


@dataclass(frozen=True)
class Slot:
    """Which samples a micro-batch holds, before they are fetched.

    Attributes:
        indices: Samples to fetch: its own, or borrowed ones when ``num_rows`` is 0.
        rank: The rank that fetches; with the place it names the random streams of the fetch.
    """

    indices: Indices
    epoch: int
    index: int
    micro: int
    num_micros: int
    num_rows: int
    global_rows: int
    world_size: int
    rank: int
    ends_epoch: bool = False

    def filled(self, data: Any) -> Batch:
        """The batch with what was fetched."""
        place = self.epoch, self.index, self.micro, self.num_micros
        return Batch(data, *place, self.num_rows, self.global_rows, self.world_size, self.ends_epoch)
