"""Datasets that give whole batches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from raytrain.data.order import Indices


class BatchDataset(Dataset[Any]):
    """A map-style dataset that makes a whole batch in one call, without a Python step per sample.

    Subclass it for any store that can gather rows. raytrain shuffles, shares out and resumes it as any other dataset; ``Subset``
    and ``random_split`` work on it.
    """

    @property
    def draws(self) -> bool:
        """Whether ``take`` may draw random numbers: its streams are then seeded for each batch, which takes 40 us."""
        return True

    @abstractmethod
    def __len__(self) -> int:
        """Samples."""

    @abstractmethod
    def take(self, indices: Indices) -> Any:
        """The batch of these samples, collated.

        Args:
            indices: ``[B]`` int64, each in ``[0, len(self))``; they may repeat.
        """

    def prepare(self) -> Any:
        """Called on each worker before the first batch, in the training process and so before any loader process."""

    def describe(self) -> dict[str, Any]:
        """Plain facts for the run's record: ``source``, ``schema``, ``digest``, where they are known."""
        return {}

    def __getitem__(self, index: int) -> Any:
        """A batch of one: for a look at the data."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.take(np.array([index % len(self)], np.int64))
