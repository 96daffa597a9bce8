"""A worker's own MLflow functions refuse, whether MLflow was imported before or is imported later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BEFORE = "import mlflow; from raytrain.mlflow_guard import refuse_mlflow; refuse_mlflow()"
AFTER = "from raytrain.mlflow_guard import refuse_mlflow; refuse_mlflow(); import mlflow"
CALLS = """
for call in (lambda: mlflow.log_metric("loss", 1.0), mlflow.start_run, lambda: mlflow.register_model("runs:/x/m", "m")):
    try:
        call()
    except Exception as error:
        assert "Report the numbers instead" in str(error), error
        assert type(error).__name__ == "TrackingError"
    else:
        raise SystemExit("not refused")
import os
assert "MLFLOW_TRACKING_PASSWORD" not in os.environ
"""
OWN = """
mlflow.set_tracking_uri("sqlite:///own.db")
mlflow.log_metric("loss", 1.0)
"""


@pytest.mark.parametrize("begin", [BEFORE, AFTER])
def test_a_worker_is_refused_and_leaves_nothing(begin: str, tmp_path: Path) -> None:
    run_in(tmp_path, begin + CALLS)
    assert not list(tmp_path.iterdir())


def test_a_store_that_the_workers_code_names_itself_is_its_own(tmp_path: Path) -> None:
    run_in(tmp_path, AFTER + OWN)
    assert (tmp_path / "own.db").exists()


def run_in(folder: Path, code: str) -> None:
    environment = {**os.environ, "MLFLOW_TRACKING_PASSWORD": "x", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)
