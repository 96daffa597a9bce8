"""The same loops on a Session: one file for one device, one node and many nodes.

python jobs/loops/on_session.py --scaling.num_workers 0
torchrun --nproc-per-node=2 jobs/loops/on_session.py
ray job submit --working-dir . -- python jobs/loops/on_session.py --scaling.num_workers 8 --scaling.use_gpu true
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from common import network, points
from torch.nn import functional as F

import raytrain


@dataclass(frozen=True)
class Settings:
    """Settings of this loop."""

    batchnorm: bool = False  # use the network with BatchNorm (over all workers with --train.sync_batchnorm true)


def loop(session: raytrain.Session, settings: Settings) -> None:
    """Train a small network."""
    model = session.prepare_model(network(settings.batchnorm))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loader = session.prepare_loader(points(), batch_size=128)
    session.register(model=model, optimizer=optimizer)
    for _ in session.epochs():
        for batch in session.batches(loader):
            x, y = batch.data
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            (loss * batch.scale).backward()
            optimizer.step()
            session.log({"train/loss": loss}, batch.num_rows)
        session.save()


if __name__ == "__main__":
    raytrain.main(loop, train=raytrain.TrainConfig(epochs=4))
