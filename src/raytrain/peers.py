"""Agreement between ranks: small collectives on the CPU, apart from the gradients' own.

They run on gloo even when gradients travel by NCCL, so that no collective here waits for a GPU.
"""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from raytrain.errors import RaytrainError


class Peers:
    """The ranks of one training process group. With one rank nothing is sent.

    Every method is a collective: all ranks must call the same ones in the same order.
    """

    def __init__(self, timeout_s: float = 1800.0) -> None:
        active = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if active else 0
        self.world_size = dist.get_world_size() if active else 1
        self._group: dist.ProcessGroup | None = None
        if self.world_size > 1:
            timeout = datetime.timedelta(seconds=timeout_s)
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, vector: torch.Tensor) -> torch.Tensor:
        """The vectors of all ranks: ``[n]`` float64 on the CPU -> ``[world_size, n]`` in the order of ranks."""
        if self.world_size == 1:
            return vector.unsqueeze(0)
        rows = torch.empty(self.world_size, vector.numel(), dtype=vector.dtype)
        dist.all_gather(list(rows.unbind(0)), vector, group=self._group)
        return rows

    def gather_objects(self, value: Any) -> list[Any]:
        """The (picklable) values of all ranks, in the order of ranks."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def from_main(self, value: Any) -> Any:
        """Rank 0's (picklable) value, on all ranks."""
        if self.world_size == 1:
            return value
        box = [value if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Do something on rank 0 alone; all ranks get its result, or its error.

        Raises:
            RaytrainError: It failed on rank 0 (there, the error itself is raised).
        """
        outcome: tuple[Any, str] = (None, "")
        error: Exception | None = None
        if self.rank == 0:
            try:
                outcome = (work(), "")
            except Exception as caught:
                error, outcome = caught, (None, f"{type(caught).__name__}: {caught}")
        value, text = self.from_main(outcome)
        if error is not None:
            raise error
        if text:
            raise RaytrainError(f"rank 0 failed: {text}")
        return value

    def add_up(self, value: torch.Tensor) -> dist.Work | None:
        """Start summing a scalar tensor on the CPU over all ranks in place; wait on what comes back."""
        if self.world_size == 1:
            return None
        work: dist.Work | None = dist.all_reduce(value, group=self._group, async_op=True)
        return work

    def same_on_all(self, name: str, value: object) -> None:
        """Stop all ranks when they disagree on a value that must be the same.

        Raises:
            RaytrainError: The values differ; each rank's is named.
        """
        values = self.gather_objects(value)
        if len({pickle.dumps(v) for v in values}) > 1:
            listed = ", ".join(f"rank {rank}: {v!r}" for rank, v in enumerate(values))
            raise RaytrainError(f"{name} must be the same on all ranks, but is {listed}.")
