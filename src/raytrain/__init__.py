"""raytrain: the same PyTorch experiment on a laptop and on a Ray cluster, right by default."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raytrain.config import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.task import Task

if TYPE_CHECKING:
    from raytrain.launch import fit
    from raytrain.models.loading import load
    from raytrain.options import main
    from raytrain.result import Result
    from raytrain.session import Session

__version__ = "0.1.0"

__all__ = [
    "Result",
    "RunConfig",
    "ScalingConfig",
    "Session",
    "Task",
    "TrackingConfig",
    "TrainConfig",
    "__version__",
    "fit",
    "load",
    "main",
]

# Loaded on first use, so that `import raytrain` costs neither torch nor Ray nor MLflow.
_LAZY = {
    "Result": "raytrain.result",
    "Session": "raytrain.session",
    "fit": "raytrain.launch",
    "load": "raytrain.models.loading",
    "main": "raytrain.options",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'raytrain' has no attribute {name!r}")
