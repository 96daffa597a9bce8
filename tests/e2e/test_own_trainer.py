"""Plain Ray Train with ``MlflowTracking`` as a command: its driver is killed, started again, and told to end."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from raytrain import TrackingConfig
from raytrain.tracking import MlflowTracker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(480)]

LOOP = Path(__file__).parents[2] / "jobs" / "loops" / "foreign_trainer.py"


def start(folder: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    }
    words = ["--name", "mine", "--epochs", "100000", "--storage", str(folder)]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, str(LOOP), *words], env=environment, stdout=log, stderr=log, cwd=folder
        )


def only_run(folder: Path) -> Any:
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("points").experiment_id])
    assert len(runs) < 2
    return runs[0] if runs else None


def steps(folder: Path) -> list[int]:
    client, run = MlflowClient(f"sqlite:///{folder}/mlflow.db"), only_run(folder)
    return [point.step for point in client.get_metric_history(run.info.run_id, "loss")] if run else []


def wait_for_steps(folder: Path, process: subprocess.Popen[bytes], num: int) -> None:
    while len(steps(folder)) < num:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.5)


def test_a_killed_driver_goes_on_with_its_run_and_a_stopped_one_is_killed(tmp_path: Path) -> None:  # case D2
    MlflowTracker(TrackingConfig(experiment="points"), str(tmp_path)).check()  # so that there is something to ask
    first = start(tmp_path)
    wait_for_steps(tmp_path, first, 3)
    first.kill()
    first.wait()
    assert only_run(tmp_path).info.status == "RUNNING"

    second = start(tmp_path)
    wait_for_steps(tmp_path, second, len(steps(tmp_path)) + 2)
    second.send_signal(signal.SIGTERM)
    second.wait(30)
    run = only_run(tmp_path)
    assert run.info.status == "KILLED"
    assert run.data.tags["raytrain.attempt"] == "2"
    assert steps(tmp_path) == sorted(set(steps(tmp_path)))
    assert steps(tmp_path)[:3] == [0, 1, 2]
