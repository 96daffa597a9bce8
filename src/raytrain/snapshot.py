"""A copy of the state in CPU memory, taken between two steps, so that writing it can go on beside the next ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Snapshotter:
    """Copies nested state; tensors go into buffers that are used again at the next call.

    What ``take`` gave is valid until ``take`` is called again.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}

    def take(self, state: Any) -> Any:
        """The same nesting of dicts, lists and tuples; tensors copied to the CPU, other values as they are."""
        on_gpu = False
        used: set[tuple[str, ...]] = set()

        def copy(value: Any, path: tuple[str, ...]) -> Any:
            nonlocal on_gpu
            if isinstance(value, torch.Tensor):
                on_gpu = on_gpu or value.is_cuda
                used.add(path)
                return self._copy(value.detach(), path)
            if isinstance(value, Mapping):
                return {key: copy(v, (*path, str(key))) for key, v in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(copy(v, (*path, str(i))) for i, v in enumerate(value))
            return value

        taken = copy(state, ())
        for path in self._buffers.keys() - used:
            del self._buffers[path]
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return taken

    def _copy(self, tensor: torch.Tensor, path: tuple[str, ...]) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)
