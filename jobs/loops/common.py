"""What the loops here have in common: 1,024 points of a function, and a network with BatchNorm."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset


def points() -> TensorDataset:
    """Inputs ``[1024, 10]`` and targets ``[1024, 2]`` in float64, so that results compare to the last digits."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(1024, 10, generator=g, dtype=torch.float64)
    return TensorDataset(x, torch.stack([x.sum(1) / 10, x.prod(1).sqrt()], 1))


def network(batchnorm: bool = False) -> nn.Module:
    """A small network with fixed weights; with BatchNorm for the loop that converts it."""
    torch.manual_seed(0)
    norm = [nn.BatchNorm1d(20)] if batchnorm else []
    return nn.Sequential(nn.Linear(10, 20), *norm, nn.ReLU(), nn.Linear(20, 2), nn.Sigmoid()).double()
