"""The runs of a storage as a table. Reads only."""

from __future__ import annotations

import datetime

from raytrain.checkpoint import CheckpointStore
from raytrain.errors import RaytrainError
from raytrain.identity import RunRecord
from raytrain.storage import Storage

_HEAD = ("NAME", "STATUS", "STEP", "BEST", "CHECKPOINTS", "UPDATED", "MLFLOW RUN")


def table(place: str) -> str:
    """One line per run: name, status, steps, best step, checkpoints on disk, time, MLflow run."""
    storage = Storage(place)
    rows = [row for name in storage.names() if (row := _row(storage.child(name), name)) is not None]
    if not rows:
        return f"no runs in {storage.uri}"
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [_HEAD, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def _row(folder: Storage, name: str) -> tuple[str, ...] | None:
    try:
        record = RunRecord.load(folder)
    except RaytrainError:
        return (name, "DAMAGED", *[""] * (len(_HEAD) - 2))
    if record is None:
        return None
    steps = [str(checkpoint.step) for checkpoint in CheckpointStore(folder.child("checkpoints")).all()]
    when = datetime.datetime.fromtimestamp(record.updated_s).strftime("%Y-%m-%d %H:%M")
    best = "" if record.best_step is None else str(record.best_step)
    run_id = record.trackers.get("mlflow_run_id", "")
    return (record.name, record.status, str(record.step), best, ",".join(steps), when, run_id)
