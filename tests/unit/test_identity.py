"""What a run is, and whether a new start may go on with it; its rows, kept to every digit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raytrain import history
from raytrain.errors import ConfigError, StorageError
from raytrain.identity import RunRecord, compare
from raytrain.report import Row
from raytrain.storage import Storage

FACTS = {"task.hidden": 128, "train.seed": 0, "train.epochs": 2, "scaling.num_workers": 2, "data.num_rows": 100}


def test_more_epochs_and_other_workers_are_harmless_and_told() -> None:  # case F4
    changes = compare(FACTS, {**FACTS, "train.epochs": 4, "scaling.num_workers": 8})
    assert not changes.harmful
    assert changes.text() == "scaling.num_workers: 2 -> 8, train.epochs: 2 -> 4"


@pytest.mark.parametrize("name", ["task.hidden", "train.seed", "data.num_rows", "train.batch_size"])
def test_what_changes_the_experiment_is_refused_with_the_difference(name: str) -> None:  # case C10
    changes = compare(FACTS, {**FACTS, name: 77})
    with pytest.raises(ConfigError, match=rf"run 'r' began with other settings: {name}: \S+ -> 77.*another run.name"):
        changes.refuse_harmful("r")


def test_numbers_compare_after_the_way_through_json() -> None:
    assert compare({"a": (1, 2), "task.x": 1.5}, {"a": [1, 2], "task.x": 1.5}) == compare({}, {})


def test_the_record_survives(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    assert RunRecord.load(folder) is None
    record = RunRecord.new(name="r", task="T", facts=FACTS).started(FACTS, {}).with_trackers({"mlflow_run_id": "abc"})
    record.save(folder)
    loaded = RunRecord.load(folder)
    assert loaded is not None
    assert (loaded.attempts, loaded.status, loaded.trackers, loaded.facts) == (
        1,
        "RUNNING",
        {"mlflow_run_id": "abc"},
        FACTS,
    )


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"name": "r"')
    with pytest.raises(StorageError, match=r"run\.json is damaged"):
        RunRecord.load(Storage(str(tmp_path)))


def test_rows_keep_every_digit_and_come_once(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    values = {"a": 0.1 + 0.2, "b": math.inf, "c": -math.inf, "d": 5e-324}
    history.append(folder, 2, [Row(1, 0.5, values), Row(2, 1.0, {"a": 1.0})])
    history.append(folder, 4, [Row(2, 1.0, {"a": 99.0, "e": 2.0}), Row(4, 2.0, {"a": math.nan})])
    rows = history.read(folder)
    assert [row.step for row in rows] == [1, 2, 4]
    assert dict(rows[0].values) == values
    assert dict(rows[1].values) == {"a": 1.0, "e": 2.0}
    assert math.isnan(rows[2].values["a"])
    assert [row.step for row in history.read(folder, upto_step=2)] == [1, 2]


def test_two_files_of_one_step_do_not_replace_each_other(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    history.append(folder, 2, [Row(2, 1.0, {"a": 1.0})])
    history.append(folder, 2, [Row(2, 1.0, {"b": 2.0})])
    assert dict(history.read(folder)[0].values) == {"a": 1.0, "b": 2.0}


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    folder = Storage(str(tmp_path))
    history.append(folder, 2, [Row(1, 0.5, {"a": 1.0}), Row(2, 1.0, {"a": 2.0})])
    (file,) = (tmp_path / "history").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert [row.step for row in history.read(folder)] == [1]
