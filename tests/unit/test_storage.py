"""Storage: whole files or none, on local folders and any pyarrow filesystem, with errors that name the place."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from raytrain.errors import StorageError
from raytrain.storage import Storage


@pytest.mark.parametrize("name", ["plain", "with space", "100%", "ümläut", "a#b?c", "deep/er"])
def test_odd_paths(tmp_path: Path, name: str) -> None:
    storage = Storage(f"{tmp_path}/{name}/")
    storage.write("f.bin", b"data")
    assert (tmp_path / name / "f.bin").read_bytes() == b"data"
    assert storage.uri == f"{tmp_path}/{name}"
    assert storage.names() == ["f.bin"]


def test_home_relative_and_file_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Storage("~/a").uri == Storage("a").uri == Storage(f"file://{tmp_path}/a").uri == str(tmp_path / "a")


def test_a_relative_folder_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = Storage("runs")
    monkeypatch.chdir("/")
    storage.write("f", b"1")
    assert (tmp_path / "runs" / "f").exists()


def test_read_list_delete_and_absence(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "none"))
    assert storage.names() == []
    assert not storage.exists("x")
    storage.delete("x")
    storage.child("b").write("x", b"1")
    storage.write("a", b"2")
    assert storage.names() == ["a", "b"]
    assert storage.read("a") == b"2"
    with storage.child("b").open_input("x") as file:
        assert file.read() == b"1"
    storage.delete("b")
    assert storage.names() == ["a"]
    with pytest.raises(StorageError, match=r"cannot read .*none/gone"):
        storage.read("gone")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    storage.write("f", b"old")
    with pytest.raises(ZeroDivisionError), storage.open_output("f") as file:
        file.write(b"half" * (1 // 0 if file.writable() else 1))
    assert storage.names() == ["f"]
    assert storage.read("f") == b"old"


def test_it_travels_to_workers(tmp_path: Path) -> None:
    again = pickle.loads(pickle.dumps(Storage(str(tmp_path))))
    again.write("f", b"1")
    assert (tmp_path / "f").exists()


def test_what_cannot_be_written_is_named_with_a_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match=r"cannot write .*file/runs.*Set|set run.storage"):
        Storage(str(tmp_path / "file" / "runs")).check_writable()


def test_writable_leaves_nothing_behind(tmp_path: Path) -> None:
    Storage(str(tmp_path)).check_writable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("uri", ["nosuch://bucket/x", "s3:/"])
def test_an_unknown_uri(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "://" in uri:
        with pytest.raises(StorageError, match="nosuch"):
            Storage(uri)
    else:
        assert Storage(uri).is_local


def test_secrets_in_a_uri_are_not_shown() -> None:
    storage = Storage("s3://key:secret@bucket/runs?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1")
    assert "secret" not in storage.uri
    assert storage.uri.startswith("s3://bucket/runs")


class Flaky(fs.FileSystemHandler):
    """A local filesystem whose n-th opening of a file for writing fails."""

    def __init__(self, root: str, fail_on: Any) -> None:
        self.local = fs.SubTreeFileSystem(root, fs.LocalFileSystem())
        self.fail_on, self.opened = fail_on, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.local, name)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        self.opened += 1
        if self.fail_on(self.opened):
            raise OSError("come back later")
        return self.local.open_output_stream(path)


for _name in [
    "get_type_name",
    "normalize_path",
    "get_file_info",
    "get_file_info_selector",
    "create_dir",
    "delete_dir",
    "delete_dir_contents",
    "delete_root_dir_contents",
    "delete_file",
    "move",
    "copy_file",
    "open_input_stream",
    "open_input_file",
    "open_append_stream",
]:

    def _forward(self: Flaky, *args: Any, _name: str = _name) -> Any:
        if _name == "get_type_name":
            return "flaky"
        if _name == "get_file_info_selector":
            return self.local.get_file_info(*args)
        if _name in ("create_dir",):
            return self.local.create_dir(args[0], recursive=args[1])
        return getattr(self.local, _name)(*args)

    setattr(Flaky, _name, _forward)
Flaky.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def flaky(root: Path, fail_on: Any) -> Storage:
    storage = Storage("runs", fs.PyFileSystem(Flaky(str(root), fail_on)))
    storage._sleep = lambda seconds: None
    return storage


def test_one_failure_is_retried_on_any_filesystem(tmp_path: Path) -> None:
    storage = flaky(tmp_path, lambda n: n == 2)
    for name in "abc":
        storage.write(name, name.encode())
    assert storage.names() == ["a", "b", "c"]
    assert storage.read("b") == b"b"


def test_lasting_failures_end_with_the_place_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write runs/a: OSError: .*come back later"):
        flaky(tmp_path, lambda n: True).write("a", b"1")
