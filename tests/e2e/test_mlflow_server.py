"""Tracking against a real MLflow server over HTTP: it stands still, dies and comes back, and nothing is lost or doubled."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain import TrackingConfig
from raytrain.report import Event, Report, Row
from raytrain.tracking import Collector, MlflowTracker, RunInfo
from tests.e2e.mlflow_server import Server, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server = Server(tmp_path)
    server.start()
    yield server
    server.kill()


def opened(server: Server, tmp_path: Path) -> tuple[MlflowTracker, dict[str, str]]:
    tracker = MlflowTracker(TrackingConfig(uri=server.url), str(tmp_path / "runs"))
    tracker.check("T")
    identity = tracker.open(
        RunInfo(
            name="r",
            task="T",
            attempt=1,
            params={"task.lr": 0.1},
            config_yaml="task: {lr: 0.1}\n",
            job_source=__file__,
            folder=str(tmp_path / "runs" / "r"),
        )
    )
    return tracker, identity


def put(collector: Collector, *steps: int) -> float:
    """Report steps; the seconds that it took."""
    began = time.monotonic()
    for step in steps:
        collector.put(Report((Row(step, step / 10, {"loss": 1 / step}),)))
    return time.monotonic() - began


def stored(tracker: MlflowTracker, run_id: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in tracker._client.get_metric_history(run_id, "loss")]


def test_a_server_that_stands_still_and_one_that_dies_cost_no_time_and_no_row(
    server: Server, tmp_path: Path
) -> None:  # case D4
    tracker, identity = opened(server, tmp_path)
    run_id, warnings = identity["mlflow_run_id"], []
    collector = Collector([tracker], warn=warnings.append)
    put(collector, 1, 2)
    until(lambda: len(stored(tracker, run_id)) == 2, 20)

    server.signal(signal.SIGSTOP)  # accepts, and never answers
    took_s = put(collector, 3, 4)
    until(lambda: len(warnings) == 1, 30)
    took_s += put(collector, 5)
    server.kill()
    took_s += put(collector, 6, 7)
    server.start()
    collector.put(Report((Row(8, 0.8, {"loss": 1 / 8}),), (Event("best", 8, {"uri": "/c/8"}),)))
    until(lambda: len(stored(tracker, run_id)) == 8, 60)  # by themselves: nothing more is reported

    collector.close("FINISHED", None)
    assert took_s < 1
    assert stored(tracker, run_id) == [(step, 1 / step) for step in range(1, 9)]
    run = tracker._client.get_run(run_id)
    assert (run.info.status, run.data.tags["raytrain.checkpoint.best"]) == ("FINISHED", "/c/8")
    assert run.info.end_time is not None
    assert "MlflowTracker" in warnings[0]


def test_a_server_that_is_gone_at_the_end_holds_nobody_up_and_the_next_start_repairs_it(
    server: Server, tmp_path: Path
) -> None:  # cases D2, D4
    tracker, identity = opened(server, tmp_path)
    warnings: list[str] = []
    collector = Collector([tracker], warn=warnings.append)
    put(collector, 1)
    until(lambda: len(stored(tracker, identity["mlflow_run_id"])) == 1, 20)
    server.signal(signal.SIGSTOP)
    put(collector, 2, 3)
    began = time.monotonic()
    collector.close("FAILED", "ValueError: x", limit_s=3)
    assert time.monotonic() - began < 5
    assert warnings
    server.kill()
    server.start()

    again = MlflowTracker(TrackingConfig(uri=server.url), str(tmp_path / "runs"))
    info = RunInfo("r", "T", 2, {"task.lr": 0.2}, "task: {lr: 0.2}\n", None, "/r", previous=identity)
    assert again.open(info)["mlflow_run_id"] == identity["mlflow_run_id"]
    second = Collector([again], history=collector.history)
    again.log(collector.history)  # as the driver does with what an earlier start kept
    put(second, 3, 4)
    second.close("KILLED", None)
    assert stored(again, identity["mlflow_run_id"]) == [(step, 1 / step) for step in range(1, 5)]
    run = again._client.get_run(identity["mlflow_run_id"])
    assert run.info.status == "KILLED"
    assert run.data.params["task.lr"] == "0.1"
    assert run.data.tags["raytrain.changed.task.lr"] == "0.1 -> 0.2"
    assert [f.path for f in again._client.list_artifacts(run.info.run_id, "job")] == [
        "job/config.yaml",
        f"job/{Path(__file__).name}",
    ]
    assert urllib.request.urlopen(again.browse().partition("#")[0], timeout=5).status == 200
