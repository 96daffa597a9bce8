"""Where a worker runs: its rank, its device, how its model is wrapped and how it speaks to the driver.

Two of them: ``LocalRuntime`` (this process, or one of torchrun's) here, and Ray Train's in ``ray_worker``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from raytrain.report import Report


@dataclass(frozen=True)
class Placement:
    """One worker among all: its ranks and its device."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device


class Runtime(Protocol):
    """What a session needs from its surroundings. All methods are called by the training thread."""

    placement: Placement

    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        """The model on its device, in DDP when there are several workers."""

    def adopt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Show a loader, whose sampling is settled already, to the surroundings."""

    def ready_to_report(self) -> bool:
        """Whether rank 0's next report would start at once."""

    def report(self, report: Report, means: Mapping[str, float]) -> None:
        """Send rank 0's report to the driver without waiting. All ranks call it, the same number of times."""

    def stop_requested(self) -> bool:
        """Whether the driver or a signal asked this worker to stop. Never waits."""

    def close(self) -> None:
        """Wait until all reports are with the driver; raise what failed on the way."""


class StopFlag:
    """A stop that anyone in the process may ask for; picklable never, thread-safe always."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.reason = ""

    def set(self, reason: str) -> None:
        """Ask for a stop; the first reason stays."""
        self.reason = self.reason or reason
        self._event.set()

    def is_set(self) -> bool:
        """Whether a stop was asked for."""
        return self._event.is_set()


class LocalRuntime:
    """Training in this process, alone or as a rank of torchrun. Reports go to a function, on rank 0."""

    def __init__(self, deliver: Callable[[Report], None], stop: StopFlag, use_gpu: bool) -> None:
        self._deliver = deliver
        self._stop = stop
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if dist.is_initialized() else 0
        device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(device)
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.placement = Placement(rank, world_size, local_rank, device)

    def wrap_model(self, model: nn.Module, ddp_options: Mapping[str, Any]) -> nn.Module:
        """The model on its device, in DDP when there are several workers."""
        model = model.to(self.placement.device)
        if self.placement.world_size == 1:
            return model
        device_ids = [self.placement.device] if self.placement.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, **ddp_options)

    def adopt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Nothing to do here."""
        return loader

    def ready_to_report(self) -> bool:
        """Always: a report is a call."""
        return True

    def report(self, report: Report, means: Mapping[str, float]) -> None:
        """Hand rank 0's report to the driver's collector."""
        if self.placement.rank == 0:
            self._deliver(report)

    def stop_requested(self) -> bool:
        """Whether a stop was asked for in this process."""
        return self._stop.is_set()

    def close(self) -> None:
        """Nothing is under way."""
