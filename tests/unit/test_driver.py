"""The driver's side of a run: what is recorded is what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytrain import RunConfig, TrackingConfig, TrainConfig
from raytrain.adopt import adopt
from raytrain.config import ConfigError
from raytrain.driver import Driver
from raytrain.errors import TrackingError
from raytrain.preflight import Findings
from raytrain.report import Event, Report, Row
from raytrain.storage import Storage
from raytrain.task import Task
from raytrain.tracking import MlflowTracker


def driver_in(folder: Path, tracking: TrackingConfig) -> Driver:
    options = adopt(TrainConfig(), None, RunConfig(name="a", storage=str(folder)))
    return Driver(Task(), options, tracking, Storage(str(folder), None), Findings(()))


def record(folder: Path) -> Any:
    return json.loads((folder / "a" / "run.json").read_text())


QUIET = TrackingConfig(mlflow=False, progress=False)


def test_a_stop_that_is_told_at_the_very_end_is_recorded(tmp_path: Path) -> None:
    with driver_in(tmp_path, QUIET).running() as deliver:
        deliver(Report((Row(3, 0.5, {"x": 1.0}),), (Event("finished", 4, {"reason": "stopped"}),)))
    assert record(tmp_path)["status"] == "KILLED"
    assert record(tmp_path)["step"] == 4


def test_an_error_is_recorded_with_its_text(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), driver_in(tmp_path, QUIET).running():
        raise ZeroDivisionError("so")
    assert record(tmp_path)["status"] == "FAILED"
    assert record(tmp_path)["error"] == "so"


def test_a_tracker_that_does_not_open_leaves_no_run_that_seems_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: MlflowTracker, run: object) -> dict[str, str]:
        raise TrackingError("went away")

    monkeypatch.setattr(MlflowTracker, "open", refuse)
    driver = driver_in(tmp_path, TrackingConfig(uri=f"sqlite:///{tmp_path}/m.db", progress=False))
    with pytest.raises(TrackingError), driver.running():
        pass
    assert record(tmp_path)["status"] == "FAILED"


@pytest.mark.parametrize(
    "uri", ["https://me:hush@host/mlflow", "postgresql://me:hush@host/db", "mysql+pymysql://me:hu@sh@host:3306/db"]
)
def test_a_password_in_the_tracking_uri_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        TrackingConfig(uri=uri)
    assert "hu" not in str(caught.value)


@pytest.mark.parametrize(
    "uri", ["https://host:5000/a@b:c", "sqlite:////tmp/a:b@c.db", "postgresql://me@host/db", "databricks"]
)
def test_uris_without_a_password_pass(uri: str) -> None:
    assert TrackingConfig(uri=uri).uri == uri


def test_a_key_in_the_storage_uri_is_refused() -> None:
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
        RunConfig(storage="s3://AKIA:hush@bucket/runs")
    assert "hush" not in str(caught.value)
