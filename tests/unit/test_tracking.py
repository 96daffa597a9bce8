"""MLflow on a real sqlite store, and the console: one run, one value per (metric, step), truthful."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shlex
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain import TrackingConfig
from raytrain.errors import ConfigError, TrackingError
from raytrain.report import Event, Row
from raytrain.tracking import ConsoleTracker, MlflowTracker, RunInfo


def row(step: int, **values: float) -> Row:
    return Row(step, step / 10, values, time_ms=1_700_000_000_000 + step)


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


@pytest.fixture(scope="module")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database: MLflow takes two seconds to make one, so each test gets a copy."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowTracker(TrackingConfig(uri=f"sqlite:///{path}", experiment="other"), "").check("other")
    return path


@pytest.fixture
def storage(new_database: Path, tmp_path: Path) -> str:
    folder = tmp_path / "ru ns %ü"
    folder.mkdir()
    shutil.copy(new_database, folder)
    return str(folder)


@pytest.fixture
def tracker(storage: str) -> MlflowTracker:
    tracker = MlflowTracker(TrackingConfig(), storage)
    tracker.check("T")
    return tracker


def run_of(tracker: MlflowTracker) -> Any:
    return tracker._client.get_run(tracker._now.run_id)


def points(tracker: MlflowTracker, key: str) -> list[tuple[int, float]]:
    return [(p.step, p.value) for p in tracker._client.get_metric_history(tracker._now.run_id, key)]


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
    assert run_of(tracker).data.tags["raytrain.inf.inf"] == "inf at step 1"  # case D8
    assert "raytrain.inf.nan" not in run_of(tracker).data.tags
    warnings = capsys.readouterr().out.splitlines()
    assert sum("mAP@0.5" in line for line in warnings) == 1
    assert sum("'note'" in line for line in warnings) == sum("'bad'" in line for line in warnings) == 1


def test_the_first_infinity_of_a_metric_is_told_once_over_all_starts(tracker: MlflowTracker, storage: str) -> None:
    identity = tracker.open(info())
    tracker.log([row(1, loss=1.0), row(2, loss=-math.inf, a=1.0), row(3, loss=math.inf)])
    again = MlflowTracker(TrackingConfig(), storage)
    again.open(info(previous=identity, attempt=2))
    again.log([row(3, loss=math.inf), row(4, loss=math.inf, a=math.inf)])  # case D8
    tags = run_of(again).data.tags
    assert {name: text for name, text in tags.items() if ".inf." in name} == {
        "raytrain.inf.loss": "-inf at step 2",
        "raytrain.inf.a": "inf at step 4",
    }
    assert [(step, math.isnan(value)) for step, value in points(again, "loss")] == [
        (1, False),
        (2, True),
        (3, True),
        (4, True),
    ]


def test_a_start_that_another_one_went_on_with_changes_nothing_any_more(tracker: MlflowTracker, storage: str) -> None:
    first = info(run_key="k", started_s=1000.0)
    tracker.open(first)
    later = MlflowTracker(TrackingConfig(), storage)
    later.open(info(run_key="k", attempt=2, started_s=2000.0, params={"task.lr": 0.2}))
    later.event(Event("checkpoint", 9, {"uri": "/c/9"}, 1))
    later.log([row(1, loss=1.0)])
    later.close("FINISHED", None, 3000.0)
    late = MlflowTracker(TrackingConfig(), storage)
    late.open(first)
    late.event(Event("checkpoint", 3, {"uri": "/c/3"}, 1))
    late.log([row(5, loss=5.0)])
    late.close("KILLED", "x", 1500.0)
    run = run_of(late)
    assert run.info.run_id == run_of(later).info.run_id == run_of(tracker).info.run_id
    assert (run.info.status, run.info.start_time, run.info.end_time) == ("FINISHED", 1_000_000, 3_000_000)
    assert (run.data.tags["raytrain.checkpoint.last"], run.data.tags["raytrain.attempt"]) == ("/c/9", "2")
    assert points(late, "loss") == [(1, 1.0)]


def test_a_start_of_workers_is_counted_once_however_often_it_is_told(tracker: MlflowTracker) -> None:
    tracker.open(info(run_key="k"))
    events = [Event("started", 0, {"world_size": 1, "device": "cpu"}, number) for number in (1, 9, 10, 9, 10, 1)]
    for event in events:
        tracker.event(event)
    tracker.open(info(run_key="k"))
    tracker.event(events[2])
    assert run_of(tracker).data.tags["raytrain.worker_starts"] == "3"


def test_a_place_is_enough_to_find_the_store_again(
    storage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    place = MlflowTracker(TrackingConfig(uri="sqlite:///x.db"), storage).place("T")
    assert MlflowTracker.at(place).uri == f"sqlite:///{tmp_path}/x.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hunter2@host:1")
    place = MlflowTracker(TrackingConfig(), storage).place("T")
    assert "hunter2" not in str(place)
    assert MlflowTracker.at(place).store._uri == "http://me:hunter2@host:1"
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(ConfigError, match="Set MLFLOW_TRACKING_URI"):
        MlflowTracker.at(place)


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
    names = [file.path for file in tracker._client.list_artifacts(tracker._now.run_id, "job")]
    assert names == ["job/config.yaml", f"job/{Path(__file__).name}"]
    tags = run_of(tracker).data.tags
    assert tags["team"] == "vision"
    assert tags["mlflow.source.name"] == __file__
    assert tags["mlflow.user"]
    assert "raytrain.version.torch" in tags


def test_the_default_store_is_made_with_its_folder(tmp_path: Path) -> None:  # case D9
    tracker = MlflowTracker(TrackingConfig(), str(tmp_path / "not yet" / "there"))
    tracker.check("T")
    assert tracker.uri == f"sqlite:///{tmp_path}/not yet/there/mlflow.db"
    assert (tmp_path / "not yet" / "there" / "mlflow.db").exists()


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


def test_a_server_that_is_away_is_named_at_once_without_its_password(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # case D4
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@127.0.0.1:9")
    tracker = MlflowTracker(TrackingConfig(), storage)
    began = time.monotonic()
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:9.*does not answer.*tracking\.mlflow=false") as caught:
        tracker.check("T")
    assert time.monotonic() - began < 10  # MLflow alone: minutes
    assert "secret" not in str(caught.value) + tracker.uri


def test_a_deleted_experiment_is_named_with_the_cure(tracker: MlflowTracker, storage: str) -> None:
    tracker._client.delete_experiment(tracker.store.experiment_id)
    with pytest.raises(TrackingError, match=r"'T' was deleted\. Restore it"):
        MlflowTracker(TrackingConfig(), storage).check("T")


def test_a_batch_whose_answer_was_lost_is_stored_once(tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker.open(info())
    send = tracker._client.log_batch

    def stored_but_not_answered(*arguments: Any, **options: Any) -> None:
        send(*arguments, **options)
        raise ConnectionError("answer lost")

    with monkeypatch.context() as broken, contextlib.suppress(ConnectionError):
        broken.setattr(tracker._client, "log_batch", stored_but_not_answered)
        tracker.log([row(1, loss=1.0), row(2, loss=2.0)])
    assert len(points(tracker, "loss")) == 2  # the store has them, the tracker does not know
    time.sleep(0.01)
    tracker.log([row(1, loss=1.0), row(2, loss=2.0), row(3, loss=3.0)])
    assert points(tracker, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_series_keeps_its_name_when_another_one_would_take_it(tracker: MlflowTracker) -> None:  # case D7
    tracker.open(info())
    tracker.log([Row(1, 0.1, {"a@b": 1.0})])
    tracker.log([Row(2, 0.2, {"a_b": 5.0})])
    tracker.log([Row(3, 0.3, {"a@b": 2.0})])
    assert points(tracker, "a_b") == [(1, 1.0), (3, 2.0)]
    (other,) = set(run_of(tracker).data.metrics) - {"a_b", "epoch"}
    assert points(tracker, other) == [(2, 5.0)]


def test_text_that_changes_is_told_once(tracker: MlflowTracker, capsys: pytest.CaptureFixture[str]) -> None:
    tracker.open(info())
    values: list[Any] = ["x", "y", None, 10**400]
    for step, value in enumerate(values, 1):
        tracker.log([Row(step, 0.1, {"note": value, "loss": 1.0})])
    assert capsys.readouterr().out.count("'note'") == 1
    assert len(points(tracker, "loss")) == len(values)


def test_params_that_cannot_be_named_in_a_tag_do_not_stop_a_resume(tracker: MlflowTracker, storage: str) -> None:
    name = "p" * 250
    identity = tracker.open(info(params={name: "x" * 5000}))
    again = MlflowTracker(TrackingConfig(), storage)
    again.open(info(params={name: "z" * 7000}, previous=identity, attempt=2))
    changed = [value for key, value in run_of(again).data.tags.items() if key.startswith("raytrain.changed.p")]
    assert len(changed) == 1
    assert changed[0].startswith("xxx")
    assert changed[0].endswith("zzz...")


@pytest.mark.parametrize("how", ["deleted", "elsewhere"])
def test_a_run_that_is_gone_begins_anew_and_says_so(
    how: str, tracker: MlflowTracker, storage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    identity = tracker.open(info())
    if how == "deleted":
        tracker._client.delete_run(tracker._now.run_id)
    else:
        identity = {"mlflow_run_id": "0" * 32}
    again = MlflowTracker(TrackingConfig(), storage)
    assert again.open(info(previous=identity, attempt=2))["mlflow_run_id"] != identity["mlflow_run_id"]
    assert "a new one begins" in capsys.readouterr().out


def test_an_old_error_does_not_stay_on_a_run_that_ends_well(tracker: MlflowTracker, storage: str) -> None:  # case D2
    identity = tracker.open(info())
    tracker.event(Event("started", 0, {"world_size": 1, "device": "cpu"}))
    tracker.close("FAILED", "ValueError: at http://me:pw@host/x")
    again = MlflowTracker(TrackingConfig(), storage)
    again.open(info(previous=identity, attempt=2))
    again.event(Event("started", 0, {"world_size": 1, "device": "cpu"}))
    again.close("FINISHED", None)
    tags = run_of(again).data.tags
    assert "raytrain.error" not in tags
    assert tags["raytrain.error.before"] == "ValueError: at http://***@host/x"
    assert tags["raytrain.worker_starts"] == "2"


def test_no_credentials_reach_the_store(tracker: MlflowTracker) -> None:
    uri = "http://me:hunter2@host/x"
    tracker.open(
        info(
            params={"tracking.uri": uri, "task.api_key": "hunter2", "task.pad_token": 7},
            config_yaml=f"tracking:\n  uri: {uri}\ntask:\n  api_key: hunter2\n  lr: 0.1\n",
            folder="s3://key:hunter2@bucket/r",
            tags={"where": uri},
        )
    )
    run = run_of(tracker)
    config = Path(tracker._client.download_artifacts(tracker._now.run_id, "job/config.yaml")).read_text()
    assert "hunter2" not in f"{run.data.params} {run.data.tags} {config}"
    assert run.data.params["task.pad_token"] == "7"
    assert "lr: 0.1" in config


def test_odd_names_of_sets_and_tags_do_not_stop_a_start(tracker: MlflowTracker) -> None:
    tracker.open(info(datasets=[{"name": "val@1", "num_rows": 3}], tags={"a@b(": "x", "long": "y" * 9000}))
    tags = run_of(tracker).data.tags
    assert tags["raytrain.data.val_1.num_rows"] == "3"
    assert tags["a_b_"] == "x"
    assert tags["long"].startswith("yyy")


def test_datasets_are_inputs_of_the_run_once_however_often_it_starts(tracker: MlflowTracker, storage: str) -> None:
    train = {"name": "train", "num_rows": 9, "source": "/d/a.parquet", "digest": "abc", "schema": {"x": "int64"}}
    val = {"name": "val", "num_rows": 2, "source": "s3://b/v", "digest": "def"}
    identity = tracker.open(info(datasets=[train, val]))
    again = MlflowTracker(TrackingConfig(), storage)
    again.open(info(datasets=[train, {**val, "digest": "changed"}], previous=identity, attempt=2))
    inputs = run_of(again).inputs.dataset_inputs
    found = {(i.dataset.name, i.dataset.digest, i.dataset.source_type, i.tags[0].value) for i in inputs}
    expected = {("train", "abc", "local", "training"), ("val", "def", "s3", "evaluation")}
    assert found == expected | {("val", "changed", "s3", "evaluation")}
    assert len(inputs) == 3
    first = next(i.dataset for i in inputs if i.dataset.digest == "abc")
    assert json.loads(first.schema)["mlflow_colspec"][0]["name"] == "x"
    assert json.loads(first.profile) == {"num_rows": 9}


def test_an_open_that_fails_half_way_leaves_no_running_run(
    tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr(tracker._client, "log_batch", refuse)
    with pytest.raises(TrackingError, match="gone"):
        tracker.open(info())
    assert tracker._start is not None
    assert tracker._client.get_run(tracker._start.run_id).info.status == "FAILED"


def test_the_browse_command_is_one_that_a_shell_takes(tracker: MlflowTracker, storage: str) -> None:
    tracker.open(info())
    command, *arguments = shlex.split(tracker.browse())
    assert arguments == ["ui", "--backend-store-uri", f"sqlite:///{storage}/mlflow.db"]
    assert Path(command).exists()
    assert "--backend-store-uri" in subprocess.run([command, "ui", "--help"], capture_output=True, text=True).stdout


def test_many_rows_are_written_in_few_requests(tracker: MlflowTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker.open(info())
    sizes = []
    send = tracker._client.log_batch
    monkeypatch.setattr(
        tracker._client, "log_batch", lambda run, metrics: (sizes.append(len(metrics)), send(run, metrics))
    )
    tracker.log([row(step, a=1.0, b=2.0) for step in range(1, 1201)])
    assert sizes == [1000, 1000, 1000, 600]
    assert len(points(tracker, "a")) == len(points(tracker, "b")) == len(points(tracker, "epoch")) == 1200


# -- console ----------------------------------------------------------------------------------------------------------------


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
