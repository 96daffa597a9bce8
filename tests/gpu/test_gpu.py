"""What only a GPU can show: run with ``pytest -m gpu`` where there is one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.result import Result
from tests.dist.toy import Toy, assert_equal_weights, plain_loop

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]


def fit(tmp_path: Path, task: Any, workers: int = 0, **train: Any) -> Result:
    return raytrain.fit(
        task,
        train=TrainConfig(**{"batch_size": 8, "epochs": 2, "log_every": "1st", **train}),
        scaling=ScalingConfig(num_workers=workers, use_gpu=True),
        run=RunConfig(name="r", storage=str(tmp_path)),
        tracking=TrackingConfig(mlflow=False),
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_one_gpu_equals_the_plain_loop_on_the_cpu(tmp_path: Path, workers: int) -> None:
    result = fit(tmp_path, Toy(optimizer_name="adam"), workers)
    weights, losses = plain_loop(26, 8, 2, "adam", False)
    assert result.last_checkpoint is not None
    assert_equal_weights(result.last_checkpoint.load_state(), weights, rtol=1e-10)
    assert [value for _, value in result.series("train/loss")] == pytest.approx(losses, rel=1e-10)


@dataclass(frozen=True)
class Normed(Toy):
    """In float32 with BatchNorm."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y, _ = batch
        return ((model(x.float()) - y.float()) ** 2).mean()


@pytest.mark.parametrize(
    "train",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"compile": True},
        {"sync_batchnorm": True},
        {"deterministic": True},
    ],
)
def test_features_train_and_resume(tmp_path: Path, train: dict[str, Any]) -> None:
    first = fit(tmp_path, Normed(num_rows=32), **train)
    second = fit(tmp_path, Normed(num_rows=32), **{**train, "epochs": 3})
    assert (first.step, second.step) == (8, 12)
    assert math.isfinite(second.metrics["val/loss"])
    assert second.load_model(map_location="cpu") is not None
