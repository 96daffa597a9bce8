"""One device, plain torch: train, save, and go on from the file.

python jobs/loops/single_plain.py --epochs 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import network, points
from torch.nn import functional as F
from torch.utils.data import DataLoader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--shuffle", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, default=Path("runs/single-plain"))
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loader = DataLoader(points(), batch_size=128, shuffle=args.shuffle)
    file, first = args.out / "state.pt", 0
    if file.exists():
        state = torch.load(file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1

    for epoch in range(first, args.epochs):
        total = 0.0
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(x)
        print(f"epoch {epoch} loss {total / len(loader.dataset):.17g}", flush=True)  # type: ignore[arg-type]
        args.out.mkdir(parents=True, exist_ok=True)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)


if __name__ == "__main__":
    main()
