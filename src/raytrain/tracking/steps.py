"""The x axis of metrics that a loop reports without saying what a step is. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

CANDIDATES = ("step", "global_step", "training_iteration", "epoch")
COUNTED = "counted"


class Steps:
    """Gives each report its step: the value of a reported key where one rises, else the number of the report.

    A key serves as long as no metric gets two values at one step, and no step is less than the one before, within one start of
    the workers. If it does not, reports are counted from there on. A report without the key belongs to the last step.

    A counted step is the number of reports that led to the state of the training: when workers start again it goes on from
    the last checkpoint, which is what they continue from, or from the beginning when there was none.

    Args:
        key: The key that the user named; it is kept whatever it does. None: the first of ``CANDIDATES`` that is reported.
        before: Tags of an earlier start of the run, see ``tags``.
    """

    def __init__(self, key: str | None = None, before: Mapping[str, str] | None = None) -> None:
        tags = before or {}
        known = key or tags.get("raytrain.step")
        self._named = key is not None
        self._counting = known == COUNTED and not self._named
        self._key = None if self._counting else known
        self._begin = int(tags["raytrain.step.begin"]) if "raytrain.step.begin" in tags else None
        self._saved = int(tags["raytrain.checkpoint.last.step"]) if "raytrain.checkpoint.last.step" in tags else None
        self.restart()

    @property
    def last(self) -> int:
        """The last step that was given out."""
        return max(0, self._last)

    @property
    def tags(self) -> dict[str, str]:
        """What a later start needs to know, as tags of the run."""
        return {"raytrain.step": self._key or COUNTED, "raytrain.step.begin": str(self._begin or 0)}

    def restart(self) -> None:
        """The workers start again, from the last checkpoint."""
        self._last = (self._begin or 0) if self._saved is None else self._saved
        self._fresh = True  # nothing of this start of the workers has a step yet
        self._names: set[str] = set()  # metrics that have a value at the last step

    def saved(self) -> None:
        """The report whose step was asked for last came with a checkpoint."""
        self._saved = self._last

    def next(self, values: Mapping[str, float], names: Collection[str]) -> int:
        """The step of a report.

        Args:
            values: What was reported.
            names: The metrics among it that may have only one value per step.
        """
        if self._key is None and not self._counting:
            self._key = next((key for key in CANDIDATES if self._rises(values, key)), None)
        step = self._last + 1 if self._key is None else self._by_key(values, self._key)
        if self._key is not None and not self._named and self._clashes(step, names):
            self._key, self._counting = None, True
            step = self._last + 1
        if self._begin is None:
            self._begin = step - 1
        if step != self._last or self._fresh:
            self._names = set()
        self._last, self._fresh = step, False
        self._names |= set(names)
        return step

    def _by_key(self, values: Mapping[str, float], key: str) -> int:
        return int(values[key]) if _is_step(values.get(key)) else max(self._last, 0)

    def _rises(self, values: Mapping[str, float], key: str) -> bool:
        return _is_step(values.get(key)) and (self._fresh or values[key] > self._last)

    def _clashes(self, step: int, names: Collection[str]) -> bool:
        """Whether a metric would get a second value at a step, or a step come after a later one."""
        return not self._fresh and (step < self._last or (step == self._last and not self._names.isdisjoint(names)))


def _is_step(value: float | None) -> bool:
    return value is not None and value >= 0 and float(value).is_integer()
