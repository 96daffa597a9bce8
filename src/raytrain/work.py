"""What runs on each worker: a session around the task, and an error that says which rank, step and line."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from raytrain.config import TrainConfig
from raytrain.data import Streamed
from raytrain.errors import RaytrainError, WorkerError
from raytrain.keeper import Keeper
from raytrain.loop import run_task
from raytrain.peers import Peers
from raytrain.runtime import Runtime
from raytrain.session import Session
from raytrain.storage import Storage
from raytrain.task import Task

# Texts of what a rank sees when another one has left in the middle of a collective.
_SECONDARY = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket timeout",
    "nccl",
    "gloo",
)


@dataclass(frozen=True)
class Job:
    """What travels to every worker.

    Attributes:
        task: The user's task.
        train: How to train.
        folder: The run's folder.
        keep: Checkpoints to keep besides the best.
        attempt: Starts of this run so far, this one included.
        use_gpu: Whether each worker has a GPU.
        streams: Sets that are read through Ray Data, by name, instead of from the task.
    """

    task: Task
    train: TrainConfig
    folder: Storage
    keep: int
    attempt: int
    use_gpu: bool
    streams: Mapping[str, Streamed] = field(default_factory=dict)


def work(job: Job, runtime: Runtime) -> None:
    """Train on this worker.

    Raises:
        WorkerError: Anything failed: with the rank, the step and the user's line.
    """
    if job.train.deterministic:
        torch.use_deterministic_algorithms(True)
    peers = Peers()
    keeper = Keeper(job.folder, job.keep, peers, job.attempt)
    try:
        keeper.restore()
        session = Session(runtime, job.train, keeper, peers)
        run_task(job.task, session, peers, job.streams)
        session.close()
    except Exception as error:
        raise failure(error, runtime.placement.rank, keeper.cursor.step) from error
    finally:
        keeper.wait()  # a checkpoint that is under way is finished, also when the run has failed


def failure(error: BaseException, rank: int, step: int) -> WorkerError:
    """An error of one rank, told so that the user finds the place.

    The text stands alone: the original may have a constructor that does not survive pickling.
    """
    kind = "" if type(error) in (RaytrainError, WorkerError) else f"{type(error).__name__}: "
    text = f"rank {rank} failed after step {step}: {kind}{error}{_hint(str(error))}"
    place = _user_line(error)
    full = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return WorkerError(f"{text}\n{place}\n{full}" if place else f"{text}\n{full}", rank, step)


def _hint(text: str) -> str:
    """A cure for errors of torch that speak of something else than their cause here."""
    if "more than 1 value per channel" in text:
        return (
            "\n  This worker's share of the batch was a single row, which BatchNorm1d does not take in training. Set "
            "train.drop_last=true, a train.batch_size that leaves a larger last batch, or fewer workers or micro-batches."
        )
    return ""


def is_secondary(error: BaseException) -> bool:
    """Whether this rank only noticed that another one had failed."""
    text = str(error).lower()
    return isinstance(error, (RuntimeError, RaytrainError)) and (
        any(words in text for words in _SECONDARY) or "this rank ends with it" in text
    )


def _user_line(error: BaseException) -> str:
    """The innermost line that is neither ours nor an installed package's."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        f for f in frames if "site-packages" not in f.filename and "/raytrain/" not in f.filename.replace("\\", "/")
    ]
    users = [f for f in users if not f.filename.startswith("<")] or users
    if not users:
        return ""
    frame = users[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"  at {frame.filename}:{frame.lineno}, in {frame.name}: {line}"
