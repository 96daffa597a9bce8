"""What an outage of the MLflow server costs a training: extra wall time, the longest step, points that are missing.

python benchmarks/tracking_outage.py                   an outage of 60 s; about four minutes in all
python benchmarks/tracking_outage.py --outage 600      the same with ten minutes

Two runs one after the other on a real `mlflow server` (sqlite): undisturbed, and with a proxy before the server that stops to
answer after ten seconds (or refuses connections, --mode refuse). Steps sleep, so that the figures are of the tracking and not of
the model.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Timer
from typing import Any, ClassVar

import torch
from torch.utils.data import TensorDataset

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.e2e.mlflow_server import Server
from tests.e2e.proxy import Proxy

STEP_S, LEAD_S, TAIL_S = 0.02, 10.0, 30.0


@dataclass(frozen=True)
class Sleepy(raytrain.Task):
    """Steps of a fixed length."""

    times: ClassVar[list[float]] = []

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(4, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def train_data(self) -> TensorDataset:
        return TensorDataset(torch.ones(4000, 4), torch.ones(4000, 1))

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        time.sleep(STEP_S)
        return (model(batch[0]) - batch[1]).pow(2).mean()


def train(folder: Path, name: str, uri: str, steps: int) -> dict[str, float]:
    """Train once; seconds in all, from the first step to the last, and of the longest step; points made and in MLflow."""
    Sleepy.times.clear()
    began = time.perf_counter()
    result = raytrain.fit(
        Sleepy(),
        train=TrainConfig(batch_size=8, steps=steps, log_every="2st", checkpoint_every="1000st"),
        scaling=ScalingConfig(num_workers=0),
        run=RunConfig(name=name, storage=str(folder)),
        tracking=TrackingConfig(uri=uri, progress=False),
    )
    ended, times = time.perf_counter(), Sleepy.times
    made = {(key, row.step): value for row in result.history for key, value in row.values.items()}
    return {
        "all_s": ended - began,
        "start_s": times[0] - began,
        "steps_s": times[-1] - times[0],
        "end_s": ended - times[-1],
        "longest_step_ms": 1000 * max(b - a for a, b in pairwise(times)),
        "points": len(made),
        "missing": len(made) - present(uri, str(result.mlflow_run_id), made),
    }


def present(uri: str, run_id: str, made: dict[tuple[str, int], float]) -> int:
    """Points that are in MLflow with the value that they have, once."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(uri), Counter[tuple[str, int, float]]()
    for key in {key for key, _ in made}:
        found.update((key, point.step, point.value) for point in client.get_metric_history(run_id, key))
    return sum(found[key, step, value] == 1 for (key, step), value in made.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--outage", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--mode", choices=["swallow", "refuse"], default="swallow")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    import mlflow.tracking  # noqa: F401  (seconds, which would be counted to the first run)

    torch.set_num_threads(1)
    steps = round((LEAD_S + args.outage + TAIL_S) / STEP_S)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{steps} steps of {1000 * STEP_S:.0f} ms, a row each second step, outage of {args.outage:.0f} s ({args.mode})",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder)
        server.start()
        proxy = Proxy(server.port)
        try:
            calm = train(folder, "undisturbed", proxy.url, steps)
            Timer(LEAD_S, proxy.set, [args.mode]).start()
            Timer(LEAD_S + args.outage, proxy.set, ["pass"]).start()
            outage = train(folder, "outage", proxy.url, steps)
        finally:
            server.kill()
            proxy.close()
    print("| | undisturbed | outage | difference |\n|---|---|---|---|")
    for key in calm:
        print(f"| {key} | {calm[key]:.1f} | {outage[key]:.1f} | {outage[key] - calm[key]:+.1f} |")


if __name__ == "__main__":
    main()
