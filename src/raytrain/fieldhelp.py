"""Help texts of dataclass fields: the docstring under a field, or the comment behind it."""

from __future__ import annotations

import ast
import inspect
import textwrap


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
