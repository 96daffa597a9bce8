"""From what a foreign trainer's workers reported to reports of one run: the mean, the step, what happened. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from raytrain.report import Event, Report, Row
from raytrain.tracking.reported import Reported, average
from raytrain.tracking.steps import CANDIDATES, Steps

NAME, FOLDER = "raytrain.trainer.name", "raytrain.folder"  # tags that tell runs apart


class Translator:
    """Takes messages as they come, and gives reports in their true order.

    Args:
        steps: Gives each report its step.
        weight: Name of the count that weighs a worker's numbers.
        per_rank: Names whose values are wanted of each worker, too.
        known: Tags that tell this run from others, as the user gave them: they stay.
        warn: Where warnings go, each once.
    """

    def __init__(
        self,
        steps: Steps,
        weight: str,
        per_rank: Collection[str],
        known: Mapping[str, str],
        warn: Callable[[str], None],
    ) -> None:
        self._steps, self._weight, self._per_rank, self._known = steps, weight, per_rank, known
        self._warn = warn
        self._warned: set[str] = set()
        self._waiting: dict[tuple[str, int], Reported] = {}
        self._expected: dict[str, int] = {}
        self._world_size = 0  # of the workers that reported last; 0 when they must start (again)
        self._failure = ""
        self._tags: Mapping[str, str] = {}
        self.num_reports = 0

    def take(self, messages: Sequence[Reported], everything: bool = False) -> list[Report]:
        """Reports of the messages so far that have all before them; with ``everything``, of all that are left."""
        self._waiting |= {(message.fit, message.order): message for message in messages}
        return [self._report(message) for message in self._in_order(everything)]

    def _in_order(self, everything: bool) -> Iterator[Reported]:
        for fit in dict.fromkeys(fit for fit, _ in self._waiting):
            orders = sorted(order for other, order in self._waiting if other == fit)
            for order in orders:
                if order == self._expected.get(fit, 0) or everything:
                    self._expected[fit] = order + 1
                    yield self._waiting.pop((fit, order))

    def _report(self, message: Reported) -> Report:
        begun = self._start(message)
        if message.failure:
            self._world_size, self._failure = 0, message.failure
            return Report(events=tuple(begun))
        if self._are_new(message):
            self._steps.restart()
            begun += self._again(len(message.ranks))
        self._world_size = len(message.ranks)
        self.num_reports += 1
        row = self._row(message)
        return Report((row,), (*begun, *self._after(message, row.step)))

    def _again(self, world_size: int) -> Iterator[Event]:
        if self._failure:  # it is known only now that it was retried
            yield Event("tags", self._steps.last, {"raytrain.error.before": self._failure})
            self._failure = ""
        yield Event("started", self._steps.last, {"world_size": world_size})

    def _start(self, message: Reported) -> list[Event]:
        start = message.start
        if start is None:
            return []
        self._world_size = 0
        name = self._known.get(NAME, start.name)
        if start.name != name:
            self._tell(
                f"MlflowTracking(name={name!r}) tracks a trainer with RunConfig(name={start.name!r}): give both the same "
                "name, or a later start finds the wrong run."
            )
        tags = {NAME: start.name, FOLDER: start.folder, "raytrain.device": start.device}
        return [Event("tags", 0, {**tags, **self._known}), Event("params", 0, start.params)]

    def _are_new(self, message: Reported) -> bool:
        """Whether these workers started after the last report: they failed, were resized, or came back from a preemption."""
        if self._world_size == 0:
            return True
        count = len(message.ranks)
        # During a preemption only the workers that stay report; they are the same ones until all are there again.
        return count != self._world_size if message.num_workers == 0 else self._world_size < count

    def _row(self, message: Reported) -> Row:
        ranks = message.ranks
        means = average(ranks, self._weight, keep=CANDIDATES)
        self._tell_what_is_odd(message)
        names = [name for name in means if name not in CANDIDATES and name != self._weight]
        step = self._steps.next(means, names)
        if message.num_workers in (0, len(ranks)):  # else it is not known which rank is missing
            for rank, values in enumerate(ranks):
                means |= {f"rank/{rank}/{name}": values[name] for name in self._per_rank if name in values}
        return Row(step, math.nan, means)

    def _after(self, message: Reported, step: int) -> Iterator[Event]:
        if message.checkpoint:
            self._steps.saved()
            yield Event("checkpoint", step, {"uri": message.checkpoint})
        if self._steps.tags != self._tags:
            if self._tags and self._tags["raytrain.step"] != self._steps.tags["raytrain.step"]:
                self._tell(
                    f"{self._tags['raytrain.step']!r} does not rise with each report; the reports are counted instead from step "
                    f"{step} on. step_key= of MlflowTracking names a better one."
                )
            self._tags = self._steps.tags
            yield Event("tags", step, self._tags)

    def _tell_what_is_odd(self, message: Reported) -> None:
        ranks, weight = message.ranks, self._weight
        if message.others:
            told = ", ".join(f"{name!r} ({kind})" for name, kind in message.others.items())
            self._tell(f"not numbers, and not written to MLflow: {told}", f"others {sorted(message.others)}")
        for name in dict.fromkeys(name for values in ranks for name in values):
            num = sum(name in values for values in ranks)
            if num < len(ranks):
                mean = "the sum is theirs" if name == weight else "the mean is theirs"
                self._tell(f"{name!r} is reported by {num} of {len(ranks)} workers: {mean}.", f"some {name}")

    def _tell(self, text: str, once_for: str = "") -> None:
        if (once_for or text) not in self._warned:
            self._warned.add(once_for or text)
            self._warn(text)
