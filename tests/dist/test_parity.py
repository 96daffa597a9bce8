"""G1: any number of workers, with or without accumulation, gives the plain single-process loop."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from raytrain import TrainConfig
from tests.dist.spawn import run_ranks
from tests.dist.toy import Toy, assert_equal_weights, plain_loop, series, train_here

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

CASES = list(itertools.product((1, 2), ("sgd", "adam"), (False, True), (26, 25)))  # accumulate, optimizer, weighted, rows


def config(accumulate: int, **limit: int) -> TrainConfig:
    return TrainConfig(batch_size=8, accumulate=accumulate, log_every="1st", **limit)  # type: ignore[arg-type]


def all_cases(folder: str) -> dict[tuple[object, ...], tuple[dict[str, torch.Tensor], list[tuple[int, float]]]]:
    """Every case on the ranks of this group: final weights and the logged losses, for 10 steps and for 2 epochs."""
    results = {}
    for case in CASES:
        accumulate, optimizer, weighted, num_rows = case
        for limit in ({"steps": 10, "epochs": 9}, {"epochs": 2}):
            task = Toy(num_rows=num_rows, optimizer_name=optimizer, weighted=weighted)
            place = f"{folder}/{'-'.join(map(str, case))}-{len(limit)}"
            outcome = train_here(task, config(accumulate, **limit), place)
            results[(*case, len(limit))] = (outcome.weights, series(outcome, "train/loss"))
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.timeout(120)
def test_weights_and_losses_equal_the_plain_loop(world_size: int, tmp_path: Path) -> None:
    results = run_ranks(world_size, all_cases, str(tmp_path), timeout_s=110)
    for case, (weights, losses) in results[0].items():
        _, optimizer, weighted, num_rows, kind = case
        limit = {"num_epochs": 9, "max_steps": 10} if kind == 2 else {"num_epochs": 2}
        want, want_losses = plain_loop(num_rows, 8, optimizer_name=optimizer, weighted=weighted, **limit)  # type: ignore[arg-type]
        assert_equal_weights(weights, want)
        assert [step for step, _ in losses] == list(range(1, len(want_losses) + 1))
        assert [value for _, value in losses] == pytest.approx(want_losses, rel=1e-12)


def eval_of_five(folder: str) -> list[tuple[int, float]]:
    outcome = train_here(Toy(), TrainConfig(batch_size=8, eval_batch_size=2, steps=1), folder)
    return series(outcome, "val/loss") + series(outcome, "val/samples")


def test_evaluation_of_five_items_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    one, two, three = (run_ranks(n, eval_of_five_after_no_step, str(tmp_path / str(n)))[0] for n in (1, 2, 3))
    assert one == two == three
    assert one["samples"] == 5.0


def eval_of_five_after_no_step(folder: str) -> dict[str, float]:
    """Evaluate untrained weights, which are the same bits on any number of ranks."""
    from raytrain.data import eval_loader
    from raytrain.evaluation import exact_means
    from raytrain.peers import Peers
    from raytrain.weighted import read_loss

    peers, task = Peers(), Toy()
    model = task.model()
    loader = eval_loader(task.eval_data(), batch_size=2, rank=peers.rank, world_size=peers.world_size)
    with torch.no_grad():
        rows = [(b.index, b.num_rows, {"loss": read_loss(task.loss(model, b.data), b.num_rows).value}) for b in loader.batches()]
    return exact_means(rows, peers)
