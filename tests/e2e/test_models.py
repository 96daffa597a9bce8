"""Models after the training as a user's commands: train, register, load, evaluate, predict, export; and over HTTP."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import raytrain
from tests.e2e.test_commands import ROOT, mlflow_server
from tests.e2e.test_loops import torchrun

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]
RAYTRAIN = [sys.executable, "-m", "raytrain"]
FEW = ["--scaling.num_workers", "0", "--train.epochs", "2", "--run.name", "m"]


def command(*words: str, cwd: Path, code: int = 0) -> str:
    done = subprocess.run([*RAYTRAIN, *words], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_from_training_to_predictions(tmp_path: Path) -> None:
    out = command("train", str(ROOT / "jobs" / "digits.py"), *FEW, "--tracking.register", "digits", cwd=tmp_path)
    assert "models:/digits@best" in out
    shown = command("evaluate", "runs/m", cwd=tmp_path)
    manifest = max(tmp_path.glob("runs/m/checkpoints/*/manifest.json"))
    metrics = json.loads(manifest.read_text())["metrics"]
    assert float(re.findall(r"val/loss +(\S+)", shown)[0]) == metrics["val/loss"]
    assert command("evaluate", "models:/digits@best", cwd=tmp_path).splitlines()[1:] == shown.splitlines()[1:]
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((9, 64), dtype=np.float32))
    command("predict", "models:/digits@best", "--input", "x.npy", "--output", "y.npy", cwd=tmp_path)
    model = raytrain.load(str(tmp_path / "runs" / "m"))
    with torch.no_grad():
        want = model(torch.from_numpy(np.load(tmp_path / "x.npy")))
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, atol=1e-6)
    command("export", "runs/m", "--format", "pt2", "--output", "m.pt2", cwd=tmp_path)
    program = torch.export.load(str(tmp_path / "m.pt2")).module()
    assert torch.allclose(program(torch.ones(5, 64)), model(torch.ones(5, 64)), atol=1e-6)
    assert not (tmp_path / "mlflow.db").exists()


def test_two_workers_train_what_a_plain_module_loads(tmp_path: Path) -> None:  # case C7
    flags = [str(ROOT / "jobs" / "digits.py"), "--run.name", "m", "--scaling.num_workers", "0", "--train.epochs"]

    def with_two(epochs: str, *more: str) -> None:
        command = [*torchrun(2), *flags, epochs, *more]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr

    with_two("1", "--tracking.log_model", "best")
    model = raytrain.load(str(tmp_path / "runs" / "m"))
    assert not any(name.startswith("module.") for name in model.state_dict())
    command("train", *flags, "2", cwd=tmp_path)
    with_two("3")
    assert raytrain.load(str(tmp_path / "runs" / "m"), which="last") is not None
    run_id = json.loads((tmp_path / "runs/m/run.json").read_text())["trackers"]["mlflow_run_id"]
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert raytrain.load(f"runs:/{run_id}/model", tracking_uri=uri) is not None


def test_models_over_http(tmp_path: Path) -> None:
    job = str(ROOT / "jobs" / "digits.py")
    with mlflow_server(tmp_path) as url:
        out = command("train", job, *FEW, "--tracking.uri", url, "--tracking.register", "digits", cwd=tmp_path)
        assert "models:/digits@best" in out
        command("register", "runs/m", "--reference", "--name", "far", cwd=tmp_path)
        want = raytrain.load(str(tmp_path / "runs" / "m")).state_dict()
        for uri in ("models:/digits@best", "models:/far@best"):
            got = raytrain.load(uri, tracking_uri=url).state_dict()
            assert all(torch.equal(got[name], value) for name, value in want.items())
        import mlflow

        mlflow.set_tracking_uri(url)
        try:
            exported = mlflow.pytorch.load_model("models:/digits@best")
        finally:
            mlflow.set_tracking_uri(None)
        assert exported(torch.ones(3, 64)).shape == (3, 10)
    out = command("register", "runs/m", cwd=tmp_path, code=1)
    assert "does not answer" in out
