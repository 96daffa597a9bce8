"""G2 and G6: a run that is killed at any step and started again equals the unbroken one, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain import TrainConfig
from raytrain.data import Order
from raytrain.report import Row
from tests.dist.spawn import run_ranks
from tests.dist.toy import Outcome, Toy, assert_equal_weights, series, train_here, without_times

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

# 24 rows in global batches of 8: 3 steps an epoch, 6 in all. Dropout and Adam make streams and moments count.
TASK = Toy(num_rows=24, optimizer_name="adam", dropout=0.3)
CONFIG = TrainConfig(epochs=2, batch_size=8, log_every="2st", checkpoint_every="1st", ema_decay=0.9, schedule="cosine")


class Killed(Exception):
    """The fault that the tests put into a step."""


class Fragile(Toy):
    """Raises at a given step, before its backward pass."""

    def loss(self, model: Any, batch: Any) -> Any:
        if self.fail_step >= 0:
            counts[0] += 1
            if counts[0] > self.fail_step:
                raise Killed
        return super().loss(model, batch)


counts = [0]


def unbroken(folder: str) -> tuple[dict[str, torch.Tensor], list[Row]]:
    outcome = train_here(TASK, CONFIG, folder)
    return outcome.weights, without_times(outcome.rows)


def broken_at_each_step(folder: str) -> list[tuple[dict[str, torch.Tensor], list[Row]]]:
    """For each of the 6 steps: die in it, start again, finish."""
    outcomes = []
    for fail_step in range(6):
        counts[0] = 0
        fragile = Fragile(**{**vars(TASK), "fail_step": fail_step})
        place = f"{folder}/{fail_step}"
        with pytest.raises(Exception, match="Killed"):
            train_here_without_eval(fragile, place)
        outcome = train_here(TASK, replace(CONFIG, eval_every=None), place)
        outcomes.append((outcome.weights, without_times(outcome.rows)))
    return outcomes


def train_here_without_eval(task: Toy, folder: str) -> Outcome:
    return train_here(task, replace(CONFIG, eval_every=None), folder)


def unbroken_without_eval(folder: str) -> tuple[dict[str, torch.Tensor], list[Row]]:
    outcome = train_here_without_eval(TASK, folder)
    return outcome.weights, without_times(outcome.rows)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_killed_at_any_step_ends_like_the_unbroken_one(world_size: int, tmp_path: Path) -> None:
    weights, rows = run_ranks(world_size, unbroken_without_eval, str(tmp_path / "whole"))[0]
    assert [row.step for row in rows] == [2, 3, 4, 6]
    for fail_step, (again, again_rows) in enumerate(run_ranks(world_size, broken_at_each_step, str(tmp_path))[0]):
        assert again_rows == rows, f"history after a kill in step {fail_step + 1}"
        for name, tensor in weights.items():
            assert torch.equal(again[name], tensor), f"{name} after a kill in step {fail_step + 1}"


class Recorder(Toy):
    """Keeps which rows each step saw."""

    def train_data(self) -> Any:
        from torch.utils.data import TensorDataset

        return TensorDataset(torch.arange(self.num_rows))

    def eval_data(self) -> Any:
        return None

    def loss(self, model: Any, batch: Any) -> Any:
        seen.append(batch[0].tolist())
        return model(torch.ones(1, 4, dtype=torch.float64)).sum()


seen: list[list[int]] = []


def steps_of(folder: str, steps: int, num_rows: int, batch_size: int) -> list[list[int]]:
    """The rows of this rank in each step up to a number of steps; borrowed ones are not there at these sizes."""
    seen.clear()
    config = TrainConfig(steps=steps, batch_size=batch_size, checkpoint_every="1st", log_every="1st")
    train_here(Recorder(num_rows=num_rows), config, folder)
    return list(seen)


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    return [sum(parts, []) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("stop", [2, 8])  # in the first epoch, and in the second, whose order is another
def test_resumed_in_mid_epoch_each_row_is_seen_once_and_in_order(
    before: int, after: int, stop: int, tmp_path: Path
) -> None:
    num_rows, batch_size, steps = 24, 4, 12
    first = joined(run_ranks(before, steps_of, str(tmp_path), stop, num_rows, batch_size))
    second = joined(run_ranks(after, steps_of, str(tmp_path), steps, num_rows, batch_size))
    order = Order(num_rows, seed=0, shuffle=True)
    want = [order.slice(k // 6, k % 6 * 4, k % 6 * 4 + 4).tolist() for k in range(steps)]
    assert first + second == want


def resume_elsewhere(folder: str, steps: int) -> Outcome:
    config = TrainConfig(steps=steps, batch_size=8, checkpoint_every="1st", log_every="1st")
    return train_here(Toy(num_rows=24), config, folder)


def test_weights_after_a_change_of_workers_equal_the_unbroken_run(tmp_path: Path) -> None:
    whole = run_ranks(1, resume_elsewhere, str(tmp_path / "whole"), 8)[0]
    for steps, world_size in ((2, 2), (4, 1), (6, 3), (8, 2)):
        changed = run_ranks(world_size, resume_elsewhere, str(tmp_path / "changed"), steps)[0]
    assert_equal_weights(changed.weights, whole.weights)
    assert [s for s, _ in series(changed, "train/loss")] == list(range(1, 9))


def epochs_run(folder: str, epochs: int) -> tuple[int, int]:
    seen.clear()
    config = TrainConfig(epochs=epochs, batch_size=8, log_every="1st")
    outcome = train_here(Recorder(num_rows=24), config, folder)
    return len(seen), outcome.step


def test_exactly_the_epochs_that_are_left_are_run(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert [run_ranks(2, epochs_run, folder, epochs)[0] for epochs in (2, 4, 4)] == [(6, 6), (6, 12), (0, 12)]
