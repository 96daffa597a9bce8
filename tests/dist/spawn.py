"""Start a few gloo processes on one function, collect what they return, and never leave one behind."""

from __future__ import annotations

import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _entry(rank: int, world_size: int, port: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo")
        outcome = ("ok", fn(*args))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    Path(folder, f"{rank}.tmp").write_bytes(pickle.dumps(outcome))
    Path(folder, f"{rank}.tmp").rename(Path(folder, f"{rank}.pkl"))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 100.0) -> list[Any]:
    """``fn(*args)`` on each rank of a fresh gloo group; the results by rank.

    ``fn`` must be a module-level function. With world size 1 it runs in one spawned process as well.

    Raises:
        AssertionError: A rank failed (its traceback is the text) or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_entry, args=(rank, world_size, port, folder, fn, args), daemon=False)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            while any(p.is_alive() for p in processes) and time.monotonic() < deadline:
                time.sleep(0.02)
            outcomes = [_outcome(folder, rank, p.exitcode) for rank, p in enumerate(processes)]
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
    errors = [f"rank {rank}: {text}" for rank, (kind, text) in enumerate(outcomes) if kind == "error"]
    assert not errors, "\n".join(errors)
    return [value for _, value in outcomes]


def _outcome(folder: str, rank: int, exitcode: int | None) -> tuple[str, Any]:
    file = Path(folder, f"{rank}.pkl")
    if file.exists():
        kind, value = pickle.loads(file.read_bytes())
        return kind, value
    return "error", "did not end in time" if exitcode is None else f"died with exit code {exitcode}"
