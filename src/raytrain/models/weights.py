"""A task's model with the weights of a checkpoint: which checkpoint, which weights, under which names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from torch import nn

from raytrain.checkpoint import CheckpointStore, SavedCheckpoint
from raytrain.data import get_rng_state, seed_everything, set_rng_state
from raytrain.errors import CheckpointError, ConfigError
from raytrain.identity import RunRecord
from raytrain.storage import Storage
from raytrain.task import Task

_WRAPPERS = ("module.", "_orig_mod.")  # what DDP and torch.compile put before each name


def record_of(folder: Storage) -> RunRecord:
    """The record of a run.

    Raises:
        ConfigError: There is no run in the folder; near names are told.
    """
    record = RunRecord.load(folder)
    if record is None:
        name, beside = folder.path.rpartition("/")[2], folder.parent().names()
        close = difflib.get_close_matches(name, beside, n=1)
        hint = f" Did you mean {folder.parent().child(close[0]).uri}?" if close and close[0] != name else ""
        raise ConfigError(f"there is no run in {folder.uri}: it has no run.json.{hint} `raytrain runs` lists the runs.")
    return record


def choose(folder: Storage, which: str = "best") -> SavedCheckpoint:
    """A checkpoint of a run: ``best`` (the newest sound one when none is best), ``last`` (the newest sound one), or of a step.

    Raises:
        ConfigError: There is no run, or no checkpoint of that step; those that there are, are listed.
        CheckpointError: There is none that is sound; with the reasons.
    """
    record, store = record_of(folder), CheckpointStore(folder.child("checkpoints"))
    there = {checkpoint.step: checkpoint for checkpoint in store.all()}
    if which not in ("best", "last"):
        if not which.isdigit() or int(which) not in there:
            steps = ", ".join(map(str, there)) or "no step"
            raise ConfigError(f"{which!r} is no checkpoint of {folder.uri}. Allowed: best, last, or one of {steps}.")
        return there[int(which)]
    newest, skipped = store.choose()
    if newest is None:
        reasons = f" ({'; '.join(skipped)})" if skipped else ""
        raise CheckpointError(
            f"{folder.uri} holds no sound checkpoint{reasons}. Set train.checkpoint_every, and train."
        )
    if which == "last":
        return newest
    best = record.best_step
    if record.status == "RUNNING":  # under way, or its driver was killed: then only the checkpoint knows
        best = newest.load_state("trainer")["best_step"]
    return there.get(best, newest) if best is not None else newest


def build(task: Task, checkpoint: SavedCheckpoint, map_location: Any = "cpu", seed: int = 0) -> nn.Module:
    """The task's own model with the weights of a checkpoint, in evaluation mode.

    With ``train.ema_decay`` these are the averaged weights: they are what was evaluated. No random stream is moved.

    Raises:
        CheckpointError: The task has no model(), a file is cut or changed, or the weights do not fit.
    """
    return fill(make(task, seed), weights_of(checkpoint, map_location), checkpoint.uri).to(map_location)


def make(task: Task, seed: int = 0) -> nn.Module:
    """A new model of a task; the random streams of the process stay where they are.

    Raises:
        CheckpointError: The task has no model().
    """
    if type(task).model is Task.model:
        raise CheckpointError(
            "the run was trained by a loop function, which has no model() to build. Give a task that has one, "
            "raytrain.load(..., task=Mine()), or take the weights alone: "
            "raytrain.checkpoint.open_checkpoint(FOLDER).load_state('model')."
        )
    before = get_rng_state()
    try:
        seed_everything(seed)
        return task.model()
    finally:
        set_rng_state(before)


def weights_of(checkpoint: SavedCheckpoint, map_location: Any = "cpu") -> dict[str, Any]:
    """The weights that were evaluated: the averaged ones where they were kept, else the model's own.

    Raises:
        CheckpointError: A file is cut, changed or not there; with the checkpoint and the cure.
    """
    try:
        state: dict[str, Any] = checkpoint.load_state("model", map_location)
        if checkpoint.manifest.averaged:
            averaged: dict[str, Any] = checkpoint.load_state("trainer", map_location)["parts"]["ema"]["model"]
            return averaged
    except CheckpointError as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.uri} is not sound: {error}. Choose another one of the run "
            "(best, last, or a step; `raytrain runs` lists them)."
        ) from None
    return state


def fill(model: nn.Module, state: Mapping[str, Any], where: str) -> nn.Module:
    """The model with the weights, strictly, whatever DDP or torch.compile put before their names; in evaluation mode.

    Raises:
        CheckpointError: They do not fit; the names and shapes are told.
    """
    try:
        model.load_state_dict(_renamed(state, model.state_dict().keys()))
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights of {where} do not fit the model: {error} The task's code or settings are not those of the run."
        ) from None
    return model.eval()


def _renamed(state: Mapping[str, Any], names: Any) -> dict[str, Any]:
    """The state under the model's names, if a wrapper's prefix is all that differs; else as it is."""
    wanted = set(names)
    for prefix in _WRAPPERS:
        without = {name.removeprefix(prefix): value for name, value in state.items()}
        with_it = {f"{prefix}{name}": value for name, value in state.items()}
        for renamed in (without, with_it):
            if set(state) != wanted and set(renamed) == wanted:
                return renamed
    return dict(state)
