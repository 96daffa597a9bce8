"""Parquet streams as batches of tensors, through the loaders that a run uses."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import raytrain
from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.data import (
    Batch,
    Categories,
    Padded,
    TableStream,
    eval_loader,
    parquet,
    parquet_stream,
    plan_eval,
    plan_train,
    train_loader,
)
from raytrain.errors import ConfigError, DataError


def write(path: Path, rows: int, start: int = 0, group: int = 7, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table({"id": pa.array(range(start, start + rows), pa.int64()), **more}), path, row_group_size=group
    )
    return path


def ids(batches: list[Batch]) -> list[int]:
    return [int(i) for batch in batches for i in batch.data["id"][: batch.num_rows]]


def test_an_epoch_has_each_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 50)
    write(tmp_path / "b.parquet", 0, 50)
    write(tmp_path / "c.parquet", 53, 50)
    stream = parquet_stream(tmp_path, num_lanes=3, block_rows=8)
    loader = train_loader(stream, batch_size=10, seed=1)
    assert loader.steps_per_epoch == 11
    epochs = [ids(list(loader.batches(epoch, 0, stop=11))) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(103))] * 2
    assert epochs[0] != epochs[1] != list(range(103))
    over_the_end = ids(list(loader.batches(0, 9, stop=4)))
    assert over_the_end == epochs[0][90:] + epochs[1][:20]
    assert ids(list(loader.batches(1, 3, stop=2))) == epochs[1][30:50]
    loader.close()


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_each_row_once_in_any_world_and_after_any_resume(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    rows, group = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    path = tmp_path_factory.getbasetemp() / f"stream-{rows}-{group}.parquet"
    if not path.exists():
        write(path, rows, group=group)
    stream = parquet_stream(path, num_lanes=data.draw(st.integers(1, 5)), block_rows=data.draw(st.integers(1, 20)))
    batch = data.draw(st.integers(1, 12))
    whole = train_loader(stream, batch_size=batch, seed=2)
    expected = [ids([b]) for b in whole.batches(1, 0, stop=whole.steps_per_epoch)]
    assert sorted(sum(expected, [])) == list(range(rows))
    world, accumulate = data.draw(st.integers(1, min(4, batch))), data.draw(st.integers(1, 3))
    start = data.draw(st.integers(0, whole.steps_per_epoch - 1))
    seen: dict[int, list[int]] = {}
    weights: dict[int, float] = {}
    for rank in range(world):
        loader = train_loader(stream, batch_size=batch, accumulate=accumulate, seed=2, rank=rank, world_size=world)
        for b in loader.batches(1, start, stop=whole.steps_per_epoch - start):
            seen.setdefault(b.index, []).extend(ids([b]))
            weights[b.index] = weights.get(b.index, 0.0) + b.scale / world
        loader.close()
    assert {k: sorted(v) for k, v in seen.items()} == {k: sorted(v) for k, v in enumerate(expected) if k >= start}
    assert all(abs(weight - 1) < 1e-12 for weight in weights.values())
    whole.close()


def test_columns_become_tensors_as_in_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "cache"))
    words = pa.array([[1] * (n % 4) for n in range(20)])
    path = write(
        tmp_path / "a.parquet", 20, group=6, t=words, c=[f"v{n % 3}" for n in range(20)], x=[n / 8 for n in range(20)]
    )
    encode = {"t": Padded(), "c": Categories(["v0", "v1", "v2"])}
    stream = parquet_stream(path, encode=encode, cast={"x": "float16"})
    table = parquet(path, encode=encode, cast={"x": "float16"})
    loader = train_loader(stream, batch_size=4, seed=0)
    for batch in loader.batches(0, 0, stop=5):
        expected = table.take(batch.data["id"].numpy())
        assert batch.data.keys() == expected.keys()
        assert all(torch.equal(batch.data[name], expected[name]) for name in expected)
    loader.close()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_sees_each_row_once_as_stored(tmp_path: Path, world: int) -> None:
    stream = parquet_stream(write(tmp_path / "a.parquet", 5))
    assert plan_eval(stream, batch_size=2).num_rows == 5
    for _ in range(2):
        loaders = [eval_loader(stream, batch_size=2, rank=rank, world_size=world) for rank in range(world)]
        batches = [batch for loader in loaders for batch in loader.batches()]
        assert ids(sorted(batches, key=lambda b: b.index)) == [0, 1, 2, 3, 4]


def add_noise(batch: dict[str, torch.Tensor]) -> tuple[list[int], torch.Tensor]:
    return batch["id"].tolist(), torch.rand(len(batch["id"]))


def test_functions_draw_the_same_numbers_after_a_resume_and_leave_the_models_stream_alone(tmp_path: Path) -> None:
    stream = parquet_stream(write(tmp_path / "a.parquet", 40)).map(add_noise)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = train_loader(stream, batch_size=8, seed=3)
    first = [batch.data for batch in loader.batches(0, 0, stop=5)]
    again = [batch.data for batch in loader.batches(0, 3, stop=2)]
    assert torch.equal(before, torch.get_rng_state())
    assert [a[0] for a in first[3:]] == [b[0] for b in again]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first[3:], again, strict=True))
    loader.close()


def test_an_error_in_the_function_names_the_place(tmp_path: Path) -> None:
    stream = parquet_stream(write(tmp_path / "a.parquet", 40)).map(lambda batch: batch["none"])
    loader = train_loader(stream, batch_size=8)
    with pytest.raises(DataError, match=r"epoch 0, batch 0: the function given to map\(\) failed: KeyError: 'none'"):
        next(loader.batches(0, 0))
    loader.close()


def test_what_cannot_be_streamed_is_told_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", 6, c=["x"] * 6, n=[1, None, 3, 4, 5, 6])
    with pytest.raises(DataError, match=r"'c'.*cannot look through all rows.*values="):
        parquet_stream(path, encode={"c": Categories()})
    with pytest.raises(DataError, match="block_rows = 0 is not possible"):
        parquet_stream(path, columns=["id"], block_rows=0)
    with pytest.raises(ConfigError, match="cannot be shared by 9 workers"):
        plan_train(parquet_stream(path, columns=["id"]), batch_size=8, world_size=9)
    with pytest.raises(DataError, match="has 0 steps"):
        plan_train(parquet_stream(path, columns=["id"]), batch_size=8, drop_last=True)
    with pytest.raises(DataError, match="is empty: 0 samples"):
        plan_train(parquet_stream(write(tmp_path / "none.parquet", 0)), batch_size=8)
    loader = train_loader(parquet_stream(path, columns=["n"]), batch_size=6)
    with pytest.raises(DataError, match=r"epoch 0, batch 0.*'n' is null"):
        next(loader.batches(0, 0))
    loader.close()
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match=r"a\.parquet.*cannot be read"):
        parquet_stream(path)


def test_closing_ends_the_threads(tmp_path: Path) -> None:
    before = threading.active_count()
    loader = train_loader(parquet_stream(write(tmp_path / "a.parquet", 500)), batch_size=8)
    batches = loader.batches(0, 0)
    next(batches)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before


def test_a_stream_has_facts_and_a_digest(tmp_path: Path) -> None:
    stream = parquet_stream(write(tmp_path / "a.parquet", 12))
    facts = stream.describe()
    assert (facts["num_rows"], facts["schema"]) == (12, {"id": "int64"})
    assert facts["digest"] != parquet_stream(write(tmp_path / "b.parquet", 13)).describe()["digest"]
    assert isinstance(stream, TableStream)


def test_wide_rows_make_small_blocks(tmp_path: Path) -> None:
    wide = pa.FixedSizeListArray.from_arrays(pa.array(torch.rand(40 * 10_000).numpy()), 10_000)
    narrow, large = write(tmp_path / "a.parquet", 40), write(tmp_path / "b.parquet", 40, x=wide)
    assert (
        parquet_stream(narrow).plan(batch_size=4, shuffle=True, drop_last=False).order
        == "8 lanes of blocks of 16384 rows"
    )
    order = parquet_stream(large).plan(batch_size=4, shuffle=True, drop_last=False).order
    assert 16 <= int(order.split()[-2]) < 16384


@dataclass(frozen=True)
class Line(raytrain.Task):
    path: str = ""
    blocks: ClassVar[int] = 8

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    def train_data(self) -> TableStream:
        return parquet_stream(self.path, block_rows=self.blocks)

    def eval_data(self) -> TableStream:
        return parquet_stream(self.path)

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        x = batch["id"][:, None].float() / 100
        return (model(x) - x).pow(2).mean(), {"mean_id": batch["id"].float().mean()}


def test_a_run_on_a_stream_resumes_exactly_and_refuses_another_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write(tmp_path / "a.parquet", 53))

    def run(name: str, steps: int) -> raytrain.Result:
        return raytrain.fit(
            Line(path),
            train=TrainConfig(steps=steps, batch_size=8, log_every="1st", eval_every="1ep"),
            scaling=ScalingConfig(num_workers=0),
            run=RunConfig(name=name, storage=str(tmp_path / "runs")),
            tracking=TrackingConfig(mlflow=False, progress=False),
        )

    whole = run("whole", 17)
    run("parts", 10)
    parts = run("parts", 17)
    a, b = whole.load_model().state_dict(), parts.load_model().state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert whole.metrics["val/mean_id"] == 26.0
    monkeypatch.setattr(Line, "blocks", 16)
    with pytest.raises(ConfigError, match=r"data\.order: 8 lanes of blocks of 8 rows -> 8 lanes of blocks of 16 rows"):
        run("parts", 20)


def test_a_page_that_does_not_match_its_checksum_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"x": torch.rand(10_000, dtype=torch.float64).numpy()})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[2000:2400] = bytes(400)
    path.write_bytes(bytes(data))
    loader = train_loader(parquet_stream(path), batch_size=64)
    with pytest.raises(DataError, match=r"a\.parquet"):
        list(loader.batches(0, 0, stop=loader.steps_per_epoch))
    loader.close()
