"""Numbers of each rank, told to all while the work goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Table = list[list[int]]  # the numbers of each rank


class Counts:
    """A few whole numbers of each rank. Made and used in the same order on all ranks.

    Args:
        alone: The other ranks are not asked: each has the same numbers.
    """

    def __init__(self, world_size: int, alone: bool = False) -> None:
        self._world_size = world_size
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 and not alone else None
        self._own: list[int] = []
        self._all: list[torch.Tensor] = []
        self._under_way: Any = None

    def tell(self, numbers: Sequence[int]) -> None:
        """Send this rank's numbers; waits for nothing but what was told before and never heard."""
        self.settle()
        self._own = list(numbers)
        if self._group is not None:
            own = torch.tensor(self._own)
            self._all = [torch.empty_like(own) for _ in range(self._world_size)]
            self._under_way = dist.all_gather(self._all, own, group=self._group, async_op=True)

    def hear(self) -> Table:
        """The numbers of all ranks."""
        if self._group is None:
            return [self._own] * self._world_size
        self.settle()
        return [numbers.tolist() for numbers in self._all]

    def settle(self) -> None:
        """Wait for what is under way: a rank that leaves before would be missed by the others."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None

    def lent(self, source: int, value: Any) -> Any:
        """A value of one rank, on all."""
        box = [value]
        if self._group is not None:
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]
