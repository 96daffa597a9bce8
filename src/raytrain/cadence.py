"""When something is due: pure decisions on steps and on a clock that all ranks share."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.config import TrainConfig
from raytrain.durations import Duration


class Cadence:
    """Every so many epochs, steps or seconds. ``None`` is never.

    Wall time is due at the first step at which the shared clock has passed it. Epochs of unknown length are counted as they end.

    Raises:
        ConfigError: It is due within an epoch whose length is not known.
    """

    def __init__(self, every: str | None, steps_per_epoch: int | None, start_s: float = 0.0) -> None:
        self._every = Duration.parse(every) if every is not None else None
        self._epochs = _whole_epochs(self._every) if self._every and steps_per_epoch is None else None
        self._steps = self._every.in_steps(steps_per_epoch) if self._every and not self._epochs else None
        self._last_s = start_s

    @property
    def ever(self) -> bool:
        """Whether it is due at all."""
        return self._every is not None

    def due(self, step: int, clock_s: float, ended: int = 0) -> bool:
        """Whether it is due after ``step`` finished optimizer steps. Asking at a due time starts the next stretch.

        Args:
            step: Optimizer steps finished.
            clock_s: Training time, as all ranks agreed on it.
            ended: Epochs finished, if one ended with this step; else 0.
        """
        if self._every is None:
            return False
        if self._epochs is not None:
            return ended > 0 and ended % self._epochs == 0
        if self._steps is not None:
            return step % self._steps == 0
        if clock_s - self._last_s < self._every.amount:
            return False
        self._last_s = clock_s
        return True


def _whole_epochs(every: Duration) -> int | None:
    """Epochs that can be counted as they end; None for a length that is not in epochs, or not in whole ones."""
    return int(every.amount) if every.unit == "ep" and every.amount == int(every.amount) else None


@dataclass(frozen=True)
class Limit:
    """The end of training: whichever of steps, epochs and seconds comes first.

    Attributes:
        steps: Optimizer steps in all, or None when they are not known.
        seconds: Wall time in all, over all attempts, or None.
        epochs: Epochs in all, where their steps are not known; else None.
    """

    steps: int | None
    seconds: float | None
    epochs: int | None = None

    @classmethod
    def of(cls, config: TrainConfig, steps_per_epoch: int | None) -> Limit:
        """The limit that a configuration states; one epoch when it states none."""
        epochs = config.epochs
        if epochs is None and config.steps is None and config.time is None:
            epochs = 1
        seconds = Duration.parse(config.time).amount if config.time is not None else None
        if steps_per_epoch is None:
            return cls(config.steps, seconds, epochs)
        steps = [n for n in (config.steps, epochs and epochs * steps_per_epoch) if n is not None]
        return cls(min(steps) if steps else None, seconds)

    def reached(self, step: int, clock_s: float, epoch: int = 0) -> bool:
        """Whether training ends after ``step`` finished optimizer steps and ``epoch`` finished epochs."""
        if self.steps is not None and step >= self.steps:
            return True
        if self.epochs is not None and epoch >= self.epochs:
            return True
        return self.seconds is not None and clock_s >= self.seconds
