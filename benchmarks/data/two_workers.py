"""Two gloo workers end to end: an MLP on 200,000 narrow rows, by a tutorial's loop, Ray Train's, and raytrain.

    python benchmarks/data/two_workers.py

A B C A B C; samples per second of the training itself, after the process group is up. All see two epochs of the same rows in global
batches of 512, and their final losses are shown so that nobody wins by doing less.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import raytrain
from raytrain.data import parquet

ROWS, EPOCHS, BATCH, ROUNDS = 200_000, 2, 256, 3


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """64 numbers, and which of ten parts of them is largest."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((ROWS, 64), dtype=np.float32))
    return x, x[:, :60].reshape(ROWS, 10, 6).sum(2).argmax(1)


class Items(Dataset[Any]):
    """Rows one by one, as tutorials have them."""

    def __init__(self) -> None:
        self.x, self.y = rows()

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def network() -> nn.Module:
    """64 - 256 - 10."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def tell(name: str, elapsed_s: float, loss: float) -> None:
    """One line of JSON for the parent."""
    print("RESULT " + json.dumps({"name": name, "rate": ROWS * EPOCHS / elapsed_s, "loss": loss}), flush=True)


def tutorial() -> None:
    """torchrun's tutorial: DistributedSampler, DDP, the loss printed at the end of each epoch."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Items()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
    if rank == 0:
        tell("torchrun tutorial, per item", time.perf_counter() - began, total / len(loader))
    dist.barrier()
    dist.destroy_process_group()


def rays_loop(config: Any) -> None:
    """Ray Train's documented loop."""
    import ray.train
    from ray.train.torch import prepare_data_loader, prepare_model

    loader = prepare_data_loader(DataLoader(Items(), batch_size=BATCH, shuffle=True))
    model = prepare_model(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    began = time.perf_counter()
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        ray.train.report({"loss": total / len(loader)})
    if ray.train.get_context().get_world_rank() == 0:
        Path(config["out"]).write_text(json.dumps([time.perf_counter() - began, total / len(loader)]))


@dataclass(frozen=True)
class Narrow(raytrain.Task):
    """The same by raytrain."""

    path: str = ""

    def model(self) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def train_data(self) -> Any:
        return parquet(self.path).map(lambda batch: (batch["x"], batch["y"])) if self.path else Items()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        return F.cross_entropy(model(x), y)


def ours(path: str) -> None:
    """raytrain under torchrun: metrics of every step over both workers, in the console and in the run's history."""
    folder = tempfile.mkdtemp()
    result = raytrain.fit(
        Narrow(path),
        train=raytrain.TrainConfig(epochs=EPOCHS, batch_size=2 * BATCH, log_every="1st", checkpoint_every=None),
        run=raytrain.RunConfig(name="r", storage=folder),
        tracking=raytrain.TrackingConfig(mlflow=False, progress=False),
    )
    if os.environ["RANK"] == "0":
        steps = [row.values["time/step_s"] for row in result.history if "time/step_s" in row.values]
        tell(f"raytrain, {'parquet' if path else 'per item'}", sum(steps), result.metrics["train/loss_epoch"])


def under_torchrun(which: str) -> dict[str, Any]:
    """Run one of the above on two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__, which]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if "RESULT " in line]
    if not lines:
        raise RuntimeError(done.stdout + done.stderr)
    found: dict[str, Any] = json.loads(lines[0].partition("RESULT ")[2])
    return found


def on_ray(folder: str) -> dict[str, Any]:
    """Ray Train's loop on two workers."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    out = f"{folder}/ray.json"
    scaling = ScalingConfig(num_workers=2)
    TorchTrainer(
        rays_loop, train_loop_config={"out": out}, scaling_config=scaling, run_config=RunConfig(storage_path=folder)
    ).fit()
    elapsed_s, loss = json.loads(Path(out).read_text())
    return {"name": "Ray Train's documented loop, per item", "rate": ROWS * EPOCHS / elapsed_s, "loss": loss}


def main() -> None:
    if len(sys.argv) > 1:
        return tutorial() if sys.argv[1] == "tutorial" else ours(sys.argv[1].removeprefix("ours:"))
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RAYTRAIN_CACHE"] = f"{folder}/cache"
        x, y = rows()
        column = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1).numpy()), 64)
        pq.write_table(pa.table({"x": column, "y": y.numpy()}), f"{folder}/a.parquet", row_group_size=20_000)
        for _ in range(ROUNDS):
            one_round = [under_torchrun(which) for which in ("tutorial", "ours:", f"ours:{folder}/a.parquet")]
            for result in (*one_round, on_ray(folder)):
                found.setdefault(result["name"], []).append(result)
                print(result, flush=True)
    base = [result["rate"] for result in found["torchrun tutorial, per item"]]
    print(
        "\n| loop | samples/s, median | least to most | against the tutorial | loss of epoch 2 |\n|---|---|---|---|---|"
    )
    for name, results in found.items():
        rates = [result["rate"] for result in results]
        ratio = statistics.median(a / b for a, b in zip(rates, base, strict=True))
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"| {name} | {statistics.median(rates):,.0f} | {spread} | {ratio:.2f} | {results[-1]['loss']:.4f} |")
    return None


if __name__ == "__main__":
    main()
