"""Where a run comes from: code, user, command, versions. No secret among them."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_GIT_LIMIT_S = 2.0

# A name that ends so is taken for a secret, unless it is a token of text models, such as pad_token.
_OF_TEXT = ("pad", "eos", "bos", "unk", "mask", "sep", "cls", "start", "end", "stop", "image", "special", "per")
_TOKEN = "".join(f"(?<!{word}[_-])" for word in _OF_TEXT) + "token"
_KEY = rf"(?:password|passwd|secret|credentials?|(?:api|access|secret|private|account)[_-]?key|{_TOKEN})(?![\w-])"
_NAME = rf"[\w.\-]{{0,200}}{_KEY}"  # bounded: texts may be long, and time must not grow with their square
_VALUE = r"(?:\"[^\"]*\"|'[^']*'|[^\s&,;'\"]+)"
_SECRETS = [
    (re.compile(r"(://)[^/\s'\"]+@"), r"\1***@"),  # user:password@ of a URL
    (re.compile(rf"(?i)({_KEY}=){_VALUE}"), r"\1***"),  # --token=x, ?token=x
    (re.compile(rf"(?i)((?<![\w-])--?{_NAME}\s+)(?!-){_VALUE}"), r"\1***"),  # --token x
    (re.compile(rf"(?im)^([ \t]{{0,40}}{_NAME}:[ \t]+)\S.*$"), r"\1***"),  # a line of YAML
    (re.compile(rf"(?i)({_KEY}[\"']:\s*){_VALUE}"), r"\1***"),  # an item of a dict
    (re.compile(r"(?i)(\bbearer\s+)[\w.~+/=\-]{8,}"), r"\1***"),
]


def facts(job_source: str | None) -> dict[str, str]:
    """Tags of a run, under MLflow's own names where it has them."""
    folder = Path(job_source).parent if job_source else Path.cwd()
    tags = {
        "mlflow.user": _user(),
        "mlflow.source.name": job_source or sys.argv[0],
        "mlflow.source.type": "LOCAL",
        "raytrain.command": command(sys.argv),
        **{f"raytrain.version.{name}": _version(name) for name in ("raytrain", "torch", "ray", "mlflow")},
        **git(folder),
    }
    if job_id := os.environ.get("RAY_JOB_SUBMISSION_ID"):
        tags |= {"raytrain.job.submission_id": job_id, "mlflow.source.type": "JOB"}
    return {name: value for name, value in tags.items() if value}


def job_source() -> Path | None:
    """The file of the job that runs, if it is one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    path = Path(file) if file else None
    return path if path and path.suffix == ".py" and path.is_file() else None


def git(folder: Path) -> dict[str, str]:
    """Commit, branch and whether files differ from it, as far as git tells in time; nothing without git or a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    branch = _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD")  # none when a commit is checked out
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        "mlflow.source.git.commit": commit,
        **({"mlflow.source.git.branch": branch} if branch else {}),
        **({"raytrain.git.dirty": str(changes != "").lower()} if changes is not None else {}),
    }


def is_secret(name: str) -> bool:
    """Whether a flag or param of this name holds a secret."""
    return re.fullmatch(_NAME, name[-200:], re.IGNORECASE) is not None


def without_secrets(text: str) -> str:
    """A text without the values of what looks secret and without user information in URLs."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def command(arguments: Sequence[str]) -> str:
    """A command line without secrets, also where they hold spaces."""
    words: list[str] = []
    secret_is_next = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        secret = name.startswith("-") and is_secret(name)
        if secret_is_next and not word.startswith("--"):
            words.append("***")
        else:
            words.append(f"{name}=***" if secret and equals else without_secrets(shlex.quote(word)))
        secret_is_next = secret and not equals
    return " ".join(words)


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None when it fails or takes too long."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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
