"""Names of settings: which there are, what an unknown one may have meant, and config files looked through for them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

from raytrain import yamlfile
from raytrain.config import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.errors import ConfigError

GROUPS = {"train": TrainConfig, "scaling": ScalingConfig, "run": RunConfig, "tracking": TrackingConfig}


def names_in(prefix: str, cls: Any) -> list[str]:
    """Dotted names of a dataclass's fields, nested ones included."""
    names = []
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        names.append(f"{prefix}.{field.name}")
        if dataclasses.is_dataclass(hints.get(field.name)):
            names += names_in(names[-1], hints[field.name])
    return names


def underscored(argument: str) -> str:
    """``--scaling.num-workers=2`` is ``--scaling.num_workers=2``; values stay as they are."""
    if not argument.startswith("--"):
        return argument
    name, sep, value = argument[2:].partition("=")
    return f"--{name.replace('-', '_')}{sep}{value}"


def refuse_unknown(argv: Sequence[str], names: Sequence[str]) -> None:
    """Stop at a flag that no group knows.

    Raises:
        ConfigError: With the nearest name.
    """
    options = ["config", "help", "print_config", *names]
    for argument in argv:
        if argument.startswith("--") and len(argument) > 2:
            name = argument[2:].partition("=")[0]
            if not _is_known(name, options):
                raise ConfigError(f"unknown option --{name}{_nearest(name, options, '--')} See --help for all.")


def _is_known(name: str, names: Sequence[str]) -> bool:
    # Below a mapping, such as train.ddp.find_unused_parameters, any name goes.
    return name in names or any(name.startswith(f"{known}.") for known in names) or name in GROUPS or name == "task"


def _nearest(name: str, names: Sequence[str], prefix: str = "") -> str:
    tail = name.rsplit(".", 1)[-1]
    by_tail = difflib.get_close_matches(tail, [n.rsplit(".", 1)[-1] for n in names], n=1, cutoff=0.75)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    close = close or [n for n in names if by_tail and n.rsplit(".", 1)[-1] == by_tail[0]][:1]
    return f"; did you mean {prefix}{close[0]}?" if close else "."


def readable(text: str, names: Sequence[str]) -> str:
    """The parser's complaint without its usage lines, with the nearest name where one is unknown."""
    text = text.strip()
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("usage:", "tip:"))]
    start = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    text = " ".join(line.strip() for line in lines[start:])
    text = text.split("error:", 1)[-1].strip() if "error:" in text else text
    for quote in ("'", '"', "`"):
        for word in text.split(quote)[1::2]:
            if "." not in word and " " in word:
                continue
            if not _is_known(word, names) and ("not found" in text or "not accepted" in text or "not expected" in text):
                return f"{text}{_nearest(word, names)}"
    return text


def checked_files(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """The arguments, their config files looked through for unknown names; empty files are left out."""
    kept: list[str] = []
    rest = iter(argv)
    for argument in rest:
        if argument.partition("=")[0] != "--config":
            kept.append(argument)
            continue
        path = argument.partition("=")[2] or next(rest, "")
        values = yamlfile.read(path)
        _refuse_unknown_keys(values, "", names, path)
        if values:
            kept += ["--config", path]
    return kept


def _refuse_unknown_keys(values: Mapping[str, Any], prefix: str, names: Sequence[str], path: str) -> None:
    groups = {name.rpartition(".")[0] for name in names} | set(GROUPS)
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in groups and isinstance(value, Mapping):
            _refuse_unknown_keys(value, f"{name}.", names, path)
        elif name in groups and name not in names:
            raise ConfigError(f"--config {path}: {name} is a group of settings, not {value!r}.")
        elif not _is_known(name, names):
            raise ConfigError(
                f"--config {path}: unknown key {name}{_nearest(name, [*names, *groups])} See --help for all."
            )
