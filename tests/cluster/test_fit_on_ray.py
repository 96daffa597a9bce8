"""``fit`` on a real Ray with two workers: the same numbers, true errors, true ends."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.errors import ConfigError, WorkerError
from raytrain.result import Result
from tests.cluster.tasks import Faulty, chatty_loop
from tests.dist.toy import assert_equal_weights, plain_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


def fit(
    tmp_path: Path, task: Any, *, name: str = "r", max_failures: int = 0, workers: int | str = 2, **train: Any
) -> Result:
    return raytrain.fit(
        task,
        train=TrainConfig(**{"batch_size": 8, "epochs": 2, "log_every": "1st", "checkpoint_every": "1st", **train}),
        scaling=ScalingConfig(num_workers=workers),
        run=RunConfig(name=name, storage=str(tmp_path / "runs"), max_failures=max_failures),
        tracking=TrackingConfig(progress=False),
    )


def mlflow_run(tmp_path: Path, experiment: str = "Faulty") -> Any:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


def test_two_workers_give_the_plain_loop_and_one_true_mlflow_run(tmp_path: Path) -> None:
    result = fit(tmp_path, Faulty(), accumulate=2)
    weights, losses = plain_loop(26, 8, 2, "sgd", False)
    assert result.last_checkpoint is not None
    assert_equal_weights(result.last_checkpoint.load_state(), weights)
    assert [v for _, v in result.series("train/loss")] == pytest.approx(losses, rel=1e-12)
    client, run = mlflow_run(tmp_path)
    assert run.info.status == "FINISHED"
    assert run.data.tags["raytrain.world_size"] == "2"
    stored = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")]
    assert stored == result.series("train/loss")
    assert not any(p.name == "mlruns" for p in Path.cwd().iterdir())


def test_an_error_on_one_rank_is_told_with_rank_step_and_line(tmp_path: Path) -> None:  # cases E2, E9
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        fit(tmp_path, Faulty(fault="raise"))
    text = str(caught.value)
    assert "rank 1 failed after step 3: TwoArguments: it broke because of the test" in text
    assert 'raise TwoArguments("it broke", "of the test")' in text
    assert "onnection" not in text
    assert time.monotonic() - began < 60
    _, run = mlflow_run(tmp_path)
    assert run.info.status == "FAILED"
    assert "it broke because of the test" in run.data.tags["raytrain.error"]


def test_a_workers_own_mlflow_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(
        WorkerError, match="rank 1 failed after step 3: TrackingError: a worker does not write to MLflow"
    ):
        fit(tmp_path, Faulty(fault="mlflow"))
    assert [p.parent.parent for p in tmp_path.rglob("mlflow.db")] == [tmp_path]


def test_a_killed_worker_is_replaced_and_nothing_shows_in_the_result(tmp_path: Path) -> None:  # case E3
    marker = tmp_path / "killed"
    result = fit(tmp_path, Faulty(fault="kill once", marker=str(marker), optimizer_name="adam"), max_failures=1)
    assert marker.exists()
    weights, losses = plain_loop(26, 8, 2, "adam", False)
    assert result.last_checkpoint is not None
    assert_equal_weights(result.last_checkpoint.load_state(), weights)
    assert [v for _, v in result.series("train/loss")] == pytest.approx(losses, rel=1e-12)
    client, run = mlflow_run(tmp_path)
    assert run.info.status == "FINISHED"
    stored = [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, "train/loss")]
    assert stored == result.series("train/loss")


def test_a_killed_worker_without_a_retry_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 died without a word.*signal 9.*run\.max_failures"):
        fit(tmp_path, Faulty(fault="kill"))


def test_more_workers_than_there_are_cpus_is_refused_with_the_numbers(tmp_path: Path) -> None:  # case E1
    num_cpus = os.cpu_count() or 1
    began = time.monotonic()
    with pytest.raises(
        ConfigError, match=rf"{num_cpus + 3} workers with 1 CPU each ask for {num_cpus + 3} CPU.*{num_cpus} are free"
    ):
        fit(tmp_path, Faulty(num_rows=100), workers=num_cpus + 3, batch_size=num_cpus + 3)
    assert time.monotonic() - began < 20


def test_an_own_loop_prints_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = raytrain.fit(
        chatty_loop,
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(name="own", storage=str(tmp_path)),
        tracking=TrackingConfig(mlflow=False),
    )
    assert result.status == "finished"
    out = capsys.readouterr().out
    assert "[rank 0] hello from 0" in out
    assert "[rank 1] hello from 1" in out
    assert "seen by 2" in out
    assert "Reporting training result" not in out
