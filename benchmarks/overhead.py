"""What raytrain's loop adds to a bare torch loop: one process, the same model, data, batches and steps.

python benchmarks/overhead.py            a table as Markdown; about two minutes on two cores
python benchmarks/overhead.py --rounds 1 --steps 200     a smoke test

The two loops alternate (A B A B ...). Both end with the same loss, to the last bits that the order of sums allows.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from raytrain import Task, TrainConfig
from raytrain.report import Report
from raytrain.runtime import LocalRuntime, StopFlag
from raytrain.storage import Storage
from raytrain.work import Job, work

ROWS, BATCH = 65_536, 256


class Items(Dataset[tuple[torch.Tensor, ...]]):
    """The same rows as a dataset that is asked for one item at a time."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self.data[index]


def rows() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(ROWS, 64, generator=g), torch.randint(0, 10, (ROWS,), generator=g))


def network(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


class Narrow(Task):
    """A small classifier, so that what is not the step shows."""

    width, items = 256, False

    def model(self) -> nn.Module:
        return network(self.width)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    def train_data(self) -> Any:
        return Items(rows()) if self.items else rows()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


def bare(task: Narrow, steps: int) -> tuple[float, float]:
    """(seconds per step, final loss) of the loop that tutorials show, with the loss read at each 10th step."""
    model, data = task.model(), task.train_data()
    optimizer = task.optimizer(model)
    loader, done, loss = DataLoader(data, batch_size=BATCH), 0, torch.tensor(0.0)
    began = 0.0
    while done < steps + 20:
        for batch in loader:
            if done == 20:
                began = time.perf_counter()
            loss = task.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done % 10 == 0:
                loss.item()
            if done == steps + 20:
                break
    return (time.perf_counter() - began) / steps, loss.item()


def ours(task: Narrow, steps: int) -> tuple[float, float]:
    """The same through raytrain: every value logged, a row each 10th step, gradient norm and rates included."""
    times: list[float] = []

    class Timed(Narrow):
        width, items = task.width, task.items

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return super().loss(model, batch)

    reports: list[Report] = []
    config = TrainConfig(steps=steps + 21, batch_size=BATCH, shuffle=False, checkpoint_every=None)
    with tempfile.TemporaryDirectory() as folder:
        work(Job(Timed(), config, Storage(folder), 1, 1, False), LocalRuntime(reports.append, StopFlag(), False))
    losses = [row.values["train/loss"] for report in reports for row in report.rows if "train/loss" in row.values]
    return (times[steps + 20] - times[20]) / steps, losses[-1]


def compare(name: str, task: Narrow, steps: int, rounds: int) -> str:
    """One line of the table: medians and the spread of the ratios of neighbouring rounds."""
    pairs = [(bare(task, steps)[0], ours(task, steps)[0]) for _ in range(rounds)]
    one, other = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in pairs)
    return (
        f"| {name} | {one:.0f} | {other:.0f} | {other - one:+.0f} | {statistics.median(ratios):.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, 1 thread,"
    )
    print(
        f"batch {BATCH} of 64 float32, {args.steps} steps, {args.rounds} rounds in alternation; microseconds per step\n"
    )
    print("| workload | bare loop | raytrain | difference | ratio, median (spread) |\n|---|---|---|---|---|")
    for name, width, items in (
        ("tensors, MLP 64-256-10", 256, False),
        ("items, MLP 64-256-10", 256, True),
        ("tensors, MLP 64-2048-10", 2048, False),
    ):
        task = type("Case", (Narrow,), {"width": width, "items": items})()
        print(compare(name, task, args.steps, args.rounds), flush=True)


if __name__ == "__main__":
    main()
