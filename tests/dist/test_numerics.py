"""Cases of gradients, metrics and schedules on two gloo ranks; the expected numbers are worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from raytrain import Task, TrainConfig
from raytrain.data import train_loader
from raytrain.errors import NonFiniteError
from raytrain.evaluation import exact_means
from raytrain.meter import Means, Meter
from raytrain.metrics import GatherMetric, SumMetric, merged
from raytrain.optim import ExactStep, bare
from raytrain.peers import Peers
from raytrain.weighted import Value, read_loss
from tests.dist.spawn import run_ranks
from tests.dist.toy import Toy, assert_equal_weights, network, plain_loop, rows, series, train_here

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


class Weight(nn.Module):
    """One weight whose gradient is the mean of what each sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


class ByRank(Task):
    """Rows that stand for gradients."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0]).mean()


class ByToken(Task):
    """Rows of (gradient per token, tokens)."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        gradient, tokens = batch
        return (model(gradient) * tokens).sum(), tokens.sum()


def gradient_of(task: Task, data: TensorDataset, accumulate: int = 1, **config: Any) -> tuple[float, float]:
    """(gradient, norm) after the first global batch, which is the whole of the data in order."""
    from raytrain.runtime import LocalRuntime, StopFlag

    model = LocalRuntime(lambda report: None, StopFlag(), False).wrap_model(Weight(), {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    peers = Peers()
    step = ExactStep(model, optimizer, TrainConfig(**config), peers, torch.device("cpu"))
    loader = train_loader(
        data, batch_size=max(2, len(data)), accumulate=accumulate, shuffle=False, rank=peers.rank, world_size=peers.world_size
    )
    step.zero()
    for batch in loader.batches(0, 0, 1):
        with step.forward(batch):
            step.backward(read_loss(task.loss(model, batch.data), batch.num_rows), batch)
    norm, _ = step.apply()
    gradient = -bare(model).w.item()  # lr 1 from 0: the step is minus the (clipped) gradient
    return gradient, norm.item()


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def gradients() -> dict[str, Any]:
    return {
        # 4 samples over 2 ranks and 3 samples over 2 ranks (2 and 1): plain DDP would give 3.0 for the second
        "uneven rows": gradient_of(ByRank(), TensorDataset(f64(1, 1, 4)))[0],
        "uneven micro-batches": gradient_of(ByRank(), TensorDataset(f64(1, 2, 3, 4, 15)), accumulate=2)[0],
        "one row on two ranks": gradient_of(ByRank(), TensorDataset(f64(7)))[0],
        # case G1: 5 tokens of gradient 1 and 1 token of gradient 7
        "tokens": gradient_of(ByToken(), TensorDataset(f64(1, 7), f64(5, 1)))[0],
        "tokens in micro-batches": gradient_of(ByToken(), TensorDataset(f64(1, 7, 1, 7), f64(5, 1, 5, 1)), accumulate=2)[0],
        "no tokens on one rank": gradient_of(ByToken(), TensorDataset(f64(1, 7), f64(5, 0)))[0],
        "no tokens anywhere": gradient_of(ByToken(), TensorDataset(f64(1, 7), f64(0, 0)))[0],
        "clipped by norm": gradient_of(ByRank(), TensorDataset(f64(6, 8)), clip_norm=3.5),
        "clipped by value": gradient_of(ByRank(), TensorDataset(f64(6, 8)), clip_value=0.5),
    }


def test_gradients_are_those_of_the_global_batch() -> None:  # cases G1, G3
    for result in run_ranks(2, gradients):
        assert result["uneven rows"] == pytest.approx(2.0, rel=1e-12)
        assert result["uneven micro-batches"] == pytest.approx(5.0, rel=1e-12)
        assert result["one row on two ranks"] == pytest.approx(7.0, rel=1e-12)
        assert result["tokens"] == pytest.approx(2.0, rel=1e-12)
        assert result["tokens in micro-batches"] == pytest.approx(2.0, rel=1e-12)
        assert result["no tokens on one rank"] == pytest.approx(1.0, rel=1e-12)
        assert result["no tokens anywhere"] == 0.0
        assert result["clipped by norm"] == pytest.approx((3.5, 7.0), rel=1e-6)  # torch divides by norm + 1e-6
        assert result["clipped by value"] == pytest.approx((0.5, 7.0), rel=1e-12)


# -- metrics: cases B1, B3, B4 --------------------------------------------------------------------------------------------


def means_of(values: list[tuple[float, float]]) -> tuple[dict[str, float], float]:
    meter, means = Meter(Peers()), Means()
    for mean, weight in values:
        meter.add({"loss": Value(torch.tensor(mean), weight)})
        meter.end_step()
    steps, _ = meter.reduce([])
    for sums in steps:
        means.add(sums)
    return means.take(), sum(sums["loss"][1] for sums in steps)


def metrics() -> dict[str, Any]:
    rank = dist.get_rank()
    squares = SumMetric(lambda s: math.sqrt(s["squares"] / s["n"]))
    errors = f64(0, 0) if rank == 0 else f64(2, 2)
    squares.update(squares=(errors**2).sum(), n=2)
    order = GatherMetric(lambda x: float((x * f64(1, 10, 100, 1000)).sum()))
    for k in range(rank, 4, 2):  # batch k is dealt to rank k % 2
        order.update(f64(k))
    only_rank_0 = GatherMetric(lambda x: float(x.sum()))
    if rank == 0:
        only_rank_0.update(f64(3, 4))
    report = Meter(Peers())
    for value in ((1.0, 3.0) if rank == 0 else (9.0, 1.0),):
        for epoch in value:
            report.add({"val": Value(epoch, 1)})
            report.end_step()
    names = Meter(Peers())
    names.add({"both": Value(1.0, 1), f"rank{rank}": Value(float(rank), 1)})
    names.end_step()
    return {
        "ranks": means_of([(1.0, 3)] if rank == 0 else [(5.0, 1)]),
        "merged": merged({"rmse": squares, "order": order, "one": only_rank_0}, Peers()),
        "epochs": [sums["val"][0] / sums["val"][1] for sums in report.reduce([])[0]],
        "names": names.reduce([1.0 + rank]),
        "exact": exact_means([(rank, 1, {"x": Value(1e16 if rank == 0 else 1.0, 1)}), (9, 1, {"x": Value(-1e16 * rank, 1)})], Peers()),
    }


def test_metrics_are_those_of_all_samples() -> None:
    zero, one = run_ranks(2, metrics)
    assert zero == one
    assert zero["ranks"] == ({"loss": 2.0}, 4.0)
    assert zero["merged"]["rmse"] == math.sqrt(2.0)
    assert zero["merged"]["order"] == 3210.0
    assert zero["merged"]["one"] == 7.0
    assert zero["epochs"] == [5.0, 2.0]
    assert zero["names"] == ([{"both": (2.0, 2.0), "rank0": (0.0, 1.0), "rank1": (1.0, 1.0)}], [[1.0], [2.0]])
    assert zero["exact"]["x"] == 0.25


def torchmetrics_values() -> dict[str, float]:
    from torchmetrics.classification import BinaryAUROC, MulticlassF1Score

    g = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(23, generator=g), torch.randint(0, 2, (23,), generator=g)
    classes, predicted = torch.randint(0, 3, (23,), generator=g), torch.randint(0, 3, (23,), generator=g)
    peers = Peers()
    metrics = {"auc": BinaryAUROC(), "f1": MulticlassF1Score(3, average="macro")}
    for k, start in enumerate(range(0, 23, 5)):
        if k % peers.world_size == peers.rank:
            part = slice(start, start + 5)
            metrics["auc"].update(scores[part], labels[part])
            metrics["f1"].update(predicted[part], classes[part])
    return merged(metrics, peers)


def test_torchmetrics_objects_are_computed_over_all_ranks() -> None:
    one = run_ranks(1, torchmetrics_values)[0]
    for many in run_ranks(3, torchmetrics_values):
        assert many == one


# -- the loop: cases B5, B6, G4, G6, G8 ------------------------------------------------------------------------------------


class CountsReduces:
    """Counts DDP's gradient all-reduces of bucket 0 by a communication hook."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP inspects annotations
            self.count += bucket.index() == 0
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            return allreduce_hook(None, bucket)

        model.register_comm_hook(None, hook)  # type: ignore[operator]


def steps_and_reduces(folder: str) -> dict[str, Any]:
    from raytrain import loop

    counter: list[CountsReduces] = []
    kept: list[Any] = []
    build = loop.build

    def counting(*args: Any) -> Any:
        parts = build(*args)
        kept.append(parts)
        if dist.get_world_size() > 1:
            counter.append(CountsReduces(parts.model))
        return parts

    loop.build = counting
    config = TrainConfig(epochs=2, batch_size=4, accumulate=2, log_every="1st", schedule="linear")
    outcome = train_here(Toy(num_rows=24, optimizer_name="sgd"), config, folder)
    models = Peers().gather_objects(bare(kept[0].model).state_dict())
    assert all(torch.equal(models[0][name], tensor) for model in models for name, tensor in model.items())
    fresh = network()
    fresh.load_state_dict(outcome.weights)  # case C7: plain names, strict
    return {
        "reduces": counter[0].count if counter else None,
        "steps": [step for step, _ in series(outcome, "train/loss")],
        "epochs": [row.epoch for row in outcome.rows if "train/loss" in row.values],
        "lr": [value for _, value in series(outcome, "train/lr")],
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_reduce_one_schedule_step_and_one_row_per_optimizer_step(  # cases B6, G4, G6
    world_size: int, tmp_path: Path
) -> None:
    result = run_ranks(world_size, steps_and_reduces, str(tmp_path))[0]
    assert result["reduces"] == (12 if world_size > 1 else None)
    assert result["steps"] == list(range(1, 13))
    assert result["epochs"] == pytest.approx([k / 6 for k in range(1, 13)])
    assert result["lr"] == pytest.approx([0.05 * (1 - k / 12) for k in range(12)])


class TwoHeads(nn.Module):
    """Both heads behind one forward, as DDP needs it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = nn.Linear(4, 1).double(), nn.Linear(4, 1).double()

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return self.body(x) + (self.head(x) if both else 0.0)


calls: list[int] = []


@dataclass(frozen=True)
class TwoHeaded(Toy):
    """A second head that is used in odd steps only, or never."""

    use: str = "odd"

    def model(self) -> nn.Module:
        return TwoHeads()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, _ = batch
        calls.append(1)
        return ((model(x, self.use == "odd" and len(calls) % 2 == 1) - y) ** 2).mean()

    def eval_data(self) -> Any:
        return None


def unused(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for use in ("odd", "never"):
        calls.clear()
        try:
            train_here(TwoHeaded(num_rows=24, use=use), TrainConfig(steps=4, batch_size=8), f"{folder}/{use}")
        except Exception as error:
            found[use] = str(error)
        calls.clear()
        config = TrainConfig(steps=4, batch_size=8, ddp={"find_unused_parameters": True})
        found[f"{use} switched"] = train_here(TwoHeaded(num_rows=24, use=use), config, f"{folder}/{use}-switched").weights
    return found


def test_parameters_without_gradient_are_named_or_the_switch_works(tmp_path: Path) -> None:
    two = run_ranks(2, unused, str(tmp_path / "2"))[0]
    one = run_ranks(1, unused, str(tmp_path / "1"))[0]
    for use, step in (("odd", 1), ("never", 0)):
        assert f"after step {step}" in two[use]
        assert "head.weight, head.bias" in two[use]
        assert "train.ddp.find_unused_parameters=true" in two[use]
        assert_equal_weights(two[f"{use} switched"], one[f"{use} switched"])


@dataclass(frozen=True)
class Poisoned(Toy):
    """Its third batch has a loss that is not a number, on rank 1 only."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        value = super().loss(model, batch)[0]
        bad = len(calls) == 3 and dist.get_rank() == dist.get_world_size() - 1
        return value * (math.nan if bad else 1.0)

    def eval_data(self) -> Any:
        return None


def poisoned(folder: str) -> tuple[str, Any]:
    calls.clear()
    text = ""
    try:
        train_here(Poisoned(num_rows=24), TrainConfig(epochs=2, batch_size=8, log_every="1st"), f"{folder}/stop")
    except Exception as error:
        assert isinstance(error.__cause__, NonFiniteError)
        text = str(error)
    calls.clear()
    config = TrainConfig(epochs=2, batch_size=8, log_every="1st", nan_policy="skip")
    outcome = train_here(Poisoned(num_rows=24), config, f"{folder}/skip")
    return text, (outcome.weights, series(outcome, "train/skipped_steps"), outcome.step)


def test_a_loss_that_is_no_number_stops_or_skips_on_all_ranks(tmp_path: Path) -> None:
    texts, skipped = zip(*run_ranks(2, poisoned, str(tmp_path)), strict=True)
    for text in texts:
        assert "after step 2" in text
        assert "train.nan_policy=skip" in text
    weights, skips, step = skipped[0]
    assert (skips, step) == ([(3, 1.0)], 6)
    assert all(torch.isfinite(t).all() for t in weights.values())


# -- features that must work together with several ranks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Normed(Toy):
    """With BatchNorm, whose statistics live in buffers."""

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 1)).double()


def features(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    ema = train_here(Toy(num_rows=24), TrainConfig(epochs=2, batch_size=8, ema_decay=0.5), f"{folder}/ema")
    found["ema"] = (series(ema, "val/loss"), ema.weights)
    for precision in ("bf16", "fp16"):
        config = TrainConfig(epochs=2, batch_size=8, precision=precision, log_every="1st")  # type: ignore[arg-type]
        found[precision] = series(train_here(Toy32(num_rows=24), config, f"{folder}/{precision}"), "train/loss")
    found["full"] = series(
        train_here(Toy32(num_rows=24), TrainConfig(epochs=2, batch_size=8, log_every="1st"), f"{folder}/full"), "train/loss"
    )
    normed = train_here(Normed(num_rows=18), TrainConfig(epochs=2, batch_size=8), f"{folder}/bn")  # last batch: 2 rows
    found["bn"] = (series(normed, "val/loss"), normed.weights["1.num_batches_tracked"].item())
    return found


@dataclass(frozen=True)
class Toy32(Toy):
    """In float32, which autocast can lower."""

    def model(self) -> nn.Module:
        return super().model().float()

    def train_data(self) -> TensorDataset:
        x, y, w = rows(self.num_rows)
        return TensorDataset(x.float(), y.float(), w)

    def eval_data(self) -> Any:
        return None


def test_features_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    one, two, three = (run_ranks(n, features, str(tmp_path / str(n)))[0] for n in (1, 2, 3))
    for many in (two, three):
        assert [v for _, v in many["ema"][0]] == pytest.approx([v for _, v in one["ema"][0]], rel=1e-12)
        assert_equal_weights(many["ema"][1], one["ema"][1])
        assert many["bn"][1] == 6  # two epochs of three steps; the borrowed rows of the last ones did not count
    plain, _ = plain_loop(24, 8, 2, "sgd", False)
    assert_equal_weights(one["ema"][1], plain)
    for result in (one, two, three):
        full = [v for _, v in result["full"]]
        assert [v for _, v in result["bf16"]] == pytest.approx(full, rel=0.05)
        assert len(result["fp16"]) == 6
        assert all(math.isfinite(v) for _, v in result["fp16"])


def unequal(folder: str) -> str:
    class Unequal(Toy):
        def train_data(self) -> TensorDataset:
            return TensorDataset(*rows(24 + 8 * dist.get_rank()))

    try:
        train_here(Unequal(), TrainConfig(steps=2, batch_size=8), folder)
    except Exception as error:
        return str(error)
    return "no error"


def test_data_of_unequal_length_is_refused_on_all_ranks_with_both_numbers(tmp_path: Path) -> None:  # case A3
    for text in run_ranks(2, unequal, str(tmp_path), timeout_s=40):
        assert "must be the same on all ranks" in text
        assert "rank 0" in text
        assert "num_rows=24" in text
        assert "num_rows=32" in text

