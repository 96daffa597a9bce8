"""A small regression in float64 that the distributed tests share, its plain single-process loop, and ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from raytrain import Task, TrainConfig
from raytrain.data import Order
from raytrain.report import Report, Row
from raytrain.runtime import LocalRuntime, StopFlag
from raytrain.storage import Storage
from raytrain.work import Job, work

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def rows(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs ``[N, 4]``, targets ``[N, 1]`` and weights ``[N]`` between 0 and 6, some of them 0."""
    g = torch.Generator().manual_seed(7)
    x = torch.randn(num_rows, 4, generator=g, dtype=torch.float64)
    y = torch.randn(num_rows, 1, generator=g, dtype=torch.float64)
    return x, y, torch.randint(0, 7, (num_rows,), generator=g)


def network() -> nn.Module:
    """A small network with fixed weights."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


@dataclass(frozen=True)
class Toy(Task):
    """The regression as a task; ``weighted`` counts each row ``weights`` times, as tokens are counted."""

    num_rows: int = 26
    optimizer_name: str = "sgd"
    weighted: bool = False
    dropout: float = 0.0
    fail_rank: int = -1
    fail_step: int = -1

    def model(self) -> nn.Module:
        net = network()
        return nn.Sequential(net, nn.Dropout(self.dropout)) if self.dropout else net

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](model.parameters())

    def train_data(self) -> TensorDataset:
        return TensorDataset(*rows(self.num_rows))

    def eval_data(self) -> TensorDataset:
        return TensorDataset(*rows(5))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, weights = batch
        squares = ((model(x) - y) ** 2).squeeze(1)
        if self.weighted:
            return (squares * weights).sum(), weights.sum()
        return squares.mean(), {"seen": (len(x), 1)}


@dataclass
class Outcome:
    """What one rank saw: the reports (rank 0 only) and the weights of the newest checkpoint."""

    weights: dict[str, torch.Tensor]
    rows: Sequence[Row]
    reports: list[Report] = field(default_factory=list)
    step: int = 0


def train_here(task: Task, train: TrainConfig, folder: str, stop: StopFlag | None = None) -> Outcome:
    """Train on the ranks of the present process group; the outcome is read back from the run's folder."""
    from raytrain import history
    from raytrain.checkpoint import CheckpointStore

    reports: list[Report] = []
    storage = Storage(folder)
    work(Job(task, train, storage, 2, 1, False), LocalRuntime(reports.append, stop or StopFlag(), False))
    chosen, _ = CheckpointStore(storage.child("checkpoints")).choose()
    assert chosen is not None
    return Outcome(chosen.load_state("model"), history.read(storage), reports, chosen.step)


def series(outcome: Outcome, metric: str) -> list[tuple[int, float]]:
    """(step, value) of a metric."""
    return [(row.step, row.values[metric]) for row in outcome.rows if metric in row.values]


def without_times(rows: Sequence[Row]) -> list[Row]:
    """The rows without wall-clock values, which no two runs share."""
    return [replace(r, values={k: v for k, v in r.values.items() if not k.startswith("time/")}) for r in rows]


def plain_loop(
    num_rows: int, batch_size: int, num_epochs: int, optimizer_name: str, weighted: bool, max_steps: int = 10**9
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The oracle: one process, one tensor, torch only. Final weights and the loss of each step."""
    x, y, weights = rows(num_rows)
    model = network()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    order, losses = Order(num_rows, seed=0, shuffle=True), []
    for epoch in range(num_epochs):
        for start in range(0, num_rows, batch_size):
            if len(losses) == max_steps:
                break
            i = torch.as_tensor(order.slice(epoch, start, min(start + batch_size, num_rows)))
            squares = ((model(x[i]) - y[i]) ** 2).squeeze(1)
            loss = (squares * weights[i]).sum() / weights[i].sum() if weighted else squares.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict(), losses


def assert_equal_weights(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float = 1e-12) -> None:
    """Equal to the given relative tolerance of the largest weight, and of the same names."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        worst = (got[name] - tensor).abs().max().item() / tensor.abs().max().item()
        assert worst <= rtol, f"{name} differs by {worst:.3e}"


def folder_in(tmp: Path, *parts: object) -> str:
    """A folder for one run."""
    return str(tmp.joinpath(*map(str, parts)))
