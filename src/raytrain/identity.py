"""What a run is: its name, the settings that matter, how far it came. Kept as ``run.json`` in its folder."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raytrain.errors import ConfigError, StorageError
from raytrain.storage import Storage

NAME = "run.json"
FORMAT_VERSION = 1

# Settings that may differ when a run goes on: they change where, how long and how it is watched, not what it computes.
_HARMLESS_GROUPS = ("scaling.", "run.", "tracking.")
_HARMLESS = (
    "train.epochs",
    "train.steps",
    "train.time",
    "train.log_every",
    "train.eval_every",
    "train.checkpoint_every",
    "train.eval_batch_size",
    "train.patience",
    "train.best_metric",
    "train.best_mode",
    "train.accumulate",
    "train.loader_workers",
    "train.nan_policy",
    "train.compile",
)


@dataclass(frozen=True)
class Changes:
    """Settings that differ from those that a run began with: name -> (before, now)."""

    harmless: Mapping[str, tuple[Any, Any]]
    harmful: Mapping[str, tuple[Any, Any]]

    def text(self) -> str:
        """The harmless ones, as one line."""
        return _listed(self.harmless)

    def refuse_harmful(self, name: str) -> None:
        """Stop where going on would mix two experiments.

        Raises:
            ConfigError: There are harmful changes; they are listed, with the cures.
        """
        if self.harmful:
            raise ConfigError(
                f"run {name!r} began with other settings: {_listed(self.harmful)}. Going on would mix two experiments. "
                "Set them back, or choose another run.name for the new one."
            )


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """The settings that differ, sorted by whether they change what is computed."""
    before, now = _plain(before), _plain(now)
    changed = {
        name: (before.get(name), now.get(name))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    }
    harmless = {name: pair for name, pair in changed.items() if _is_harmless(name)}
    return Changes(harmless, {name: pair for name, pair in changed.items() if name not in harmless})


def _is_harmless(name: str) -> bool:
    return name in _HARMLESS or name.startswith(_HARMLESS_GROUPS)


def _listed(changes: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{name}: {before} -> {now}" for name, (before, now) in changes.items())


def _plain(facts: Mapping[str, Any]) -> dict[str, Any]:
    """As they look after a way through JSON, so that a stored run and a new start compare."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(facts), default=str))
    return plain


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Attributes:
        name: Its name.
        task: Name of the task's class.
        facts: Settings it runs with, flat.
        status: ``RUNNING``, ``FINISHED``, ``FAILED`` or ``KILLED``, as the driver last knew.
        attempts: Starts of a driver.
        step: Optimizer steps finished when it ended last.
        best_step: Step of the best checkpoint, or None.
        stopped_early: It finished before its last step because of ``train.patience``.
        trackers: What the trackers need to go on, such as the MLflow run id.
        error: Text of the error of a failed run.
        created_s, updated_s: Unix times; the driver writes the record each minute while it lives.
        key: What this run alone has, in all its starts; trackers find it by that.
        driver: What tells the process of the last start from all others; see ``liveness``.
    """

    name: str
    task: str
    facts: Mapping[str, Any]
    status: str = "RUNNING"
    attempts: int = 0
    step: int = 0
    best_step: int | None = None
    stopped_early: bool = False
    trackers: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None
    created_s: float = 0.0
    updated_s: float = 0.0
    format_version: int = FORMAT_VERSION
    key: str = ""
    driver: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def new(cls, *, name: str, task: str, facts: Mapping[str, Any]) -> RunRecord:
        """The record of a run that begins."""
        return cls(name, task, _plain(facts), created_s=time.time())

    @classmethod
    def load(cls, folder: Storage) -> RunRecord | None:
        """The record in a run's folder; None when there is no run.

        Raises:
            StorageError: There is one, but it cannot be read.
        """
        if not folder.exists(NAME):
            return None
        try:
            return cls(**json.loads(folder.read(NAME)))
        except (ValueError, TypeError) as error:
            raise StorageError(
                f"{folder.child(NAME).uri} is damaged ({error}). Remove this file to start the run's record anew; its checkpoints "
                "are found without it."
            ) from None

    def save(self, folder: Storage) -> None:
        """Write it, whole or not at all."""
        data = {**asdict(self), "updated_s": time.time()}
        folder.write(NAME, json.dumps(data, indent=1).encode())

    def started(self, facts: Mapping[str, Any], driver: Mapping[str, Any]) -> RunRecord:
        """One more start, with the settings of now, by this driver."""
        key = self.key or uuid.uuid4().hex
        begun = replace(self, status="RUNNING", attempts=self.attempts + 1, error=None)
        return replace(begun, facts=_plain(facts), key=key, driver=dict(driver))

    def with_trackers(self, trackers: Mapping[str, str]) -> RunRecord:
        """With what the trackers told of themselves."""
        return replace(self, trackers={**self.trackers, **trackers})

    def at(self, step: int, best_step: int | None) -> RunRecord:
        """As far as it came by now."""
        return replace(self, step=step, best_step=best_step)

    def ended(self, status: str, *, stopped_early: bool = False, error: str | None = None) -> RunRecord:
        """The end of a start."""
        return replace(self, status=status, stopped_early=stopped_early, error=error)
