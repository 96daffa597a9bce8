"""Collector, console and MLflow on a real sqlite store: once, in order, truthful, and never in the way."""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raytrain import TrackingConfig
from raytrain.errors import TrackingError
from raytrain.report import Event, Report, Row
from raytrain.tracking import Collector, ConsoleTracker, MlflowTracker, RunInfo
from raytrain.tracking.names import clean, clean_all, param_values
from raytrain.tracking.provenance import without_secrets


class Kept:
    """A tracker that keeps what it gets, and can be away."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.events: list[Event] = []
        self.ended: list[tuple[str, str | None]] = []
        self.away = False

    def open(self, run: RunInfo) -> dict[str, str]:
        return {}

    def log(self, rows: Sequence[Row]) -> None:
        if self.away:
            raise ConnectionError("nobody there")
        self.rows += rows

    def event(self, event: Event) -> None:
        self.events.append(event)

    def close(self, status: str, error: str | None) -> None:
        self.ended.append((status, error))


def row(step: int, **values: float) -> Row:
    return Row(step, step / 10, values)


def test_replayed_steps_are_dropped_per_metric() -> None:  # case D1
    kept = Kept()
    collector = Collector([kept], history=[row(1, loss=1.0), row(2, loss=2.0)])
    collector.put(Report((row(2, loss=2.0, val=9.0), row(3, loss=3.0))))
    collector.put(Report((row(3, loss=3.0), row(4, loss=4.0)), (Event("finished", 4),)))
    collector.close("FINISHED", None)
    assert [(r.step, dict(r.values)) for r in kept.rows] == [(2, {"val": 9.0}), (3, {"loss": 3.0}), (4, {"loss": 4.0})]
    assert [r.step for r in collector.history] == [1, 2, 2, 3, 4]
    assert kept.ended == [("FINISHED", None)]
    assert [e.kind for e in kept.events] == ["finished"]


def test_an_outage_costs_nothing_and_loses_nothing() -> None:  # case D4
    kept, other, warnings = Kept(), Kept(), []
    collector = Collector([kept, other], warn=warnings.append)
    kept.away = True
    for step in range(1, 40):
        collector.put(Report((row(step, loss=1.0),)))
        time.sleep(0.02)
    kept.away = False
    collector.close("FINISHED", None)
    assert [r.step for r in kept.rows] == [r.step for r in other.rows] == list(range(1, 40))
    assert len(warnings) == 1
    assert "nobody there" in warnings[0]


def test_what_hangs_at_the_end_is_given_up_and_told() -> None:
    release, warnings = threading.Event(), []

    class Hanging(Kept):
        def close(self, status: str, error: str | None) -> None:
            release.wait(20)

    collector = Collector([Hanging()], warn=warnings.append)
    collector.close("FINISHED", None, limit_s=0.2)
    release.set()
    assert "did not answer within 0.2 s" in warnings[0]


# -- MLflow ---------------------------------------------------------------------------------------------------------------


def info(**changes: Any) -> RunInfo:
    values: dict[str, Any] = {
        "name": "r",
        "task": "T",
        "attempt": 1,
        "params": {"task.lr": 0.1},
        "config_yaml": "task: {lr: 0.1}\n",
        "job_source": __file__,
        "folder": "/runs/r",
    }
    return RunInfo(**{**values, **changes})


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return str(tmp_path / "ru ns %ü")


@pytest.fixture
def tracker(storage: str) -> MlflowTracker:
    tracker = MlflowTracker(TrackingConfig(), storage)
    tracker.check("T")
    return tracker


def run_of(tracker: MlflowTracker) -> Any:
    return tracker._client.get_run(tracker._run_id)


def points(tracker: MlflowTracker, key: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in tracker._client.get_metric_history(tracker._run_id, key)]


@pytest.mark.parametrize(("status", "error"), [("FINISHED", None), ("FAILED", "ValueError: x"), ("KILLED", None)])
def test_the_end_is_truthful(tracker: MlflowTracker, status: Any, error: str | None) -> None:  # case D2
    tracker.open(info())
    assert run_of(tracker).info.status == "RUNNING"
    tracker.close(status, error)
    run = run_of(tracker)
    assert run.info.status == status
    assert run.info.end_time is not None
    assert run.data.tags.get("raytrain.error") == error


def test_a_second_start_goes_on_with_the_run(tracker: MlflowTracker, storage: str) -> None:  # cases D1, D6
    identity = tracker.open(info(params={"train.epochs": 2}))
    tracker.log([row(1, loss=1.0), row(2, loss=2.0)])
    tracker.close("FAILED", "x")
    again = MlflowTracker(TrackingConfig(), storage)
    assert (
        again.open(info(params={"train.epochs": 4}, previous=identity, attempt=2))["mlflow_run_id"]
        == identity["mlflow_run_id"]
    )
    again.log([row(2, loss=99.0), row(3, loss=3.0)])
    again.close("FINISHED", None)
    assert points(again, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    run = run_of(again)
    assert (run.info.status, run.data.params["train.epochs"]) == ("FINISHED", "2")
    assert run.data.tags["raytrain.changed.train.epochs"] == "2 -> 4"
    assert run.data.tags["raytrain.attempt"] == "2"


def test_one_bad_metric_does_not_lose_the_others(
    tracker: MlflowTracker, capsys: pytest.CaptureFixture[str]
) -> None:  # case D7
    tracker.open(info())
    values: dict[str, Any] = {"loss": 1.0, "mAP@0.5": 0.3, "note": "x", "bad": None, "nan": math.nan, "inf": math.inf}
    for step in (1, 2):
        tracker.log([Row(step, 0.5, values)])
    assert points(tracker, "loss") == [(1, 1.0), (2, 1.0)]
    assert points(tracker, "mAP_0.5") == [(1, 0.3), (2, 0.3)]
    assert points(tracker, "epoch") == [(1, 0.5), (2, 0.5)]
    for key in ("nan", "inf"):
        assert [math.isnan(value) for _, value in points(tracker, key)] == [True, True]
    warnings = capsys.readouterr().out.splitlines()
    assert sum("mAP@0.5" in line for line in warnings) == 1
    assert sum("'note'" in line for line in warnings) == sum("'bad'" in line for line in warnings) == 1


def test_params_of_every_kind(tracker: MlflowTracker) -> None:  # case D5
    params = {f"p{i}": i for i in range(150)} | {
        "long": "y" * 10_000,
        "a(b": 1,
        "a[b": 2,
        "list": "[1, 2]",
        "none": None,
    }
    tracker.open(info(params=params))
    stored = run_of(tracker).data.params
    assert len(stored) == len(params)
    assert stored["p149"] == "149"
    assert stored["long"].endswith("...")
    assert sorted(value for name, value in stored.items() if name.startswith("a_b")) == ["1", "2"]


def test_config_and_job_are_artifacts_and_tags_tell_where_it_came_from(tracker: MlflowTracker) -> None:
    tracker.open(info(tags={"team": "vision"}))
    names = [file.path for file in tracker._client.list_artifacts(tracker._run_id, "job")]
    assert names == ["job/config.yaml", f"job/{Path(__file__).name}"]
    tags = run_of(tracker).data.tags
    assert tags["team"] == "vision"
    assert tags["mlflow.source.name"] == __file__
    assert tags["mlflow.user"]
    assert "raytrain.version.torch" in tags


def test_events_are_tags(tracker: MlflowTracker) -> None:
    tracker.open(info())
    tracker.event(Event("started", 0, {"world_size": 2, "device": "cpu"}))
    tracker.event(Event("best", 5, {"uri": "/c/5"}))
    tracker.event(Event("checkpoint", 9, {"uri": "/c/9"}))
    tracker.event(Event("note", 9, {"text": "hello"}))
    tags = run_of(tracker).data.tags
    assert (tags["raytrain.checkpoint.best"], tags["raytrain.checkpoint.last"]) == ("/c/5", "/c/9")
    assert tags["raytrain.world_size"] == "2"


@pytest.mark.parametrize("uri", ["file:./mlruns", "./mlruns"])
def test_folder_stores_are_refused_with_the_cure(uri: str, storage: str) -> None:  # case D9
    with pytest.raises(TrackingError, match=r"folder.*tracking\.uri=sqlite:////"):
        MlflowTracker(TrackingConfig(uri=uri), storage).check("T")


def test_a_server_that_is_away_is_named_at_the_start(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9.*does not answer.*tracking\.mlflow=false"):
        MlflowTracker(TrackingConfig(uri="http://user:secret@127.0.0.1:9"), storage).check("T")


def test_a_deleted_experiment_is_named_with_the_cure(tracker: MlflowTracker, storage: str) -> None:
    tracker._client.delete_experiment(tracker._experiment_id)
    with pytest.raises(TrackingError, match=r"'T' was deleted\. Restore it"):
        MlflowTracker(TrackingConfig(), storage).check("T")


def test_many_rows_are_written_in_few_requests(tracker: MlflowTracker) -> None:
    tracker.open(info())
    tracker.log([row(step, a=1.0, b=2.0) for step in range(1, 1201)])
    assert len(points(tracker, "a")) == len(points(tracker, "b")) == 1200


# -- names, secrets, console ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("val/loss", "val/loss"),
        ("mAP@0.5", "mAP_0.5"),
        ("a(b)", "a_b_"),
        ("", "_"),
        ("../x", "_/x"),
        ("/a/", "a"),
        ("ü", "ü"),
    ],
)
def test_names_are_cleaned(name: str, cleaned: str) -> None:
    assert clean(name) == cleaned


def test_names_that_collide_stay_apart() -> None:
    names = clean_all(["a@b", "a_b", "a#b"])
    assert names["a_b"] == "a_b"
    assert len(set(names.values())) == 3
    assert len(clean("x" * 400)) == 250
    assert param_values({"x": "y" * 7000})["x"].endswith("...")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("job --api-key=abc --lr 1", "job --api-key=*** --lr 1"),
        ("job --db_password s3cret", "job --db_password ***"),
        ("--uri http://me:pw@host/x", "--uri http://***@host/x"),
        ("--task.lr 0.1", "--task.lr 0.1"),
    ],
)
def test_secrets_are_left_out_of_commands(text: str, safe: str) -> None:
    assert without_secrets(text) == safe


def test_the_console_shows_few_lines_and_the_last_evaluation() -> None:
    out = io.StringIO()
    console = ConsoleTracker(out, every_s=60)
    console.open(info())
    for step in range(1, 100):
        console.log([Row(step, step / 10, {"train/loss": 1 / step, "time/samples_per_s": 1000.0})])
        console.log([Row(step, step / 10, {"val/loss": 2 / step, "val/samples": 5.0})])
    console.event(Event("warning", 3, {"text": "checkpoint skipped: x"}))
    console.close("FINISHED", None)
    lines = out.getvalue().splitlines()
    assert len(lines) < 8
    assert "warning: checkpoint skipped: x" in out.getvalue()
    assert "step      99" in lines[-1]
    assert "val/loss 0.0202" in lines[-1]
    assert "1,000 samples/s" in lines[-1]
