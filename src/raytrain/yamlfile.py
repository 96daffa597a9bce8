"""YAML as people read it (the core schema of YAML 1.2): ``on``, ``no`` and ``2:8`` are text, ``1e-5`` is a number."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from raytrain.errors import ConfigError


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  # as PyYAML has it

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # PyYAML keeps the last of two equal keys: half of a file with two ``train:`` groups would be lost without a word.
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in {key for key in keys if keys.count(key) > 1}:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


_CORE = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
for _name, (_pattern, _first) in _CORE.items():
    firsts = [None if c == "\0" else c for c in _first]
    # To the writer as well, on top of YAML 1.1: what either would read as a number is quoted when it is text.
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), firsts)


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    text = repr(value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", special.get(text, text))


_Dumper.add_representer(float, _float)


def load(text: str) -> Any:
    """The value of a YAML text."""
    return yaml.load(text, Loader=_Loader)  # a SafeLoader: plain values only


def dump(value: Any) -> str:
    """Plain values as YAML that ``load`` reads back to the same."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def read(path: str) -> dict[str, Any]:
    """The mapping in a file; an empty file is an empty one.

    Raises:
        ConfigError: It cannot be read, is no YAML or no mapping.
    """
    try:
        values = load(Path(path).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(
            f"--config {path} holds a {type(values).__name__}. Allowed: a mapping of groups, such as 'train: {{epochs: 3}}'."
        )
    return values
