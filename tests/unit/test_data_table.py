"""Parquet and Arrow as a map-style dataset, on real files."""

from __future__ import annotations

import datetime
import io
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from torch.utils.data import DataLoader, random_split

from raytrain.data import (
    Categories,
    HashPart,
    Image,
    Packed,
    Padded,
    TableDataset,
    arrow,
    eval_loader,
    parquet,
    plan_train,
    train_loader,
)
from raytrain.data.nodecache import NodeCache
from raytrain.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAYTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, rows_per_group: int = 4, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=rows_per_group)
    return path


def rows(dataset: TableDataset, *places: int) -> Any:
    return dataset.take(np.array(places, np.int64))


def ids(path: Path, start: int, stop: int) -> Path:
    return write(path, max(4, (stop - start) // 8), id=pa.array(range(start, stop), pa.int64()))


def test_rows_of_many_files_come_in_the_order_of_their_paths(tmp_path: Path) -> None:
    ids(tmp_path / "t" / "b.parquet", 5, 9)
    ids(tmp_path / "t" / "a.parquet", 0, 5)
    ids(tmp_path / "t" / "_hidden.parquet", 50, 60)
    write(tmp_path / "t" / "c.parquet", id=pa.array([], pa.int64()))  # a file without rows among others is fine
    data = parquet(tmp_path / "t")
    assert len(data) == 9
    assert rows(data, *range(9))["id"].tolist() == list(range(9))
    assert data[-1]["id"].tolist() == [8]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("t/*.parquet", 2),
        ("t/**/*.parquet", 3),
        ("t/x/a*.parquet", 1),
        ("t/[ab].parquet", 2),
        (["t/a.parquet", "t/x"], 2),
    ],
)
def test_globs_and_lists(tmp_path: Path, pattern: Any, expected: int) -> None:
    for number, name in enumerate(("t/a", "t/b", "t/x/a1")):
        ids(tmp_path / f"{name}.parquet", number, number + 1)
    paths = [str(tmp_path / p) for p in pattern] if isinstance(pattern, list) else str(tmp_path / pattern)
    assert len(parquet(paths)) == expected


def test_odd_paths_and_uris(tmp_path: Path) -> None:
    path = ids(tmp_path / "ein Ordner mit ü%20 & 100%" / "a b.parquet", 0, 3)
    assert len(parquet(path)) == 3
    assert len(parquet(path.parent.as_uri())) == 3
    assert len(parquet(f"{path.parent}/")) == 3


def test_folders_named_key_value_add_columns(tmp_path: Path) -> None:
    for year, kind, start in ((2024, "a", 0), (2025, "b", 4)):
        ids(tmp_path / f"year={year}" / f"kind={kind}" / "f.parquet", start, start + 4)
    data = parquet(tmp_path, encode={"kind": Categories()})
    batch = rows(data, 0, 7)
    assert batch["year"].tolist() == [2024, 2025]
    assert batch["kind"].tolist() == [0, 1]
    kept = parquet(tmp_path, columns=["id", "year"], where=pc.field("year") == 2025)
    assert rows(kept, 0, 3)["id"].tolist() == [4, 7]
    assert rows(parquet(tmp_path / "*" / "kind=b", columns=["id"]), 0)["id"].tolist() == [4]


PLAIN = [
    (pa.int8(), [1, -2], torch.int8), (pa.uint8(), [1, 255], torch.uint8), (pa.uint16(), [1, 65535], torch.int32),
    (pa.uint32(), [1, 2**32 - 1], torch.int64), (pa.uint64(), [1, 2], torch.int64), (pa.int64(), [1, -(2**60)], torch.int64),
    (pa.float16(), [0.5, 2.0], torch.float16), (pa.float32(), [0.5, 2.0], torch.float32), (pa.float64(), [0.1, 2.0], torch.float64),
    (pa.bool_(), [True, False], torch.bool),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "dtype"), PLAIN, ids=lambda value: str(value))
def test_numbers_keep_their_value(tmp_path: Path, kind: pa.DataType, values: list[Any], dtype: torch.dtype) -> None:
    column = pa.array([np.float16(v) for v in values] if kind == pa.float16() else values, kind)
    batch = rows(parquet(write(tmp_path / "a.parquet", x=column)), 1, 0, 1)
    assert batch["x"].dtype == dtype
    assert batch["x"].tolist() == [values[1], values[0], values[1]]


