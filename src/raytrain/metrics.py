"""Metrics that are no plain mean (RMSE, F1, AUC): a state per rank, brought together before it is computed.

Torchmetrics' objects work as they are. For a metric of one's own there are two kinds: ``SumMetric`` keeps sums
(RMSE), ``GatherMetric`` keeps every value (AUC).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from raytrain.errors import RaytrainError
from raytrain.peers import Peers


class SumMetric:
    """A number computed from sums over all samples.

    ``SumMetric(lambda s: (s["squares"] / s["n"]) ** 0.5)`` with ``update(squares=((a - b) ** 2).sum(), n=len(a))`` is the RMSE.
    The sums are exact before they are rounded once: the same bits on any number of workers.
    """

    def __init__(self, compute: Callable[[Mapping[str, float]], float]) -> None:
        self._compute = compute
        self._sums: dict[str, list[float]] = {}

    def update(self, **sums: Any) -> None:
        """Add one batch's sums, numbers or scalar tensors."""
        for name, value in sums.items():
            self._sums.setdefault(name, []).append(float(value))

    def compute(self) -> float:
        """The metric, NaN when nothing was seen."""
        if not self._sums:
            return math.nan
        return float(self._compute({name: math.fsum(values) for name, values in self._sums.items()}))

    def reset(self) -> None:
        """Forget everything."""
        self._sums = {}

    def state(self) -> Any:
        """What travels between ranks."""
        return self._sums

    def merge(self, states: Sequence[Any]) -> None:
        """Become the metric over the states of all ranks."""
        self.reset()
        for state in states:
            for name, values in state.items():
                self._sums.setdefault(name, []).extend(values)


class GatherMetric:
    """A number computed from the values of all samples, in the order of the dataset.

    ``GatherMetric(lambda scores, labels: roc_auc_score(labels, scores))`` with ``update(scores, labels)``, tensors ``[B, ...]``.
    """

    def __init__(self, compute: Callable[..., float]) -> None:
        self._compute = compute
        self._batches: list[tuple[torch.Tensor, ...]] = []

    def update(self, *tensors: torch.Tensor) -> None:
        """Keep one batch: tensors ``[B, ...]``."""
        self._batches.append(tuple(t.detach().cpu() for t in tensors))

    def compute(self) -> float:
        """The metric, NaN when nothing was seen."""
        if not self._batches:
            return math.nan
        return float(self._compute(*(torch.cat(parts) for parts in zip(*self._batches, strict=True))))

    def reset(self) -> None:
        """Forget everything."""
        self._batches = []

    def state(self) -> Any:
        """What travels between ranks."""
        return self._batches

    def merge(self, states: Sequence[Any]) -> None:
        """Become the metric over the states of all ranks."""
        self._batches = in_turn(states)


def in_turn(lists: Sequence[Sequence[Any]]) -> list[Any]:
    """One list of all: batch k was dealt to rank k % world_size, so taking turns restores the dataset's order."""
    missing = object()
    turns = itertools.zip_longest(*lists, fillvalue=missing)
    return [item for turn in turns for item in turn if item is not missing]


def merged(metrics: Mapping[str, Any], peers: Peers) -> dict[str, float]:
    """The values of stateful metrics over all ranks. A collective.

    Raises:
        RaytrainError: An object is no such metric, or its value is not a number or a dict of numbers.
    """
    for name, metric in metrics.items():
        if not (hasattr(metric, "merge") or hasattr(metric, "metric_state")):
            raise RaytrainError(
                f"metrics()[{name!r}] is a {type(metric).__name__}. Allowed: torchmetrics objects, raytrain.metrics.SumMetric "
                "and GatherMetric, or any object with update, compute, reset, state and merge."
            )
    everywhere = peers.gather_objects({name: _state(metric) for name, metric in metrics.items()})
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        states = [state[name] for state in everywhere]
        if hasattr(metric, "merge"):
            metric.merge(states)
        else:
            _merge_torchmetric(metric, states)
        values.update(_numbers(name, metric.compute()))
    return values


def _state(metric: Any) -> Any:
    if hasattr(metric, "merge"):
        return metric.state()
    state = {name: _to_cpu(value) for name, value in metric.metric_state.items()}
    return metric.update_count, state


def _to_cpu(value: Any) -> Any:
    return [v.cpu() for v in value] if isinstance(value, list) else value.cpu()


def _merge_torchmetric(metric: Any, states: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
    """What torchmetrics' own sync does, but ranks that saw no batch have no say (nor can they make others wait)."""
    seen = [state for count, state in states if count] or [states[0][1]]
    metric.distributed_available_fn = _never  # compute() must not sync a second time
    metric._computed = None
    metric._update_count = sum(count for count, _ in states)
    for name, reduction in metric._reductions.items():
        values = [state[name] for state in seen]
        if isinstance(values[0], list):
            setattr(metric, name, [v.to(metric.device) for v in in_turn(values)])
            continue
        stacked = torch.stack(values).to(metric.device)
        setattr(metric, name, stacked if reduction is None else reduction(stacked))


def _never() -> bool:
    return False


def _numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}/{key}": float(v) for key, v in value.items()}
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):
        raise RaytrainError(
            f"metrics()[{name!r}].compute() gave {type(value).__name__} of shape {list(getattr(value, 'shape', []))}: "
            "give one number, or a dict of numbers (average='macro' in torchmetrics, for example)."
        ) from None
