"""How long the first batch of the second epoch takes with loader processes: raytrain against Ray's prepare_data_loader.

    python benchmarks/data/epochs.py

Both get the same DataLoader (2 processes, persistent, a dataset whose items take 1 ms). A pause at the end of the first epoch
stands for the evaluation that a real loop does there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from raytrain.data import train_loader

ROUNDS = 7
PAUSE_S = 0.3


class Slow(Dataset[torch.Tensor]):
    """256 items that take a millisecond each."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        return torch.full((16,), float(index))


def loader() -> DataLoader[Any]:
    """What the user wrote."""
    return DataLoader(Slow(), batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)


def second_epoch_s(first: Iterator[Any], second: Any) -> float:
    """Go through the first epoch, pause, and wait for the first batch of the next."""
    for _ in first:
        pass
    time.sleep(PAUSE_S)
    began = time.perf_counter()
    next(iter(second()))
    return time.perf_counter() - began


def ours() -> float:
    """raytrain: one stream over the ends of epochs, fetched ahead."""
    prepared = train_loader(loader(), seed=0)
    batches = prepared.batches(0, 0)
    first = (next(batches) for _ in range(prepared.steps_per_epoch))
    try:
        return second_epoch_s(first, lambda: batches)
    finally:
        prepared.close()


def rays() -> float:
    """Ray Train's helper, in its local mode: it makes the loader anew, without persistent processes."""
    from ray.train.torch import prepare_data_loader

    prepared = prepare_data_loader(loader())
    return second_epoch_s(iter(prepared), lambda: prepared)


def compare(_: Any = None) -> None:
    """Rounds in alternation; medians and spread."""
    times: dict[str, list[float]] = {"raytrain": [], "prepare_data_loader": []}
    for _ in range(ROUNDS):
        times["raytrain"].append(ours())
        times["prepare_data_loader"].append(rays())
    print("| loader | first batch of epoch 2, ms: median | least | most |\n|---|---|---|---|")
    for name, values in times.items():
        least, median, most = (1000 * f(values) for f in (min, statistics.median, max))
        print(f"| {name} | {median:.1f} | {least:.1f} | {most:.1f} |")


def main() -> None:
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(compare, scaling_config=ScalingConfig(num_workers=0)).fit()  # 0: in this process, without a cluster


if __name__ == "__main__":
    main()
