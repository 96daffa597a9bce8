"""Models in MLflow and its registry, on a real database: logged, registered, loaded again, and kept."""

from __future__ import annotations

import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain
from raytrain.checkpoint import CheckpointStore, open_checkpoint
from raytrain.cli import run
from raytrain.errors import CheckpointError, ConfigError
from raytrain.storage import Storage
from tests.unit.test_models import JOB, Small

pytestmark = pytest.mark.timeout(120)
ON_MLFLOW = JOB.replace("raytrain.TrackingConfig(mlflow=False)", "raytrain.TrackingConfig(progress=False)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text(ON_MLFLOW)
    return tmp_path


def train(*flags: str, name: str = "a") -> None:
    assert run(["train", "small.py", "--run.name", name, *flags]) == 0


def client() -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{Path.cwd()}/runs/mlflow.db")


def run_id(name: str = "a") -> str:
    return str(json.loads(Path(f"runs/{name}/run.json").read_text())["trackers"]["mlflow_run_id"])


def models(name: str = "a") -> dict[str, Any]:
    here, of = client(), run_id(name)
    found = here.search_logged_models([here.get_run(of).info.experiment_id], f"source_run_id = '{of}'")
    assert len({model.name for model in found}) == len(found)
    return {model.name: model for model in found}


def alike(one: Any, other: Any) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def knows_exports() -> bool:
    import mlflow.pytorch

    return "serialization_format" in inspect.signature(mlflow.pytorch.save_model).parameters


def points(name: str = "a") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client().get_metric_history(run_id(name), "val/loss")]


def test_by_default_checkpoints_are_referred_to(folder: Path) -> None:
    train()
    tags = client().get_run(run_id()).data.tags
    assert tags["raytrain.checkpoint.best.step"] == models()["checkpoint"].tags["raytrain.step"]
    scores = json.loads(tags["raytrain.checkpoint.best.metrics"])
    assert scores["val/loss"] == open_checkpoint("runs/a").metrics["val/loss"]
    linked = {metric.key: metric.value for metric in models()["checkpoint"].metrics}
    assert linked == {name: value for name, value in scores.items() if not name.startswith("train/")}
    assert len(points()) == len({step for step, _ in points()}) == 3  # still one point per step
    assert alike(raytrain.load(f"runs:/{run_id()}/checkpoint"), raytrain.load("runs/a"))
    assert alike(raytrain.load(f"runs:/{run_id()}/model"), raytrain.load("runs/a"))
    assert not (folder / "mlflow.db").exists()


def test_a_model_is_logged_registered_and_loads_everywhere(folder: Path) -> None:  # case D12
    import mlflow

    train("--tracking.register", "small", "--tracking.log_model", "both")
    assert client().get_run(run_id()).info.status == "FINISHED"
    best = raytrain.load("runs/a")
    assert alike(raytrain.load("models:/small@best"), best)
    assert alike(raytrain.load("models:/small@last"), raytrain.load("runs/a", which="last"))
    assert alike(raytrain.load("models:/small/1"), best)
    assert alike(raytrain.load(f"runs:/{run_id()}/model"), best)
    assert alike(raytrain.load("models:/small@best", task=Small()), best)
    assert "checkpoint" not in models()
    location = models()["model"].artifact_location
    if knows_exports():
        exported = mlflow.pytorch.load_model(location)
        rows = torch.randn(7, 3)
        assert torch.allclose(exported(rows), best(rows), atol=1e-6)
    signature = mlflow.models.Model.load(location.removeprefix("file://")).signature
    assert [tuple(spec.shape) for spec in signature.inputs] == [(-1, 3)]
    assert len(points()) == 3
    assert run(["evaluate", "models:/small@best"]) == 0


