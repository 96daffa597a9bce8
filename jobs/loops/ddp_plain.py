"""Several devices, plain torch: DDP with a sampler, SyncBatchNorm, an averaged loss, a writer and a checkpoint on rank 0.

One node:    torchrun --nproc-per-node=2 jobs/loops/ddp_plain.py
Many nodes:  torchrun --nnodes=2 --node-rank=R --nproc-per-node=8 --master-addr=HOST --master-port=29500 jobs/loops/ddp_plain.py
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from common import network, points
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter


def average(value: torch.Tensor) -> float:
    """The mean of a value over all ranks."""
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def train(args: argparse.Namespace, gpu: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    model = network(args.batchnorm)
    if args.batchnorm and gpu:  # SyncBatchNorm takes no CPU tensors
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    file, state = args.out / "state.pt", None
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
    model = DistributedDataParallel(model.to(device), device_ids=[device] if gpu else None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])

    data = points()
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, shuffle=args.shuffle)
    loader = DataLoader(data, batch_size=128 // world_size, sampler=sampler)
    writer = SummaryWriter(args.out / "tensorboard") if rank == 0 else None
    for epoch in range(state["epoch"] + 1 if state else 0, args.epochs):
        sampler.set_epoch(epoch)  # without it every epoch has the same order
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += average(loss)
        if writer is not None:
            writer.add_scalar("train/loss", total / len(loader), epoch + 1)
            print(f"epoch {epoch} loss {total / len(loader):.17g}", flush=True)
            args.out.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)
    if writer is not None:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/ddp-plain"))
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    train(args, gpu)  # a function of its own: DDP must be gone before the group that it holds is destroyed
    dist.barrier()  # and no rank leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
