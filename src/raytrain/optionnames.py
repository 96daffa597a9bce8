"""Names of settings: which there are, what an unknown one may have meant, and config files looked through for them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from raytrain import yamlfile
from raytrain.config import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.errors import ConfigError
from raytrain.fieldhelp import allowed
from raytrain.task import Task

GROUPS = {"train": TrainConfig, "scaling": ScalingConfig, "run": RunConfig, "tracking": TrackingConfig}
Job = type[Task] | Callable[..., None]
Names = Mapping[str, Any]  # the type of each setting, by its dotted name

_NONE = type(None)


def task_type(job: Job) -> Any:
    """The dataclass whose fields are the ``task`` flags, or None."""
    if isinstance(job, type) and issubclass(job, Task):
        _check_task_type(job)
        return job if dataclasses.is_dataclass(job) and dataclasses.fields(job) else None
    if isinstance(job, type) or not callable(job):
        raise ConfigError(
            f"main() takes a subclass of raytrain.Task, as main(Digits), or a function over a Session, not {job!r}."
        )
    parameters = list(inspect.signature(job).parameters)
    if len(parameters) < 2:
        return None
    config = _hints(job).get(parameters[1])
    if not dataclasses.is_dataclass(config):
        raise ConfigError(
            f"{job.__name__}(session, {parameters[1]}): give the second argument a dataclass as its type; its fields become flags."
        )
    return config


def _check_task_type(job: type[Task]) -> None:
    """That fields are what they seem: below a dataclass, a subclass without the decorator keeps its parent's defaults."""
    own = [name for name in vars(job).get("__annotations__", {}) if name in vars(job)]
    if dataclasses.is_dataclass(job):
        if own and "__dataclass_fields__" not in vars(job):
            raise ConfigError(f"{job.__name__} has fields ({', '.join(own)}): put @dataclass(frozen=True) above it.")
        return
    parameters = inspect.signature(job).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ConfigError(
            f"{job.__name__}(...) needs {', '.join(needed)}. Make it a dataclass with these as fields; they become flags."
        )


def names_of(job: Job) -> Names:
    """The settings of a job: its own below ``task``, then those of the groups."""
    task = task_type(job)
    groups = {**({} if task is None else {"task": task}), **GROUPS}
    return {name: hint for group, cls in groups.items() for name, hint in names_in(group, cls).items()}


