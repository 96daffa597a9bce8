"""The errors that raytrain raises for its users, each with the value, the cause and the cure."""

from __future__ import annotations


class RaytrainError(Exception):
    """Base of all errors of this package. The message alone tells what to do."""


class ConfigError(RaytrainError, ValueError):
    """A setting that cannot work, found before anything was started (exit code 2)."""


class DataError(RaytrainError, ValueError):
    """A dataset or loader that cannot be trained on exactly once per epoch."""


class CheckpointError(RaytrainError):
    """A checkpoint that is not whole, or does not belong to this model or run."""


class StorageError(RaytrainError):
    """A storage that cannot be read or written."""


class NonFiniteError(RaytrainError):
    """A loss or gradient that is not a finite number, with ``nan_policy="stop"``."""


class WorkerError(RaytrainError):
    """The user's code failed on a worker: which rank, which step, which line.

    Attributes:
        rank: World rank of the worker that failed first, or None when unknown.
        step: Optimizer steps that were finished when it failed, or None when unknown.
    """

    def __init__(self, message: str, rank: int | None = None, step: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, int | None, int | None]]:
        return type(self), (str(self), self.rank, self.step)


class TrackingError(RaytrainError):
    """The tracking server or store refused before the training began."""
