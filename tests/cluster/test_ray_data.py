"""Ray Datasets as data, on a real Ray: each row once on two workers, unequal shards, going on in mid-epoch, too few CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.errors import ConfigError, WorkerError
from raytrain.result import Result

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

ROWS = 53
HALF = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5})


@dataclass(frozen=True)
class OverRay(raytrain.Task):
    """Means over ids and their squares tell whether each row came once."""

    rows: int = ROWS

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1).double()

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-5)

    def train_data(self) -> Any:
        import ray.data

        return ray.data.range(self.rows, override_num_blocks=3).map_batches(
            lambda b: {"id": b["id"], "x": b["id"] / 10}
        )

    def eval_data(self) -> Any:
        import ray.data

        return {
            "val": ray.data.range(7, override_num_blocks=2).map_batches(lambda b: {"id": b["id"], "x": b["id"] / 10})
        }

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        ids, count = batch["id"].double(), len(batch["id"])
        means = {"id": (ids.sum(), count), "square": ((ids**2).sum(), count)}
        return (model(batch["x"][:, None]) - 1).pow(2).mean(), means


def run(folder: Path, task: raytrain.Task, scaling: ScalingConfig = HALF, **train: Any) -> Result:
    return raytrain.fit(
        task,
        train=TrainConfig(**{"batch_size": 8, "log_every": "1st", **train}),
        scaling=scaling,
        run=RunConfig(name="r", storage=str(folder)),
        tracking=TrackingConfig(mlflow=False, progress=False),
    )


def test_each_row_once_and_going_on_in_mid_epoch(tmp_path: Path) -> None:
    first = run(tmp_path, OverRay(), steps=10)  # 7 steps an epoch: into the second one
    squares = sum(n * n for n in range(ROWS)) / ROWS
    assert first.series("train/id_epoch") == [(7, 26.0)]
    assert first.series("train/square_epoch")[0][1] == pytest.approx(squares, rel=1e-12)
    assert first.metrics["val/samples"] == 7
    assert first.metrics["val/id"] == 3.0
    second = run(tmp_path, OverRay(), epochs=3)
    assert second.step == 21
    assert second.series("train/id_epoch")[-1] == (21, 26.0)
    assert second.series("train/square_epoch")[-1][1] == pytest.approx(squares, rel=1e-12)
    assert [row.step for row in second.history if "train/loss" in row.values] == list(range(1, 22))


def test_workers_that_leave_no_cpu_to_ray_data_are_refused(tmp_path: Path) -> None:  # case E1
    with pytest.raises(
        ConfigError, match=r"Ray Data needs at least 1 CPU besides the workers, but 2 workers with 1 CPU each leave 0"
    ):
        run(tmp_path, OverRay(), ScalingConfig(num_workers=2), steps=1)


def test_without_workers_of_ray_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train, val is a Ray Dataset.*num_workers to 1 or more"):
        run(tmp_path, OverRay(), ScalingConfig(num_workers=0), steps=1)


def test_an_empty_one_ends_all_workers(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="epoch 0 has 0 samples on all 2 workers together"):
        run(tmp_path, OverRay(rows=0), steps=1)


@dataclass(frozen=True)
class AsStored(OverRay):
    """Rows that Ray can count without running anything."""

    def train_data(self) -> Any:
        import ray.data

        return ray.data.range(self.rows, override_num_blocks=1)  # one block: a worker gets none

    def eval_data(self) -> Any:
        return None

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        return super().loss(model, {"id": batch["id"], "x": batch["id"].double() / 10})


def test_a_schedule_needs_the_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"schedule = 'cosine' must know its end: give train\.steps\. The training data"
    ):
        run(tmp_path, OverRay(), epochs=2, schedule="cosine")
    result = run(tmp_path, AsStored(), epochs=1, schedule="cosine")
    assert result.step == 7
    assert result.series("train/id_epoch") == [(7, 26.0)]


def test_an_epoch_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    run(tmp_path, AsStored(), steps=10, shuffle=False)
    result = run(tmp_path, AsStored(), ScalingConfig(num_workers=1), epochs=2, shuffle=False)
    assert result.step == 14
    assert result.series("train/id_epoch") == [(7, 26.0), (14, 26.0)]  # one block in its order: the same rows again
