"""Write docs/api.md from the docstrings: python docs/make_api.py"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

from raytrain.fieldhelp import field_help

PAGES = {
    "raytrain": ["Task", "fit", "main", "load", "Result", "Session"],
    "raytrain.config": ["TrainConfig", "ScalingConfig", "RunConfig", "TrackingConfig"],
    "raytrain.data": [
        "Batch",
        "TrainLoader",
        "EvalLoader",
        "train_loader",
        "eval_loader",
        "iterable",
        "own_shards",
        "sample_generator",
        "Order",
    ],
    "raytrain.metrics": ["SumMetric", "GatherMetric"],
    "raytrain.checkpoint": ["SavedCheckpoint", "CheckpointStore", "open_checkpoint"],
    "raytrain.tracking": ["Tracker", "RunInfo", "Collector", "MlflowTracker", "MlflowTracking"],
    "raytrain.report": ["Row", "Event", "Report"],
    "raytrain.errors": [
        "RaytrainError",
        "ConfigError",
        "DataError",
        "CheckpointError",
        "StorageError",
        "NonFiniteError",
        "WorkerError",
        "TrackingError",
    ],
}


def page() -> str:
    """The whole reference as Markdown."""
    parts = ["# API", "", "Made from the docstrings by `python docs/make_api.py`.", ""]
    for module, names in PAGES.items():
        parts += [f"## {module}", ""]
        for name in names:
            parts += entry(name, getattr(importlib.import_module(module), name))
    return "\n".join(parts).rstrip() + "\n"


def entry(name: str, thing: Any) -> list[str]:
    """One class with its public methods, or one function."""
    if not inspect.isclass(thing):
        return [f"### {name}{signature(thing)}", "", *text(thing)]
    head = f"### class {name}"
    if dataclasses.is_dataclass(thing) and (helps := field_help(thing)):
        rows = [
            f"| `{f.name}` | {default(f)} | {' '.join(helps.get(f.name, '').split())} |"
            for f in dataclasses.fields(thing)
        ]
        return [head, "", *text(thing), "| field | default | |", "|---|---|---|", *rows, ""]
    parts = [head, "", *text(thing)]
    for key, member in vars(thing).items():
        if key.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        title = f"{name}.{key}" + ("" if isinstance(member, property) else signature(member))
        parts += [f"#### {title}", "", *text(member)]
    return parts


def signature(function: Any) -> str:
    """Its parameters, without self and without annotations of where it lives."""
    found = inspect.signature(function)
    kept = [p for p in found.parameters.values() if p.name != "self"]
    return str(found.replace(parameters=kept)).replace("'", "")


def default(field: Any) -> str:
    """The default of a field."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "`{}`" if field.default_factory is not dataclasses.MISSING else "required"


def text(thing: Any) -> list[str]:
    """The docstring, its sections as they stand."""
    doc = inspect.getdoc(thing.fget if isinstance(thing, property) else thing) or ""
    return ["```text", *doc.splitlines(), "```", ""] if "\n" in doc else [doc, ""]


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(page())
