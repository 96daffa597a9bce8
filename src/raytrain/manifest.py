"""The manifest of a checkpoint: what is in it, of which size and hash. Written last; without it there is no checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raytrain.errors import CheckpointError

FORMAT_VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and SHA-256 of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is.

    Attributes:
        step: Optimizer steps finished.
        epoch: Epochs finished.
        index: Global batches finished in the epoch under way.
        world_size: Workers that it was made with; it resumes on any number.
        attempt: Start of the run that made it.
        created_s: Unix time.
        metrics: Latest values at that step; NaN and infinities as they were.
        files: Facts by file name.
        versions: raytrain's and torch's.
        averaged: Whether ``trainer.pt`` holds averaged weights (``train.ema_decay``), which were the ones evaluated.
        format_version: Of this layout.
    """

    step: int
    epoch: int
    index: int
    world_size: int
    attempt: int
    created_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    averaged: bool = False
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        """Strict JSON: numbers that JSON does not know become strings."""
        values = asdict(self)
        values["metrics"] = {name: encode(value) for name, value in self.metrics.items()}
        return json.dumps(values, indent=1, allow_nan=False, sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read it.

        Raises:
            CheckpointError: It is no manifest, or of a newer format.
        """
        try:
            values: dict[str, Any] = json.loads(data)
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise CheckpointError(
                    f"format version {version} is newer than this raytrain reads ({FORMAT_VERSION}): update it"
                )
            values["metrics"] = {name: decode(value) for name, value in values["metrics"].items()}
            values["files"] = {name: FileFacts(**facts) for name, facts in values["files"].items()}
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the manifest cannot be read ({type(error).__name__}: {error})") from None


def encode(value: float) -> float | str:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else repr(value)


def decode(value: float | str) -> float:
    """The number again."""
    return float(value)
