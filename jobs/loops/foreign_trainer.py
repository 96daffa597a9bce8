"""Plain Ray Train, as in its documentation, and three lines of raytrain: the run in MLflow.

    python jobs/loops/foreign_trainer.py --name mine --epochs 4

The loop knows nothing of raytrain. It reports each worker's own loss and count, and saves a checkpoint per epoch; the same
command again goes on with the training, and with the same MLflow run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from common import network, points
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn import functional as F
from torch.utils.data import DataLoader

from raytrain.tracking import MlflowTracking


def train_loop(config: dict[str, Any]) -> None:
    model = prepare_model(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    loader = prepare_data_loader(DataLoader(points(), batch_size=64, shuffle=True))
    first = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(os.path.join(folder, "state.pt"), weights_only=True)
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        total, num_samples = 0.0, 0
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
            num_samples += len(x)
        metrics = {"loss": total / num_samples, "num_samples": num_samples, "epoch": epoch}
        with tempfile.TemporaryDirectory() as folder:
            saved = None
            if ray.train.get_context().get_world_rank() == 0:
                weights = getattr(model, "module", model).state_dict()
                state = {"model": weights, "optimizer": optimizer.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(folder, "state.pt"))
                saved = Checkpoint.from_directory(folder)
            ray.train.report(metrics, checkpoint=saved)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="foreign")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--storage", type=Path, default=Path("runs"))
    args = parser.parse_args()

    storage = str(args.storage.absolute())
    with MlflowTracking(experiment="points", name=args.name, storage=storage, per_rank=["loss"]) as tracking:
        TorchTrainer(
            train_loop,
            train_loop_config={"lr": 0.001, "epochs": args.epochs},
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(
                name=args.name,
                storage_path=storage,
                failure_config=FailureConfig(max_failures=1),
                callbacks=[tracking.callback],
            ),
        ).fit()


if __name__ == "__main__":
    main()