def test_times_are_whole_numbers_in_their_own_unit(tmp_path: Path) -> None:
    day = datetime.date(1970, 1, 3)
    at = datetime.datetime(1970, 1, 1, 0, 0, 5)
    columns = {
        "d": pa.array([day]),
        "ms": pa.array([at], pa.timestamp("ms")),
        "us": pa.array([at], pa.timestamp("us", "UTC")),
    }
    batch = rows(parquet(write(tmp_path / "a.parquet", **columns)), 0)
    assert [batch[name].item() for name in ("d", "ms", "us")] == [2, 5000, 5_000_000]


def test_fixed_lists_and_tensors_become_shapes(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    nested = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), 2), 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"lists": nested, "tensor": tensors}), path, row_group_size=3)
    batch = rows(parquet(path), 3, 1)
    for name in ("lists", "tensor"):
        assert torch.equal(batch[name], torch.from_numpy(values)[[3, 1]])


def test_a_tensor_stored_in_another_order_of_axes_is_refused(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int32).reshape(2, 3, 4).transpose(0, 2, 1)
    array = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    with pytest.raises(DataError, match="permuted axes"):
        parquet(write(tmp_path / "a.parquet", x=array))


LISTS = [[1, 2, 3], [], [4], [5, 6]]


def test_lists_are_padded_with_a_mask(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows_per_group=3, t=pa.array(LISTS, pa.list_(pa.int32())))
    batch = rows(parquet(path, encode={"t": Padded(value=-1)}), 3, 0, 1)
    assert batch["t"].tolist() == [[5, 6, -1], [1, 2, 3], [-1, -1, -1]]
    assert batch["t_mask"].tolist() == [[True, True, False], [True, True, True], [False, False, False]]
    assert batch["t"].dtype == torch.int32
    cut = rows(parquet(path, encode={"t": Padded(max_length=2, multiple_of=4)}), 0, 2)
    assert cut["t"].tolist() == [[1, 2, 0, 0], [4, 0, 0, 0]]
    assert rows(parquet(path, encode={"t": Padded()}), 1)["t"].shape == (1, 0)


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "bool"])
@pytest.mark.parametrize("longest", [3, 300])
def test_short_and_long_lists_are_padded_alike(tmp_path: Path, longest: int, dtype: str) -> None:
    lists = [[n % 2] * n for n in range(longest)]
    path = write(tmp_path / "a.parquet", 50, t=pa.array(lists, pa.list_(pa.int64())))
    places = [longest - 1, 0, longest - 1, longest // 2]
    batch = rows(parquet(path, encode={"t": Padded(value=1)}, cast={"t": dtype}), *places)
    expected = [lists[place] + [1] * (longest - 1 - place) for place in places]
    assert batch["t"].to(torch.int64).tolist() == expected
    assert batch["t"].dtype == getattr(torch, dtype)
    assert batch["t_mask"].sum(1).tolist() == places


def test_lists_are_packed_with_offsets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=pa.array(LISTS, pa.large_list(pa.float32())))
    batch = rows(parquet(path, encode={"t": Packed()}), 3, 1, 0)
    assert batch["t"].tolist() == [5, 6, 1, 2, 3]
    assert batch["t_offsets"].tolist() == [0, 2, 2, 5]


