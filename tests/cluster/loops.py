"""Loops of plain Ray Train for the tests: nothing of raytrain in them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint


def scripted(config: dict[str, Any]) -> None:
    """Reports what the config says for this rank; saves every ``save_every`` reports, fails once before ``fail_before``."""
    rank = ray.train.get_context().get_world_rank()
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            first = int(Path(folder, "next").read_text())
    marker = Path(config.get("marker", ""))
    for i, metrics in enumerate(config["reports"][rank][first:], first):
        if i == config.get("fail_before") and rank == 1 and not marker.exists():
            marker.touch()
            raise ValueError("boom of the test")
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if rank == 0 and (i + 1) % config.get("save_every", 10**9) == 0:
                Path(folder, "next").write_text(str(i + 1))
                saved = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=saved)


def with_mlflow(config: dict[str, Any]) -> None:
    """Logs to MLflow by itself, as many do."""
    import mlflow

    ray.train.report({"loss": 1.0})
    mlflow.log_metric("loss", 1.0)
