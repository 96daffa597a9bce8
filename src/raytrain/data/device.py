"""Batches on the device: any nesting keeps its types."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from raytrain.data.batch import Batch


def move(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """The same nested data with its tensors on the device.

    Dicts, tuples, named tuples, lists and dataclasses keep their type, objects with ``to(device)`` move themselves, other
    values pass.
    """
    return _mapped(data, lambda tensor: tensor.to(device, non_blocking=non_blocking), device)


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device. On a GPU, copies run on a stream of their own, beside the work on earlier batches.

    On a CPU this is the iterator itself.
    """
    if device.type == "cpu":
        return batches
    if device.type != "cuda":
        return (batch.with_data(move(batch.data, device)) for batch in batches)
    return _beside(batches, device)


def _beside(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    side = torch.cuda.Stream(device)
    for batch in batches:
        compute = torch.cuda.current_stream(device)

        def copied(tensor: torch.Tensor, compute: torch.cuda.Stream = compute) -> torch.Tensor:
            if tensor.device.type != "cpu":
                return tensor.to(device)
            with torch.cuda.stream(side):
                moved = tensor.pin_memory().to(device, non_blocking=True)
            moved.record_stream(compute)  # its memory belongs to the side stream, but is read on this one
            return moved

        data = _mapped(batch.data, copied, device)
        compute.wait_stream(side)
        yield batch.with_data(data)


def _mapped(data: Any, fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Any:
    if isinstance(data, torch.Tensor):
        return fn(data)
    if callable(getattr(data, "to", None)) and not isinstance(data, type):
        return data.to(device)  # before the containers: it knows what has to stay (lengths of a PackedSequence, say)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_mapped(value, fn, device) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(_mapped(value, fn, device) for value in data)
    if isinstance(data, Mapping):
        return _mapped_mapping(data, {key: _mapped(value, fn, device) for key, value in data.items()})
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        twin = copy.copy(data)
        for field in dataclasses.fields(data):
            if hasattr(data, field.name):
                object.__setattr__(twin, field.name, _mapped(getattr(data, field.name), fn, device))  # frozen or not
        return twin
    return data


def _mapped_mapping(data: Mapping[Any, Any], moved: dict[Any, Any]) -> Any:
    if type(data) is dict:
        return moved
    if isinstance(data, MutableMapping):
        twin = copy.copy(data)  # keeps what a defaultdict, or a class of the user's, holds beside its items
        twin.update(moved)
        return twin
    return type(data)(moved)  # type: ignore[call-arg]
