"""The best value so far, and how long it has stood."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from raytrain.errors import ConfigError

_MORE_IS_BETTER = ("acc", "auc", "f1", "precision", "recall", "r2", "score", "bleu", "iou")


def mode_of(metric: str) -> Literal["min", "max"]:
    """Whether more or less of a metric is better, by its name."""
    name = metric.rsplit("/", 1)[-1].lower()
    return "max" if any(word in name for word in _MORE_IS_BETTER) else "min"


class BestTracker:
    """The best value of a metric: NaN never wins, of equal values the earlier one stays.

    Attributes:
        value: The best value, None before the first.
        step: Its optimizer step.
        since: Evaluations without a new best.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"]) -> None:
        self.metric, self.mode = metric, mode
        self.value: float | None = None
        self.step: int | None = None
        self.since = 0

    def update(self, step: int, values: Mapping[str, float]) -> bool:
        """Take an evaluation in; whether it is a new best.

        Raises:
            ConfigError: The metric is not among the values; they are listed.
        """
        if self.metric not in values:
            known = ", ".join(sorted(values))
            raise ConfigError(f"train.best_metric = {self.metric!r} is not among the metrics. Allowed: {known}.")
        value = values[self.metric]
        if math.isnan(value) or (self.value is not None and not self._better(value, self.value)):
            self.since += 1
            return False
        self.value, self.step, self.since = value, step, 0
        return True

    def _better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {"value": self.value, "step": self.step, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.value, self.step, self.since = state["value"], state["step"], int(state["since"])