def test_registering_again_makes_nothing_twice_and_another_end_moves_the_alias(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--tracking.register", "small", "--tracking.log_model", "last", "--tracking.model_format", "weights")
    for _ in range(2):
        assert run(["register", "runs/a"]) == 0
    assert [version.version for version in client().search_model_versions("name = 'small'")] == [1]
    assert run(["resume", "runs/a", "--train.epochs", "4"]) == 0
    assert client().get_model_version_by_alias("small", "last").version == 2
    assert alike(raytrain.load("models:/small@last"), raytrain.load("runs/a", which="last"))
    assert run(["register", "runs/a", "--name", "other", "--log", "best"]) == 0
    assert "models:/other@best" in capsys.readouterr().out
    assert alike(raytrain.load("models:/other@best"), raytrain.load("runs/a"))


def test_a_failure_is_told_with_the_command_and_the_run_is_finished(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / "mlartifacts").write_text("in the way")
    train("--tracking.log_model", "best")
    shown = capsys.readouterr().out
    assert "the model was not logged" in shown
    assert f"raytrain register {folder}/runs/a" in shown
    assert client().get_run(run_id()).info.status == "FINISHED"
    (folder / "runs" / "mlartifacts").unlink()
    assert run(["register", "runs/a"]) == 0
    assert alike(raytrain.load(f"runs:/{run_id()}/model"), raytrain.load("runs/a"))


def test_a_failed_run_hands_its_checkpoint_over(folder: Path) -> None:
    failing = ON_MLFLOW.replace(
        "def loss(self, model, batch):", "def loss(self, model, batch):\n        self.tick(model)"
    )
    tick = '    def tick(self, model):\n        Small.calls = getattr(Small, "calls", 0) + model.training\n'
    tick += '        if Small.calls == 8: raise OSError("the disk")\n'
    (folder / "small.py").write_text(failing.replace("    def metrics(self)", tick + "    def metrics(self)"))
    assert run(["train", "small.py", "--run.name", "a", "--tracking.register", "small"]) == 1
    assert client().get_run(run_id()).info.status == "FAILED"
    assert alike(raytrain.load("models:/small@best"), raytrain.load("runs/a"))


def test_a_checkpoint_that_a_version_refers_to_is_never_deleted(folder: Path) -> None:
    train("--run.keep", "1", "--train.best_metric", "train/loss_epoch")
    first = raytrain.load("runs/a", which="last")
    assert run(["register", "runs/a", "--reference", "--name", "small", "--log", "last"]) == 0
    assert run(["resume", "runs/a", "--train.epochs", "6"]) == 0
    assert alike(raytrain.load("models:/small@last"), first)
    kept = {checkpoint.step for checkpoint in CheckpointStore(Storage("runs/a/checkpoints")).all()}
    assert 9 in kept
    assert 12 not in kept
    client().delete_registered_model("small")
    assert run(["resume", "runs/a", "--train.epochs", "7"]) == 0
    kept = {checkpoint.step for checkpoint in CheckpointStore(Storage("runs/a/checkpoints")).all()}
    assert 9 not in kept


def test_a_version_made_on_the_page_of_mlflow_keeps_its_checkpoint_too(folder: Path) -> None:
    import mlflow

    train("--run.keep", "1")
    first = raytrain.load(f"runs:/{run_id()}/checkpoint")
    mlflow.set_tracking_uri(f"sqlite:///{folder}/runs/mlflow.db")
    try:
        mlflow.register_model(f"models:/{models()['checkpoint'].model_id}", "small")
    finally:
        mlflow.set_tracking_uri(None)
    assert run(["resume", "runs/a", "--train.epochs", "8"]) == 0
    assert alike(raytrain.load("models:/small/1"), first)


def test_pickled_models_are_refused_unless_trusted(folder: Path) -> None:
    import mlflow
    from mlflow.models import Model

    train()
    marker = folder / "executed"

    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(marker), "w"))

    here = client()
    experiment = here.get_run(run_id()).info.experiment_id
    model = here.create_logged_model(experiment, "theirs", run_id())
    path = folder / "theirs"
    (path / "data").mkdir(parents=True)
    (path / "data" / "model.pth").write_bytes(pickle.dumps(Evil()))
    (path / "data" / "pickle_module_info.txt").write_text("mlflow.pytorch.pickle_module")
    described = Model(model_uuid=model.model_id, model_id=model.model_id)
    described.add_flavor("pytorch", model_data="data", pytorch_version="2", code=None)
    described.save(str(path / "MLmodel"))
    here.log_model_artifacts(model.model_id, str(path))
    here.finalize_logged_model(model.model_id, "READY")
    with pytest.raises(ConfigError, match=r"pickled model.*trusted=True"):
        raytrain.load(f"models:/{model.model_id}")
    assert not marker.exists()
    net = torch.nn.Linear(2, 1)
    pickled = {"serialization_format": "pickle"} if knows_exports() else {}
    mlflow.pytorch.save_model(net, str(folder / "net"), pip_requirements=["torch"], **pickled)
    good = here.create_logged_model(experiment, "good", run_id())
    here.log_model_artifacts(good.model_id, str(folder / "net"))
    assert alike(raytrain.load(f"runs:/{run_id()}/good", trusted=True), net)


def test_a_cut_weights_file_and_lost_checkpoints_are_told(folder: Path) -> None:
    train("--tracking.log_model", "best")
    file = next(folder.glob("runs/mlartifacts/models/*/artifacts/raytrain/weights.pt"))
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(CheckpointError, match="cut or damaged"):
        raytrain.load(f"runs:/{run_id()}/model")
    train(name="b")
    for path in folder.glob("runs/b/checkpoints/*/manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"refers to the checkpoint .* not there"):
        raytrain.load(f"runs:/{run_id('b')}/model")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tracking.log_model", "best", "--train.checkpoint_every", "none"], "needs checkpoints"),
        (["--tracking.log_model", "best", "--tracking.mlflow", "false"], "'none' without MLflow"),
    ],
)
def test_what_cannot_be_logged_is_refused_first(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "small.py", *flags]) == 2
    assert words in capsys.readouterr().err


def test_names_that_are_not_there(folder: Path) -> None:
    train()
    for uri, words in [
        ("models:/small@best", "not in MLflow"),
        ("models:/small", "not understood"),
        ("runs:/nothing/model", "not in MLflow"),
    ]:
        with pytest.raises(ConfigError, match=words):
            raytrain.load(uri)
