"""Names and values as MLflow takes them; secrets left out; where a run comes from."""

from __future__ import annotations

import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain.tracking.names import clean, clean_all, clean_apart, number, param_values, tag_values
from raytrain.tracking.provenance import command, facts, git, is_secret, without_secrets


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("val/loss", "val/loss"),
        ("mAP@0.5", "mAP_0.5"),
        ("a(b)", "a_b_"),
        ("", "_"),
        ("../x", "_/x"),
        ("/a/", "a"),
        ("ü", "ü"),
    ],
)
def test_names_are_cleaned(name: str, cleaned: str) -> None:
    assert clean(name) == cleaned


def test_names_that_collide_stay_apart() -> None:
    names = clean_all(["a@b", "a_b", "a#b"])
    assert names["a_b"] == "a_b"
    assert len(set(names.values())) == 3
    assert len(clean("x" * 400)) == 250
    assert param_values({"x": "y" * 7000})["x"].endswith("...")


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("http://me:p@ss@host/x and s3://k:v@b", "http://***@host/x and s3://***@b"),
        ("s3://b/p?access_key=A&secret_key=B&region=eu", "s3://b/p?access_key=***&secret_key=***&region=eu"),
        ("api_key: abc\nlr: 1", "api_key: ***\nlr: 1"),
        ("{'auth_token': 'abc', 'lr': 1}", "{'auth_token': ***, 'lr': 1}"),
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer ***"),
        ("--tokenizer gpt2 --max_tokens 512 --pad_token=0", "--tokenizer gpt2 --max_tokens 512 --pad_token=0"),
        ("SyntaxError: unexpected token ) in line 3", "SyntaxError: unexpected token ) in line 3"),
        ("--use_token --lr 1", "--use_token --lr 1"),
        ("job --api-key=abc --lr 1", "job --api-key=*** --lr 1"),
        ("job --db_password s3cret", "job --db_password ***"),
        ("--uri http://me:pw@host/x", "--uri http://***@host/x"),
        ("--task.lr 0.1", "--task.lr 0.1"),
    ],
)
def test_secrets_are_left_out_of_commands(text: str, safe: str) -> None:
    assert without_secrets(text) == safe


def test_a_command_line_hides_secrets_with_spaces() -> None:
    words = ["job.py", "--db-password", "a b c", "--hf_token=x y", "--name", "my run", "--task.max_tokens", "9"]
    assert command(words) == "job.py --db-password *** --hf_token=*** --name 'my run' --task.max_tokens 9"


@pytest.mark.parametrize(
    ("name", "secret"),
    [("task.token", True), ("aws_secret_access_key", True), ("PASSWORD", True), ("eos_token", False), ("lr", False)],
)
def test_names_of_secrets(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


@pytest.mark.parametrize("piece", ["y", "-", "--a", " ", "\n", "token", "token=", "://", "a://b", "'", "bearer "])
def test_long_texts_take_no_time(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    began = time.monotonic()
    without_secrets(text)
    is_secret(text)
    assert time.monotonic() - began < 5  # where time grows with the square of the length: minutes


def test_a_name_in_use_is_not_given_twice() -> None:
    assert clean_apart("a_b", []) == "a_b"
    other = clean_apart("a_b", ["a_b"])
    assert other != "a_b"
    assert other == clean(other)


def test_tags_fit() -> None:
    assert tag_values({"a(": "x" * 9000}) == {"a_": "x" * 4997 + "..."}


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (True, 1.0), ("1", None), (None, None), (10**400, None), ([1], None), (-math.inf, -math.inf)],
)
def test_numbers(value: Any, expected: float | None) -> None:
    assert number(value) == expected


def test_numbers_of_numpy_and_torch() -> None:
    import numpy as np
    import torch

    assert number(np.float32(0.5)) == number(torch.tensor(0.5)) == number(torch.tensor([0.5])) == 0.5
    assert number(torch.ones(2)) is None


def run_git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=trunk"]
    subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True)


def test_git_tells_commit_branch_and_changes(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("1")
    run_git(tmp_path, "init")
    run_git(tmp_path, "add", "job.py")
    run_git(tmp_path, "commit", "-m", "x")
    clean_state = git(tmp_path)
    assert len(clean_state["mlflow.source.git.commit"]) == 40
    assert (clean_state["mlflow.source.git.branch"], clean_state["raytrain.git.dirty"]) == ("trunk", "false")
    (tmp_path / "job.py").write_text("2")
    run_git(tmp_path, "checkout", "--detach")
    dirty = git(tmp_path)
    assert dirty["raytrain.git.dirty"] == "true"
    assert "mlflow.source.git.branch" not in dirty


def test_no_repository_or_no_git_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git(tmp_path) == {}
    monkeypatch.setenv("PATH", os.devnull)
    assert git(Path(__file__).parent) == {}
    monkeypatch.setenv("RAY_JOB_SUBMISSION_ID", "raysubmit_1")
    tags = facts(None)
    assert (tags["raytrain.job.submission_id"], tags["mlflow.source.type"]) == ("raysubmit_1", "JOB")
