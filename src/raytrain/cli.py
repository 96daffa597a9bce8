"""The ``raytrain`` command: run, check and resume jobs, list their runs, and use their models."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from raytrain import options
from raytrain.errors import ConfigError, RaytrainError

_VERBS = {
    "train": "run a job file: raytrain train JOB.py [--flags]",
    "check": "everything that can be known before workers are held: raytrain check JOB.py [--flags]",
    "resume": "go on with a run from its folder alone: raytrain resume RUNS/NAME [--flags]",
    "runs": "list the runs of a storage, or mend them: raytrain runs [STORAGE] [--repair], raytrain runs --send FILE",
    "evaluate": "metrics of a checkpoint: raytrain evaluate RUN [--data NAME] [--checkpoint best|last|STEP]",
    "predict": "answers to the rows of a file: raytrain predict RUN --input FILE.parquet|.csv|.npy --output FILE",
    "export": "a program that needs no raytrain: raytrain export RUN --format pt2|onnx --output FILE",
    "register": "log a run's model into MLflow, and register it: raytrain register RUN [--name NAME] [--log best|last|both]",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry of the command; ends the process with a truthful exit code."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """As ``main``; gives the exit code back."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return options.DONE if argv else options.BAD_CONFIG
    verb, rest = argv[0], argv[1:]
    if verb == "--version":
        from raytrain import __version__

        print(f"raytrain {__version__}")
        return options.DONE
    if verb not in _VERBS:
        close = difflib.get_close_matches(verb, _VERBS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f". Allowed: {', '.join(_VERBS)}."
        print(f"raytrain: error: unknown verb {verb!r}{hint}", file=sys.stderr)
        return options.BAD_CONFIG
    try:
        return _RUN[verb](rest)
    except ConfigError as error:
        print(f"raytrain: error: {error}", file=sys.stderr)
        return options.BAD_CONFIG
    except RaytrainError as error:
        print(f"raytrain: failed: {error}", file=sys.stderr)
        return options.FAILED


def _usage() -> str:
    return "\n".join(["usage: raytrain VERB ...", "", *(f"  {verb:9} {text}" for verb, text in _VERBS.items())])


def _train(argv: list[str]) -> int:
    with _as_job(argv, "train") as job:
        return _exit_code(lambda: runpy.run_path(str(job), run_name="__main__"))


def _check(argv: list[str]) -> int:
    with _as_job(argv, "check") as job:
        token = options.action.set(_print_checks)
        try:
            return _exit_code(lambda: runpy.run_path(str(job), run_name="__main__"))
        finally:
            options.action.reset(token)


def _print_checks(settings: options.Options) -> int:
    from raytrain.launch import check

    groups = (settings.train, settings.scaling, settings.run, settings.tracking)
    for line in check(settings.task, *groups):
        print(f"ok  {line}")
    return options.DONE


def _resume(argv: list[str]) -> int:
    with _from_folder(argv, "resume") as job:
        return _exit_code(lambda: runpy.run_path(str(job), run_name="__main__"))


def _runs(argv: list[str]) -> int:
    from raytrain.listing import table

    parser = argparse.ArgumentParser(prog="raytrain runs", description="List the runs of a storage, or mend them.")
    parser.add_argument("storage", nargs="?", default="runs", help="folder or URI (default: runs)")
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--repair", action="store_true", help="end runs whose driver died, and send what was left")
    either.add_argument("--send", metavar="FILE", help="send to MLflow what a driver kept while it was away")
    args = parser.parse_args(argv)
    if args.send is not None:
        return _send(args.send)
    if args.repair:
        return _repair(args.storage)
    print(table(args.storage))
    return options.DONE


def _send(file: str) -> int:
    from raytrain.tracking.sending import send

    path = Path(file).expanduser().absolute()
    if not path.exists():
        if path.with_suffix(".sent").exists():
            print(f"sent already: {path.with_suffix('.sent')}")
            return options.DONE
        raise ConfigError(f"there is no file {file!r} to send.")
    for sent in send(path, _warn):
        print(
            f"{sent.run}: sent {sent.num_items} items to MLflow. {sent.path} is needed no more.\n  browse {sent.where}"
        )
        if not sent.has_end:
            print("  its driver left no end of the run: raytrain runs STORAGE --repair gives it one")
    return options.DONE


def _repair(storage: str) -> int:
    from raytrain.repair import repair

    report = repair(storage, _warn)
    for line in report.done or ([] if report.failed else ["nothing to mend"]):
        print(line)
    for line in report.failed:
        print(f"raytrain: not mended: {line}", file=sys.stderr)
    return options.FAILED if report.failed else options.DONE


def _warn(text: str) -> None:
    print(f"raytrain: warning: {text}", file=sys.stderr)


def _model_verb(verb: str) -> Callable[[list[str]], int]:
    def run_it(argv: list[str]) -> int:
        from raytrain.models import verbs

        return verbs.run(verb, argv)

    return run_it


_RUN: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "check": _check,
    "resume": _resume,
    "runs": _runs,
    **{verb: _model_verb(verb) for verb in ("evaluate", "predict", "export", "register")},
}


def _exit_code(work: Callable[[], Any]) -> int:
    try:
        work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(bool(stop.code))
    raise ConfigError("the job file ended without calling raytrain.main(...).")


@contextlib.contextmanager
def _as_job(argv: list[str], verb: str) -> Iterator[Path]:
    """Within the block the process looks as if it had been started as ``python JOB.py [flags]``."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"raytrain {verb} needs a job file: raytrain {verb} JOB.py [--flags].")
    job = Path(argv[0])
    if not job.is_file():
        raise ConfigError(f"there is no job file {argv[0]!r}.")
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(job), *argv[1:]], [str(job.resolve().parent), *sys.path]
    try:
        yield job
    finally:
        sys.argv, sys.path[:] = before


def _folder(argv: list[str], verb: str) -> Path:
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"raytrain {verb} needs the folder of a run: raytrain {verb} RUNS/NAME.")
    folder = Path(argv[0]).expanduser()
    for name in ("config.yaml", "job.py"):
        if not (folder / name).is_file():
            raise ConfigError(
                f"{folder} is not the folder of a run that was started from a job file: it has no {name}."
            )
    return folder


@contextlib.contextmanager
def _from_folder(argv: list[str], verb: str) -> Iterator[Path]:
    folder = _folder(argv, verb)
    place = ["--run.storage", str(folder.resolve().parent), "--run.name", folder.resolve().name]
    flags = ["--config", str(folder / "config.yaml"), *place, "--run.resume", "must", *argv[1:]]
    with _as_job([str(folder / "job.py"), *flags], verb) as job:
        yield job
