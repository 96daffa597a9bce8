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

    def train_data(self) -> Any:
        shards = [range(*shard) for shard in self.shards]
        return iterable(Part(self.num_rows, shards or None), own_shards=bool(shards))

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


def test_an_empty_shard_is_an_error_on_all_ranks_and_no_wait(tmp_path: Path) -> None:
    task = Sharded(num_rows=10, shards=((0, 10), (10, 10)))
    for text in run_ranks(2, message, task, str(tmp_path)):
        assert "rank 1 of 2 got no samples at all" in text


def test_shards_that_make_fewer_rows_than_said_end_all_ranks(tmp_path: Path) -> None:
    task = Sharded(num_rows=12, shards=UNEVEN)
    for text in run_ranks(2, message, task, str(tmp_path)):
        assert "was said to have 12 samples, but yielded only 10 in epoch 0" in text
