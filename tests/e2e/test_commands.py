"""Jobs as commands on an embedded Ray: what is printed, exit codes, signals, and the MLflow page in its own words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain.identity import RunRecord
from raytrain.storage import Storage
from tests.dist.spawn import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]

SLOW = """
from dataclasses import dataclass
import time, torch
from torch.utils.data import TensorDataset
import raytrain

@dataclass(frozen=True)
class Slow(raytrain.Task):
    def model(self): return torch.nn.Linear(4, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.01)
    def train_data(self): return TensorDataset(torch.ones(400, 4), torch.ones(400, 1))
    def loss(self, model, batch):
        time.sleep(0.02)
        return (model(batch[0]) - batch[1]).pow(2).mean()

if __name__ == "__main__":
    raytrain.main(Slow, train=raytrain.TrainConfig(batch_size=8, log_every="1st"))
"""


def mlflow_client(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")


def test_the_job_of_make_train(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "jobs" / "digits.py"), "--scaling.num_workers", "2", "--run.name", "d"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert len(out.splitlines()) < 40, out
    assert "2 workers on cpu" in out
    accuracy = float(re.findall(r"best .*val/accuracy (\S+)", out)[0])
    assert accuracy > 0.97
    assert re.search(r"speed  [\d,]+ samples/s", out)
    assert f"saved  {tmp_path}/runs/d/checkpoints/step-" in out
    assert f"ui --backend-store-uri 'sqlite:///{tmp_path}/runs/mlflow.db'" in out
    for chatter in ("(raylet)", "(RayTrainWorker", "INFO", "alembic"):
        assert chatter not in out + done.stderr


def test_sigterm_saves_and_exits_with_4_and_the_same_command_goes_on(tmp_path: Path) -> None:  # case E8
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "slow.py", "--scaling.num_workers", "2", "--run.name", "s"]
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen([*command, "--train.epochs", "50"], cwd=tmp_path, stdout=log, stderr=log, text=True)
    try:
        until(lambda: "step" in (tmp_path / "log").read_text(), 90)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 4, (tmp_path / "log").read_text()
    finally:
        process.kill()
        log.close()
    record = RunRecord.load(Storage(str(tmp_path / "runs" / "s")))
    assert record is not None
    assert (record.status, record.step > 0) == ("KILLED", True)
    client = mlflow_client(tmp_path)
    run_id = record.trackers["mlflow_run_id"]
    assert client.get_run(run_id).info.status == "KILLED"
    epochs = record.step // 50 + 1
    done = subprocess.run(
        [*command, "--train.epochs", str(epochs)], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"goes on after step {record.step}" in done.stdout
    history = client.get_metric_history(run_id, "train/loss")
    assert [point.step for point in history] == list(range(1, 50 * epochs + 1))
    assert client.get_run(run_id).info.status == "FINISHED"


def until(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen([*command, *store], env=environment, stdout=log, stderr=log)
        try:
            until(lambda: answers(url), 60)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except OSError:
        return False


def test_a_run_over_http_is_on_the_server(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with mlflow_server(tmp_path) as url:
        command = [sys.executable, "slow.py", "--scaling.num_workers", "0", "--run.name", "h", "--tracking.uri", url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        from mlflow.tracking import MlflowClient

        client = MlflowClient(url)
        run_id = re.findall(r"MLflow run (\w+)", done.stdout)[0]
        assert client.get_run(run_id).info.status == "FINISHED"
        assert len(client.get_metric_history(run_id, "train/loss")) == 50
        assert [f.path for f in client.list_artifacts(run_id, "job")] == ["job/config.yaml", "job/slow.py"]
        page = re.findall(r"browse (\S+)", done.stdout)[0]
        assert page.startswith(url)
        assert run_id in page
