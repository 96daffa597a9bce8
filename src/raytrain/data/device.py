"""Batches on the device: any nesting keeps its types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def move(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """The same nested data with its tensors on the device.

    Dicts, tuples, named tuples, lists, dataclasses and objects with ``to(device)`` keep their type; other values pass.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(move(v, device, non_blocking) for v in data))
    if isinstance(data, (list, tuple)):
        return type(data)(move(v, device, non_blocking) for v in data)
    if isinstance(data, Mapping):
        moved = {key: move(value, device, non_blocking) for key, value in data.items()}
        return moved if type(data) is dict else type(data)(moved)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {f.name: move(getattr(data, f.name), device, non_blocking) for f in dataclasses.fields(data) if f.init}
        return dataclasses.replace(data, **fields)
    if hasattr(data, "to") and callable(data.to):
        return data.to(device)
    return data
