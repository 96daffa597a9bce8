"""A model evaluated again, by the same sums as in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raytrain.config import TrainConfig
from raytrain.data import eval_loader
from raytrain.data.device import ahead
from raytrain.errors import ConfigError
from raytrain.evaluation import autocast, eval_batch_size, evaluating, exact_means
from raytrain.loop import batch_values, named
from raytrain.metrics import merged
from raytrain.peers import Peers
from raytrain.preflight import opened, seeded
from raytrain.task import Task
from raytrain.weighted import read_values


def sets_of(task: Task, seed: int, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """The data to evaluate on by name: all sets of ``eval_data``, or those named; ``train`` is the training data.

    Raises:
        ConfigError: There is no such set; those that there are, are listed.
    """
    with seeded(seed):  # opened in the order of the training, so that data made from random numbers is the same
        train = opened(task)
        sets = {**named(task.eval_data()), "train": train}
    if not names and len(sets) == 1:
        raise ConfigError(f"{type(task).__name__} has no eval_data(). Allowed: --data train.")
    for name in names:
        if name not in sets:
            raise ConfigError(f"there is no data {name!r}. Allowed: {', '.join(sets)}.")
    return {name: sets[name] for name in names or [name for name in sets if name != "train"]}


def score(
    task: Task, model: nn.Module, sets: Mapping[str, Any], config: TrainConfig, device: torch.device
) -> dict[str, float]:
    """``SET/loss``, ``SET/NAME`` and ``SET/samples`` over all samples, to the bits of the run's own evaluation."""
    peers = Peers()
    scores: dict[str, float] = {}
    for name, data in sets.items():
        loader = eval_loader(
            data, batch_size=eval_batch_size(config), loader_workers=config.loader_workers, seed=config.seed
        )
        metrics = task.metrics()
        rows = []
        with evaluating([model], world_size=1):
            for moved in ahead(loader.batches(), device):
                with autocast(config.precision, device):
                    values = batch_values(task, model, moved, metrics)
                rows.append((moved.index, moved.num_rows, read_values(values, moved.num_rows)))
            found = {**exact_means(rows, peers), **(merged(metrics, peers) if metrics else {})}
        scores |= {f"{name}/{key}": value for key, value in found.items()}
        loader.close()
    return scores
