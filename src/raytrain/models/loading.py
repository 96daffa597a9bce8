"""``load``: a model from a run's folder, a checkpoint's folder, or MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from raytrain.checkpoint import SavedCheckpoint, open_checkpoint
from raytrain.manifest import NAME as MANIFEST
from raytrain.models import rebuild, weights
from raytrain.options import Options
from raytrain.storage import Storage
from raytrain.task import Task

_MLFLOW = ("models:/", "runs:/")


def load(
    uri: str,
    map_location: Any = "cpu",
    *,
    task: Task | None = None,
    which: str = "best",
    trusted: bool = False,
    tracking_uri: str | None = None,
) -> nn.Module:
    """The bare model with its weights, in evaluation mode.

    The task is made again from the job's file and settings that were kept with the weights: that runs the file, plain Python
    that you can read. With ``task`` nothing is run. Weights are read by ``torch.load(weights_only=True)``. What would execute
    pickled code (a model logged as a pickle, by others say) is refused unless ``trusted``.

    Args:
        uri: A run's folder, a checkpoint's, or of MLflow: ``models:/NAME@ALIAS``, ``models:/NAME/3``, ``runs:/ID/model``.
        map_location: Device of the weights.
        task: Any object with the run's ``model()``; needed when the run was not started from a job's file.
        which: Of a run: ``best`` (the newest when none is best), ``last``, or a step.
        trusted: Allow models that can only be loaded by executing pickled code.
        tracking_uri: Of MLflow. Default: MLFLOW_TRACKING_URI, else ``runs/mlflow.db``.

    Raises:
        ConfigError: There is no such run or model, or its task cannot be made again.
        CheckpointError: There is no sound checkpoint, or the weights do not fit.
    """
    return open_model(uri, which, map_location, task=task, trusted=trusted, tracking_uri=tracking_uri).model


@dataclass(frozen=True)
class Opened:
    """A model with what is known of where it comes from.

    Attributes:
        model: With its weights, in evaluation mode.
        where: The checkpoint or MLflow model.
        settings: The run's task and settings; None when they were not kept or a task was given.
        task: The task; None for a model of MLflow that others logged.
        step: Optimizer steps of the checkpoint, None when unknown.
    """

    model: nn.Module
    where: str
    settings: Options | None
    task: Task | None
    step: int | None


def open_model(
    uri: str,
    which: str = "best",
    map_location: Any = "cpu",
    *,
    task: Task | None = None,
    flags: Sequence[str] = (),
    trusted: bool = False,
    tracking_uri: str | None = None,
) -> Opened:
    """As ``load``, with ``flags`` over the run's settings; gives all that was found."""
    if uri.startswith(_MLFLOW):
        from raytrain.models.logged import open_logged

        return open_logged(uri, map_location, task=task, flags=flags, trusted=trusted, tracking_uri=tracking_uri)
    folder = Storage(uri)
    if folder.exists(MANIFEST):
        return open_checkpointed(open_checkpoint(uri), _run_of(folder), map_location, task, flags)
    return open_checkpointed(weights.choose(folder, which), folder, map_location, task, flags)


def open_checkpointed(
    checkpoint: SavedCheckpoint, run: Storage, map_location: Any, task: Task | None, flags: Sequence[str] = ()
) -> Opened:
    """The model of a checkpoint; its task as given, or as the run's folder says. Raises as ``load``."""
    settings = None if task else rebuild.settings(run, flags)
    task = task or (settings.task if settings else None)
    assert task is not None
    model = weights.build(task, checkpoint, map_location)
    return Opened(model, checkpoint.uri, settings, task, checkpoint.step)


def _run_of(checkpoint: Storage) -> Storage:
    """The run that a checkpoint's folder belongs to; the folder itself when it was copied away, job and all."""
    return checkpoint if checkpoint.exists(rebuild.JOB) else checkpoint.parent().parent()
