"""Weighted values: what a task's loss returns, read into sums and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from raytrain.errors import RaytrainError

Number = Any  # a float, or a scalar tensor that is not read before the window ends

_ALLOWED = (
    "a scalar tensor (mean over the samples), (sum, weight), or one of these with a dict of metrics: "
    "(mean, {'accuracy': mean}) or ((sum, weight), {'accuracy': (sum, weight)})"
)


class Value(NamedTuple):  # several are made per step: a frozen dataclass costs three times as much
    """A mean or a sum with the weight it stands for.

    Attributes:
        amount: The mean, or the sum when ``is_sum``: a number or a scalar tensor.
        weight: What it is averaged over: samples, tokens, ...
        is_sum: The amount is already multiplied by the weight.
    """

    amount: Number
    weight: Number
    is_sum: bool = False


@dataclass(frozen=True)
class Loss:
    """What ``Task.loss`` returned, read.

    Attributes:
        value: Mean or sum with its weight, attached to the graph.
        metrics: Values to log beside it, detached.
    """

    value: Value
    metrics: Mapping[str, Value] = field(default_factory=dict)


def read_loss(output: Any, num_rows: int) -> Loss:
    """Read what a task's loss returned for a batch of ``num_rows`` samples.

    Raises:
        RaytrainError: It is none of the allowed forms; the text names the type and the forms.
    """
    metrics: Mapping[str, Any] = {}
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping):
        output, metrics = output
    value = _read_value("loss", output, num_rows)
    if not isinstance(value.amount, torch.Tensor):
        raise RaytrainError(f"loss() returned {output!r} without a gradient. Allowed: {_ALLOWED}.")
    return Loss(value, {name: detached(_read_value(name, v, num_rows)) for name, v in metrics.items()})


def read_values(values: Mapping[str, Any], num_rows: int) -> dict[str, Value]:
    """Read logged values: each a mean over the samples, or a ``(sum, weight)`` pair."""
    return {name: detached(_read_value(name, value, num_rows)) for name, value in values.items()}


def _read_value(name: str, value: Any, num_rows: int) -> Value:
    if isinstance(value, Value):
        return value
    if isinstance(value, tuple):
        if len(value) != 2:
            raise RaytrainError(f"{name!r} is a tuple of {len(value)} values. Allowed: {_ALLOWED}.")
        # No samples: the batch's rows are borrowed, and what the user counted in them must not count.
        weight = _scalar(name, value[1]) if num_rows else 0.0
        return Value(_scalar(name, value[0]), weight, is_sum=True)
    return Value(_scalar(name, value), num_rows)


def _scalar(name: str, value: Any) -> Number:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise RaytrainError(
                f"{name!r} is a tensor of shape {list(value.shape)}, not a scalar. Allowed: {_ALLOWED}."
            )
        return value.reshape(()) if value.dim() else value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RaytrainError(f"{name!r} is of type {type(value).__name__}. Allowed: {_ALLOWED}.") from None


def detached(value: Value) -> Value:
    """The value without its graph."""
    return Value(_detach(value.amount), _detach(value.weight), value.is_sum)


def _detach(number: Number) -> Number:
    return number.detach() if isinstance(number, torch.Tensor) else number
