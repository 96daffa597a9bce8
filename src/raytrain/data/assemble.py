"""Batches of rows that differ in length: padded, packed, or decoded images. And a whole table in memory as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch

from raytrain.data.columns import Array, Codes, Image, Packed, Padded, Rule, as_stored, numbers
from raytrain.data.images import decode_all

_LONG = 64  # numbers per row, from which on rows are copied one by one


def ragged(
    rule: Rule, values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, rows: Sequence[int]
) -> dict[str, torch.Tensor]:
    """The batch of a column of lists or of encoded images.

    Args:
        values: Of all rows, one after the other.
        starts: Where each row of the batch begins among them: ``[B]``.
        lengths: Of each row: ``[B]``.
        rows: What the rows are called in errors.
    """
    name, encoding = rule.name, rule.encoding
    if isinstance(encoding, Image):
        places = zip(starts.tolist(), (starts + lengths).tolist(), strict=True)
        return {name: decode_all([values[start:stop].numpy() for start, stop in places], encoding, name, rows)}
    if isinstance(encoding, (Padded, Packed)) and encoding.max_length is not None:
        lengths = lengths.clamp(max=encoding.max_length)
    if isinstance(encoding, Padded) and int(lengths.sum()) > _LONG * len(lengths):
        return _padded_by_row(name, values, starts, lengths, encoding)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    own = values[torch.arange(int(offsets[-1])) + torch.repeat_interleave(starts - offsets[:-1], lengths)]
    if isinstance(encoding, Padded):
        return _padded(name, own, lengths, encoding)
    return {name: own, f"{name}_offsets": offsets}


def _padded(name: str, values: torch.Tensor, lengths: torch.Tensor, encoding: Padded) -> dict[str, torch.Tensor]:
    padded, mask = _padding(lengths, encoding, values.dtype)
    return {name: padded.masked_scatter_(mask, values), f"{name}_mask": mask}


def _padded_by_row(
    name: str, values: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, encoding: Padded
) -> dict[str, torch.Tensor]:
    """Long rows: a copy of each is several times faster than an index for each number."""
    padded, mask = _padding(lengths, encoding, values.dtype)
    source, target = _as_numpy(values), _as_numpy(padded)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        target[row, :length] = source[start : start + length]
    return {name: padded, f"{name}_mask": mask}


def _padding(lengths: torch.Tensor, encoding: Padded, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch that is all padding, and where its rows will be."""
    longest = int(lengths.max()) if len(lengths) else 0
    width = -(-longest // encoding.multiple_of) * encoding.multiple_of
    mask = torch.arange(width) < lengths[:, None]
    return torch.full(mask.shape, encoding.value, dtype=dtype), mask


def _as_numpy(tensor: torch.Tensor) -> Array:
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def to_tensors(
    table: pa.Table, rules: Sequence[Rule], categories: Mapping[str, Sequence[Any]], where: str
) -> dict[str, torch.Tensor]:
    """All rows of a table as one batch.

    Args:
        categories: Values of each column with categories.
        where: Names the rows' origin in errors.

    Raises:
        DataError: A value that makes no tensor.
    """
    batch: dict[str, torch.Tensor] = {}
    for rule in rules:
        array = table.column(rule.name).combine_chunks()
        if rule.name in categories:
            batch[rule.name] = torch.from_numpy(Codes(categories[rule.name], rule).of(array, where))
            continue
        values, lengths = numbers(array, where, rule)
        stored = as_stored(values, rule)
        if lengths is None:
            batch[rule.name] = stored
        else:
            sizes = torch.from_numpy(lengths)
            batch |= ragged(rule, stored, sizes.cumsum(0) - sizes, sizes, range(len(lengths)))
    return batch
