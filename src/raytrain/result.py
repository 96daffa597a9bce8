"""What a run gives back, and how its models are loaded again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raytrain.report import Row

if TYPE_CHECKING:
    from torch import nn

    from raytrain.checkpoint import SavedCheckpoint
    from raytrain.task import Task


@dataclass(frozen=True)
class Result:
    """A run that has ended.

    Attributes:
        name: Name of the run.
        folder: URI of its folder.
        status: ``finished``, or ``stopped`` when it was asked to stop (the same command goes on with it).
        step: Optimizer steps finished.
        metrics: The latest value of each metric.
        history: All rows, by rising step.
        last_checkpoint: The newest checkpoint, or None.
        best_checkpoint: The one with the best metric, or None.
        trackers: What the trackers told of themselves, such as ``mlflow_run_id``.
        task: The task that was trained.
    """

    name: str
    folder: str
    status: Literal["finished", "stopped"]
    step: int
    metrics: dict[str, float]
    history: Sequence[Row] = field(repr=False, default=())
    last_checkpoint: SavedCheckpoint | None = None
    best_checkpoint: SavedCheckpoint | None = None
    trackers: dict[str, str] = field(default_factory=dict)
    task: Task | None = field(repr=False, default=None)

    @property
    def mlflow_run_id(self) -> str | None:
        """Id of the MLflow run, or None without MLflow."""
        return self.trackers.get("mlflow_run_id")

    def series(self, metric: str) -> list[tuple[int, float]]:
        """All (step, value) of one metric."""
        return [(row.step, row.values[metric]) for row in self.history if metric in row.values]

    def load_model(self, which: Literal["best", "last"] = "best", map_location: Any = "cpu") -> nn.Module:
        """The task's model with the weights of the best (or else the last) checkpoint, in evaluation mode.

        With ``train.ema_decay`` they are the averaged ones, which were evaluated.

        Raises:
            CheckpointError: There is no checkpoint, or it is not sound.
        """
        from raytrain.errors import CheckpointError
        from raytrain.models.weights import build

        checkpoint = (self.best_checkpoint if which == "best" else None) or self.last_checkpoint
        if checkpoint is None or self.task is None:
            raise CheckpointError(f"run {self.name!r} has no checkpoint to load. Set train.checkpoint_every.")
        return build(self.task, checkpoint, map_location)
