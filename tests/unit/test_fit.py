"""``fit`` in this process, as a user calls it: result, history, MLflow, resume, refusals."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import raytrain
from raytrain import RunConfig, ScalingConfig, Session, Task, TrackingConfig, TrainConfig
from raytrain.errors import CheckpointError, ConfigError, DataError, StorageError, WorkerError
from raytrain.launch import check
from raytrain.result import Result

HERE = ScalingConfig(num_workers=0)
QUIET = TrackingConfig(mlflow=False, progress=False)


@dataclass(frozen=True)
class Line(Task):
    """Fit a line to 20 points."""

    lr: float = 0.1
    hidden: int = 3
    num_rows: int = 20
    extra: Any = None
    bad_step: int = -1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(1, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1)).double()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_data(self) -> TensorDataset:
        x = torch.linspace(0, 1, self.num_rows, dtype=torch.float64).unsqueeze(1)
        return TensorDataset(x, 2 * x + 1)

    def eval_data(self) -> Any:
        return {"val": self.train_data(), "far": TensorDataset(*(t + 5 for t in self.train_data().tensors))}

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        error = model(x) - y
        return (error**2).mean(), {"mae": error.abs().mean()}


def fit(tmp_path: Path, task: Any = None, tracking: TrackingConfig = QUIET, name: str = "r", **train: Any) -> Result:
    return raytrain.fit(
        task if task is not None else Line(),
        train=TrainConfig(**{"batch_size": 4, "log_every": "1st", **train}),
        scaling=HERE,
        run=RunConfig(name=name, storage=str(tmp_path / "runs")),
        tracking=tracking,
    )


def test_the_result_holds_everything(tmp_path: Path) -> None:  # case B5
    result = fit(tmp_path, epochs=3, tracking=TrackingConfig(progress=False))
    assert (result.status, result.step) == ("finished", 15)
    assert [step for step, _ in result.series("train/loss")] == list(range(1, 16))
    assert [step for step, _ in result.series("val/mae")] == [5, 10, 15]
    assert result.metrics["far/loss"] == result.series("far/loss")[-1][1]
    assert result.metrics["val/samples"] == 20
    assert result.last_checkpoint is not None
    assert result.best_checkpoint is not None
    assert result.last_checkpoint.step == 15
    model = result.load_model()
    x, y = Line().train_data().tensors
    with torch.no_grad():
        loss = ((model(x) - y) ** 2).mean().item()
    assert loss == pytest.approx(min(value for _, value in result.series("val/loss")), rel=1e-12)
    loaded = raytrain.load(result.folder, task=Line())
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    run = client.get_run(result.mlflow_run_id)
    assert (run.info.status, run.info.run_name, run.data.params["task.lr"]) == ("FINISHED", "r", "0.1")
    for metric in ("train/loss", "val/mae"):
        stored = [(p.step, p.value) for p in client.get_metric_history(result.mlflow_run_id, metric)]
        assert stored == result.series(metric)
    saved = yaml.safe_load((tmp_path / "runs" / "r" / "config.yaml").read_text())
    assert (saved["train"]["epochs"], saved["task"]["hidden"]) == (3, 3)


def test_rows_are_means_over_their_steps_and_epochs(tmp_path: Path) -> None:
    fine = fit(tmp_path, epochs=2, name="fine")
    coarse = fit(tmp_path, epochs=2, name="coarse", log_every="2st")
    losses = [value for _, value in fine.series("train/loss")]
    assert coarse.series("train/loss") == [
        (step, pytest.approx(sum(losses[step - n : step]) / n)) for step, n in ((2, 2), (4, 2), (6, 2), (8, 2), (10, 2))
    ]
    assert coarse.series("train/loss_epoch") == [(s, pytest.approx(sum(losses[s - 5 : s]) / 5)) for s in (5, 10)]


def test_without_checkpoints_and_evaluation_there_are_still_metrics(tmp_path: Path) -> None:
    result = fit(tmp_path, epochs=3, checkpoint_every=None, eval_every=None)
    assert len(result.series("train/loss")) == 15
    assert result.last_checkpoint is None
    with pytest.raises(CheckpointError, match="no checkpoint"):
        result.load_model()


def test_cadences_in_steps_and_time(tmp_path: Path) -> None:
    result = fit(tmp_path, epochs=2, eval_every="4st", checkpoint_every="3st")
    assert [step for step, _ in result.series("val/loss")] == [4, 8, 10]
    timed = fit(tmp_path, time="1s", name="timed", eval_every=None, checkpoint_every="0.3s")
    assert timed.status == "finished"
    assert timed.step > 10
    assert timed.last_checkpoint is not None
    assert timed.last_checkpoint.step == timed.step


def test_early_stop_by_patience(tmp_path: Path) -> None:
    result = fit(tmp_path, task=replace(Line(), lr=0.0), epochs=50, patience=3)
    assert (result.status, result.step) == ("finished", 20)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.step == 5
    assert fit(tmp_path, task=replace(Line(), lr=0.0), epochs=50, patience=3).step == 20


# -- going on ---------------------------------------------------------------------------------------------------------------


def test_more_epochs_go_on_and_the_same_again_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # C4, F4
    tracking = TrackingConfig(progress=False)
    first = fit(tmp_path, epochs=2, tracking=tracking)
    second = fit(tmp_path, epochs=4, tracking=tracking)
    whole = fit(tmp_path, epochs=4, name="whole")
    assert "goes on with changed settings: train.epochs: 2 -> 4" in capsys.readouterr().out
    assert second.mlflow_run_id == first.mlflow_run_id
    assert second.series("train/loss") == whole.series("train/loss")
    assert second.series("val/loss") == whole.series("val/loss")
    third = fit(tmp_path, epochs=4, tracking=tracking)
    assert "already complete: 20 optimizer steps" in capsys.readouterr().out
    assert (third.status, third.step, third.series("train/loss")) == ("finished", 20, whole.series("train/loss"))


def test_another_experiment_under_the_same_name_is_refused(tmp_path: Path) -> None:  # case C10
    fit(tmp_path, epochs=1)
    with pytest.raises(ConfigError, match=r"task\.hidden: 3 -> 4"):
        fit(tmp_path, task=Line(hidden=4), epochs=1)
    with pytest.raises(ConfigError, match=r"data\.num_rows: 20 -> 24"):
        fit(tmp_path, task=replace(Line(), num_rows=24), epochs=1)


def test_resume_never_and_must(tmp_path: Path) -> None:
    storage = str(tmp_path / "runs")
    with pytest.raises(ConfigError, match="there is no run 'x'"):
        raytrain.fit(Line(), scaling=HERE, run=RunConfig(name="x", storage=storage, resume="must"), tracking=QUIET)
    fit(tmp_path, epochs=1, name="x")
    with pytest.raises(ConfigError, match="run 'x' exists already"):
        raytrain.fit(Line(), scaling=HERE, run=RunConfig(name="x", storage=storage, resume="never"), tracking=QUIET)


class Fails(Line):
    """Raises in a step, once."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        if model.training:
            count[0] += 1
            if count[0] == 8:
                raise KeyError("the users own words")
        return super().loss(model, batch)


