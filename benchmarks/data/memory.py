"""Peak memory of a process that reads one shuffled epoch, against the size of the data.

    python benchmarks/data/memory.py [--sizes 0.25,1,4]

Anonymous memory is what the process itself holds; pages of mapped files are the page cache's, shared and given back at need.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROW_BYTES = 64 * 4
GROUP_ROWS = 65_536


def write(path: Path, gigabytes: float) -> None:
    """A file of rows of 64 float32, row group by row group."""
    rows = int(gigabytes * 1e9 / ROW_BYTES)
    schema = pa.schema([("x", pa.list_(pa.float32(), 64))])
    values = np.random.default_rng(0).random(GROUP_ROWS * 64, dtype=np.float32)
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        for start in range(0, rows, GROUP_ROWS):
            count = min(GROUP_ROWS, rows - start)
            column = pa.FixedSizeListArray.from_arrays(pa.array(values[: count * 64]), 64)
            writer.write_table(pa.table({"x": column}), row_group_size=GROUP_ROWS)


def anonymous_mb() -> float:
    """Memory of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def child(kind: str, path: Path, cache: Path) -> None:
    """Read an epoch and print the peak beyond what there was before the first batch, and the rows per second."""
    from raytrain.data import parquet, parquet_stream, train_loader

    source = parquet(path, cache=cache) if kind == "parquet" else parquet_stream(path)
    before, peak, done = anonymous_mb(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anonymous_mb())

    thread = threading.Thread(target=watch)
    thread.start()
    began = time.perf_counter()
    loader = train_loader(source, batch_size=4096)
    rows = sum(batch.num_rows for batch in loader.batches(0, 0, stop=loader.steps_per_epoch))
    elapsed_s = time.perf_counter() - began
    done.set()
    thread.join()
    loader.close()
    print(f"{peak[0] - before:.0f} {rows / elapsed_s:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory against the size of the data.")
    parser.add_argument("--sizes", default="0.25,1,4")
    parser.add_argument("--child", nargs=3)
    options = parser.parse_args()
    if options.child:
        kind, path, cache = options.child
        return child(kind, Path(path), Path(cache))
    print("| data, GB | source | peak anonymous memory, MB | rows/s |\n|---|---|---|---|")
    for size in map(float, options.sizes.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "a.parquet")
            write(path, size)
            for kind, name in (
                ("parquet", "parquet, table made"),
                ("parquet", "parquet, table there"),
                ("stream", "stream"),
            ):
                command = [sys.executable, __file__, "--child", kind, str(path), f"{folder}/cache"]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                peak, rate = done.stdout.split()[-2:]
                print(f"| {size:g} | {name} | {peak} | {int(rate):,} |", flush=True)
    return None


if __name__ == "__main__":
    main()
