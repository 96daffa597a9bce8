"""Lengths of training and of cadences, in epochs, optimizer steps or wall time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from raytrain.errors import ConfigError

Unit = Literal["ep", "st", "s"]

_SECONDS = {"s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*")
_ALLOWED = "a number with a unit: '3ep' (epochs), '500st' (optimizer steps), '90s', '10min', '2h' or '1d' (wall time)"


@dataclass(frozen=True)
class Duration:
    """A positive amount of epochs (``ep``), optimizer steps (``st``) or seconds (``s``).

    Raises:
        ConfigError: The amount is not positive, or steps are not whole.
    """

    amount: float
    unit: Unit

    def __post_init__(self) -> None:
        if not self.amount > 0:
            raise ConfigError(f"a duration must be above zero, not {self}. Allowed: {_ALLOWED}.")
        if self.unit == "st" and self.amount != int(self.amount):
            raise ConfigError(f"optimizer steps are whole numbers, not {self}.")

    @classmethod
    def parse(cls, text: str | Duration) -> Duration:
        """Read ``'3ep'``, ``'500st'``, ``'10min'``.

        Raises:
            ConfigError: The text is not a number with a known unit.
        """
        if isinstance(text, Duration):
            return text
        match = _PATTERN.fullmatch(str(text).lower())
        unit = match.group(2) if match else ""
        if match and unit in ("ep", "st"):
            return cls(float(match.group(1)), "ep" if unit == "ep" else "st")
        if match and unit in _SECONDS:
            return cls(float(match.group(1)) * _SECONDS[unit], "s")
        raise ConfigError(f"{text!r} is not a duration. Allowed: {_ALLOWED}.")

    def in_steps(self, steps_per_epoch: int | None) -> int | None:
        """The same length in optimizer steps (at least 1), or None for wall time.

        Raises:
            ConfigError: It is in epochs, and the steps of an epoch are not known.
        """
        if self.unit == "s":
            return None
        if self.unit == "ep" and steps_per_epoch is None:
            raise ConfigError(
                f"{self} is in epochs, but the training data does not say how long an epoch is. Give it in optimizer steps, such "
                "as '100st', or give the data a length (__len__)."
            )
        steps = self.amount * ((steps_per_epoch or 0) if self.unit == "ep" else 1)
        return max(1, round(steps))

    def __str__(self) -> str:
        return f"{self.amount:.15g}{self.unit}"
