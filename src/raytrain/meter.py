"""True metrics: values kept per step on each rank, made global by one collective per window of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrain.peers import Peers
from raytrain.weighted import Value

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight)


@dataclass
class _Step:
    values: list[tuple[str, Value]] = field(default_factory=list)


class Meter:
    """Collects weighted values per step and reduces a whole window of steps at once.

    ``add`` never reads a tensor: on a GPU nothing waits until ``reduce``. What comes back is the same on
    all ranks, bit for bit, and does not depend on where a window ends.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._schema: tuple[str, ...] = ()
        self._steps: list[_Step] = []
        self._open = _Step()

    def add(self, values: Mapping[str, Value]) -> None:
        """Count values towards the step that is under way; several calls in a step add up."""
        self._open.values.extend(values.items())

    def end_step(self) -> None:
        """Close the step that is under way."""
        self._steps.append(self._open)
        self._open = _Step()

    def __len__(self) -> int:
        return len(self._steps)

    def reduce(self, control: Sequence[float]) -> tuple[list[Sums], list[list[float]]]:
        """Make the finished steps global. A collective: all ranks, after the same number of steps.

        Args:
            control: This rank's words to all others (flags, clock), of the same length on all ranks.

        Returns:
            The sums and weights over all ranks of each step, and the control words of each rank.
        """
        local = _read([step.values for step in self._steps])
        names = tuple(sorted({name for sums in local for name in sums}))
        known = set(names) <= set(self._schema)
        head = [1.0 if known else 0.0, *control]
        body = _encode(local, self._schema) if known else [0.0] * (len(local) * 2 * len(self._schema))
        gathered = self._peers.gather(torch.tensor(head + body, dtype=torch.float64)).tolist()
        controls = [row[1 : len(head)] for row in gathered]
        if all(row[0] == 1.0 for row in gathered):
            steps = _decode([row[len(head) :] for row in gathered], self._schema, len(local))
        else:
            steps = self._reduce_new_names(local)
        self._steps = []
        return steps, controls

    def _reduce_new_names(self, local: list[Sums]) -> list[Sums]:
        everywhere = self._peers.gather_objects(local)
        names = {name for ranks in everywhere for sums in ranks for name in sums}
        self._schema = tuple(sorted(names | set(self._schema)))
        bodies = [_encode(ranks, self._schema) for ranks in everywhere]
        return _decode(bodies, self._schema, len(local))


class Means:
    """Running sums over steps, such as a row of the log or an epoch: global, deterministic, restorable."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}

    def add(self, sums: Sums) -> None:
        """Add one step."""
        for name, (total, weight) in sums.items():
            pair = self._sums.setdefault(name, [0.0, 0.0])
            pair[0] += total
            pair[1] += weight

    def take(self) -> dict[str, float]:
        """The weighted means since the last call; starts anew."""
        means = {name: total / weight for name, (total, weight) in self._sums.items() if weight}
        self._sums = {}
        return means

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {name: list(pair) for name, pair in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's values."""
        self._sums = {name: [float(v) for v in pair] for name, pair in state.items()}


def _read(steps: list[list[tuple[str, Value]]]) -> list[Sums]:
    """Read all tensors of all steps in one transfer per dtype, then sum up within each step."""
    flat = [number for values in steps for _, value in values for number in (value.amount, value.weight)]
    numbers = iter(_to_floats(flat))
    result: list[Sums] = []
    for values in steps:
        sums: Sums = {}
        for name, value in values:
            amount, weight = next(numbers), next(numbers)
            # A weight of zero means "no rows": what a borrowed batch gave must not count, NaN included.
            total = (amount if value.is_sum else amount * weight) if weight else 0.0
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + weight)
        result.append(sums)
    return result


def _to_floats(numbers: list[Any]) -> list[float]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, number in enumerate(numbers):
        if isinstance(number, torch.Tensor):
            by_kind.setdefault((number.dtype, number.device), []).append(index)
    floats = [0.0 if isinstance(n, torch.Tensor) else float(n) for n in numbers]
    for indices in by_kind.values():
        read = torch.stack([numbers[i].detach() for i in indices]).tolist()
        for index, value in zip(indices, read, strict=True):
            floats[index] = float(value)
    return floats


def _encode(steps: list[Sums], schema: Sequence[str]) -> list[float]:
    return [number for sums in steps for name in schema for number in sums.get(name, (0.0, 0.0))]


def _decode(bodies: list[list[float]], schema: Sequence[str], num_steps: int) -> list[Sums]:
    """Add up the ranks in their order, so that every rank gets the same bits."""
    result: list[Sums] = []
    for step in range(num_steps):
        sums: Sums = {}
        for column, name in enumerate(schema):
            at = 2 * (step * len(schema) + column)
            total = weight = 0.0
            for body in bodies:
                total += body[at]
                weight += body[at + 1]
            if weight:
                sums[name] = (total, weight)
        result.append(sums)
    return result
