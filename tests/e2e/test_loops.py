"""The tutorials' loops in plain torch and on a Session, run as commands: equal results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from raytrain import history
from raytrain.checkpoint import open_checkpoint
from raytrain.storage import Storage
from tests.dist.spawn import free_port
from tests.dist.toy import assert_equal_weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

LOOPS = Path(__file__).parents[2] / "jobs" / "loops"
PYTHON = [sys.executable]


def torchrun(num_ranks: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={num_ranks}",
        f"--master-port={free_port()}",
    ]


def run(launcher: list[str], script: str, *flags: str, cwd: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, str(LOOPS / script), *flags], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100
    )
    # gloo may abort a process that has done its work, when it ends (seen on a loaded machine, in plain torch only);
    # what was trained is on disk by then, and is compared.
    aborted = script == "ddp_plain.py" and "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or aborted, done.stdout + done.stderr
    return done.stdout


def plain_losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"^epoch \d+ loss (\S+)$", output, re.MULTILINE)]


def session_losses(folder: Path) -> list[float]:
    return [
        row.values["train/loss_epoch"] for row in history.read(Storage(str(folder))) if "train/loss_epoch" in row.values
    ]


def floats(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


@pytest.mark.parametrize(
    ("kind", "num_ranks", "batchnorm"), [("single", 0, False), ("ddp", 2, False), ("ddp", 1, True)]
)
def test_plain_and_session_end_with_the_same_weights_and_losses(
    kind: str, num_ranks: int, batchnorm: bool, tmp_path: Path
) -> None:
    # BatchNorm on one rank only: without SyncBatchNorm (GPUs) its statistics depend on which rows fall on which rank.
    launcher = torchrun(num_ranks) if num_ranks else PYTHON
    extra = ["--batchnorm"] if batchnorm else []
    plain = [run(launcher, f"{kind}_plain.py", "--no-shuffle", *extra, "--epochs", n, cwd=tmp_path) for n in ("2", "4")]
    flags = ["--scaling.num_workers", "0", "--train.shuffle", "false", "--run.name", "r", "--tracking.mlflow", "false"]
    flags += ["--task.batchnorm", str(batchnorm).lower()]
    for epochs in ("2", "4"):  # the second start goes on where the first ended, as the plain one does
        run(launcher, "on_session.py", *flags, "--train.epochs", epochs, cwd=tmp_path)
    want = torch.load(tmp_path / "runs" / f"{kind}-plain" / "state.pt", weights_only=True)["model"]
    got = open_checkpoint(str(tmp_path / "runs" / "r")).load_state("model")
    assert_equal_weights(floats(got), floats(want))
    losses = plain_losses("".join(plain))
    assert len(losses) == 4
    assert session_losses(tmp_path / "runs" / "r") == pytest.approx(losses, rel=1e-12)
    if kind == "ddp":
        assert list((tmp_path / "runs" / "ddp-plain" / "tensorboard").iterdir())