count = [0]


def test_a_failed_run_goes_on_to_the_same_result_and_mlflow_says_the_truth(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    tracking = TrackingConfig(progress=False)
    count[0] = 0
    with pytest.raises(WorkerError) as caught:
        fit(tmp_path, task=Fails(), epochs=3, tracking=tracking, checkpoint_every="2st")
    text = str(caught.value)
    assert "rank 0 failed after step 7: KeyError: 'the users own words'" in text
    assert f"{__file__}:" in text
    assert 'raise KeyError("the users own words")' in text
    client = MlflowClient(f"sqlite:///{tmp_path}/runs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("Fails").experiment_id])
    assert run.info.status == "FAILED"
    assert "the users own words" in run.data.tags["raytrain.error"]
    result = fit(tmp_path, task=Fails(), epochs=3, tracking=tracking, checkpoint_every="2st")
    whole = fit(tmp_path, epochs=3, name="whole")
    assert result.mlflow_run_id == run.info.run_id
    assert result.series("train/loss") == whole.series("train/loss")
    assert client.get_run(run.info.run_id).info.status == "FINISHED"
    stored = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(p.step, p.value) for p in stored] == whole.series("train/loss")


def test_a_signal_stops_with_a_checkpoint_and_the_same_call_goes_on(tmp_path: Path) -> None:
    class Slow(Line):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            time.sleep(0.01)
            return super().loss(model, batch)

    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    stopped = fit(tmp_path, task=Slow(), epochs=60, eval_every=None)
    assert stopped.status == "stopped"
    assert 0 < stopped.step < 300
    assert stopped.last_checkpoint is not None
    assert stopped.last_checkpoint.step == stopped.step
    going_on = fit(tmp_path, task=Slow(), epochs=stopped.step // 5 + 2, eval_every=None)
    assert going_on.status == "finished"
    assert [step for step, _ in going_on.series("train/loss")] == list(range(1, going_on.step + 1))


def test_a_broken_newest_checkpoint_is_passed_over_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = fit(tmp_path, epochs=2)
    assert result.last_checkpoint is not None
    file = Path(result.last_checkpoint.uri, "model.pt")
    file.write_bytes(file.read_bytes()[:400])
    again = fit(tmp_path, epochs=3, tracking=TrackingConfig(mlflow=False))
    whole = fit(tmp_path, epochs=3, name="whole")
    out = capsys.readouterr().out
    assert "checkpoint skipped" in out
    assert "model.pt has 400 bytes" in out
    assert again.series("train/loss") == whole.series("train/loss")


# -- refusals in the first second -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "train", "scaling", "words"),
    [
        (Line(num_rows=3), {"batch_size": 8, "drop_last": True}, HERE, ["3 samples", "batch of 8"]),
        (Line(num_rows=0), {}, HERE, ["TensorDataset is empty"]),
        (Line(), {"batch_size": 2}, ScalingConfig(num_workers=4), ["2 samples", "4 workers"]),
        (Line(extra=threading.Lock()), {}, ScalingConfig(num_workers=2), ["task.extra", "lock", "cannot travel"]),
        (Line(), {"sync_batchnorm": True}, HERE, ["train.sync_batchnorm", "scaling.use_gpu"]),
        (Line(), {"schedule": "cosine", "time": "1min"}, HERE, ["must know its end"]),
        (Line(), {"epochs": 1, "warmup": "9st"}, HERE, ["warmup", "9 steps", "5 steps"]),
        (Line(), {"best_metric": "vall/loss"}, HERE, ["train.best_metric", "vall", "val", "far"]),
    ],
)
def test_what_cannot_work_ends_before_ray_starts(
    task: Task, train: dict[str, Any], scaling: ScalingConfig, words: list[str], tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises((ConfigError, DataError)) as caught:
        raytrain.fit(
            task,
            train=TrainConfig(**{"batch_size": 4, **train}),
            scaling=scaling,
            run=RunConfig(storage=str(tmp_path)),
            tracking=QUIET,
        )
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert time.monotonic() - began < 20
    assert not list(tmp_path.iterdir())


def test_a_distributed_sampler_in_the_task_is_told_to_go(tmp_path: Path) -> None:
    class Sharded(Line):
        def train_data(self) -> Any:
            data = super().train_data()
            return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))

    with pytest.raises(DataError, match="Leave DistributedSampler and ranks out"):
        fit(tmp_path, task=Sharded(), epochs=1, batch_size=None)


