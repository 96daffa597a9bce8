"""Predictions for files and exported programs: every format, and what is told when a model does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import csv, parquet
from torch import nn

import raytrain
from raytrain.cli import run
from raytrain.errors import ConfigError
from raytrain.models.example import example_of
from raytrain.models.exporting import ExportError, export_pt2
from raytrain.models.package import _signature
from tests.unit.test_models import JOB, Small

PREDICT = """
    def predict(self, model, batch):
        x = torch.stack([batch["a"], batch["b"], batch["c"]], 1).float()
        return {"side": model(x).argmax(1), "name": [n.upper() for n in batch["name"]]}
    def metrics(self)"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(JOB)
    rows = np.random.default_rng(0).normal(size=(10, 3))
    np.save("x.npy", rows)
    table = pa.table({"name": [f"n{i}" for i in range(10)], **{c: rows[:, i] for i, c in enumerate("abc")}})
    parquet.write_table(table, "x.parquet", row_group_size=4)
    csv.write_csv(table, "x.csv")
    return tmp_path


def trained(job: str = JOB, *flags: str) -> nn.Module:
    Path("small.py").write_text(job)
    assert run(["train", "small.py", "--run.name", "a", "--train.epochs", "1", *flags]) == 0
    return raytrain.load("runs/a")


@pytest.mark.parametrize("source", ["x.npy", "x.parquet", "x.csv"])
@pytest.mark.parametrize("target", ["y.npy", "y.parquet", "y.csv"])
def test_predictions_are_the_models_answers_in_order(folder: Path, source: str, target: str) -> None:
    model = trained()
    columns = [] if source.endswith("npy") else ["--columns", "a,b,c"]
    command = ["predict", "runs/a", "--input", source, "--output", target, "--batch-size", "4", *columns]
    assert run(command) == 0
    want = model(torch.from_numpy(np.load("x.npy")).float()).detach().numpy()
    if target.endswith("npy"):
        got = np.load(target)
    else:
        read = parquet.read_table(target) if target.endswith("parquet") else csv.read_csv(target)
        assert read.schema.names == ["prediction_0", "prediction_1"]
        got = np.stack([column.to_numpy() for column in read.columns], 1)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_a_task_says_what_it_predicts_from_named_columns(folder: Path) -> None:
    model = trained(JOB.replace("\n    def metrics(self)", PREDICT))
    assert run(["predict", "runs/a", "--input", "x.parquet", "--output", "y.csv"]) == 0
    table = csv.read_csv("y.csv")
    want = model(torch.from_numpy(np.load("x.npy")).float()).argmax(1)
    assert table["side"].to_pylist() == want.tolist()
    assert table["name"].to_pylist() == [f"N{i}" for i in range(10)]
    assert run(["predict", "runs/a", "--input", "x.parquet", "--output", "y.npy"]) == 2  # two arrays are no array


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--input", "x.npy", "--output", "y.txt"], 2, "Allowed: names that end in .parquet, .csv, .npy."),
        (["--input", "none.npy", "--output", "y.npy"], 2, "there is no file 'none.npy'"),
        (["--input", "x.npy", "--output", "x.npy"], 2, "Name another file"),
        (["--input", "x.csv", "--output", "y.npy"], 1, "column 'name' is no number"),
        (["--input", "x.csv", "--output", "y.npy", "--columns", "a,z"], 1, "no column 'z'. There are: name, a, b, c"),
        (["--input", "x.csv", "--output", "y.npy", "--columns", "a"], 1, "Define predict(self, model, batch)"),
        (["--input", "cut.parquet", "--output", "y.npy"], 1, "cut.parquet cannot be read"),
        (["--input", "empty.csv", "--output", "y.npy"], 1, "empty.csv has no rows"),
        (["--input", "pickled.npy", "--output", "y.npy"], 1, "allow_pickle"),
        (["--output", "y.npy"], 2, "required: --input"),
    ],
)
def test_what_cannot_be_predicted_is_told(
    folder: Path, flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained()
    Path("cut.parquet").write_bytes(Path("x.parquet").read_bytes()[:100])
    Path("empty.csv").write_text("a,b,c\n")
    np.save("pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert run(["predict", "runs/a", *flags]) == code
    assert words in capsys.readouterr().err
    assert not Path("y.npy").exists()


def test_an_exported_program_takes_any_number_of_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained()
    assert run(["export", "runs/a", "--format", "pt2", "--output", "a.pt2"]) == 0
    assert "takes any number of rows" in capsys.readouterr().out
    program = torch.export.load("a.pt2").module()
    for num_rows in (1, 3, 50):
        rows = torch.randn(num_rows, 3)
        assert torch.allclose(program(rows), model(rows), atol=1e-6)


def test_onnx(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = trained()
    code = run(["export", "runs/a", "--format", "onnx", "--output", "a.onnx"])
    if importlib.util.find_spec("onnxscript") is None:
        assert code == 2
        assert "pip install 'raytrain[onnx]'" in capsys.readouterr().err
        return
    assert code == 0
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession("a.onnx")
    rows = torch.randn(9, 3)
    got = session.run(None, {session.get_inputs()[0].name: rows.numpy()})[0]
    np.testing.assert_allclose(got, model(rows).detach().numpy(), atol=1e-5)


class Two(nn.Module):
    """Two inputs, one of them by name, and an answer of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x) + shift
        return y, y.sum(1)


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 0 else -x


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Given(raytrain.Task):
    def __init__(self, example: object) -> None:
        self.given = example

    def example(self) -> object:
        return self.given


def test_examples_with_several_inputs_and_names() -> None:
    task = Given({"x": torch.randn(3, 2), "shift": torch.randn(3, 1)})
    model = Two().eval()
    example = example_of(task, model, raytrain.TrainConfig())
    assert example.rows == 3
    assert export_pt2(model, example)[1] == 0
    signature = _signature(model, example)
    assert [spec.name for spec in signature.inputs] == ["x", "shift"]
    assert len(signature.outputs.inputs) == 2


def test_models_that_cannot_be_exported_say_why() -> None:
    example = example_of(Given(torch.ones(2, 2)), Branching(), raytrain.TrainConfig())
    with pytest.raises(ExportError, match=r"cannot trace the model.*\(if, \.item\(\)\)"):
        export_pt2(Branching(), example)
    with pytest.raises(ExportError, match="random in evaluation mode"):
        export_pt2(Noisy(), example)


class Around(Small):
    """A loss that uses a part of the model only."""

    def train_data(self) -> object:
        return torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4).long())

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        return model[0](batch[0]).sum()  # type: ignore[index]


def test_a_loss_that_does_not_call_the_model_needs_an_example() -> None:
    task = Around()
    with pytest.raises(ConfigError, match=r"Define example\(self\)"):
        example_of(task, task.model().eval(), raytrain.TrainConfig())
