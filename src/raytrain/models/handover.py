"""From a run's checkpoints to MLflow's models and its registry, at the end of a run or afterwards."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raytrain.checkpoint import SavedCheckpoint
from raytrain.config import TrainConfig
from raytrain.errors import ConfigError
from raytrain.models import weights
from raytrain.models.example import Example, example_of
from raytrain.models.package import Package
from raytrain.models.rebuild import CONFIG, JOB
from raytrain.pins import pin
from raytrain.storage import Storage
from raytrain.task import Task
from raytrain.tracking import MlflowTracker
from raytrain.tracking.mlflow_models import (
    CHECKPOINT,
    COPIED,
    COPY,
    FORM,
    FORMAT,
    REFERENCE,
    REFERRED,
    RUN,
    STEP,
    WEIGHTS,
    Kept,
    ModelBook,
    reason,
)


@dataclass(frozen=True)
class Order:
    """What is wanted in MLflow.

    Attributes:
        log: ``best``, ``last`` or ``both``.
        name: Registered name, or None.
        form: Of copies: ``pt2``, ``weights`` or ``pickle``.
        reference: Refer to the checkpoints instead of copying their models.
    """

    log: str
    name: str | None = None
    form: str = "pt2"
    reference: bool = False


def hand_over(
    folder: Storage, task: Task, train: TrainConfig, book: ModelBook, order: Order, tell: Callable[[str], None]
) -> list[str]:
    """Log the models of a run's checkpoints, and register them; what is there already is taken as it is.

    Returns:
        A line for each model.

    Raises:
        RaytrainError: There is no sound checkpoint, or its model cannot be made.
    """
    lines = []
    for name, (checkpoint, aliases) in _chosen(folder, order).items():
        kept = Kept(checkpoint.uri, checkpoint.step, checkpoint.metrics)
        if order.reference:
            model = book.refer_to(name, kept, folder.uri)
        else:
            tags = {FORM: COPY, CHECKPOINT: kept.uri, RUN: folder.uri, WEIGHTS: _digest(checkpoint), FORMAT: order.form}
            make = functools.partial(_write, folder, task, train, checkpoint, order, tell)
            model, _ = book.put(name, kept, tags, make)
        line = f"{name} {model.model_id}: {'refers to' if order.reference else 'copy of'} step {kept.step}"
        if order.name is not None:
            facts = {STEP: kept.step, CHECKPOINT: kept.uri, FORM: REFERENCE if order.reference else COPY}
            version = book.register(order.name, model, aliases, facts)
            if order.reference:
                pin(checkpoint.storage, [f"{order.name}/{version}"])
            line += f", version {version} of {order.name}: "
            line += " ".join(f"models:/{order.name}@{alias}" for alias in aliases)
        lines.append(line)
    return lines


def _chosen(folder: Storage, order: Order) -> dict[str, tuple[SavedCheckpoint, tuple[str, ...]]]:
    """Names of logged models, each with its checkpoint and aliases."""
    name = REFERRED if order.reference else COPIED
    if order.log != "both":
        return {name: (weights.choose(folder, order.log), (order.log,))}
    best, last = weights.choose(folder, "best"), weights.choose(folder, "last")
    if best.step == last.step:
        return {name: (best, ("best", "last"))}
    return {name: (best, ("best",)), f"{name}-last": (last, ("last",))}


def _digest(checkpoint: SavedCheckpoint) -> str:
    """Of the files that the weights come from."""
    names = ["model.pt", *(["trainer.pt"] if checkpoint.manifest.averaged else [])]
    hashes = "".join(checkpoint.manifest.files[name].sha256 for name in names if name in checkpoint.manifest.files)
    return hashlib.sha256(hashes.encode()).hexdigest()


def _write(
    folder: Storage,
    task: Task,
    train: TrainConfig,
    checkpoint: SavedCheckpoint,
    order: Order,
    tell: Callable[[str], None],
    described: Any,
    to: Path,
) -> None:
    model = weights.build(task, checkpoint, "cpu", train.seed)
    sources = {name: folder.read(name) for name in (JOB, CONFIG) if folder.exists(name)}
    facts = {"step": checkpoint.step, "run": folder.uri, "checkpoint": checkpoint.uri}
    example = _example(task, model, train, tell)
    Package(model, _plain(model.state_dict()), facts, sources, example, order.form, tell).write(described, to)


def _plain(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def _example(task: Task, model: torch.nn.Module, train: TrainConfig, tell: Callable[[str], None]) -> Example | None:
    """What the model is called with; None, told, when it is not found: a model without a signature is still a model."""
    try:
        example = example_of(task, model, train)
        example.call(model)
        return example
    except ConfigError as error:
        tell(f"the logged model has no signature and no exported program: {error}")
    except Exception as error:
        tell(f"the logged model has no signature and no exported program: {type(error).__name__}: {error}")
    return None


def hand_over_or_tell(folder: Storage, task: Task, train: TrainConfig, tracker: MlflowTracker, order: Order) -> None:
    """As ``hand_over`` for a run that has just ended: prints what was done, or what failed and how to do it later."""
    try:
        with tracker.uploading() as book:
            for line in hand_over(folder, task, train, book, order, _note):
                print(f"  model  {line}", flush=True)
    except Exception as error:
        _note(f"the model was not logged ({reason(error)}). To do it later: raytrain register {folder.uri}")


def _note(text: str) -> None:
    print(f"raytrain: warning: {text}", flush=True)
