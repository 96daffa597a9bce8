"""Names and values as MLflow takes them; pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from raytrain.tracking.provenance import is_secret, without_secrets

MAX_NAME = 250
MAX_PARAM = 6000
MAX_TAG = 5000
_ILLEGAL = re.compile(r"[^\w\-. /:]")


def clean(name: str) -> str:
    """A name with only the characters that MLflow allows, not empty, not a relative path, at most 250 long."""
    cleaned = _ILLEGAL.sub("_", name).strip("/ ") or "_"
    cleaned = "/".join("_" if part in ("", ".", "..") else part for part in cleaned.split("/"))
    return _with_hash(cleaned, name) if len(cleaned) > MAX_NAME else cleaned


def clean_apart(name: str, taken: Collection[str]) -> str:
    """A clean name that is none of those that are taken already."""
    cleaned = clean(name)
    return _with_hash(cleaned, name) if cleaned in taken else cleaned


def clean_all(names: Iterable[str]) -> dict[str, str]:
    """Clean names for each name; two that would become one keep apart by a short hash."""
    result: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(set(names), key=lambda n: (clean(n) != n, n)):  # a name that is legal already stays as it is
        result[name] = clean_apart(name, taken)
        taken.add(result[name])
    return result


def param_values(params: Mapping[str, Any]) -> dict[str, str]:
    """Params under clean names, as text that fits and holds no secret; what is cut ends in '...'."""
    names = clean_all(params)
    return {
        names[name]: "***" if is_secret(name) and value else fit(without_secrets(str(value)), MAX_PARAM)
        for name, value in params.items()
    }


def tag_values(tags: Mapping[str, Any]) -> dict[str, str]:
    """Tags under clean names, as text that fits and holds no secret."""
    names = clean_all(tags)
    return {names[name]: fit(without_secrets(str(value)), MAX_TAG) for name, value in tags.items()}


def number(value: Any) -> float | None:
    """A number of any kind (numpy's, a tensor of one element) as a float; None for what is none."""
    try:
        return None if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def fit(text: str, limit: int) -> str:
    """The text, cut to a limit; then it ends in '...'."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _with_hash(cleaned: str, name: str) -> str:
    return f"{cleaned[: MAX_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
