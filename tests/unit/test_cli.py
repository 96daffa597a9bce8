"""The raytrain command, in this process: verbs, exit codes, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.cli import run

JOB = """
from dataclasses import dataclass
import torch
from torch.utils.data import TensorDataset
import raytrain

@dataclass(frozen=True)
class Tiny(raytrain.Task):
    lr: float = 0.1
    num_rows: int = 8
    fail: bool = False
    def model(self): return torch.nn.Linear(1, 1)
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=self.lr)
    def train_data(self): return TensorDataset(torch.ones(self.num_rows, 1), torch.ones(self.num_rows, 1))
    def loss(self, model, batch):
        if self.fail: raise OSError("disk of the user")
        return (model(batch[0]) - batch[1]).pow(2).mean()

if __name__ == "__main__":
    raytrain.main(Tiny, train=raytrain.TrainConfig(batch_size=4, epochs=2), scaling=raytrain.ScalingConfig(num_workers=0),
                  tracking=raytrain.TrackingConfig(mlflow=False))
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(JOB)
    return "tiny.py"


def test_train_resume_and_runs(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", job, "--run.name", "a"]) == 0
    assert "a: finished after 4 optimizer steps" in capsys.readouterr().out
    assert run(["resume", "runs/a", "--train.epochs", "3"]) == 0
    assert "a: finished after 6 optimizer steps" in capsys.readouterr().out
    assert run(["resume", "runs/a"]) == 0
    assert "already complete: 6 optimizer steps" in capsys.readouterr().out
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "run.json").write_text("{")
    assert run(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["NAME", "STATUS", "STEP"]
    assert lines[1].split()[:3] == ["a", "FINISHED", "6"]
    assert lines[2].split() == ["broken", "DAMAGED"]


def test_check_does_not_train(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", job, "--train.batch_size", "3"]) == 0
    assert "ok  8 samples shuffled in 3 global batches of 3 per epoch" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["train", "tiny.py", "--train.epoch", "3"], 2, "did you mean --train.epochs?"),
        (["train", "tiny.py", "--task.num_rows", "0"], 2, "0 samples"),
        (["check", "tiny.py", "--task.num_rows", "0"], 2, "0 samples"),
        (["train", "tiny.py", "--task.fail", "true"], 1, "rank 0 failed after step 0: OSError: disk of the user"),
        (["trian", "tiny.py"], 2, "did you mean 'train'?"),
        (["dance"], 2, "Allowed: train, check"),
        (["train"], 2, "needs a job file"),
        (["train", "none.py"], 2, "no job file 'none.py'"),
        (["resume", "."], 2, "not the folder of a run"),
        (["resume"], 2, "needs the folder of a run"),
    ],
)
def test_exit_codes_and_words(
    job: str, argv: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == code
    assert words in capsys.readouterr().err


def test_a_file_that_is_no_job(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.py").write_text("x = 1\n")
    assert run(["train", "other.py"]) == 2
    assert "without calling raytrain.main" in capsys.readouterr().err


def test_usage_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert run(["--version"]) == 0
    assert "raytrain train JOB.py" in capsys.readouterr().out


def test_no_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", str(tmp_path / "none")]) == 0
    assert "no runs in" in capsys.readouterr().out
