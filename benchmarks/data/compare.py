"""Rows per second of shuffled epochs, one process: raytrain against peers, on three shapes.

    python benchmarks/data/compare.py [--quick] [--images 20000] [--shapes narrow,images,tokens] [--out benchmarks/data.md]

Peers: pip install -c constraints.txt datasets litdata webdataset (Ray comes with raytrain). One that is not installed is left out,
and said so. Each contestant is measured in alternation with the per-item DataLoader (A B A B), at most five seconds a time, after a
warm-up; it has to give the rows that all others give.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from contestants import ALL, Contestant, PerItem
from shapes import Shape, shapes

ROUNDS = 3
VERSIONS = ("raytrain", "torch", "pyarrow", "ray", "datasets", "litdata", "webdataset")


def rate(contestant: Contestant, epoch: int, limit_s: float) -> float:
    """Rows per second within an epoch, or within the time limit; the first batch is not timed."""
    batches = contestant.epoch(epoch)
    next(batches)
    rows, began = 0, time.perf_counter()
    for batch in batches:
        rows += len(batch["id"])
        if time.perf_counter() - began > limit_s:
            break
    return rows / (time.perf_counter() - began)


def check(contestant: Contestant, limit_s: float) -> None:
    """That the rows are the right ones, each once, as far as the time goes."""
    seen: set[int] = set()
    count, began, whole = 0, time.perf_counter(), True
    for batch in contestant.epoch(0):
        ids = batch["id"].tolist()
        count += len(ids)
        seen.update(ids)
        if count == len(ids):  # the first batch: its content as well
            for place in range(4):
                expected = contestant.shape.make(*chunk_of(contestant.shape, ids[place]))["x"]
                row = torch.as_tensor(expected[ids[place] % 2000])
                got = batch["x"][place][: len(row)]
                assert torch.equal(got.to(row.dtype).reshape(row.shape), row), f"{contestant.name}: other rows"
        if time.perf_counter() - began > limit_s:
            whole = False
            break
    assert len(seen) == count, f"{contestant.name}: {count - len(seen)} rows came twice"
    assert not whole or count == contestant.shape.num_rows, f"{contestant.name}: {count} rows"


def chunk_of(shape: Shape, row: int) -> tuple[int, int]:
    """The rows that are made together with this one."""
    start = row // 2000 * 2000
    return start, min(start + 2000, shape.num_rows)


def measure(shape: Shape, folder: Path, limit_s: float) -> tuple[list[list[str]], list[str]]:
    """Lines of the table, and notes."""
    base = PerItem(folder, shape)
    lines, notes, bound = [], [], 0.0
    for kind in ALL:
        try:
            contestant = kind(folder, shape)
            check(contestant, limit_s)
        except (ImportError, NotImplementedError) as error:
            notes.append(f"{kind.name}: left out, {error}")
            continue
        ours, bases = [], []
        for number in range(ROUNDS):
            ours.append(rate(contestant, number + 1, limit_s))
            bases.append(rate(base, number + 1, limit_s))
        bound = bound or statistics.median(ours)
        ratio = statistics.median(a / b for a, b in zip(ours, bases, strict=True))
        middle = statistics.median(ours)
        spread = f"{min(ours):,.0f} to {max(ours):,.0f}"
        lines.append([kind.name, f"{middle:,.0f}", spread, f"{ratio:.2f}", f"{middle / bound:.2f}"])
        print("  ", *lines[-1], sep=" | ", flush=True)
        del contestant
        shutil.rmtree(folder / kind.__name__, ignore_errors=True)
    return lines, notes


def versions() -> str:
    """Of all that is installed."""
    found = []
    for name in VERSIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows per second: raytrain against peers.")
    parser.add_argument("--quick", action="store_true", help="few rows, half a second a time: does it run?")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--shapes", default="narrow,images,tokens")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    page = [f"{datetime.date.today()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions()}."]
    for shape in shapes(400 if options.quick else options.images):
        if shape.name not in options.shapes.split(","):
            continue
        if options.quick and shape.name != "images":
            shape = Shape(shape.name, 6000, shape.batch_size, shape.make)
        page.append(f"\n**{shape.name}**, {shape.num_rows:,} rows, batches of {shape.batch_size}\n")
        print(page[-1], flush=True)
        page.append(
            "| | rows/s, median | least to most | against per-item DataLoader | against the bound |\n|---|---|---|---|---|"
        )
        with tempfile.TemporaryDirectory() as folder:
            lines, notes = measure(shape, Path(folder), 0.5 if options.quick else 5.0)
        page += [f"| {' | '.join(line)} |" for line in lines] + [f"\n{note}" for note in notes]
    text = "\n".join(page) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