def test_an_unknown_best_metric_ends_before_the_first_step(tmp_path: Path) -> None:  # case C11
    with pytest.raises(WorkerError, match=r"after step 0.*'val/maee' is not among.*val/loss, val/mae"):
        fit(tmp_path, epochs=1, best_metric="val/maee")
    assert fit(tmp_path, epochs=1, best_metric="val/mae", name="ok").status == "finished"


def test_a_storage_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write .*runs.*run\.storage"):
        fit(tmp_path)


@pytest.mark.parametrize("task", [Line, 5, "text"])
def test_what_is_no_task_is_refused(task: Any) -> None:
    with pytest.raises(ConfigError, match="takes a Task object or a function"):
        raytrain.fit(task)


def test_check_lists_what_it_looked_at(tmp_path: Path) -> None:
    lines = check(Line(), TrainConfig(batch_size=8), HERE, RunConfig(name="r", storage=str(tmp_path)), TrackingConfig())
    text = "\n".join(lines)
    assert "20 samples shuffled in 3 global batches of 8" in text
    assert "evaluation set 'far': 20 samples" in text
    assert "MLflow answers at sqlite:///" in text
    assert not (tmp_path / "r").exists()


def test_rays_own_configs_are_taken_as_they_are(tmp_path: Path) -> None:
    from ray.train import CheckpointConfig, FailureConfig
    from ray.train import RunConfig as RayRunConfig
    from ray.train import ScalingConfig as RayScalingConfig

    result = raytrain.fit(
        Line(),
        train=TrainConfig(epochs=4, batch_size=4),
        scaling=RayScalingConfig(num_workers=0),
        run=RayRunConfig(
            name="ray",
            storage_path=str(tmp_path),
            failure_config=FailureConfig(max_failures=2),
            checkpoint_config=CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="far/loss", checkpoint_score_order="max"
            ),
        ),
        tracking=QUIET,
    )
    worst = max(result.series("far/loss"), key=lambda point: point[1])
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.step == worst[0]
    assert len(list((tmp_path / "ray" / "checkpoints").iterdir())) <= 2


