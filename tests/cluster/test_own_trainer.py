"""``MlflowTracking`` around plain Ray Train with two workers: true means, true steps, true ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain.tracking import MlflowTracking
from tests.cluster.loops import scripted, with_mlflow

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]


@pytest.fixture(scope="module", autouse=True)
def ray_with_two_cpus() -> Iterator[None]:
    """One Ray for all tests here."""
    from raytrain.ray_connection import ray_running

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.3")
        with ray_running():
            yield


def fit(
    tmp_path: Path, loop: Any, config: dict[str, Any], *, max_failures: int = 0, **tracking: Any
) -> tuple[Any, Any]:
    """Train on two workers; the client and the run as MLflow has it, also when the trainer raised."""
    from mlflow.tracking import MlflowClient
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    name = tracking.setdefault("name", "mine")
    own = MlflowTracking("tests", storage=str(tmp_path), **tracking)
    try:
        with own:
            TorchTrainer(
                loop,
                train_loop_config=config,
                scaling_config=ScalingConfig(num_workers=2),
                run_config=RunConfig(
                    name=name,
                    storage_path=str(tmp_path),
                    failure_config=FailureConfig(max_failures=max_failures),
                    callbacks=[own.callback],
                ),
            ).fit()
    finally:
        client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
        tmp_path.joinpath("run_id").write_text(own.run_id)
    return client, client.get_run(own.run_id)


def run_of(tmp_path: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(tmp_path.joinpath("run_id").read_text())


def points(client: Any, run: Any, key: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in client.get_metric_history(run.info.run_id, key)]


def test_metrics_are_means_over_the_workers_without_any_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # cases B1, B4, B5, D7
    odd = {"loss": 1.0, "mAP@0.5": 0.3, "note": "x", "n": np.float32(1), "bad": None, "top": {"k": 2}}
    reports = [
        [{"val": 1.0, "only0": 7.0}, {"val": 3.0}, {"val": 1.0, "count": 3}, {"val": 2.0, "count": 0}, odd],
        [{"val": 9.0}, {"val": 1.0}, {"val": 5.0, "count": 1}, {"val": 4.0, "count": 2}, odd],
    ]
    config = {"reports": reports, "lr": 0.1, "nested": {"depth": 3}}
    client, run = fit(tmp_path, scripted, config, weight="count", per_rank=["val"])
    assert run.info.status == "FINISHED"
    assert points(client, run, "val") == [(1, 5.0), (2, 2.0), (3, 2.0), (4, 4.0)]
    assert points(client, run, "count") == [(3, 4.0), (4, 2.0)]
    assert points(client, run, "rank/0/val") == [(1, 1.0), (2, 3.0), (3, 1.0), (4, 2.0)]
    assert points(client, run, "rank/1/val") == [(1, 9.0), (2, 1.0), (3, 5.0), (4, 4.0)]
    assert points(client, run, "only0") == [(1, 7.0)]
    assert [points(client, run, key) for key in ("loss", "mAP_0.5", "n", "top/k")] == [
        [(5, 1.0)],
        [(5, 0.3)],
        [(5, 1.0)],
        [(5, 2.0)],
    ]
    assert run.data.params["train_loop_config.lr"] == "0.1"
    assert run.data.params["train_loop_config.nested.depth"] == "3"
    assert run.data.tags["raytrain.step"] == "counted"
    out = capsys.readouterr().out
    assert "'only0' is reported by 1 of 2 workers" in out
    assert "not written to MLflow: 'note' (str), 'bad' (NoneType)" in out


def test_a_retry_and_a_later_start_go_on_with_the_run(tmp_path: Path) -> None:  # cases D1, D3, C10
    reports = [[{"loss": float(i), "rank": rank} for i in range(6)] for rank in (0, 1)]
    config = {"reports": reports, "save_every": 2, "fail_before": 3, "marker": str(tmp_path / "failed")}
    client, first = fit(tmp_path, scripted, config, max_failures=1, per_rank=["rank"])
    assert (tmp_path / "failed").exists()
    assert first.info.status == "FINISHED"
    assert points(client, first, "loss") == [(i + 1, float(i)) for i in range(6)]
    for rank in (0, 1):
        assert points(client, first, f"rank/{rank}/rank") == [(i + 1, float(rank)) for i in range(6)]
    tags = first.data.tags
    assert (tags["raytrain.worker_starts"], tags["raytrain.attempt"]) == ("2", "1")
    assert "rank 1: ValueError: boom of the test" in tags["raytrain.error.before"]
    assert "raytrain.error" not in tags
    assert Path(tags["raytrain.checkpoint.last"], "next").read_text() == "6"
    assert tags["raytrain.folder"] == str(tmp_path / "mine")

    longer = [[*values, {"loss": 6.0, "rank": rank}] for rank, values in enumerate(reports)]
    client, second = fit(tmp_path, scripted, {**config, "reports": longer})
    assert second.info.run_id == first.info.run_id
    assert points(client, second, "loss") == [(i + 1, float(i)) for i in range(7)]
    assert (second.data.tags["raytrain.attempt"], second.info.status) == ("2", "FINISHED")


def test_a_failing_loop_ends_the_run_as_failed_and_a_workers_own_mlflow_is_refused(tmp_path: Path) -> None:  # case D2
    from ray.train import TrainingFailedError

    with pytest.raises(TrainingFailedError, match="Report the numbers instead"):
        fit(tmp_path, with_mlflow, {})
    run = run_of(tmp_path)
    assert run.info.status == "FAILED"
    assert run.info.end_time is not None
    assert run.data.metrics == {"loss": 1.0}
    assert "rank 0: TrackingError: a worker does not write to MLflow" in run.data.tags["raytrain.error"]
    assert not [p for p in tmp_path.rglob("*") if p.name in ("mlruns", "mlflow.db") and p.parent != tmp_path]
