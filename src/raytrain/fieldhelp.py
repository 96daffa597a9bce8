"""Help texts of dataclass fields: the docstring under a field, or the comment behind it; and what a type allows."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import textwrap
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text (in YAML, quotes make a number text)",
    Path: "a path",
    type(None): "null",
}


def field_help(cls: type) -> dict[str, str]:
    """Text by field name, over the class and its bases; empty where the source is not at hand."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
            body = ast.parse(source).body[0]
        except (OSError, TypeError, SyntaxError, IndexError):
            continue
        if isinstance(body, ast.ClassDef):
            texts |= _of_class(body, source.splitlines())
    return texts


def _of_class(body: ast.ClassDef, lines: list[str]) -> dict[str, str]:
    texts = {}
    for node, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        comment = lines[(node.end_lineno or 1) - 1][node.end_col_offset :].strip()
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            texts[node.target.id] = inspect.cleandoc(after.value.value)
        elif comment.startswith("#"):
            texts[node.target.id] = comment.lstrip("#: ").strip()
    return texts


def allowed(hint: Any) -> str:
    """What may be given for a type, in words: ``a whole number or none``."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _WORDS:
        return _WORDS[hint]
    if origin in (Union, types.UnionType):
        return " or ".join(allowed(part) for part in parts)
    if origin is Literal:
        return ", ".join(repr(part) for part in parts)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(hint.__members__)
    if dataclasses.is_dataclass(hint):
        return f"a mapping with {', '.join(field.name for field in dataclasses.fields(hint))}"
    return _of_container(origin or hint, parts)


def _of_container(kind: Any, parts: tuple[Any, ...]) -> str:
    if kind is tuple and parts and parts[-1] is not ...:
        return f"a list [...] of {len(parts)} items: {', then '.join(allowed(part) for part in parts)}"
    if kind in (list, tuple, set, frozenset):
        return f"a list [...]{f', each {allowed(parts[0])}' if parts else ''}"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return (
            f"a mapping {{name: value}}{f', each value {allowed(parts[1])}' if parts and parts[1] is not Any else ''}"
        )
    return getattr(kind, "__name__", str(kind))
