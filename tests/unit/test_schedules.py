"""Learning rates worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from raytrain.config import TrainConfig
from raytrain.errors import ConfigError
from raytrain.schedules import check_schedule, named_schedule, scale_lr


def optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates(config: TrainConfig, num_steps: int, steps_per_epoch: int = 4) -> list[float]:
    opt = optimizer()
    schedule = named_schedule(opt, config, num_steps, steps_per_epoch)
    seen = []
    for _ in range(num_steps):
        seen.append(opt.param_groups[0]["lr"])
        opt.step()
        if schedule is not None:
            schedule.step()
    return seen


def test_constant_without_warmup_is_no_schedule() -> None:
    assert named_schedule(optimizer(), TrainConfig(), 10, 4) is None


def test_linear_with_warmup() -> None:
    seen = rates(TrainConfig(schedule="linear", warmup="2st"), 6)
    assert seen == pytest.approx([1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25])


def test_cosine() -> None:
    seen = rates(TrainConfig(schedule="cosine"), 4)
    assert seen == pytest.approx([0.5 * (1 + math.cos(math.pi * k / 4)) for k in range(4)])


def test_warmup_in_epochs_then_constant() -> None:
    assert rates(TrainConfig(warmup="0.5ep"), 5) == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("config", "num_steps", "text"),
    [
        (TrainConfig(schedule="cosine", time="1min"), None, "must know its end"),
        (TrainConfig(warmup="10st"), 10, "is 10 steps, but the whole run is 10 steps"),
        (TrainConfig(warmup="10s"), 10, "give it in steps or epochs"),
    ],
)
def test_impossible_schedules_are_refused(config: TrainConfig, num_steps: int | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_schedule(config, num_steps, 4)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_scaling_is_by_batch_size(rule: str, factor: float) -> None:
    opt = optimizer(0.5)
    config = TrainConfig(lr_scaling=rule, lr_base_batch=8)  # type: ignore[arg-type]
    assert scale_lr(opt, config, batch_size=32) == factor
    assert opt.param_groups[0]["lr"] == 0.5 * factor
