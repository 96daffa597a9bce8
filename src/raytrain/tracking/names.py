"""Names and values as MLflow takes them; pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

MAX_NAME = 250
MAX_PARAM = 6000
_ILLEGAL = re.compile(r"[^\w\-. /:]")


def clean(name: str) -> str:
    """A name with only the characters that MLflow allows, not empty, not a relative path, at most 250 long."""
    cleaned = _ILLEGAL.sub("_", name).strip("/ ") or "_"
    cleaned = "/".join("_" if part in ("", ".", "..") else part for part in cleaned.split("/"))
    if len(cleaned) > MAX_NAME:
        cleaned = f"{cleaned[: MAX_NAME - 9]}_{_short(name)}"
    return cleaned


def clean_all(names: Iterable[str]) -> dict[str, str]:
    """Clean names for each name; two that would become one keep apart by a short hash."""
    result: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in sorted(names, key=lambda n: (clean(n) != n, n)):  # a name that is legal already stays as it is
        cleaned = clean(name)
        if taken.setdefault(cleaned, name) != name:
            cleaned = f"{cleaned[: MAX_NAME - 9]}_{_short(name)}"
            taken[cleaned] = name
        result[name] = cleaned
    return result


def param_values(params: Mapping[str, Any]) -> dict[str, str]:
    """Params under clean names, as text that fits; what is cut ends in '...', the whole is in the config artifact."""
    names = clean_all(params)
    return {names[name]: _fit(str(value)) for name, value in params.items()}


def _fit(text: str) -> str:
    return text if len(text) <= MAX_PARAM else f"{text[: MAX_PARAM - 3]}..."


def _short(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:8]
