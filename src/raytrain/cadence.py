"""When something is due: pure decisions on steps and on a clock that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.config import TrainConfig
from raytrain.durations import Duration


class Cadence:
    """Every so many epochs, steps or seconds. ``None`` is never.

    Wall time is due at the first step at which the shared clock has passed it.
    """

    def __init__(self, every: str | None, steps_per_epoch: int, start_s: float = 0.0) -> None:
        self._every = Duration.parse(every) if every is not None else None
        self._steps = self._every.in_steps(steps_per_epoch) if self._every else None
        self._last_s = start_s

    @property
    def ever(self) -> bool:
        """Whether it is due at all."""
        return self._every is not None

    def due(self, step: int, clock_s: float) -> bool:
        """Whether it is due after ``step`` finished optimizer steps. Asking at a due time starts the next stretch."""
        if self._every is None:
            return False
        if self._steps is not None:
            return step % self._steps == 0
        if clock_s - self._last_s < self._every.amount:
            return False
        self._last_s = clock_s
        return True


@dataclass(frozen=True)
class Limit:
    """The end of training: whichever of steps and seconds comes first.

    Attributes:
        steps: Optimizer steps in all, or None when only time ends the run.
        seconds: Wall time in all, over all attempts, or None.
    """

    steps: int | None
    seconds: float | None

    @classmethod
    def of(cls, config: TrainConfig, steps_per_epoch: int) -> Limit:
        """The limit that a configuration states; one epoch when it states none."""
        epochs = config.epochs
        if epochs is None and config.steps is None and config.time is None:
            epochs = 1
        steps = [n for n in (config.steps, epochs and epochs * steps_per_epoch) if n is not None]
        seconds = Duration.parse(config.time).amount if config.time is not None else None
        return cls(min(steps) if steps else None, seconds)

    def reached(self, step: int, clock_s: float) -> bool:
        """Whether training ends after ``step`` finished optimizer steps."""
        if self.steps is not None and step >= self.steps:
            return True
        return self.seconds is not None and clock_s >= self.seconds
