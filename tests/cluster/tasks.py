"""Tasks for the tests on Ray; in a module, as in a job's helper file."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import raytrain
from tests.dist.toy import Toy

calls: list[int] = []


class TwoArguments(Exception):
    """An error that pickle cannot make again: its constructor takes two arguments, its text is one."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what} because {why}")


@dataclass(frozen=True)
class Faulty(Toy):
    """Misbehaves on rank 1 before the backward pass of its fourth step."""

    fault: str = "none"
    marker: str = ""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        if model.training and len(calls) == 4 and _rank() == 1:
            if self.fault == "raise":
                raise TwoArguments("it broke", "of the test")
            if self.fault == "mlflow":
                import mlflow

                mlflow.log_metric("loss", 1.0)
            if self.fault == "kill" or (self.fault == "kill once" and not Path(self.marker).exists()):
                if self.marker:
                    Path(self.marker).touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_initialized() else 0


def chatty_loop(session: raytrain.Session) -> None:
    """Prints, and sees where it runs."""
    import ray.train

    context = ray.train.get_context()
    assert (context.get_world_rank(), context.get_world_size()) == (session.rank, session.world_size)
    print(f"hello from {session.rank}")
    session.note(f"seen by {session.world_size}")
