"""The tracking server is away, hangs, fails or refuses while a run goes on: nothing is lost, nothing is there twice (case D4)."""

from __future__ import annotations

import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from mlflow.tracking import MlflowClient
from torch.utils.data import TensorDataset

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig, cli, history
from raytrain.errors import TrackingError
from raytrain.storage import Storage
from tests.e2e.mlflow_server import Server, until
from tests.e2e.proxy import Proxy

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]

STEPS = 16
Points = dict[tuple[str, int], float]


@dataclass(frozen=True)
class Slow(raytrain.Task):
    """Sixteen steps, at some of which something is done."""

    at: ClassVar[Mapping[int, Callable[[], Any]]] = {}
    pause_s: ClassVar[float] = 0.05
    steps: ClassVar[Iterator[int]] = iter(())

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.arange(256.0).reshape(64, 4) / 256, torch.ones(64, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        time.sleep(self.pause_s)
        self.at.get(next(self.steps), lambda: None)()
        return (model(batch[0]) - batch[1]).pow(2).mean()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def train(
    folder: Path, uri: str | None, at: Mapping[int, Callable[[], Any]] | None = None, strict: bool = False, **train: Any
) -> raytrain.Result:
    """Train in this process; ``at`` says what happens before which step."""
    task = type("Slow", (Slow,), {"at": at or {}, "steps": iter(range(1, 1000))})()
    return raytrain.fit(
        task,
        train=TrainConfig(**{"batch_size": 4, "log_every": "1st", "checkpoint_every": "4st", **train}),
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(name="r", storage=str(folder)),
        tracking=TrackingConfig(mlflow=uri is not None, uri=uri, strict=strict, experiment=folder.name),
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Points:
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder, None)
    return in_folder(folder)


def in_folder(folder: Path) -> Points:
    return {
        (name, row.step): value
        for row in history.read(Storage(str(folder / "r")))
        for name, value in row.values.items()
        if not name.startswith("time/")
    }


def in_mlflow(server: Server, run_id: str) -> Points:
    """All points of a run; fails where there are two for one (key, step)."""
    client, found = MlflowClient(server.url), {}
    for key in client.get_run(run_id).data.metrics:
        for point in client.get_metric_history(run_id, key):
            assert (key, point.step) not in found
            found[key, point.step] = point.value
    return {place: value for place, value in found.items() if not place[0].startswith(("time/", "epoch"))}


def the_run(server: Server, folder: Path) -> Any:
    """The only run of the experiment that is named after the folder."""
    client = MlflowClient(server.url)
    experiment = client.get_experiment_by_name(folder.name)
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def check_whole(server: Server, folder: Path, undisturbed: Points) -> Any:
    """The run is in MLflow as if nothing had happened."""
    run = the_run(server, folder)
    assert in_mlflow(server, run.info.run_id) == undisturbed
    assert run.info.status == "FINISHED"
    assert run.info.start_time < run.info.end_time
    assert run.data.params["train.batch_size"] == "4"
    assert run.data.tags["raytrain.worker_starts"] == "1"
    assert run.data.tags["raytrain.end"]
    assert run.data.tags["raytrain.checkpoint.last"].endswith("step-0000000016")
    names = [file.path for file in MlflowClient(server.url).list_artifacts(run.info.run_id, "job")]
    assert "job/config.yaml" in names
    return run


def spools(folder: Path) -> list[Path]:
    return sorted((folder / "r" / "spool").glob("*.jsonl"))


def test_down_at_the_start_and_back_in_mid_run(
    server: Server, proxy: Proxy, tmp_path: Path, undisturbed: Points, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.set("refuse")
    result = train(tmp_path, proxy.url, {8: lambda: (until(lambda: spools(tmp_path), 20), proxy.set("pass"))})
    run = check_whole(server, tmp_path, undisturbed)
    assert result.mlflow_run_id == run.info.run_id
    assert not spools(tmp_path)
    out = capsys.readouterr().out
    assert out.count("Training goes on") == 1
    assert "--send" not in out


def test_a_server_that_hangs_at_the_start_delays_it_by_seconds_only(
    server: Server, proxy: Proxy, tmp_path: Path, undisturbed: Points, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    proxy.set("swallow")
    began, first_step = time.monotonic(), []
    train(tmp_path, proxy.url, {1: lambda: first_step.append(time.monotonic()), 8: lambda: proxy.set("pass")})
    assert first_step[0] - began < 10  # 5 s for the server, the rest for the start itself
    check_whole(server, tmp_path, undisturbed)


@pytest.mark.parametrize("mode", ["refuse", "swallow", "cut"])
def test_an_outage_in_mid_run(mode: Any, server: Server, proxy: Proxy, tmp_path: Path, undisturbed: Points) -> None:
    train(tmp_path, proxy.url, {4: lambda: proxy.set(mode), 6: lambda: time.sleep(2.5), 12: lambda: proxy.set("pass")})
    check_whole(server, tmp_path, undisturbed)
    assert not spools(tmp_path)


@pytest.mark.parametrize("num_bytes", [0, 20, 200])
def test_answers_that_are_cut_at_the_start_make_one_run(
    num_bytes: int, server: Server, proxy: Proxy, tmp_path: Path, undisturbed: Points
) -> None:
    proxy.cut_after = num_bytes
    proxy.set("cut")
    train(tmp_path, proxy.url, {8: lambda: proxy.set("pass")})
    assert proxy.num_cut > 0
    check_whole(server, tmp_path, undisturbed)


def sent(command: str) -> int:
    words = shlex.split(command)
    assert words[0] == "raytrain"
    return cli.run(words[1:])


def test_a_server_that_is_never_back_gets_all_by_one_command_and_twice_is_as_once(
    server: Server, proxy: Proxy, tmp_path: Path, undisturbed: Points, capsys: pytest.CaptureFixture[str]
) -> None:
    proxy.set("refuse")
    began = time.monotonic()
    result = train(tmp_path, proxy.url)
    assert result.status == "finished"
    assert time.monotonic() - began < 30
    (command,) = re.findall(r"raytrain runs --send .*", capsys.readouterr().out)
    assert sent(command) == 1  # still away: told, nothing lost
    (file,) = spools(tmp_path)
    shutil.copy(file, tmp_path / "start-copy.jsonl")
    proxy.set("pass")
    assert sent(command) == 0
    before = check_whole(server, tmp_path, undisturbed).to_dictionary()
    assert sent(command) == 0  # tells that it was sent
    assert sent(f"raytrain runs --send {shlex.quote(str(tmp_path / 'start-copy.jsonl'))}") == 0
    after = check_whole(server, tmp_path, undisturbed).to_dictionary()
    assert (before["info"], before["data"]) == (after["info"], after["data"])
    start_s, end_s = (int(before["info"][name]) / 1000 for name in ("start_time", "end_time"))
    assert end_s - start_s < 30  # of the training, not of the sending


def test_the_next_start_sends_first_what_the_one_before_left(
    server: Server, proxy: Proxy, tmp_path: Path, undisturbed: Points
) -> None:
    proxy.set("refuse")
    train(tmp_path, proxy.url, steps=8)
    assert len(spools(tmp_path)) == 1
    proxy.set("pass")
    train(tmp_path, proxy.url)
    run = the_run(server, tmp_path)
    assert {k: v for k, v in in_mlflow(server, run.info.run_id).items() if "_epoch" not in k[0]} == {
        k: v for k, v in undisturbed.items() if "_epoch" not in k[0]
    }
    assert (run.info.status, run.data.tags["raytrain.attempt"], run.data.tags["raytrain.worker_starts"]) == (
        "FINISHED",
        "2",
        "2",
    )
    assert run.data.params["train.steps"] == "8"
    assert run.data.tags["raytrain.changed.train.steps"] == "8 -> None"
    assert not spools(tmp_path)


@pytest.fixture
def answering() -> Iterator[Callable[[int], str]]:
    """A server that gives every request the same answer."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_POST = do_PUT = do_PATCH = do_GET

            def log_message(self, *arguments: Any) -> None:
                """Nothing."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize("status", [500, 503, 401, 403])
def test_errors_and_refused_credentials_do_not_stop_a_run(
    status: int,
    answering: Callable[[int], str],
    tmp_path: Path,
    undisturbed: Points,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(tmp_path, answering(status)).status == "finished"
    out = capsys.readouterr().out
    assert str(status) in out or "credentials" in out
    assert out.count("raytrain runs --send") == 1
    rows = [line for line in spools(tmp_path)[0].read_text().splitlines() if '"kind":"row"' in line]
    assert sum('"train/loss":' in line for line in rows) == STEPS
    assert in_folder(tmp_path) == undisturbed


@pytest.mark.parametrize("status", [500, 401])
def test_strict_refuses_to_start(status: int, answering: Callable[[int], str], tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"does not answer as it should.*tracking\.mlflow=false"):
        train(tmp_path, answering(status), strict=True)
    assert not spools(tmp_path)


def test_strict_names_a_server_that_is_down(proxy: Proxy, tmp_path: Path) -> None:
    proxy.set("refuse")
    with pytest.raises(TrackingError, match="refused"):
        train(tmp_path, proxy.url, strict=True)


@pytest.mark.parametrize("uri", ["http://", "http://host:port", "htp://host", "./mlruns"])
def test_a_uri_that_cannot_work_stops_the_start_in_both_modes(uri: str, tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match="MLflow"):
        train(tmp_path, uri)
    assert not spools(tmp_path)


def test_a_deleted_experiment_stops_the_start(server: Server, proxy: Proxy, tmp_path: Path) -> None:
    client = MlflowClient(server.url)
    client.delete_experiment(client.create_experiment(tmp_path.name))
    with pytest.raises(TrackingError, match="was deleted"):
        train(tmp_path, proxy.url)
