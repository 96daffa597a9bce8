"""What a model is called with: as the task says, or as its loss calls it for the first evaluation batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raytrain.config import TrainConfig
from raytrain.data import eval_loader
from raytrain.errors import ConfigError
from raytrain.loop import named
from raytrain.preflight import opened, seeded
from raytrain.task import Task

_ROWS = 4


@dataclass(frozen=True)
class Example:
    """Arguments of one call of the model, on the CPU.

    Attributes:
        args: By position.
        kwargs: By name.
        rows: Size of the batch dimension, the first one of every tensor; None where they have none in common.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Example:
        """With the number of rows that its tensors have in common."""
        sizes = {t.shape[0] if t.dim() else None for t in _tensors((args, dict(kwargs)))}
        return cls(args, kwargs, sizes.pop() if len(sizes) == 1 else None)

    def first(self, num_rows: int) -> Example:
        """Its first rows; itself where rows are not known."""
        if self.rows is None or self.rows <= num_rows:
            return self
        cut = pytree.tree_map_only(torch.Tensor, lambda t: t[:num_rows].clone(), (self.args, dict(self.kwargs)))
        return Example(cut[0], cut[1], num_rows)

    def repeated(self) -> Example:
        """Twice the rows, to see that the size of the batch is free."""
        twice = pytree.tree_map_only(torch.Tensor, lambda t: torch.cat([t, t.flip(0)]), (self.args, dict(self.kwargs)))
        return Example(twice[0], twice[1], None if self.rows is None else 2 * self.rows)

    def call(self, model: nn.Module) -> Any:
        """What the model answers, without gradients."""
        with torch.no_grad():
            return model(*self.args, **self.kwargs)


def example_of(task: Task, model: nn.Module, config: TrainConfig) -> Example:
    """Arguments of a call of the model, a few rows.

    Raises:
        ConfigError: The loss does not call the model, or its data cannot be opened; with the cure.
    """
    given = task.example()
    if given is not None:
        args = given if isinstance(given, tuple) else () if isinstance(given, Mapping) else (given,)
        return Example.of(args, given if isinstance(given, Mapping) else {})
    seen: list[Example] = []

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(Example.of(args, kwargs))

    handle = model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        with torch.no_grad():
            task.loss(model, _first_batch(task, config))
    finally:
        handle.remove()
    if not seen or not _tensors((seen[0].args, dict(seen[0].kwargs))):
        raise ConfigError(
            f"{type(task).__name__}.loss does not call the model itself, so what it is called with is not known. Define "
            "example(self) in the task: a tensor, a tuple of them, or a dict of keyword arguments."
        )
    return seen[0].first(_ROWS)


def _first_batch(task: Task, config: TrainConfig) -> Any:
    with seeded(config.seed):
        sets = named(task.eval_data())
        data = next(iter(sets.values())) if sets else opened(task)
    loader = eval_loader(data, batch_size=_ROWS, seed=config.seed)
    try:
        return next(iter(loader.batches())).data
    finally:
        loader.close()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
