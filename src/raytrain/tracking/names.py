"""Names and values as MLflow takes them; pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from raytrain.tracking.provenance import is_secret, without_secrets

MAX_NAME = 250
MAX_PARAM = 6000
MAX_TAG = 5000
INFINITE = "raytrain.inf."  # tags of metrics that were infinite
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


class Cleaner:
    """Metrics as MLflow takes them: each name keeps its clean one, and what is changed is told once.

    Args:
        tell: Gets a text, and what it is said once for.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        self._tell = tell
        self._names: dict[str, str] = {}

    def name(self, name: str) -> str:
        """The clean name of a metric."""
        if name not in self._names:
            self._names[name] = clean_apart(name, self._names.values())  # one that is in use keeps its name
            if self._names[name] != name:
                self._tell(
                    f"MLflow does not allow the metric name {name!r}; it is written as {self._names[name]!r}.", name
                )
        return self._names[name]

    def number(self, name: str, value: Any) -> float | None:
        """The value as a number; None for what is none."""
        as_number = number(value)
        if as_number is None:
            self._tell(f"the metric {name!r} is {value!r}, not a number; MLflow does not get it.", f"text {name}")
        elif math.isinf(as_number):
            # MLflow's database gives infinity back as 1.8e308, a number that never was: NaN shows that there was none.
            tag = f"{INFINITE}{self.name(name)}"
            self._tell(
                f"the metric {name!r} was infinite; MLflow shows it as NaN, and since when in the tag {tag}.", tag
            )
        return as_number


def fit(text: str, limit: int) -> str:
    """The text, cut to a limit; then it ends in '...'."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _with_hash(cleaned: str, name: str) -> str:
    return f"{cleaned[: MAX_NAME - 9]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
