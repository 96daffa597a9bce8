"""How a column of a table becomes a tensor: its rule, and the plain numbers that are stored of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raytrain.errors import DataError

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Padded:
    """Lists of varying length as ``[B, T]``, T being the longest of the batch, with ``<name>_mask`` ``[B, T]`` bool (True: real).

    Attributes:
        value: What stands in the padding.
        max_length: Longer lists are cut to it; None for none.
        multiple_of: T is rounded up to a multiple of it.
    """

    value: float = 0
    max_length: int | None = None
    multiple_of: int = 1


@dataclass(frozen=True)
class Packed:
    """Lists of varying length one after the other: ``[sum of lengths]``, with ``<name>_offsets`` ``[B + 1]`` int64."""

    max_length: int | None = None


@dataclass(frozen=True)
class Categories:
    """Strings or whole numbers as codes ``[B]`` int64: the place of the value among ``values``.

    Attributes:
        values: The values that there are, in the order of their codes. None: those of the data, sorted. An evaluation set needs
            those of the training set: ``train.categories("name")``.
        unknown: Give the code ``len(values)`` to a value that is not among them (and to null); otherwise that is an error.
    """

    values: Sequence[Any] | None = None
    unknown: bool = False


@dataclass(frozen=True)
class Image:
    """Encoded images (PNG, JPEG and what else Pillow reads) as ``[B, C, H, W]`` uint8, decoded when they are fetched.

    Attributes:
        mode: Pillow's mode: "RGB" (C = 3) or "L" (C = 1).
        size: (H, W) to scale to; None when all have one size.
    """

    mode: str = "RGB"
    size: tuple[int, int] | None = None


Encoding = Padded | Packed | Categories | Image


@dataclass(frozen=True)
class Rule:
    """What is done with a column.

    Attributes:
        encoding: For what is no plain number; None for numbers.
        cast: The tensor's type, or None for the column's own.
        fill: Stands for null; None: a null is an error.
    """

    name: str
    encoding: Encoding | None
    cast: torch.dtype | None
    fill: Any

    @property
    def is_ragged(self) -> bool:
        """Whether rows differ in length: lists, and encoded images."""
        return isinstance(self.encoding, (Padded, Packed, Image))


def rule_for(field: pa.Field, encoding: Encoding | None, cast: torch.dtype | None, fill: Any) -> Rule:
    """The rule of a column, from its type and what the user said.

    Raises:
        DataError: They do not fit; with the column, its type and what is possible.
    """
    kind, name = field.type, field.name
    if encoding is None and pa.types.is_dictionary(kind):
        encoding = Categories()
    needed = _needed(kind)
    if needed is None:
        raise DataError(
            f"the column {name!r} is of type {kind}, which makes no tensor. Leave it out with columns=[...], or change it."
        )
    if not isinstance(encoding, needed):
        allowed = " or ".join(f"{n.__name__}()" for n in needed if n is not type(None)) or "no encoding"
        said = f"not {encoding}" if encoding is not None else f"encode={{{name!r}: ...}}"
        raise DataError(
            f"the column {name!r} is of type {kind}: it needs {allowed}, {said}. Or leave it out with columns=[...]."
        )
    if isinstance(kind, pa.FixedShapeTensorType) and list(kind.permutation or ()) != sorted(kind.permutation or ()):
        raise DataError(
            f"the column {name!r} holds tensors with permuted axes (permutation={kind.permutation}), which programs read in "
            "different ways. Write them with their axes in order (a contiguous array)."
        )
    if pa.types.is_decimal(kind) and cast is None:
        raise DataError(
            f"the column {name!r} is of type {kind}: say which float it becomes, cast={{{name!r}: 'float64'}}."
        )
    if isinstance(encoding, (Categories, Image)) and cast is not None:
        raise DataError(f"the column {name!r} is encoded by {type(encoding).__name__}; a cast does not go with it.")
    return Rule(name, encoding, cast, fill)


def _needed(kind: pa.DataType) -> tuple[type, ...] | None:
    """Encodings that a type may have; NoneType where it may have none."""
    t = pa.types
    if isinstance(kind, pa.FixedShapeTensorType):
        return (type(None),) if _is_number(kind.value_type) else None
    if t.is_dictionary(kind) or t.is_string(kind) or t.is_large_string(kind) or t.is_string_view(kind):
        return (Categories,)
    if t.is_binary(kind) or t.is_large_binary(kind):
        return (Image,)
    if t.is_list(kind) or t.is_large_list(kind):
        return (Padded, Packed) if _is_number(kind.value_type) else None
    if t.is_fixed_size_list(kind):
        return (type(None),) if _is_number(_innermost(kind)) else None
    if t.is_integer(kind):
        return (type(None), Categories)
    return (type(None),) if _is_number(kind) or t.is_decimal(kind) else None


def _is_number(kind: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_temporal(kind)) and not (
        t.is_interval(kind)
    )


def _innermost(kind: pa.DataType) -> pa.DataType:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return kind


def numbers(array: pa.Array, where: str, rule: Rule) -> tuple[Array, Array | None]:
    """A column's chunk as plain numbers: (``[n, ...]``, None), or (flat values, lengths ``[n]``) for lists.

    Args:
        where: Names the file and the column's first row, for errors.

    Raises:
        DataError: A null without a fill, or a value that the rule does not take.
    """
    if isinstance(array, pa.ExtensionArray) and not isinstance(array, pa.FixedShapeTensorArray):
        array = array.storage
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        if array.null_count and rule.fill is not None:
            array = pc.fill_null(array, pa.scalar([], array.type))  # the fill itself is for nulls inside of lists
        array = _without_nulls(array, where, rule)
        lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
        return _plain(_no_null_inside(array.flatten(), where, rule), rule), lengths
    if pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type):
        return _bytes(_without_nulls(array, where, rule))
    if isinstance(array, pa.FixedShapeTensorArray):
        storage = _no_null_inside(_without_nulls(array.storage, where, rule).flatten(), where, rule)
        return _plain(storage, rule).reshape(len(array), *array.type.shape), None
    if pa.types.is_fixed_size_list(array.type):
        return _fixed_lists(array, where, rule), None
    return _plain(_without_nulls(array, where, rule), rule), None


def _without_nulls(array: pa.Array, where: str, rule: Rule) -> pa.Array:
    if array.null_count == 0:
        return array
    if rule.fill is not None:
        try:
            return pc.fill_null(array, pa.scalar(rule.fill, array.type))
        except (pa.ArrowException, TypeError) as error:
            raise DataError(
                f"fill={{{rule.name!r}: {rule.fill!r}}} does not fit the column's type {array.type}: {error}"
            ) from None
    row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
    raise DataError(
        f"{where}, row {row} of this part: the column {rule.name!r} is null there, and a tensor has no null. Give "
        f"fill={{{rule.name!r}: ...}}, or leave such rows out with where=field({rule.name!r}).is_valid()."
    )


def _no_null_inside(values: pa.Array, where: str, rule: Rule) -> pa.Array:
    if values.null_count and rule.fill is None:
        raise DataError(
            f"{where}: the column {rule.name!r} has a null inside a list. Give fill={{{rule.name!r}: ...}}."
        )
    return _without_nulls(values, where, rule)


def _fixed_lists(array: pa.Array, where: str, rule: Rule) -> Array:
    shape: list[int] = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        if array.null_count:
            row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{where}, row {row} of this part: the column {rule.name!r} has no list there (null).")
        shape.append(array.type.list_size)
        array = array.flatten()
    return _plain(_no_null_inside(array, where, rule), rule).reshape(shape)


def _bytes(array: pa.Array) -> tuple[Array, Array]:
    array = array.cast(pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    values = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]] if data is not None else np.empty(0, np.uint8)
    return values, np.diff(bounds)


def _plain(array: pa.Array, rule: Rule) -> Array:
    """An array without nulls, as numpy in a type that torch has."""
    kind = array.type
    if pa.types.is_decimal(kind):
        array = array.cast(pa.float64())
    elif pa.types.is_date32(kind) or pa.types.is_time32(kind):
        array = array.cast(pa.int32())
    elif pa.types.is_temporal(kind):
        array = array.cast(pa.int64())  # in the column's own unit
    elif pa.types.is_uint16(kind) or pa.types.is_uint32(kind):
        array = array.cast(pa.int32() if pa.types.is_uint16(kind) else pa.int64())
    elif pa.types.is_uint64(kind):
        try:
            array = array.cast(pa.int64())
        except pa.ArrowInvalid as error:
            raise DataError(f"the column {rule.name!r} is uint64 with a value above int64's: {error}") from None
    return np.asarray(array.to_numpy(zero_copy_only=False))


def as_stored(values: Array, rule: Rule) -> torch.Tensor:
    """Plain numbers in the type that they are stored in: the cast is done once, when they are written."""
    tensor = torch.from_numpy(np.require(values, requirements=("C", "W")))
    if rule.cast is None:
        return tensor
    stored = tensor.to(rule.cast)
    if not (tensor.is_floating_point() or rule.cast.is_floating_point) and not torch.equal(
        stored.to(tensor.dtype), tensor
    ):
        raise DataError(
            f"cast={{{rule.name!r}: {str(rule.cast).removeprefix('torch.')!r}}} does not hold the column's values, which reach "
            f"from {tensor.min()} to {tensor.max()}. Choose a larger type."
        )
    return stored


class Codes:
    """The codes of a column's categories.

    Args:
        values: In the order of their codes.
    """

    def __init__(self, values: Sequence[Any], rule: Rule) -> None:
        self._rule = rule
        self._unknown = isinstance(rule.encoding, Categories) and rule.encoding.unknown
        self._values = pa.array(list(values))

    def of(self, array: pa.Array, where: str) -> Array:
        """Codes ``[n]`` int64.

        Raises:
            DataError: A value is not among them.
        """
        array = decoded(array)
        if not self._unknown or self._rule.fill is not None:
            array = _without_nulls(array, where, self._rule)
        codes = pc.index_in(array, value_set=self._values.cast(array.type))
        if codes.null_count:
            if not self._unknown:
                row = int(np.flatnonzero(codes.is_null().to_numpy(zero_copy_only=False))[0])
                raise DataError(
                    f"{where}, row {row} of this part: {array[row].as_py()!r} is not among the {len(self._values)} categories of "
                    f"the column {self._rule.name!r}. Give Categories(..., unknown=True) for a code of its own."
                )
            codes = pc.fill_null(codes, len(self._values))
        return np.asarray(codes.to_numpy(zero_copy_only=False)).astype(np.int64)


def decoded(array: pa.Array) -> pa.Array:
    """A dictionary-encoded array as its values."""
    return array.dictionary_decode() if isinstance(array, pa.DictionaryArray) else array
