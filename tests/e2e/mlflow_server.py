"""A real MLflow server on loopback, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.dist.spawn import free_port


class Server:
    """An MLflow server on a port of its own, with a sqlite store that outlives it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        options = {
            "--host": "127.0.0.1",
            "--port": str(self.port),
            "--workers": "1",
            "--backend-store-uri": f"sqlite:///{self._folder}/server.db",
            "--artifacts-destination": str(self._folder / "artifacts"),
        }
        words = [word for option in options.items() for word in option]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *words],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(self._answers, 60)

    def signal(self, number: int) -> None:
        """Send a signal to the server and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it at once, as a machine that is lost."""
        if self._process is not None:
            self.signal(signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def _answers(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200
        except OSError:
            return False


def until(true: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