# -- a loop of one's own ------------------------------------------------------------------------------------------------------


def own_loop(session: Session) -> None:
    """The same training as ``Line``'s, by hand."""
    task = Line()
    model = session.prepare_model(task.model())
    optimizer = task.optimizer(model)
    loader = session.prepare_loader(DataLoader(task.train_data(), batch_size=4, shuffle=True))
    scores = session.prepare_eval(task.train_data())
    session.register(model=model, optimizer=optimizer)
    for _ in session.epochs(3):
        for batch in session.batches(loader):
            x, y = batch.data
            loss = ((model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            (loss * batch.scale).backward()
            optimizer.step()
            session.log({"train/loss": loss.detach()}, batch.num_rows)
        session.evaluate(lambda b: {"loss": ((model(b.data[0]) - b.data[1]) ** 2).mean()}, scores)
        session.save()


def test_an_own_loop_equals_the_tasks(tmp_path: Path) -> None:
    own = fit(tmp_path, task=own_loop, name="own", batch_size=None, eval_batch_size=5)
    task = fit(tmp_path, epochs=3, name="task", eval_batch_size=5)
    assert own.series("train/loss") == task.series("train/loss")
    assert own.series("val/loss") == task.series("val/loss")
    assert own.step == 15
    again = fit(tmp_path, task=own_loop, name="own", batch_size=None)
    assert again.series("train/loss") == task.series("train/loss")


def test_metrics_that_are_no_number_are_kept_as_they_are(tmp_path: Path) -> None:
    def loop(session: Session) -> None:
        loader = session.prepare_loader(Line().train_data(), batch_size=10)
        for _ in session.epochs(1):
            for batch in session.batches(loader):
                session.log({"train/odd": (math.nan if batch.index else math.inf, 1)})

    values = [value for _, value in fit(tmp_path, task=loop, batch_size=None).series("train/odd")]
    assert values[0] == math.inf
    assert math.isnan(values[1])
