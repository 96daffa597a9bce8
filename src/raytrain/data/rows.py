"""Rows of batches and samples that others made: how many, in parts, together, and whether two are the same."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raytrain.errors import DataError


def count_rows(data: Any) -> int:
    """Rows of a collated batch: the length of its first tensor, array or list.

    Raises:
        DataError: It holds none.
    """
    for value in _leaves(data):
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim:
            return len(value)
    if isinstance(data, Sequence) and not isinstance(data, (str, bytes)):
        return len(data)
    if isinstance(data, Mapping) and data and isinstance(first := next(iter(data.values())), (list, tuple)):
        return len(first)
    raise DataError(
        f"the rows of a batch of type {type(data).__name__} cannot be counted, and so not be weighted. Allowed: tensors, or dicts, "
        "tuples and lists of tensors, whose first dimension counts the rows."
    )


class Rows:
    """A collated batch as rows: it has a length and can be sliced.

    Raises:
        DataError: The batch's rows cannot be counted; when it is sliced, that it holds something else than rows.
    """

    def __init__(self, data: Any, num_rows: int | None = None) -> None:
        self.data = data
        self._num_rows = count_rows(data) if num_rows is None else num_rows

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, rows: slice) -> Rows:
        start, stop, _ = rows.indices(self._num_rows)
        if (start, stop) == (0, self._num_rows):
            return self
        return Rows(_slice(self.data, start, stop, self._num_rows), max(0, stop - start))


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several batches as one."""
    if len(parts) == 1:
        return parts[0]
    return Rows(_join([part.data for part in parts]), sum(map(len, parts)))


def _join(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    if isinstance(first, np.ndarray):
        return np.concatenate(values)
    if isinstance(first, Mapping):
        return type(first)({key: _join([value[key] for value in values]) for key in first})  # type: ignore[call-arg]
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_join(column) for column in zip(*values, strict=True)))
    if _is_columns(first):
        return type(first)(_join(column) for column in zip(*values, strict=True))
    return type(first)(item for value in values for item in value)


def _is_columns(data: Any) -> bool:
    """Whether a list or tuple holds one thing per column, and not one per row."""
    return bool(data) and all(isinstance(v, (torch.Tensor, np.ndarray, Mapping, list, tuple)) for v in data)


def _slice(data: Any, start: int, stop: int, num_rows: int) -> Any:
    if isinstance(data, (torch.Tensor, np.ndarray)):
        if data.ndim and len(data) == num_rows:
            return data[start:stop]
    elif isinstance(data, Mapping):
        return type(data)({k: _slice(v, start, stop, num_rows) for k, v in data.items()})  # type: ignore[call-arg]
    elif isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_slice(value, start, stop, num_rows) for value in data))
    elif isinstance(data, (list, tuple)):
        if _is_columns(data):
            return type(data)(_slice(value, start, stop, num_rows) for value in data)
        if len(data) == num_rows:
            return data[start:stop]
    raise DataError(
        f"a batch of {num_rows} rows with a {type(data).__name__} in it cannot be cut to the share of a worker. Allowed: tensors, "
        "arrays and lists of as many rows, in dicts, tuples and lists."
    )


def fingerprint(sample: Any) -> int:
    """A number that two ranks get alike when their samples hold the same tensors, arrays, numbers and texts: 32 bits."""
    digest = 0
    for value in _leaves(sample):
        if isinstance(value, torch.Tensor):
            plain = value.detach()
            if plain.device.type != "cpu" or plain.layout is not torch.strided:
                continue
            value = plain.contiguous().view(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
        if isinstance(value, np.ndarray):
            if value.dtype.hasobject:
                continue
            digest = zlib.crc32(np.ascontiguousarray(value).tobytes(), digest)
        elif isinstance(value, (int, float, complex, str, bytes, np.generic)):
            digest = zlib.crc32(repr(value).encode(), digest)
    return digest


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _leaves(value)
    else:
        yield data
