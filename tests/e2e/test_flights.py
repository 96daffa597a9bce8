"""The job on Parquet: makes its files, trains, and evaluates aircraft that it has not seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

JOB = Path(__file__).parents[2] / "jobs" / "flights.py"


def run(folder: Path, *more: str) -> str:
    command = [sys.executable, str(JOB), "--task.folder", str(folder / "data"), "--scaling.num_workers", "0", *more]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_flights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "cache"))
    out = run(tmp_path, "--train.steps", "300")
    rows = [int(n.replace(",", "")) for n in re.findall(r"(?:train|val): ([\d,]+) samples", out)]
    assert sum(rows) == 327_346  # flights that arrived
    auc = float(re.findall(r"val/auc (\S+)", out)[-1])
    assert 0.6 < auc < 0.75  # better than chance, and no leak of what is foretold
    assert len(list((tmp_path / "data").glob("origin=*/*.parquet"))) == 3
