"""Encoded images as tensors."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch

from raytrain.data.columns import Array, Image
from raytrain.errors import DataError


def decode_all(encoded: Sequence[Array], encoding: Image, column: str, rows: Sequence[int]) -> torch.Tensor:
    """Decode images of one size: ``[B, C, H, W]`` uint8.

    Raises:
        DataError: One cannot be decoded, or differs in size and no size was asked for; the row is named.
    """
    images: list[torch.Tensor] = []
    for data, row in zip(encoded, rows, strict=True):
        try:
            images.append(_decode(data, encoding))
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for broken files
            raise DataError(f"row {row}: the image in column {column!r} cannot be decoded: {error}") from None
        if images[-1].shape != images[0].shape:
            raise DataError(
                f"row {row}: the image in column {column!r} has the size {tuple(images[-1].shape[1:])}, but another of the batch "
                f"{tuple(images[0].shape[1:])}. Give Image(size=(height, width)) to scale all to one."
            )
    return torch.stack(images)


def _decode(data: Array, encoding: Image) -> torch.Tensor:
    try:
        from PIL import Image as Pillow
    except ImportError:
        raise DataError("encoded images need Pillow: pip install pillow.") from None
    with Pillow.open(io.BytesIO(data.tobytes())) as opened:
        if encoding.size is not None:
            opened.draft(
                encoding.mode, encoding.size[::-1]
            )  # a JPEG is then decoded at a smaller scale, which is faster
        image = opened.convert(encoding.mode)
    if encoding.size is not None and image.size != encoding.size[::-1]:
        image = image.resize(encoding.size[::-1], Pillow.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image, np.uint8))
    return pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
