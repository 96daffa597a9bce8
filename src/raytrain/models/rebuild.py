"""A run's task and settings again, from the ``job.py`` and ``config.yaml`` that its folder keeps."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from raytrain import options
from raytrain.errors import CheckpointError, ConfigError
from raytrain.storage import Storage

JOB, CONFIG = "job.py", "config.yaml"


def settings(folder: Storage, flags: Sequence[str] = ()) -> options.Options:
    """The task and settings that a folder's job and configuration say. Runs ``job.py``, which trains nothing.

    Args:
        folder: Of a run, or of a logged model.
        flags: Settings that differ, as on a command line.

    Raises:
        ConfigError: The folder has no job, the job does not run by itself, or a flag is not known.
    """
    for name in (JOB, CONFIG):
        if not folder.exists(name):
            raise ConfigError(
                f"{folder.uri} has no {name}: it was not started from a job file, so its task cannot be made again. Give the task: "
                "raytrain.load(..., task=Mine())."
            )
    if folder.is_local:
        return _run(Path(folder.path), flags)
    with tempfile.TemporaryDirectory() as copy:
        for name in (JOB, CONFIG):
            Path(copy, name).write_bytes(folder.read(name))
        return _run(Path(copy), flags)


def _run(folder: Path, flags: Sequence[str]) -> options.Options:
    seen: list[options.Options] = []

    def keep(found: options.Options) -> int:
        seen.append(found)
        return options.DONE

    job = folder / JOB
    if "raytrain" not in job.read_text(encoding="utf-8", errors="replace"):
        raise ConfigError(f"{job} is no job: it does not use raytrain. Give the task: raytrain.load(..., task=Mine()).")
    told = io.StringIO()
    token = options.action.set(keep)
    try:
        with _as_main(job, ["--config", str(folder / CONFIG), *flags]), contextlib.redirect_stderr(told):
            runpy.run_path(str(job), run_name="__main__")
    except SystemExit:
        pass
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{job} needs the module {error.name!r}, which is not beside it. Set PYTHONPATH to the folder that has it."
        ) from None
    except Exception as error:
        raise CheckpointError(f"{job} does not run any more: {type(error).__name__}: {error}") from error
    finally:
        options.action.reset(token)
    if not seen:
        reason = told.getvalue().strip().removeprefix("raytrain: error: ") or "it ended without raytrain.main(...)"
        raise ConfigError(f"{job}: {reason}")
    return seen[-1]


@contextlib.contextmanager
def _as_main(job: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Within the block the process looks as if it had been started as ``python job.py ARGUMENTS``."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(job), *arguments], [str(job.resolve().parent), *sys.path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
