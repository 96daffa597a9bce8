"""Iterable training data over processes: the plain loop's numbers, resumed anywhere, and never a hang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from raytrain import TrainConfig
from raytrain.data.randomness import Streams, iterating
from tests.dist.spawn import run_ranks
from tests.dist.toy import OPTIMIZERS, Outcome, Toy, assert_equal_weights, network, rows, series, train_here

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]


class Passing(IterableDataset[Any]):
    """The toy's rows in an order drawn anew in each epoch, without a length."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def order(self) -> list[int]:
        return torch.randperm(self.num_rows).tolist()

    def __iter__(self) -> Iterator[Any]:
        columns = rows(self.num_rows)
        for i in self.order():
            yield tuple(column[i] for column in columns)


@dataclass(frozen=True)
class Iterated(Toy):
    kind: type[Passing] = Passing

    def train_data(self) -> Any:
        return self.kind(self.num_rows)


def config(**limit: Any) -> TrainConfig:
    return TrainConfig(**{"batch_size": 8, "accumulate": 2, "log_every": "1st", "checkpoint_every": "1st", **limit})


def plain_loop(num_rows: int, num_epochs: int, max_steps: int = 10**9) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The oracle: one process over the same orders."""
    x, y, _ = rows(num_rows)
    model = network()
    optimizer, losses = OPTIMIZERS["adam"](model.parameters()), []
    for epoch in range(num_epochs):
        with Streams(iterating(0, epoch)):
            order = torch.randperm(num_rows)
        for i in order.split(8):
            if len(losses) == max_steps:
                break
            loss = ((model(x[i]) - y[i]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model.state_dict(), losses


def iterated(folder: str, num_rows: int, limit: dict[str, Any]) -> Outcome:
    return train_here(Iterated(num_rows=num_rows, optimizer_name="adam"), config(**limit), folder)


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_and_losses_equal_the_plain_loop(world_size: int, tmp_path: Path) -> None:
    outcome = run_ranks(world_size, iterated, str(tmp_path), 25, {"epochs": 3})[0]
    weights, losses = plain_loop(25, 3)
    assert_equal_weights(outcome.weights, weights)
    assert [value for _, value in series(outcome, "train/loss")] == pytest.approx(losses, rel=1e-12)
    assert [step for step, _ in series(outcome, "val/loss")] == [4, 8, 12]  # at the ends of epochs of unknown length
    assert [step for step, _ in series(outcome, "train/loss_epoch")] == [4, 8, 12]
    assert [row.epoch for row in outcome.rows if "train/loss" in row.values][:6] == [0, 0, 0, 1, 1.25, 1.5]


def test_resumed_in_mid_epoch_on_other_numbers_of_workers(tmp_path: Path) -> None:
    for steps, world_size in ((2, 2), (5, 1), (12, 2)):
        outcome = run_ranks(world_size, iterated, str(tmp_path), 25, {"steps": steps})[0]
    weights, losses = plain_loop(25, 3)
    assert_equal_weights(outcome.weights, weights)
    assert [value for _, value in series(outcome, "train/loss")] == pytest.approx(losses, rel=1e-12)


class Unseeded(Passing):
    """Draws from a source that nobody can seed."""

    def order(self) -> list[int]:
        return np.random.default_rng().permutation(self.num_rows).tolist()  # type: ignore[no-any-return]


class Dealt(Passing):
    """Every rank has rows of its own, but nobody has said so."""

    def order(self) -> list[int]:
        return list(range(self.num_rows))[dist.get_rank() :: dist.get_world_size()]


@dataclass(frozen=True)
class EvalDealt(Iterated):
    """Only the evaluation data is dealt."""

    def eval_data(self) -> Any:
        return Dealt(9)


TASKS = {"unseeded": Iterated(kind=Unseeded), "dealt": Iterated(kind=Dealt), "evaluation": EvalDealt()}


def differing(folder: str) -> dict[str, str]:
    said = {}
    for name, task in TASKS.items():
        with pytest.raises(Exception, match="DataError") as caught:
            train_here(task, config(epochs=1), f"{folder}/{name}")
        said[name] = str(caught.value)
    return said


def test_ranks_that_read_different_samples_are_told_so(tmp_path: Path) -> None:
    for said in run_ranks(2, differing, str(tmp_path)):
        for name, text in said.items():
            place = "for evaluation" if name == "evaluation" else "as global batch 0 of epoch 0 (rank 0: 8 samples"
            assert f"the ranks read different samples {place}" in text
            assert "own_shards(dataset)" in text
