"""Checkpoints: whole and verified, or they do not exist."""

from __future__ import annotations

import math
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.best import BestTracker, mode_of
from raytrain.checkpoint import CheckpointStore, open_checkpoint
from raytrain.errors import CheckpointError, ConfigError, StorageError
from raytrain.identity import RunRecord
from raytrain.snapshot import Snapshotter
from raytrain.storage import Storage
from raytrain.writer import BackgroundWriter


def store_in(folder: Path, keep: int = 2) -> CheckpointStore:
    return CheckpointStore(Storage(str(folder)), keep=keep)


def write(store: CheckpointStore, step: int, **metrics: float) -> Any:
    parts = {"model": {"w": torch.full((50,), float(step))}, "trainer": {"step": step, "list": [1, 2.5, "x", None]}}
    return store.write(step, parts, epoch=0, index=step, world_size=2, attempt=1, metrics=metrics)


def test_what_is_written_is_loaded_with_weights_only(tmp_path: Path) -> None:
    saved = write(store_in(tmp_path), 10, loss=0.5, worst=math.nan, most=math.inf)
    again = pickle.loads(pickle.dumps(store_in(tmp_path).all()[0]))
    assert torch.equal(again.load_state("model")["w"], torch.full((50,), 10.0))
    assert again.load_state("trainer") == {"step": 10, "list": [1, 2.5, "x", None]}
    plain = torch.load(Path(saved.uri, "model.pt"), weights_only=True, map_location="cpu")
    assert torch.equal(plain["w"], torch.full((50,), 10.0))
    assert (again.step, again.metrics["loss"], again.metrics["most"]) == (10, 0.5, math.inf)
    assert math.isnan(again.metrics["worst"])


def test_an_unknown_part_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no part 'ema'.*model, trainer"):
        write(store_in(tmp_path), 1).load_state("ema")


@pytest.mark.parametrize("part", ["model.pt", "trainer.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path: Path, part: str, damage: str) -> None:  # case C8
    store = store_in(tmp_path)
    write(store, 1)
    file = Path(write(store, 2).uri, part)
    data = file.read_bytes()
    places = range(1, len(data), max(1, len(data) // 16)) if damage in ("cut", "flip") else [0]
    for place in places:
        if damage == "gone":
            file.unlink()
        elif damage == "flip" and part != "manifest.json":
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        else:
            file.write_bytes(data[: place if damage != "empty" else 0])
        chosen, skipped = store.choose()
        assert chosen is not None
        assert chosen.step == 1, f"{part} {damage} at {place}"
        assert "step-0000000002" in skipped[0]
        assert part in skipped[0] or "manifest" in skipped[0]
        if damage != "gone" and part != "manifest.json":
            with pytest.raises(CheckpointError, match=part):
                store.all()[-1].load_state(part.removesuffix(".pt"))


def test_without_any_sound_one_there_is_none(tmp_path: Path) -> None:
    store = store_in(tmp_path / "checkpoints")
    assert store.choose() == (None, [])
    Path(write(store, 1).uri, "model.pt").unlink()
    chosen, skipped = store.choose()
    assert chosen is None
    assert len(skipped) == 1
    with pytest.raises(CheckpointError, match=r"no sound checkpoint.*model\.pt"):
        open_checkpoint(str(tmp_path))


def test_an_unfinished_one_is_written_anew(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write(store, 3)
    (tmp_path / "step-0000000003" / "manifest.json").unlink()
    (tmp_path / "step-0000000003" / "stray.tmp").write_text("x")
    assert store.all() == []
    write(store, 3)
    assert store.choose()[0] is not None
    assert sorted(p.name for p in (tmp_path / "step-0000000003").iterdir()) == [
        "manifest.json",
        "model.pt",
        "trainer.pt",
    ]


def test_newest_and_best_are_kept_and_nothing_else(tmp_path: Path) -> None:  # case C11
    store = store_in(tmp_path, keep=1)
    tracker = BestTracker("val/loss", "min")
    for step, value in enumerate((0.5, math.nan, 0.4, 0.9), start=1):
        tracker.update(step, {"val/loss": value})
        write(store, step)
        store.prune(tracker.step)
    assert [c.step for c in store.all()] == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-0000000003", "step-0000000004"]


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    manifest = Path(write(store, 1).uri, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 99'))
    assert "newer than this raytrain" in store.choose()[1][0]


def test_a_run_is_read_from_a_copy_and_from_its_folder(tmp_path: Path) -> None:  # case H4
    run = tmp_path / "run"
    store = store_in(run / "checkpoints", keep=5)
    for step in (1, 2, 3):
        write(store, step)
    record = RunRecord.new(name="run", task="T", facts={}).at(3, 2).ended("FINISHED")
    record.save(Storage(str(run)))
    shutil.copytree(run, tmp_path / "copy")
    assert open_checkpoint(str(tmp_path / "copy")).step == 2
    assert open_checkpoint(str(tmp_path / "copy" / "checkpoints" / "step-0000000003")).step == 3


# -- the best value ------------------------------------------------------------------------------------------------------


def test_nan_is_never_best_and_of_equals_the_earlier_stays() -> None:
    tracker = BestTracker("m", "min")
    assert [tracker.update(s, {"m": v}) for s, v in enumerate((math.nan, 0.5, 0.5, math.nan, 0.4))] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert (tracker.value, tracker.step, tracker.since) == (0.4, 4, 0)


def test_a_resumed_run_knows_the_old_best() -> None:
    before, after = BestTracker("m", "max"), BestTracker("m", "max")
    before.update(1, {"m": 3.0})
    before.update(2, {"m": 2.0})
    after.load_state_dict(before.state_dict())
    assert (after.since, after.update(3, {"m": 2.5}), after.since, after.step) == (1, False, 2, 1)


def test_an_unknown_metric_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'val/acc' is not among the metrics\. Allowed: val/loss"):
        BestTracker("val/acc", "max").update(1, {"val/loss": 1.0})


@pytest.mark.parametrize(
    ("name", "mode"), [("val/accuracy", "max"), ("val/loss", "min"), ("a/f1", "max"), ("val/perplexity", "min")]
)
def test_more_or_less_by_name(name: str, mode: str) -> None:
    assert mode_of(name) == mode


# -- snapshot and background ----------------------------------------------------------------------------------------------


def test_a_snapshot_does_not_change_with_the_model_and_reuses_its_buffers() -> None:
    weight, snapshotter = torch.ones(3), Snapshotter()
    state = {"a": [weight, {"b": (weight, 5)}], "c": "text"}
    first = snapshotter.take(state)
    weight += 1
    assert first["a"][0].tolist() == [1, 1, 1]
    assert first["c"] == "text"
    place = first["a"][0].data_ptr()
    second = snapshotter.take(state)
    assert (second["a"][0].data_ptr(), second["a"][0].tolist()) == (place, [2, 2, 2])
    assert snapshotter.take({"a": torch.ones(4, dtype=torch.int8)})["a"].dtype == torch.int8


def test_background_failures_are_told_once() -> None:
    writer = BackgroundWriter()

    def fail() -> None:
        raise StorageError("disk full")

    writer.submit(fail)
    writer.wait()
    assert "disk full" in str(writer.take_failure())
    assert writer.take_failure() is None
