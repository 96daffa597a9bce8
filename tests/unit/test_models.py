"""Models after the training: which weights, by which names, what is told when something is missing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import raytrain
from raytrain.checkpoint import open_checkpoint
from raytrain.cli import run
from raytrain.errors import CheckpointError, ConfigError
from raytrain.identity import RunRecord
from raytrain.models.weights import fill
from raytrain.storage import Storage

JOB = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import TensorDataset
import raytrain
from raytrain.metrics import SumMetric

@dataclass(frozen=True)
class Small(raytrain.Task):
    width: int = 8
    def model(self): return nn.Sequential(nn.Linear(3, self.width), nn.BatchNorm1d(self.width), nn.ReLU(), nn.Linear(self.width, 2))
    def optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def data(self, n, seed):
        x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x.sum(1) > 0).long())
    def train_data(self): return self.data(24, 0)
    def eval_data(self): return {"val": self.data(11, 1), "far": self.data(7, 2)}
    def loss(self, model, batch):
        scores = model(batch[0])
        return nn.functional.cross_entropy(scores, batch[1]), {"accuracy": (scores.argmax(1) == batch[1]).float().mean()}
    def metrics(self): return {"hits": SumMetric(lambda s: s["hits"])}
    def update_metrics(self, metrics, model, batch):
        metrics["hits"].update(hits=(model(batch[0]).argmax(1) == batch[1]).sum())

if __name__ == "__main__":
    raytrain.main(Small, train=raytrain.TrainConfig(batch_size=8, epochs=3, eval_batch_size=4),
                  scaling=raytrain.ScalingConfig(num_workers=0),
                  tracking=raytrain.TrackingConfig(mlflow=False))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(JOB)
    return tmp_path


def train(*flags: str, name: str = "a") -> None:
    assert run(["train", "small.py", "--run.name", name, *flags]) == 0


def test_load_gives_the_bare_model_of_a_run_or_checkpoint(folder: Path) -> None:
    train()
    model = raytrain.load("runs/a")
    assert type(model) is nn.Sequential
    assert not any(module.training for module in model.modules())
    state = open_checkpoint("runs/a").load_state("model")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    steps = sorted((folder / "runs" / "a" / "checkpoints").iterdir())
    last = raytrain.load("runs/a", which="last").state_dict()
    of_folder = raytrain.load(str(steps[-1])).state_dict()
    assert all(torch.equal(last[name], value) for name, value in of_folder.items())
    before = torch.get_rng_state()
    raytrain.load("runs/a", which="6")
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluate_prints_what_the_training_measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train()
    steps = [json.loads(path.read_text()) for path in sorted(folder.glob("runs/a/checkpoints/*/manifest.json"))]
    for manifest in steps:
        capsys.readouterr()
        assert run(["evaluate", "runs/a", "--checkpoint", str(manifest["step"])]) == 0
        assert shown(capsys.readouterr().out) == {
            k: v for k, v in manifest["metrics"].items() if k[:3] in ("val", "far")
        }
    assert run(["evaluate", "runs/a", "--data", "far", "--data", "train"]) == 0
    names = shown(capsys.readouterr().out)
    assert names["train/samples"] == 24
    assert {name.partition("/")[0] for name in names} == {"far", "train"}


def shown(text: str) -> dict[str, float]:
    return {line.split()[0]: float(line.split()[1]) for line in text.splitlines()[1:]}


def test_averaged_weights_are_what_is_loaded_and_evaluated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train("--train.ema_decay", "0.5")
    checkpoint = open_checkpoint("runs/a")
    averaged = checkpoint.load_state("trainer")["parts"]["ema"]["model"]
    model = raytrain.load(checkpoint.uri)
    assert all(torch.equal(averaged[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(averaged["0.weight"], checkpoint.load_state("model")["0.weight"])
    capsys.readouterr()
    assert run(["evaluate", checkpoint.uri]) == 0
    assert shown(capsys.readouterr().out)["val/loss"] == checkpoint.metrics["val/loss"]


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_prefixes_of_wrappers_fit_either_way(prefix: str) -> None:  # case C7
    plain = nn.Linear(2, 1)
    wrapped = nn.Module()
    for name in prefix.split(".")[:-1]:
        wrapped.add_module(name, nn.Linear(2, 1))
    named = {f"{prefix}{name}": value for name, value in plain.state_dict().items()}
    assert torch.equal(fill(nn.Linear(2, 1), named, "here").weight, plain.weight)
    if prefix:
        fill(wrapped, plain.state_dict(), "here")
        fill(wrapped, wrapped.state_dict(), "here")
    with pytest.raises(CheckpointError, match=r"(?s)here do not fit.*size mismatch"):
        fill(nn.Linear(3, 1), named, "here")


def test_a_cut_file_is_named_with_the_cure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # case C6
    train()
    file = max(folder.glob("runs/a/checkpoints/*/model.pt"))
    file.write_bytes(file.read_bytes()[:400])
    with pytest.raises(CheckpointError, match=r"model.pt has 400 bytes instead of \d+. Choose another one"):
        raytrain.load(str(file.parent))
    assert run(["evaluate", str(file.parent)]) == 1
    assert "is not sound" in capsys.readouterr().err
    assert raytrain.load("runs/a", which="last") is not None  # the newest sound one


def test_what_is_missing_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train()
    with pytest.raises(ConfigError, match=r"no run in .*/runs/b"):
        raytrain.load("runs/b")
    assert run(["evaluate", "runs/a", "--checkpoint", "4"]) == 2
    assert "Allowed: best, last, or one of 6, 9." in capsys.readouterr().err
    assert run(["evaluate", "runs/a", "--data", "vall"]) == 2
    assert "there is no data 'vall'. Allowed: val, far, train." in capsys.readouterr().err
    assert run(["evaluate"]) == 2
    assert run(["evaluate", "runs/a", "--task.widht", "3"]) == 2
    assert "did you mean --task.width?" in capsys.readouterr().err
    assert run(["evaluate", "runs/a", "--task.width", "3"]) == 1
    assert "do not fit the model" in capsys.readouterr().err
    (folder / "runs" / "a" / "job.py").write_text("import raytrain, nowhere_to_be_found\n")
    with pytest.raises(ConfigError, match=r"needs the module 'nowhere_to_be_found'.*PYTHONPATH"):
        raytrain.load("runs/a")
    (folder / "runs" / "a" / "job.py").unlink()
    with pytest.raises(ConfigError, match=r"no job.py.*task=Mine\(\)"):
        raytrain.load("runs/a")
    assert raytrain.load("runs/a", task=Small()) is not None


@dataclass(frozen=True)
class Small(raytrain.Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def test_the_best_of_a_run_whose_driver_was_killed(folder: Path) -> None:
    train()
    record = RunRecord.load(Storage("runs/a"))
    assert record is not None
    want = raytrain.load("runs/a").state_dict()
    killed = {**vars(record), "status": "RUNNING", "best_step": None}
    RunRecord(**killed).save(Storage("runs/a"))
    assert all(torch.equal(want[name], value) for name, value in raytrain.load("runs/a").state_dict().items())


def test_a_script_that_calls_fit_is_not_trained_again(folder: Path) -> None:
    script = (
        JOB.split("if __name__")[0] + "print(raytrain.fit(Small(), train=raytrain.TrainConfig(batch_size=8, epochs=1), "
    )
    script += "scaling=raytrain.ScalingConfig(num_workers=0), run=raytrain.RunConfig(name='f'), "
    script += "tracking=raytrain.TrackingConfig(mlflow=False)))\n"
    (folder / "small.py").write_text(script)
    assert run(["train", "small.py"]) == 2  # it trained, and main was missed
    before = Path("runs/f/run.json").read_bytes()
    assert raytrain.load("runs/f") is not None
    assert Path("runs/f/run.json").read_bytes() == before


def test_a_loop_function_has_no_model(tmp_path: Path) -> None:
    def loop(session: Any) -> None:
        model = session.prepare_model(nn.Linear(1, 1))
        loader = session.prepare_loader(TensorDataset(torch.ones(4, 1)), batch_size=2)
        session.register(model=model)
        for _ in session.epochs(1):
            for batch in session.batches(loader):
                session.log({"train/loss": model(batch.data[0]).mean()}, batch.num_rows)
            session.save()

    tracking = raytrain.TrackingConfig(mlflow=False)
    where = raytrain.RunConfig(name="l", storage=str(tmp_path))
    result = raytrain.fit(loop, scaling=raytrain.ScalingConfig(num_workers=0), run=where, tracking=tracking)
    with pytest.raises(CheckpointError, match="loop function"):
        raytrain.load(result.folder, task=result.task)
