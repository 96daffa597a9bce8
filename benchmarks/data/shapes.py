"""The three shapes that are compared, made from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Rows = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Shape:
    """Rows of one kind.

    Attributes:
        make: The columns of rows ``[start, stop)``; a column of varying lengths is an object array.
        batch_size: Rows per batch.
    """

    name: str
    num_rows: int
    batch_size: int
    make: Callable[[int, int], Rows]

    @property
    def is_ragged(self) -> bool:
        """Whether rows differ in length."""
        return self.name == "tokens"


def narrow(start: int, stop: int) -> Rows:
    """64 float32 and a label."""
    x = np.random.default_rng(start).random((stop - start, 64), dtype=np.float32)
    return {"x": x, "id": np.arange(start, stop)}


def images(start: int, stop: int) -> Rows:
    """3 x 224 x 224 bytes and a label."""
    x = np.random.default_rng(start).integers(0, 256, (stop - start, 3, 224, 224), dtype=np.uint8)
    return {"x": x, "id": np.arange(start, stop)}


def tokens(start: int, stop: int) -> Rows:
    """16 to 512 int32."""
    random = np.random.default_rng(start)
    x = np.empty(stop - start, object)
    for row, length in enumerate(random.integers(16, 513, stop - start)):
        x[row] = random.integers(0, 50_000, length, dtype=np.int32)
    return {"x": x, "id": np.arange(start, stop)}


def shapes(num_images: int) -> list[Shape]:
    """All three."""
    return [
        Shape("narrow", 200_000, 256, narrow),
        Shape("images", num_images, 64, images),
        Shape("tokens", 100_000, 64, tokens),
    ]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Token rows as ``[B, T]`` with a mask: what every contestant has to deliver."""
    lengths = torch.tensor([len(row) for row in rows])
    x = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"x": x, "x_mask": torch.arange(x.shape[1]) < lengths[:, None]}


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Items of tokens as a batch."""
    return {**padded([row["x"] for row in rows]), "id": torch.stack([torch.as_tensor(row["id"]) for row in rows])}
