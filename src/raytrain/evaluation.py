"""Exact evaluation: every sample once, and sums whose bits do not depend on who added them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raytrain.config import TrainConfig
from raytrain.peers import Peers
from raytrain.weighted import Value

BatchValues = tuple[int, int, Mapping[str, Value]]  # index of the batch, its rows, its values


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The forward pass in ``train.precision``; nothing for 'full'."""
    dtype = _DTYPES.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def eval_batch_size(config: TrainConfig) -> int:
    """Samples per forward pass in evaluation, for data that came without a DataLoader."""
    return config.eval_batch_size or min(config.batch_size or 256, 256)


def exact_means(batches: Sequence[BatchValues], peers: Peers) -> dict[str, float]:
    """Weighted means over the batches of all ranks, and ``samples``.

    The sums are exact before they are rounded once (Shewchuk's algorithm, ``math.fsum``): the order of batches and
    their place on ranks leave no trace in any bit. A collective.
    """
    local = [(index, num_rows, _read(values)) for index, num_rows, values in batches]
    everywhere = [batch for rank in peers.gather_objects(local) for batch in rank]
    totals: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for _, _, values in everywhere:
        for name, (total, weight) in values.items():
            totals.setdefault(name, []).append(total)
            weights.setdefault(name, []).append(weight)
    means = {name: _sum(totals[name]) / _sum(weights[name]) for name in sorted(totals) if _sum(weights[name])}
    return {**means, "samples": float(sum(num_rows for _, num_rows, _ in everywhere))}


def _read(values: Mapping[str, Value]) -> dict[str, tuple[float, float]]:
    read = {}
    for name, value in values.items():
        amount, weight = float(value.amount), float(value.weight)
        if weight:
            read[name] = (amount if value.is_sum else amount * weight, weight)
    return read


def _sum(numbers: Sequence[float]) -> float:
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # infinities of both signs, or too large: what floats make of it
        return sum(numbers)


@contextlib.contextmanager
def evaluating(models: Sequence[nn.Module], world_size: int) -> Iterator[None]:
    """Evaluation mode, without gradients, with rank 0's buffers on all ranks; afterwards as before.

    Buffers (BatchNorm statistics) follow rank 0 in training; the last step's update is brought over here.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    if world_size > 1:
        for model in models:
            for buffer in model.buffers():
                dist.broadcast(buffer, src=0)
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