def names_in(prefix: str, cls: Any, seen: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Types of a dataclass's fields by dotted name, those of nested dataclasses included."""
    names: dict[str, Any] = {}
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        name, hint = f"{prefix}.{field.name}", hints.get(field.name, Any)
        names[name] = hint
        inner = _nested(hint)
        if inner is not None and inner not in seen:
            names |= names_in(name, inner, (*seen, cls))
    return names


def _hints(thing: Any) -> dict[str, Any]:
    """Types of its fields or parameters; none when one names what only a type checker sees."""
    try:
        return get_type_hints(thing)
    except NameError:
        return {}


def _nested(hint: Any) -> Any:
    """The dataclass in ``C`` or ``C | None``, or None."""
    parts = [part for part in get_args(hint) if part is not _NONE]
    hint = parts[0] if len(parts) == 1 and _NONE in get_args(hint) else hint
    return hint if dataclasses.is_dataclass(hint) else None


def tidy(argv: Sequence[str], names: Names) -> list[str]:
    """The arguments as the parser knows them: ``--scaling.num-workers=2`` with an underscore, and ``none`` as null where
    a setting may be None. Values, and names below a mapping such as ``--tracking.tags.my-team``, stay as they are.
    """
    given: list[str] = []
    flag = ""
    for argument in argv:
        if not argument.startswith("--"):
            given.append(_null(argument, names.get(flag)))
            flag = ""
            continue
        flag, sep, value = argument[2:].partition("=")
        plain = flag.replace("-", "_")
        known = next((n for n in names if plain.startswith(f"{n}.") and _is_open(names[n])), "")
        flag = known + flag[len(known) :] if known else plain
        given.append(f"--{flag}{sep}{_null(value, names.get(flag))}")
    return given


def _null(value: str, hint: Any) -> str:
    arguments = get_args(hint)
    can_say_none = any(get_origin(part) is Literal and "none" in get_args(part) for part in arguments)
    return "null" if value.lower() == "none" and _NONE in arguments and not can_say_none else value


def refuse_unknown(argv: Sequence[str], names: Names) -> None:
    """Stop at a flag that no group knows.

    Raises:
        ConfigError: With the nearest name.
    """
    others = ("config", "help", "print_config")
    for argument in argv:
        if argument.startswith("--") and len(argument) > 2:
            name = argument[2:].partition("=")[0]
            if name not in others and not _is_known(name.removesuffix("+").removesuffix(".help"), names):
                raise ConfigError(
                    f"unknown option --{name}{_nearest(name, [*others, *names], '--')} See --help for all."
                )


def _is_known(name: str, names: Names) -> bool:
    if name in names or name in GROUPS or name == "task":
        return True
    return any(name.startswith(f"{known}.") and _is_open(hint) for known, hint in names.items())


def _is_open(hint: Any) -> bool:
    """Whether any name goes below it, as below a mapping: ``train.ddp.find_unused_parameters``."""
    parts = [hint, *get_args(hint)] if _NONE in get_args(hint) else [hint]
    kinds = [kind for part in parts for kind in (part, get_origin(part))]
    return Any in kinds or any(isinstance(kind, type) and issubclass(kind, Mapping) for kind in kinds)


def _nearest(name: str, names: Sequence[str], prefix: str = "") -> str:
    tail = name.rsplit(".", 1)[-1]
    by_tail = difflib.get_close_matches(tail, [n.rsplit(".", 1)[-1] for n in names], n=1, cutoff=0.75)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    close = close or [n for n in names if by_tail and n.rsplit(".", 1)[-1] == by_tail[0]][:1]
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def readable(text: str, names: Names) -> str:
    """The parser's complaint in one line and in our words: the setting, its value, what is allowed."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("usage:", "tip:"))]
    start = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    text = " ".join(lines[start:]).split("error:", 1)[-1].strip()
    # A nested dataclass of the user's own refused, and the parser wrapped it in what else might have been given.
    wrapped = re.search(r"Errors: (.*) Given value type:", text)
    own = re.sub(r"- Expected a <class 'NoneType'>", "", wrapped.group(1)).strip(" -") if wrapped else ""
    if own and not re.match("Expected|Problem|Parser key", own):
        return own
    wrong = re.match(r'Parser key "([^"]+)":.*?(?:Got|Given) value: ((?:(?!(?:Got|Given) value: ).)*)$', text)
    if wrong and wrong.group(1) in names:
        key, value = wrong.groups()
        return f"{key} = {value!r} is not possible. Allowed: {allowed(names[key])}."
    unknown = re.search(r"Group '([^']+)' does not accept option '([^']+)'", text)
    if unknown:
        name = ".".join(unknown.groups())
        return f"unknown key {name}{_nearest(name, [*names])} See --help for all."
    return text


def checked_files(argv: Sequence[str], names: Names) -> list[str]:
    """The arguments, their config files looked through for unknown names; empty files are left out.

    Raises:
        ConfigError: A file that cannot be read, or that has an unknown key.
    """
    kept: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument.partition("=")[0] != "--config":
            kept.append(argument)
            continue
        path = argument.partition("=")[2] or next(rest, "")
        if not path or path.startswith("--"):
            raise ConfigError("--config needs a YAML file: --config run.yaml.")
        values = yamlfile.read(path)
        _refuse_unknown_keys(values, "", names, path)
        if values:
            kept += ["--config", path]
    return kept


def _refuse_unknown_keys(values: Mapping[str, Any], prefix: str, names: Names, path: str) -> None:
    groups = {name.rpartition(".")[0] for name in names} | set(GROUPS)
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, Mapping):
            _refuse_unknown_keys(value, f"{name}.", names, path)
        elif name in groups and name not in names:
            raise ConfigError(
                f"--config {path}: {name} is a group of settings, not {value!r}. Allowed: lines such as "
                f"'{next(n for n in names if n.startswith(name + '.')).rpartition('.')[2]}: ...' below it."
            )
        elif not _is_known(name, names):
            raise ConfigError(
                f"--config {path}: unknown key {name}{_nearest(name, [*names, *groups])} See --help for all."
            )
