"""The rows of a run, kept beside its checkpoints: what a resumed run knows of its past."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from raytrain.manifest import decode, encode
from raytrain.report import Row
from raytrain.storage import Storage

_FOLDER = "history"


def append(folder: Storage, step: int, rows: Sequence[Row]) -> None:
    """Keep rows that were made up to a step, as one JSON line each; every digit survives."""
    if rows:
        name = f"{step:010d}-{time.time_ns()}.jsonl"  # sorted by step, then by age
        folder.child(_FOLDER).write(name, "".join(_line(row) for row in rows).encode())


def read(folder: Storage, upto_step: int | None = None) -> list[Row]:
    """All rows up to a step, by rising step, one value for each (metric, step): the first that was written."""
    storage = folder.child(_FOLDER)
    rows: list[Row] = []
    for name in storage.names():
        if name.endswith(".jsonl"):
            rows += _rows(storage.read(name))
    return merged(row for row in rows if upto_step is None or row.step <= upto_step)


def merged(rows: Iterable[Row]) -> list[Row]:
    """One row per step, by rising step; of two values for one metric and step the first stays."""
    by_step: dict[int, Row] = {}
    for row in rows:
        before = by_step.get(row.step)
        values = {**row.values, **before.values} if before else dict(row.values)
        by_step[row.step] = Row(row.step, before.epoch if before else row.epoch, values)
    return [by_step[step] for step in sorted(by_step)]


def _line(row: Row) -> str:
    values = {name: encode(float(value)) for name, value in row.values.items()}
    return json.dumps({"step": row.step, "epoch": row.epoch, "values": values}, allow_nan=False) + "\n"


def _rows(data: bytes) -> list[Row]:
    rows = []
    for line in data.decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
            values = {name: decode(value) for name, value in entry["values"].items()}
            rows.append(Row(int(entry["step"]), float(entry["epoch"]), values))
        except (ValueError, KeyError, TypeError):
            continue  # a line that was cut: its rows come again with the steps that are replayed
    return rows
