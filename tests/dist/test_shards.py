"""Cases A3, A4 and G3 on two gloo ranks: shards of unequal length, streams that all read; equal to a plain loop, and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from raytrain import TrainConfig
from raytrain.data import iterable
from tests.dist.spawn import run_ranks
from tests.dist.toy import OPTIMIZERS, Outcome, Toy, assert_equal_weights, network, rows, series, train_here

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

CONFIG = TrainConfig(epochs=2, batch_size=4, log_every="1st", checkpoint_every="1st")


class Part(IterableDataset[tuple[torch.Tensor, ...]]):
    """Rows of the toy regression: those that a rank is given, or all."""

    def __init__(self, total: int, by_rank: list[range] | None) -> None:
        self.total, self.by_rank = total, by_rank

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        x, y, weights = rows(self.total)
        for n in self.by_rank[dist.get_rank()] if self.by_rank else range(self.total):
            yield x[n], y[n], weights[n]


@dataclass(frozen=True)
class Sharded(Toy):
    """The regression on shards, or on one stream."""

    shards: tuple[tuple[int, int], ...] = ()
    said: int | None = None

    def train_data(self) -> Any:
        shards = [range(*shard) for shard in self.shards]
        return iterable(Part(self.num_rows, shards or None), own_shards=bool(shards), num_rows=self.said)

    def eval_data(self) -> Any:
        shards = [range(*shard) for shard in self.shards]
        return iterable(Part(self.num_rows, shards or None), own_shards=bool(shards))


def by_hand(batches: list[list[int]], weighted: bool, num_rows: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The oracle: plain torch on the given batches, twice. Weights, and the loss of each step."""
    x, y, weights = rows(num_rows)
    model = network()
    optimizer, losses = OPTIMIZERS["adam"](model.parameters()), []
    for batch in batches * 2:
        squares = ((model(x[batch]) - y[batch]) ** 2).squeeze(1)
        optimizer.zero_grad()
        loss = (squares * weights[batch]).sum() / weights[batch].sum() if weighted else squares.mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def trained(task: Sharded, config: TrainConfig, folder: str) -> Outcome:
    return train_here(task, config, folder)


def interrupted(task: Sharded, folder: str) -> Outcome:
    train_here(task, TrainConfig(**{**vars(CONFIG), "epochs": None, "steps": 2}), folder)
    return train_here(task, CONFIG, folder)


UNEVEN = ((0, 7), (7, 10))  # 7 and 3 rows in global batches of 4: rank 1 runs out
DEALT = [[0, 1, 7, 8], [2, 3, 4, 9], [5, 6]]  # even shares, then what is lacking comes from rank 0


@pytest.mark.parametrize(("weighted", "accumulate"), [(False, 1), (True, 2)])
def test_shards_of_unequal_length_train_each_row_once(weighted: bool, accumulate: int, tmp_path: Path) -> None:
    task = Sharded(num_rows=10, optimizer_name="adam", weighted=weighted, shards=UNEVEN)
    config = TrainConfig(**{**vars(CONFIG), "accumulate": accumulate})
    outcome = run_ranks(2, trained, task, config, str(tmp_path))[0]
    assert outcome.step == 6
    weights, losses = by_hand(DEALT, weighted, 10)
    assert_equal_weights(outcome.weights, weights)
    assert [v for _, v in series(outcome, "train/loss")] == pytest.approx(losses, rel=1e-12)  # borrowed rows do not count
    assert [value for _, value in series(outcome, "val/samples")] == [10.0, 10.0]


def test_a_run_on_shards_resumes_in_mid_epoch(tmp_path: Path) -> None:
    task = Sharded(num_rows=10, optimizer_name="adam", shards=UNEVEN)
    whole = run_ranks(2, trained, task, CONFIG, str(tmp_path / "whole"))[0]
    parts = run_ranks(2, interrupted, task, str(tmp_path / "parts"))[0]
    assert all(torch.equal(parts.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_one_stream_that_all_ranks_read_equals_the_plain_loop(world: int, tmp_path: Path) -> None:
    task = Sharded(num_rows=10, optimizer_name="adam")
    outcome = run_ranks(world, trained, task, CONFIG, str(tmp_path))[0]
    assert_equal_weights(outcome.weights, by_hand([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], False, 10)[0])


def message(task: Sharded, folder: str) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - its text is what is looked at
        train_here(task, CONFIG, folder)
    return str(caught.value)


def said_of(tasks: list[Sharded], folder: str) -> list[str]:
    return [message(task, f"{folder}/{number}") for number, task in enumerate(tasks)]


def test_what_is_wrong_with_shards_is_told_by_all_ranks_and_no_wait(tmp_path: Path) -> None:
    tasks = [
        Sharded(num_rows=10, shards=UNEVEN, said=12),
        Sharded(num_rows=10, shards=UNEVEN, said=9),
        Sharded(num_rows=10, shards=((0, 0), (10, 10))),
    ]
    for fewer, more, none in run_ranks(2, said_of, tasks, str(tmp_path)):
        assert "was said to have 12 samples, but yielded only 10 in epoch 0" in fewer
        assert "was said to have 9 samples, but yielded at least 10 in epoch 0" in more
        assert "epoch 0 has 0 samples on all 2 workers together" in none


EMPTY = [((0, 10), (10, 10)), ((0, 0), (0, 10))]


def with_an_empty_shard(folder: str) -> list[Outcome]:
    tasks = [Sharded(num_rows=10, optimizer_name="adam", shards=shards) for shards in EMPTY]
    return [train_here(task, CONFIG, f"{folder}/{number}") for number, task in enumerate(tasks)]


def test_a_rank_without_any_row_is_lent_one(tmp_path: Path) -> None:
    weights, losses = by_hand([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], False, 10)
    for outcome in run_ranks(2, with_an_empty_shard, str(tmp_path))[0]:
        assert_equal_weights(outcome.weights, weights)
        assert [v for _, v in series(outcome, "train/loss")] == pytest.approx(losses, rel=1e-12)


def test_an_epoch_of_shards_does_not_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    task = Sharded(num_rows=10, optimizer_name="adam", shards=UNEVEN)
    run_ranks(2, trained, task, TrainConfig(**{**vars(CONFIG), "epochs": None, "steps": 2}), str(tmp_path))
    (text,) = run_ranks(1, message, task, str(tmp_path))
    assert "made by 2 workers in the middle of epoch 0" in text
    assert "Go on with scaling.num_workers = 2" in text