def test_categories_are_codes_in_sorted_order_and_shared_by_sets(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", c=["b", "a", "c", "a"])
    write(tmp_path / "val.parquet", c=["a", "z"])
    train = parquet(tmp_path / "train.parquet", encode={"c": Categories()})
    assert train.categories("c") == ["a", "b", "c"]
    assert rows(train, 0, 1, 2, 3)["c"].tolist() == [1, 0, 2, 0]
    val = tmp_path / "val.parquet"
    with pytest.raises(DataError, match=r"val\.parquet.*row 1.*'z' is not among the 3 categories.*unknown=True"):
        rows(parquet(val, encode={"c": Categories(train.categories("c"))}), 0)
    assert rows(parquet(val, encode={"c": Categories(train.categories("c"), unknown=True)}), 0, 1)["c"].tolist() == [
        0,
        3,
    ]


def test_dictionary_columns_and_whole_numbers_have_categories(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows_per_group=1, d=pa.array(["y", "x"]).dictionary_encode(), n=[70, -7])
    data = parquet(path, encode={"n": Categories()})
    assert rows(data, 0, 1)["d"].tolist() == [1, 0]
    assert rows(data, 0, 1)["n"].tolist() == [1, 0]
    assert data.categories("n") == [-7, 70]


def encoded(color: int, size: tuple[int, int], kind: str) -> bytes:
    file = io.BytesIO()
    Pillow.new("RGB", size, (color, 0, 255)).save(file, kind)
    return file.getvalue()


def test_images_are_decoded_and_scaled(tmp_path: Path) -> None:
    data = [encoded(10, (6, 4), "PNG"), encoded(200, (6, 4), "PNG"), encoded(90, (12, 8), "JPEG")]
    path = write(tmp_path / "a.parquet", image=pa.array(data))
    batch = rows(parquet(path, encode={"image": Image()}), 1, 0)
    assert batch["image"].shape == (2, 3, 4, 6)
    assert batch["image"][:, :, 0, 0].tolist() == [[200, 0, 255], [10, 0, 255]]
    with pytest.raises(DataError, match=r"row 2.*\(8, 12\).*size="):
        rows(parquet(path, encode={"image": Image()}), 0, 2)
    scaled = rows(parquet(path, encode={"image": Image(size=(2, 3), mode="L")}), 0, 1, 2)
    assert scaled["image"].shape == (3, 1, 2, 3)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet",
        image=pa.array([encoded(1, (5, 5), "PNG"), b"no image", encoded(1, (64, 64), "PNG")[:90]]),
    )
    data = parquet(path, encode={"image": Image()})
    for row in (1, 2):
        with pytest.raises(DataError, match=rf"row {row}: the image in column 'image' cannot be decoded"):
            rows(data, 0, row)


