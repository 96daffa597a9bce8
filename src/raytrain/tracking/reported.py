"""What the workers of anybody's TorchTrainer reported, as plain values; and the mean over the workers. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain.tracking.names import number

_MAX_ITEMS = 100  # of a list among settings; a longer one is told by its length
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Start:
    """What is known of a ``fit()`` when its first report comes: the settings of the trainer, and the actor that controls it."""

    name: str
    folder: str
    device: str
    params: Mapping[str, Any] = field(default_factory=dict)
    controller: Any = None


@dataclass(frozen=True)
class Reported:
    """One ``ray.train.report`` of all workers, or the failure of some.

    Attributes:
        fit: Identity of the ``fit()``; the same over its retries.
        order: Rises by one within a fit: an async actor may hand messages on in another order.
        ranks: The numbers of each worker, by rank.
        others: Names of what is no number, with its type.
        checkpoint: URI of the checkpoint that came with it, or empty.
        num_workers: Workers that were asked for; 0 when that may change (elastic).
        failure: What the workers failed with; then nothing was reported.
        start: With the first of a fit.
    """

    fit: str
    order: int
    ranks: Sequence[Mapping[str, float]] = ()
    others: Mapping[str, str] = field(default_factory=dict)
    checkpoint: str = ""
    num_workers: int = 0
    failure: str = ""
    start: Start | None = None


def plain(metrics: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """The numbers of a dict, nested ones under ``outer/inner``; and the types of what is none, by name."""
    numbers: dict[str, float] = {}
    others: dict[str, str] = {}
    for name, value in _leaves(metrics, "", "/"):
        as_number = number(value)
        if as_number is None:
            others[name] = type(value).__name__
        else:
            numbers[name] = as_number
    return numbers, others


def settings(config: Any) -> dict[str, Any]:
    """A train loop's config as flat settings by dotted name; large values are told by their size."""
    if not isinstance(config, Mapping):
        return {}
    return {name: _setting(value) for name, value in _leaves(config, "", ".")}


def average(ranks: Sequence[Mapping[str, float]], weight: str, keep: Collection[str] = ()) -> dict[str, float]:
    """The mean of each name over the workers that reported it, weighted by their count where all of these gave one.

    Args:
        ranks: The numbers of each worker.
        weight: Name of the count; its own value becomes the sum. A worker that counted 0 measured nothing.
        keep: Names whose largest value is kept instead: steps and epochs.
    """
    names = dict.fromkeys(name for values in ranks for name in values)
    means = {}
    for name in names:
        found = [values for values in ranks if name in values]
        if name == weight:
            means[name] = math.fsum(values[name] for values in found)
        elif name in keep:
            means[name] = max(values[name] for values in found)
        else:
            mean = _mean([values[name] for values in found], [values.get(weight) for values in found])
            if mean is not None:
                means[name] = mean
    return means


def _mean(values: Sequence[float], weights: Sequence[float | None]) -> float | None:
    counts = [weight if weight is not None and 0 <= weight < math.inf else None for weight in weights]
    pairs = [(v, 1.0 if None in counts else c) for v, c in zip(values, counts, strict=True)]
    counted = [(value, count) for value, count in pairs if count]
    if not counted:
        return None
    if all(value == counted[0][0] for value, _ in counted):
        return counted[0][0]  # without the rounding of a division
    if not all(math.isfinite(value) for value, _ in counted):
        return sum(value for value, _ in counted)  # NaN, or infinity
    return math.fsum(value * count for value, count in counted) / math.fsum(count for _, count in counted)


def _leaves(values: Mapping[Any, Any], prefix: str, separator: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
            yield from _leaves(value, f"{name}{separator}", separator, depth + 1)
        else:
            yield name, value


def _setting(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set)) and len(value) <= _MAX_ITEMS:
        return str([_setting(item) for item in value])
    if hasattr(value, "__len__"):
        return f"{type(value).__name__} of {len(value)}"
    return getattr(value, "__qualname__", None) or str(value)
