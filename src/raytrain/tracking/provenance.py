"""Where a run comes from: code, user, command, versions. No secret among them."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SECRET_FLAG = re.compile(r"(?i)([\w.\-]*(?:password|passwd|secret|token|api[-_]?key|credential)[\w.\-]*)(=|\s+)(\S+)")
_USER_INFO = re.compile(r"(\w+://)[^/\s@]+@")


def facts(job_source: str | None) -> dict[str, str]:
    """Tags of a run, under MLflow's own names where it has them."""
    folder = Path(job_source).parent if job_source else Path.cwd()
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": job_source or sys.argv[0],
        "mlflow.source.type": "LOCAL",
        "raytrain.command": without_secrets(" ".join(sys.argv)),
        **{f"raytrain.version.{name}": _version(name) for name in ("raytrain", "torch", "ray", "mlflow")},
        **git(folder),
    }
    if job_id := os.environ.get("RAY_JOB_SUBMISSION_ID"):
        tags |= {"raytrain.job.submission_id": job_id, "mlflow.source.type": "JOB"}
    return {name: value for name, value in tags.items() if value}


def git(folder: Path) -> dict[str, str]:
    """Commit, branch and whether files differ from it; nothing outside of a repository or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    return {
        "mlflow.source.git.commit": commit,
        "mlflow.source.git.branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"),
        "raytrain.git.dirty": str(bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))).lower(),
    }


def without_secrets(text: str) -> str:
    """A command line without values of flags that look secret and without user information in URLs."""
    return _USER_INFO.sub(r"\1***@", _SECRET_FLAG.sub(r"\1\2***", text))


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
