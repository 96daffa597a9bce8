"""Whether the driver of a run still lives: by its process on this machine, by its heartbeat elsewhere."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEARTBEAT_S = 60.0
SILENT_S = (
    15 * 60.0
)  # a driver elsewhere that was not heard of for so long is taken for dead; clocks may differ by minutes


def this_process() -> dict[str, Any]:
    """What tells this process from all others: kept in the record of its run."""
    return {"host": socket.gethostname(), "place": _place(), "pid": os.getpid(), "started": _started(os.getpid())}


def lives(driver: Mapping[str, Any], heard_s: float) -> bool:
    """Whether a driver lives, as far as can be told from here.

    Args:
        driver: What it told of itself by ``this_process``.
        heard_s: Unix time of its last heartbeat.
    """
    if driver.get("place") == _place():
        # A process id is given again some day; with the time of its start it is not.
        return bool(driver["started"]) and _started(int(driver["pid"])) == driver["started"]
    return time.time() - heard_s < SILENT_S


def _place() -> str:
    """Where process ids mean the same as here: this boot of this machine, and this container in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(pid: int) -> str:
    """When a process began, in whatever unit the system has; empty when there is none, or only its remains."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self").exists():
        return ""
    try:
        command = ["ps", "-o", "lstart=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
