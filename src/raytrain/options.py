"""Settings from a YAML file and flags, over a job's defaults; and ``main``, which runs a job with them.

Parsed by jsonargparse (YAML, dotted flags, typed values); what is added here: near misses, and help from comments.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from raytrain import yamlfile
from raytrain.config import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.errors import ConfigError, DataError, RaytrainError, StorageError, TrackingError
from raytrain.fieldhelp import field_help
from raytrain.optionnames import (
    GROUPS,
    Job,
    checked_files,
    names_in,
    names_of,
    readable,
    refuse_unknown,
    task_type,
    tidy,
)
from raytrain.task import LoopTask, Task

DONE, FAILED, BAD_CONFIG, STOPPED, INTERRUPTED = 0, 1, 2, 4, 130


@dataclass(frozen=True)
class Options:
    """A task with all its settings."""

    task: Task
    train: TrainConfig
    scaling: ScalingConfig
    run: RunConfig
    tracking: TrackingConfig


def main(job: Job, argv: Sequence[str] | None = None, **defaults: Any) -> None:
    """Run a job file as a command: read its settings, train, end the process with a truthful exit code.

    Exit codes: 0 done (also when it stopped early by rule), 1 failed, 2 a setting that cannot work, 4 stopped and resumable,
    130 interrupted.

    Args:
        job: A Task class, or a function over a Session.
        argv: Flags; those of the process when None.
        defaults: The job's own ``train``, ``scaling``, ``run`` and ``tracking``.
    """
    sys.exit(run_command(job, argv, **defaults))


def run_command(job: Job, argv: Sequence[str] | None = None, **defaults: Any) -> int:
    """As ``main``; gives the exit code back."""
    try:
        return (action.get() or _train)(parse(job, argv, **defaults))
    except (ConfigError, DataError, StorageError, TrackingError) as error:
        print(f"raytrain: error: {error}", file=sys.stderr, flush=True)
        return BAD_CONFIG
    except RaytrainError as error:
        print(f"raytrain: failed: {error}", file=sys.stderr, flush=True)
        return FAILED
    except KeyboardInterrupt:
        print("raytrain: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return FAILED


def _train(options: Options) -> int:
    from raytrain.launch import fit
    from raytrain.summary import summary

    result = fit(options.task, train=options.train, scaling=options.scaling, run=options.run, tracking=options.tracking)
    if os.environ.get("RANK", "0") == "0":
        print(summary(result), end="", flush=True)
    return DONE if result.status == "finished" else STOPPED


# What ``main`` does with the settings of a job; the ``raytrain`` command sets others than training.
action: ContextVar[Callable[[Options], int] | None] = ContextVar("action", default=None)


def parse(job: Job, argv: Sequence[str] | None = None, **defaults: Any) -> Options:
    """Read settings: the job's defaults, then each ``--config FILE``, then flags.

    Raises:
        ConfigError: An unknown name, or a value that is not possible; with what is allowed and the nearest name.
    """
    from jsonargparse import Namespace

    names = names_of(job)
    given = tidy(sys.argv[1:] if argv is None else argv, names)
    refuse_unknown(given, names)
    given = checked_files(given, names)
    parser = _parser(job, defaults)
    shown, text = StringIO(), ""
    try:
        with redirect_stderr(shown):
            space: Namespace = parser.parse_args(given)
            made = parser.instantiate(space)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = shown.getvalue()
    except ConfigError as error:
        text = str(error)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if text:
        raise ConfigError(readable(text, names))
    groups = {name: made.get(name) or cls() for name, cls in GROUPS.items()}
    return Options(_task(job, made.get("task")), **groups)


def _parser(job: Job, defaults: Mapping[str, Any]) -> Any:
    import jsonargparse

    jsonargparse.set_loader("raytrain", yamlfile.load, (yaml.YAMLError,))
    jsonargparse.set_dumper("raytrain", yamlfile.dump)
    parser = jsonargparse.ArgumentParser(
        prog=Path(sys.argv[0]).name,
        usage="%(prog)s [--config RUN.yaml] [--GROUP.NAME VALUE ...] [--print-config]",
        description=inspect.getdoc(job),
        default_env=False,
        exit_on_error=True,
        parser_mode="raytrain",
    )
    parser.add_argument("--config", action="config", help="YAML file with the same keys; flags win over it")
    task = task_type(job)
    if task is not None:
        parser.add_class_arguments(task, "task", fail_untyped=False)
        _add_help(parser, "task", task)
    for name, cls in GROUPS.items():
        parser.add_class_arguments(cls, name)
        _add_help(parser, name, cls)
    for name, value in defaults.items():
        if name not in GROUPS or not isinstance(value, GROUPS[name]):
            raise ConfigError(f"main({name}=...): allowed are {', '.join(GROUPS)}, each of its own type.")
        parser.set_defaults({f"{name}.{key}": v for key, v in _fields(value).items()})
    return parser


def _task(job: Job, made: Any) -> Task:
    if not isinstance(job, type):
        return LoopTask(job, made)
    if made is not None:
        task: Task = made
        return task
    new: Task = job()
    return new


def _add_help(parser: Any, group: str, cls: type) -> None:
    texts = {f"{group}.{name}": text for name, text in field_help(cls).items()}
    for name, hint in names_in(group, cls).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            texts |= {f"{name}.{inner}": text for inner, text in field_help(hint).items()}
    for action in parser._actions:
        if action.dest in texts:
            action.help = texts[action.dest]


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}


def known_names(job: Job) -> list[str]:
    """All dotted names that a job knows."""
    return list(names_of(job))


# -- saving -----------------------------------------------------------------------------------------------------------


def dump(options: Options) -> str:
    """The effective settings as YAML that alone repeats the run."""
    values = {"task": task_fields(options.task), **{name: _fields(getattr(options, name)) for name in GROUPS}}
    return yamlfile.dump(_plain(values))


def flatten(options: Options) -> dict[str, Any]:
    """All settings by dotted name, lists and mappings resolved."""
    flat = _flat("task", _plain(task_fields(options.task)))
    for name in GROUPS:
        flat |= _flat(name, _plain(_fields(getattr(options, name))))
    return flat


def task_fields(task: Task) -> dict[str, Any]:
    """The user's fields of a task, or of the config of a loop."""
    holder: Any = task.config if isinstance(task, LoopTask) else task
    return _fields(holder) if dataclasses.is_dataclass(holder) and not isinstance(holder, type) else {}


def _plain(value: Any) -> Any:
    """As YAML can say it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(_fields(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value) if isinstance(value, Path) else repr(value)


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        if not value:
            return {}
        return {k: v for key, item in value.items() for k, v in _flat(f"{prefix}.{key}", item).items()}
    if isinstance(value, list):
        return {prefix: yaml.dump(value, default_flow_style=True, width=10**9).strip()}
    return {prefix: value}
