"""Stable parts of a table: which rows belong to one depends on a column's value alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raytrain.data.columns import Array, decoded
from raytrain.data.order import key_of, mix_words
from raytrain.errors import DataError


@dataclass(frozen=True)
class HashPart:
    """Rows whose hash, as a number in [0, 1), lies in ``[start, stop)``.

    A row stays in its part when files are added, sorted or split anew, and rows with the same value (of one patient, of one user)
    stay together. ``HashPart("id", 0, 0.9)`` and ``HashPart("id", 0.9, 1)`` split a table in two.

    Attributes:
        by: A column of whole numbers, strings, dates or booleans.
        salt: Another one gives other parts.
    """

    by: str
    start: float = 0.0
    stop: float = 1.0
    salt: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= 1:
            raise DataError(
                f"HashPart({self.by!r}, {self.start}, {self.stop}) is not possible. Allowed: 0 <= start < stop <= 1."
            )

    def check(self, schema: pa.Schema) -> None:
        """See that the column can be hashed.

        Raises:
            DataError: It is not there, or of another type.
        """
        if self.by not in schema.names:
            raise DataError(f"HashPart names the column {self.by!r}. There are: {', '.join(schema.names)}.")
        kind, t = schema.field(self.by).type, pa.types
        kind = kind.value_type if t.is_dictionary(kind) else kind
        if not (
            t.is_integer(kind)
            or t.is_string(kind)
            or t.is_large_string(kind)
            or t.is_temporal(kind)
            or t.is_boolean(kind)
        ):
            raise DataError(
                f"HashPart needs whole numbers, strings, dates or booleans, but {self.by!r} is of type {kind}."
            )

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of a batch that belong to this part. A null has a hash as well."""
        fractions = self.fractions(decoded(batch.column(self.by)))
        return batch.filter(pa.array((fractions >= self.start) & (fractions < self.stop)))

    def fractions(self, values: pa.Array) -> Array:
        """The hash of each value as a number in [0, 1): ``[n]`` float64."""
        key = key_of(*self.salt.encode(), 7)
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            encoded = values.dictionary_encode(null_encoding="encode")
            hashed = np.array([_of_text(text, key) for text in encoded.dictionary.to_pylist()], np.uint64)
            words = hashed[encoded.indices.to_numpy(zero_copy_only=False)]
        else:
            whole = (
                values.cast(pa.int32())
                if pa.types.is_date32(values.type) or pa.types.is_time32(values.type)
                else values
            )
            filled = whole.cast(pa.int64(), safe=False).fill_null(-(2**63)).to_numpy(zero_copy_only=False)
            words = mix_words(filled.astype(np.int64).view(np.uint64) ^ np.uint64(key))
        fractions: Array = (words >> np.uint64(11)).astype(np.float64) / 2.0**53
        return fractions


def _of_text(text: str | None, key: int) -> int:
    data = b"\0" if text is None else b"\1" + text.encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=key.to_bytes(8, "little")).digest(), "little")