def test_casts_are_done_once_and_keep_their_type(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", x=[1.0, 2.5], n=[1, 2])
    batch = rows(parquet(path, cast={"x": "bfloat16", "n": torch.float16}), 1)
    assert batch["x"].dtype == torch.bfloat16
    assert batch["n"].dtype == torch.float16
    assert batch["x"].item() == 2.5


def test_a_cast_that_would_wrap_numbers_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", n=[1, 300])
    with pytest.raises(DataError, match="does not hold the column's values, which reach from 1 to 300"):
        rows(parquet(path, cast={"n": "int8"}), 0)
    assert rows(parquet(path, cast={"n": "int16"}), 1)["n"].item() == 300


def test_a_null_names_file_column_and_row_or_is_filled(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", rows_per_group=10, x=[1.0, None, 3.0], c=["a", None, "b"])
    with pytest.raises(DataError, match=r"a\.parquet, from row 0.*row 1 .*'x' is null.*fill="):
        rows(parquet(path, columns=["x"]), 0)
    with pytest.raises(DataError, match=r"'c' is null"):
        rows(parquet(path, columns=["c"], encode={"c": Categories()}), 0)
    filled = parquet(path, encode={"c": Categories()}, fill={"x": -1.0, "c": "?"})
    assert rows(filled, 0, 1, 2)["x"].tolist() == [1, -1, 3]
    assert filled.categories("c") == ["?", "a", "b"]
    assert len(parquet(path, columns=["x"], where=pc.field("x").is_valid())) == 2
    assert rows(parquet(path, columns=["x"], where=[("x", ">", 2)]), 0)["x"].tolist() == [3]
    with pytest.raises(DataError, match=r"fill=\{'x': 'no'\} does not fit"):
        rows(parquet(path, columns=["x"], fill={"x": "no"}), 0)


def test_nulls_in_lists(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", t=pa.array([[1, None], None, [3]], pa.list_(pa.int64())))
    with pytest.raises(DataError, match="'t' is null"):
        rows(parquet(path, encode={"t": Padded()}), 0)
    filled = rows(parquet(path, encode={"t": Padded()}, fill={"t": 9}), 0, 1, 2)
    assert filled["t"].tolist() == [[1, 9], [0, 0], [3, 0]]
    table = pa.table({"t": pa.array([[1, 2], None], pa.list_(pa.int64(), 2))})
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"b\.arrow.*row 1.*no list there"):
        rows(arrow(tmp_path / "b.arrow", fill={"t": 1}), 0)


@pytest.mark.parametrize(
    ("column", "options", "message"),
    [
        (pa.array(["a"]), {}, r"'x' is of type string: it needs Categories\(\)"),
        (pa.array([[1]]), {}, r"needs Padded\(\) or Packed\(\)"),
        (pa.array([b"a"]), {}, r"needs Image\(\)"),
        (pa.array([{"a": 1}]), {}, "makes no tensor"),
        (pa.array([[["a"]]]), {}, "makes no tensor"),
        (pa.array([1.5]), {"encode": {"x": Padded()}}, "needs no encoding, not Padded"),
        (pa.array([1]).cast(pa.decimal128(30, 2)), {}, r"cast=\{'x': 'float64'\}"),
        (pa.array([1]), {"cast": {"x": "float33"}}, "is no type of torch"),
        (pa.array([1]), {"encode": {"y": Padded()}}, "encode names 'y'.*There are: x"),
        (pa.array([1]), {"columns": ["z"]}, "columns names 'z'.*There are: x"),
        (pa.array([1]), {"columns": []}, "at least one"),
        (pa.array([1]), {"part": HashPart("q")}, "There are: x"),
        (pa.array([1.5]), {"part": HashPart("x")}, "is of type double"),
    ],
)
def test_what_makes_no_tensor_is_told_before_anything_is_read(
    tmp_path: Path, column: pa.Array, options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.parquet", x=column)
    with pytest.raises(DataError, match=message):
        parquet(path, **options)


def test_a_decimal_needs_a_cast_and_gets_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", x=pa.array([1, 25]).cast(pa.decimal128(30, 2)))
    assert rows(parquet(path, cast={"x": "float32"}), 1)["x"].tolist() == [25.0]


def test_files_that_are_not_whole_or_unlike_the_others_are_named(tmp_path: Path) -> None:
    ids(tmp_path / "a.parquet", 0, 4)
    bad = ids(tmp_path / "b.parquet", 4, 8)
    whole = bad.read_bytes()
    for content in (whole[:-20], whole[: len(whole) // 2], b"", b"no parquet at all"):
        bad.write_bytes(content)
        with pytest.raises(DataError, match=r"b\.parquet.*cannot be read"):
            parquet(tmp_path)
    write(bad, id=["x", "y"])
    with pytest.raises(DataError, match=r"b\.parquet has the column 'id' as string, but .*a\.parquet as int64"):
        parquet(tmp_path)
    write(bad, other=[1])
    with pytest.raises(DataError, match=r"b\.parquet has no column 'id'.*other"):
        parquet(tmp_path)


def test_a_page_damaged_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"x": np.random.default_rng(0).random(10_000)})
    pq.write_table(table, path, compression="zstd", write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[2000:2400] = bytes(400)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"a\.parquet cannot be read"):
        rows(parquet(path), 0)


@pytest.mark.parametrize("place", ["nothing.parquet", "*.parquet", "empty"])
def test_no_files_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"does not exist|no parquet files"):
        parquet(tmp_path / place)
    with pytest.raises(DataError, match="empty list"):
        parquet([])


def test_no_rows_at_all_is_told_before_training(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", id=pa.array([], pa.int64()))
    with pytest.raises(DataError, match="is empty: 0 samples"):
        plan_train(parquet(path), batch_size=2)
    some = ids(tmp_path / "b.parquet", 0, 5)
    with pytest.raises(DataError, match="is empty: 0 samples"):
        plan_train(parquet(some, where=pc.field("id") > 10), batch_size=2)


def test_hash_parts_are_disjoint_whole_and_stable(tmp_path: Path) -> None:
    names = [f"user {n % 700}" for n in range(2000)]
    path = write(tmp_path / "a.parquet", rows_per_group=500, id=list(range(2000)), name=names)
    for by in ("id", "name"):
        train = parquet(path, columns=["id"], part=HashPart(by, 0, 0.8))
        val = parquet(path, columns=["id"], part=HashPart(by, 0.8, 1))
        a, b = (rows(part, *range(len(part)))["id"].tolist() for part in (train, val))
        assert sorted(a + b) == list(range(2000))
        assert 1500 < len(a) < 1700
        if by == "name":
            assert not {names[i] for i in a} & {names[i] for i in b}
    again = write(tmp_path / "b.parquet", id=[1999, 3, 5000], name=["x", "y", "z"])
    kept = parquet(again, columns=["id"], part=HashPart("id", 0, 0.8))
    first = parquet(path, columns=["id"], part=HashPart("id", 0, 0.8))
    both = {1999, 3} & set(rows(first, *range(len(first)))["id"].tolist())
    assert {1999, 3} & set(rows(kept, *range(len(kept)))["id"].tolist()) == both


def test_the_hash_is_the_same_in_every_version() -> None:
    assert HashPart("x").fractions(pa.array([0, 1, None])).round(6).tolist() == EXPECTED_NUMBERS
    assert HashPart("x").fractions(pa.array(["a", "", None])).round(6).tolist() == EXPECTED_TEXTS
    assert HashPart("x", salt="s").fractions(pa.array([0, 1])).round(6).tolist() != EXPECTED_NUMBERS[:2]


EXPECTED_NUMBERS = [0.609395, 0.963352, 0.195834]
EXPECTED_TEXTS = [0.168187, 0.112013, 0.608899]


@given(
    st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 100)
)
@settings(max_examples=40, deadline=None)
def test_each_row_once_in_any_world(
    tmp_path_factory: pytest.TempPathFactory,
    num_rows: int,
    batch: int,
    world: int,
    accumulate: int,
    epoch: int,
    start: int,
) -> None:
    data = small_tables(tmp_path_factory)[num_rows]
    batch = max(batch, world)
    seen: dict[int, list[int]] = {}
    for rank in range(world):
        loader = train_loader(data, batch_size=batch, accumulate=accumulate, seed=3, rank=rank, world_size=world)
        start %= loader.steps_per_epoch
        for got in loader.batches(epoch, start, stop=loader.steps_per_epoch - start):
            seen.setdefault(got.index, []).extend(got.data["id"][: got.num_rows].tolist())
    one = train_loader(data, batch_size=batch, seed=3)
    order = [got.data["id"].tolist() for got in one.batches(epoch, 0, stop=one.steps_per_epoch)]
    assert sorted(sum(order, [])) == list(range(num_rows))
    assert {k: sorted(v) for k, v in seen.items()} == {k: sorted(v) for k, v in enumerate(order) if k >= start}


_TABLES: list[TableDataset] = []


def small_tables(factory: pytest.TempPathFactory) -> list[TableDataset]:
    if not _TABLES:
        folder = factory.mktemp("tables")
        paths = [ids(folder / f"{n}.parquet", 0, n) for n in range(61)]
        _TABLES.extend(parquet(path, cache=folder / "cache") for path in paths)
    return _TABLES


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_loaders_subsets_and_functions_keep_working(tmp_path: Path, loader_workers: int) -> None:
    data = parquet(ids(tmp_path / "a.parquet", 0, 30)).map(lambda batch: (batch["id"], torch.rand(len(batch["id"]))))
    part, rest = random_split(data, [20, 10], torch.Generator().manual_seed(0))
    first = train_loader(DataLoader(part, batch_size=6, shuffle=True, num_workers=loader_workers), seed=1)
    seen = [batch.data for batch in first.batches(0, 0, stop=4)]
    assert sorted(sum((ids_.tolist() for ids_, _ in seen), [])) == sorted(part.indices)
    again = [b.data for b in train_loader(part, batch_size=6, seed=1).batches(0, 0, stop=4)]
    for (a, noise_a), (b, noise_b) in zip(seen, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(noise_a, noise_b)  # random numbers depend on the place, not on the process
    assert sorted(sum((b.data[0].tolist() for b in eval_loader(rest, batch_size=4).batches()), [])) == sorted(
        rest.indices
    )
    first.close()


def test_a_collate_function_is_refused(tmp_path: Path) -> None:
    data = parquet(ids(tmp_path / "a.parquet", 0, 8))
    with pytest.raises(DataError, match=r"collate_fn.*map\(\)"):
        plan_train(DataLoader(data, batch_size=2, collate_fn=list))


def test_an_error_in_the_function_names_the_samples(tmp_path: Path) -> None:
    data = parquet(ids(tmp_path / "a.parquet", 0, 8)).map(lambda batch: batch["nothing"])
    with pytest.raises(DataError, match=r"samples .* of TableDataset failed: KeyError: 'nothing'"):
        next(train_loader(data, batch_size=2).batches(0, 0))


def test_it_travels_as_a_description(tmp_path: Path) -> None:
    data = parquet(ids(tmp_path / "a.parquet", 0, 500_000))
    rows(data, 1)
    small = pickle.dumps(data)
    assert len(small) < 20_000
    assert rows(pickle.loads(small), 7)["id"].tolist() == [7]


def test_writing_to_a_batch_or_the_table_changes_no_file(tmp_path: Path) -> None:
    data = parquet(ids(tmp_path / "a.parquet", 0, 8))
    rows(data, 0)["id"] += 100
    assert rows(data, 0)["id"].tolist() == [0]


def test_arrow_files(tmp_path: Path) -> None:
    table = pa.table({"id": list(range(10)), "t": pa.array([[1] * n for n in range(10)])})
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    data = arrow(tmp_path / "a.arrow", encode={"t": Padded()})
    assert len(data) == 10
    assert rows(data, 9, 2)["t"].sum(1).tolist() == [9, 2]
    (tmp_path / "a.arrow").write_bytes((tmp_path / "a.arrow").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.arrow.*cannot be read"):
        arrow(tmp_path / "a.arrow")


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    first = parquet(ids(tmp_path / "a" / "a.parquet", 0, 8)).describe()
    copy = parquet(ids(tmp_path / "b" / "a.parquet", 0, 8)).describe()
    other = parquet(ids(tmp_path / "c" / "a.parquet", 1, 9)).describe()
    assert first["digest"] == copy["digest"] != other["digest"]
    assert first["schema"] == {"id": "int64"}
    assert first["num_rows"] == 8


# -- the cache of the node --------------------------------------------------------------------------------------------


def entries(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.is_dir())


def test_a_prepared_table_is_found_again_and_a_changed_file_makes_a_new_one(tmp_path: Path, cache: Path) -> None:
    path = ids(tmp_path / "a.parquet", 0, 8)
    rows(parquet(path), 0)
    before = entries(cache)
    rows(parquet(path), 0)
    assert entries(cache) == before
    ids(path, 1, 9)
    assert rows(parquet(path), 0)["id"].tolist() == [1]
    assert len(entries(cache)) == 2
    rows(parquet(path, cast={"id": "int32"}), 0)
    assert len(entries(cache)) == 3


def test_what_a_killed_writer_left_is_cleared(tmp_path: Path, cache: Path) -> None:
    path = ids(tmp_path / "a.parquet", 0, 8)
    rows(parquet(path), 0)
    key = entries(cache)[0]
    (cache / key).rename(cache / f"{key}.partial-999999")
    assert rows(parquet(path), 3)["id"].tolist() == [3]
    assert entries(cache) == [key]


def test_a_failed_table_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "a.parquet", x=[1.0, None])
    with pytest.raises(DataError):
        rows(parquet(path), 0)
    assert entries(cache) == []


def open_and_count(path: Path, made: Any, out: Any) -> None:
    original = TableDataset._write

    def counted(self: TableDataset, folder: Path) -> None:
        made.put(1)
        original(self, folder)

    TableDataset._write = counted  # type: ignore[method-assign]
    out.put(rows(parquet(path), 0)["id"].item())


def test_one_process_makes_it_while_the_others_wait(tmp_path: Path) -> None:
    path = ids(tmp_path / "a.parquet", 5, 400_000)
    context = multiprocessing.get_context("fork")
    made, out = context.Queue(), context.Queue()
    processes = [context.Process(target=open_and_count, args=(path, made, out)) for _ in range(4)]
    for process in processes:
        process.start()
    assert [out.get(timeout=30) for _ in processes] == [5] * 4
    for process in processes:
        process.join()
    assert made.qsize() == 1


def filled(cache: NodeCache, key: str, size: int) -> Any:
    return cache.open(key, lambda folder: (folder / "x").write_bytes(bytes(size)) and None, lambda: size, key)


def test_the_least_recently_used_table_leaves_and_one_in_use_stays(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "c", limit_bytes=2500)
    first = filled(cache, "first", 1000)
    filled(cache, "second", 1000)
    filled(cache, "third", 1000)  # the first is in use; the second is not
    assert entries(tmp_path / "c") == ["first", "third"]
    with pytest.raises(DataError, match=r"fourth needs about .* GB in the cache .*parquet_stream"):
        filled(cache, "fourth", 2000)
    del first
    filled(cache, "fourth", 2000)
    assert entries(tmp_path / "c") == ["fourth"]
