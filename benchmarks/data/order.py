"""The order of up to 10^9 samples: time per batch and memory against the length, and how random it is.

python benchmarks/data/order.py
"""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np

from raytrain.data import Order

BATCH = 256
BATCHES = 4000


def time_per_batch_us(length: int) -> tuple[float, float]:
    """(mean, longest) time of one batch of an epoch's order, over 4,000 batches from its middle."""
    order = Order(length, seed=1, shuffle=True)
    start = length // 2 if length > 2 * BATCH * BATCHES else 0
    stop = min(length, start + BATCH * BATCHES)
    times = []
    for first in range(start, stop - BATCH + 1, BATCH):
        began = time.perf_counter()
        order.slice(0, first, first + BATCH)
        times.append(time.perf_counter() - began)
    return statistics.fmean(times) * 1e6, max(times) * 1e6


def peak_mb() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def randomness(length: int) -> dict[str, float]:
    """Figures of the first million positions of two epochs: 0 means no structure, 1 uniform."""
    order = Order(length, seed=1, shuffle=True)
    count = min(1_000_000, length)
    first, second = (order.slice(epoch, 0, count) for epoch in (0, 1))
    bins = np.bincount((first * 1000 // length).astype(np.int64), minlength=1000)
    expected = count / 1000
    return {
        "correlation of position and sample": float(np.corrcoef(np.arange(count), first)[0, 1]),
        "correlation of neighbours": float(np.corrcoef(first[:-1], first[1:])[0, 1]),
        "correlation of two epochs": float(np.corrcoef(first, second)[0, 1]),
        "chi-square of 1,000 bins, per degree of freedom": float(((bins - expected) ** 2 / expected).sum() / 999),
    }


def main() -> None:
    print("| samples | us per batch of 256, mean | longest | peak memory, MB |\n|---|---|---|---|")
    for exponent in (4, 5, 6, 7, 8, 9):
        mean, longest = time_per_batch_us(10**exponent)
        print(f"| 10^{exponent} | {mean:.1f} | {longest:.0f} | {peak_mb():.0f} |")
    print()
    for name, value in randomness(10**9).items():
        print(f"{name}, 10^9 samples: {value:.4f}")


if __name__ == "__main__":
    main()
