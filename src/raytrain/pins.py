"""Checkpoints that stay: a file in their folder says what in the model registry points to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from raytrain.errors import StorageError
from raytrain.storage import Storage

NAME = "registered.json"


def pin(checkpoint: Storage, versions: Sequence[str]) -> None:
    """Keep a checkpoint for these versions (``NAME/3``), besides those that it is kept for already."""
    merged = sorted({*pinned_for(checkpoint), *versions})
    checkpoint.write(NAME, json.dumps({"versions": merged}, indent=1).encode())


def pinned_for(checkpoint: Storage) -> list[str]:
    """The versions that a checkpoint is kept for; a file that cannot be read keeps it for one of unknown name."""
    if not checkpoint.exists(NAME):
        return []
    try:
        return list(json.loads(checkpoint.read(NAME))["versions"])
    except (StorageError, ValueError, KeyError, TypeError):
        return ["?"]


class Registry(Protocol):
    """What is asked of the model registry."""

    def referring(self) -> Mapping[str, Sequence[str]]:
        """Versions by the URI of the checkpoint that they point to."""

    def is_gone(self, version: str) -> bool:
        """Whether a version is in the registry no more."""


def keep_registered(checkpoints: Storage, registry: Registry) -> None:
    """As ``settle``, for what the registry says now; when it says nothing, all pins stay, and it is told."""
    try:
        settle(checkpoints, registry.referring(), registry.is_gone)
    except Exception as error:
        text = f"which checkpoints the model registry points to is not known now ({type(error).__name__})"
        print(f"raytrain: warning: {text}", flush=True)


def settle(checkpoints: Storage, wanted: Mapping[str, Sequence[str]], is_gone: Callable[[str], bool]) -> None:
    """Pin what the registry points to, and let go what was pinned for versions that are gone.

    Args:
        checkpoints: The folder of the run's checkpoints.
        wanted: Versions by the URI of the checkpoint that they point to.
        is_gone: Whether a version is in the registry no more.
    """
    by_name = {uri.partition("?")[0].rpartition("/")[2]: versions for uri, versions in wanted.items()}
    for name in checkpoints.names():
        folder = checkpoints.child(name)
        before = pinned_for(folder)
        now = sorted({*by_name.get(name, ()), *(version for version in before if not is_gone(version))})
        if now and now != before:
            folder.write(NAME, json.dumps({"versions": now}, indent=1).encode())
        elif before and not now:
            folder.delete(NAME)
