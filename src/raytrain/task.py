"""What the user writes: a model, its data, its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from raytrain.session import Session


class Task:
    """An experiment. Subclass it as a frozen dataclass: its fields become flags and MLflow parameters.

    All methods run on every worker, after the random streams were seeded; ``train_data`` and
    ``eval_data`` also run once on the driver, so that bad data fails at once.
    """

    def model(self) -> nn.Module:
        """The model on the CPU. All ranks start from rank 0's weights."""
        raise NotImplementedError(f"{type(self).__name__} needs model(self) -> torch.nn.Module.")

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the parameters of ``model`` (the bare module, on its device)."""
        raise NotImplementedError(f"{type(self).__name__} needs optimizer(self, model) -> torch.optim.Optimizer.")

    def schedule(self, optimizer: Optimizer, num_steps: int) -> LRScheduler | None:
        """A learning-rate schedule, stepped once per optimizer step; None for the one of ``train.schedule``.

        Args:
            optimizer: The optimizer.
            num_steps: Optimizer steps of the whole run; 0 when only ``train.time`` ends it.
        """
        return None

    def train_data(self) -> Any:
        """What to train on: a Dataset, map-style or iterable, a DataLoader, whose settings are kept; docs/data.md has more."""
        raise NotImplementedError(f"{type(self).__name__} needs train_data(self) -> Dataset or DataLoader.")

    def eval_data(self) -> Any:
        """What to evaluate on: None, a Dataset or DataLoader (named ``val``), or a dict of named ones."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """The loss of one batch.

        Returns:
            One of: a scalar mean over the samples of the batch; ``(sum, weight)`` where the weight counts
            what the sum runs over (tokens, say), a number or a scalar tensor; or either of these in a
            pair with a dict of metrics, ``(mean, {"accuracy": mean})`` or ``((sum, weight), {...})``.
            A metric is a mean over the samples, or a ``(sum, weight)`` pair of its own.
        """
        raise NotImplementedError(f"{type(self).__name__} needs loss(self, model, batch).")

    def metrics(self) -> Mapping[str, Any]:
        """Metrics with a state (F1, AUC, RMSE), by name: torchmetrics objects or the like, made anew per evaluation."""
        return {}

    def update_metrics(self, metrics: Mapping[str, Any], model: nn.Module, batch: Any) -> None:
        """Feed one evaluation batch into what ``metrics`` made. Needed only together with it."""
        raise NotImplementedError(
            f"{type(self).__name__} has metrics() and so needs update_metrics(self, metrics, model, batch)."
        )

    def example(self) -> Any:
        """What ``model`` is called with, for signatures and exports: a tensor, a tuple of them, or a dict of keyword arguments.

        None: what ``loss`` calls it with for the first evaluation batch. Give two rows or more, so that the batch dimension shows.
        """
        return None

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """What ``raytrain predict`` writes for a batch of rows: a tensor ``[B, ...]``, or a dict of tensors ``[B]`` by column.

        Args:
            model: The model with its weights, in evaluation mode, without gradients.
            batch: Of a table: a dict of columns, tensors ``[B]`` and lists of text; of an array: a tensor ``[B, ...]``.
                For this default, which calls ``model(batch)``, the columns of a table become one float tensor ``[B, C]``.
        """
        return model(batch)


@dataclass(frozen=True)
class LoopTask(Task):
    """A user's own loop over a Session, as a task: ``loop(session)`` or ``loop(session, config)``."""

    loop: Callable[..., None]
    config: object | None = None

    def run(self, session: Session) -> None:
        """Run the loop on this worker."""
        if self.config is None:
            self.loop(session)
        else:
            self.loop(session, self.config)
