"""What data is that has no random access, and what any loader offers to the training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader

from raytrain.data.batch import Batch
from raytrain.data.source import DataPlan


class TrainBatches(Protocol):
    """The micro-batches of one rank, epoch after epoch, from any position.

    Attributes:
        plan: What is trained on.
    """

    plan: DataPlan

    @property
    def steps_per_epoch(self) -> int | None:
        """Global batches per epoch; None when it is not known beforehand: batches then say ``ends_epoch``."""

    def batches(self, epoch: int, index: int, stop: int | None = None) -> Iterator[Batch]:
        """Batches from global batch ``index`` of an epoch on, over the ends of epochs; None: without end."""

    def adopt(self, adopted_by: Callable[[DataLoader[Any]], DataLoader[Any]]) -> None:
        """Let the surroundings see torch's loader, where there is one."""

    def close(self) -> None:
        """End processes and threads that read."""


class EvalBatches(Protocol):
    """The evaluation batches of one rank.

    Attributes:
        plan: What is evaluated.
    """

    plan: DataPlan

    def batches(self) -> Iterator[Batch]:
        """This rank's batches; ``index`` is the batch's place in the whole set."""

    def close(self) -> None:
        """End processes and threads that read."""


class Streamed(ABC):
    """Data that is read in passing and forms its batches itself."""

    @abstractmethod
    def plan(self, *, batch_size: int | None, shuffle: bool | None, drop_last: bool | None) -> DataPlan:
        """What an epoch of it is; None leaves a choice to it. Raises DataError when there is nothing to train on."""

    @abstractmethod
    def train_loader(
        self, plan: DataPlan, *, accumulate: int, rank: int, world_size: int, seed: int, loader_workers: int
    ) -> TrainBatches:
        """This rank's training batches."""

    @abstractmethod
    def eval_loader(self, plan: DataPlan, *, rank: int, world_size: int, seed: int, loader_workers: int) -> EvalBatches:
        """This rank's evaluation batches."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Plain facts for the run's record: ``source``, ``schema``, ``digest``."""
