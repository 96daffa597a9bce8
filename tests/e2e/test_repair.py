"""Drivers that die: the next start, or raytrain runs --repair, mends what they left (cases D2, D4)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from raytrain import cli
from raytrain.identity import RunRecord
from raytrain.storage import Storage
from tests.e2e.mlflow_server import Server, until
from tests.e2e.proxy import Proxy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

JOB = """
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
        time.sleep(0.1)
        return (model(batch[0]) - batch[1]).pow(2).mean()

if __name__ == "__main__":
    raytrain.main(Slow, train=raytrain.TrainConfig(batch_size=8, log_every="1st", checkpoint_every="10st"),
                  scaling=raytrain.ScalingConfig(num_workers=0), run=raytrain.RunConfig(name="k"))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def command(folder: Path, uri: str, *flags: str) -> list[str]:
    (folder / "slow.py").write_text(JOB)
    return [sys.executable, "slow.py", "--tracking.uri", uri, "--tracking.experiment", folder.name, *flags]


def killed_driver(folder: Path, uri: str, when: Callable[[], bool]) -> None:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command(folder, uri), cwd=folder, stdout=log, stderr=log)
        try:
            until(when, 60)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(20)


def has_spooled(folder: Path, text: str) -> bool:
    return any(text in file.read_text() for file in (folder / "runs" / "k" / "spool").glob("*.jsonl"))


def the_run(server: Server, folder: Path) -> Any:
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name(folder.name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def steps_of(server: Server, run: Any) -> list[int]:
    return [point.step for point in MlflowClient(server.url).get_metric_history(run.info.run_id, "train/loss")]


def record(folder: Path) -> RunRecord:
    found = RunRecord.load(Storage(str(folder / "runs" / "k")))
    assert found is not None
    return found


def test_a_driver_that_was_killed_during_an_outage_is_mended_by_the_next_start(
    server: Server, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.set("refuse")
    killed_driver(tmp_path, proxy.url, lambda: has_spooled(tmp_path, '"step":15'))
    assert record(tmp_path).status == "RUNNING"
    proxy.set("pass")
    done = subprocess.run(command(tmp_path, proxy.url), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"goes on after step [12]0", done.stdout), done.stdout
    run = the_run(server, tmp_path)
    assert steps_of(server, run) == list(range(1, 51))
    assert (run.info.status, run.data.tags["raytrain.attempt"]) == ("FINISHED", "2")
    assert not (tmp_path / "runs" / "k" / "spool").exists()


def test_repair_ends_the_run_of_a_dead_driver_and_sends_what_it_left(
    server: Server, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.set("refuse")
    killed_driver(tmp_path, proxy.url, lambda: has_spooled(tmp_path, '"step":15'))
    runs = str(tmp_path / "runs")
    assert cli.run(["runs", runs, "--repair"]) == 1  # MLflow is away: nothing is given up
    assert "not mended: k" in capsys.readouterr().err
    assert record(tmp_path).status == "RUNNING"
    proxy.set("pass")
    assert cli.run(["runs", runs, "--repair"]) == 0
    assert "k: KILLED, the driver died" in capsys.readouterr().out
    run = the_run(server, tmp_path)
    assert (run.info.status, run.data.tags["raytrain.error"]) == ("KILLED", "the driver died")
    assert run.info.start_time < run.info.end_time
    assert steps_of(server, run)[:15] == list(range(1, 16))
    assert (record(tmp_path).status, record(tmp_path).error) == ("KILLED", "the driver died")
    assert cli.run(["runs", runs, "--repair"]) == 0
    assert capsys.readouterr().out == "nothing to mend\n"
    done = subprocess.run(command(tmp_path, proxy.url), cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    run = the_run(server, tmp_path)
    assert (run.info.status, steps_of(server, run)) == ("FINISHED", list(range(1, 51)))


def test_repair_ends_the_run_of_a_driver_that_died_while_mlflow_was_there(
    server: Server, proxy: Proxy, tmp_path: Path
) -> None:
    killed_driver(tmp_path, proxy.url, lambda: "step" in (tmp_path / "log").read_text())
    assert the_run(server, tmp_path).info.status == "RUNNING"
    assert cli.run(["runs", str(tmp_path / "runs"), "--repair"]) == 0
    assert the_run(server, tmp_path).info.status == "KILLED"
    assert record(tmp_path).status == "KILLED"


def test_repair_leaves_a_living_driver_alone(
    server: Server, proxy: Proxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command(tmp_path, proxy.url), cwd=tmp_path, stdout=log, stderr=log)
        try:
            until(lambda: "step" in (tmp_path / "log").read_text(), 60)
            assert cli.run(["runs", str(tmp_path / "runs"), "--repair"]) == 0
            assert f"k: left alone, its driver lives (process {process.pid} on" in capsys.readouterr().out
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert the_run(server, tmp_path).info.status == "FINISHED"


def test_a_driver_elsewhere_is_judged_by_its_heartbeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs" / "k"
    elsewhere = {"host": "other", "place": "another boot", "pid": os.getpid(), "started": "1"}
    RunRecord.new(name="k", task="T", facts={}).started({}, elsewhere).save(Storage(str(folder)))
    assert cli.run(["runs", str(tmp_path / "runs"), "--repair"]) == 0
    assert "left alone" in capsys.readouterr().out
    data = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**data, "updated_s": data["updated_s"] - 20 * 60}))
    assert cli.run(["runs", str(tmp_path / "runs"), "--repair"]) == 0
    assert "on other); not in MLflow" in capsys.readouterr().out
    assert record(tmp_path).status == "KILLED"
