"""Data that deals to ranks by itself: how it is known, read, and cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from raytrain.data import own_shards, plan_train, train_loader
from raytrain.data.detect import is_iterable, shards_itself
from raytrain.data.rows import Rows, count_rows, fingerprint, joined
from raytrain.errors import DataError
from tests.unit.data_kit import Ids, ids, take
from tests.unit.iter_kit import Count, PerWorker, Told


def foreign(module: str, name: str, *bases: type, **members: Any) -> Any:
    """An object of a class as another library would have it."""
    made = type(name, bases or (IterableDataset,), {"__module__": module, "__iter__": lambda self: iter(())})()
    vars(made).update(members)
    return made


def split_by_node(source: Any) -> Any:
    """As webdataset's function is called."""
    return source


split_by_node.__module__ = "webdataset.shardlists"


class Wraps(IterableDataset[Any]):
    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inside)


KNOWN = {
    "litdata": foreign("litdata.streaming.dataset", "StreamingDataset"),
    "litdata's child": type("Mine", (type(foreign("litdata.streaming.dataset", "StreamingDataset")),), {})(),
    "mosaicml": foreign("streaming.base.dataset", "StreamingDataset"),
    "hugging face, split": foreign("datasets.iterable_dataset", "IterableDataset", object, _distributed=(0, 2)),
    "webdataset, split": foreign("webdataset.compat", "WebDataset", pipeline=[split_by_node]),
    "webdataset, resampled": foreign(
        "webdataset.compat", "WebDataset", pipeline=[foreign("webdataset.x", "ResampledShards")]
    ),
    "torchdata, distributed": Wraps(foreign("torchdata.nodes.loader", "Loader", object, root=None)),
}
KNOWN["torchdata, distributed"].inside.root = DistributedSampler(Ids(4), num_replicas=2, rank=0)
SHARED = {
    "plain": Count(3),
    "hugging face, whole": foreign("datasets.iterable_dataset", "IterableDataset", object, _distributed=None),
    "webdataset, whole": foreign("webdataset.compat", "WebDataset", pipeline=[lambda source: source]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_data_that_shards_itself_is_known_also_within_other_data(name: str) -> None:
    for data in (KNOWN[name], Wraps(KNOWN[name]), DataLoader(Wraps(KNOWN[name]))):
        assert is_iterable(data)
        assert shards_itself(data)
        assert "shards of its own" in plan_train(data).note


@pytest.mark.parametrize("name", SHARED)
def test_other_data_is_read_by_every_rank(name: str) -> None:
    assert is_iterable(SHARED[name])
    assert not shards_itself(Wraps(SHARED[name]))


def test_what_cannot_be_iterated() -> None:
    with pytest.raises(DataError, match="no __iter__"):
        own_shards(3)
    with pytest.raises(DataError, match="own_shards"):
        plan_train(iter([1]))


# -- read by one rank --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data", [own_shards(Count(7)), own_shards(DataLoader(PerWorker(7), batch_size=3, num_workers=2))]
)
def test_its_samples_are_batched_and_the_epoch_ends_with_them(data: Any) -> None:
    loader = train_loader(data, batch_size=3, accumulate=2)
    seen, batch = [], None
    for batch in loader.batches(0, 0):
        seen.append(ids(batch))
        if batch.is_last and batch.ends_epoch:
            break
    assert sorted(sum(seen, [])) == list(range(7))
    assert batch is not None
    loader.close()


def test_it_goes_on_from_any_position_and_is_told_the_epoch() -> None:
    data = own_shards(Told(7))
    whole = [ids(batch) for batch in take(train_loader(data, batch_size=3), 6)]
    assert whole == [[0, 1, 2], [3, 4, 5], [6], [100, 101, 102], [103, 104, 105], [106]]
    for cut_at in range(6):
        loader = train_loader(data, batch_size=3)
        rest = take(loader, 6 - cut_at, epoch=cut_at // 3, index=cut_at % 3)
        assert [ids(batch) for batch in rest] == whole[cut_at:]


class Brings:
    """A loader of another library: batches of its own, one of them empty."""

    batches: ClassVar[list[Any]] = [
        {"x": torch.arange(5), "name": list("abcde")},
        {"x": torch.arange(0), "name": []},
        {"x": torch.arange(2), "name": list("fg")},
    ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def test_the_rows_of_a_loader_that_brings_batches_make_global_batches() -> None:
    batches = take(train_loader(own_shards(Brings()), batch_size=4, accumulate=2), 2)
    assert [(b.num_rows, b.global_rows, b.data["x"].tolist(), b.data["name"], b.ends_epoch) for b in batches] == [
        (2, 4, [0, 1], ["a", "b"], False),
        (2, 4, [2, 3], ["c", "d"], False),
        (2, 3, [4, 0], ["e", "f"], True),
        (1, 3, [1], ["g"], True),
    ]
    with pytest.raises(DataError, match=r"yields batches \(batch_size=None\)"):
        plan_train(DataLoader(Count(4), batch_size=None))
    assert plan_train(own_shards(DataLoader(Count(4), batch_size=None)), batch_size=2).batch_size == 2


def test_drop_last_of_shards_whose_length_is_not_known() -> None:
    for num_rows, steps in ((7, 2), (8, 2), (9, 3)):
        loader = train_loader(own_shards(Count(num_rows)), batch_size=3, drop_last=True)
        batches = take(loader, steps + 1)
        assert [b.ends_epoch for b in batches[:steps]] == [False] * (steps - 1) + [True]
        assert [len(ids(b)) for b in batches] == [3] * (steps + 1)
        assert batches[-1].epoch == 1


def test_no_sample_at_all_is_told() -> None:
    with pytest.raises(DataError, match="epoch 0 has 0 samples on all 1 workers"):
        take(train_loader(own_shards(Count(0))), 1)


# -- rows --------------------------------------------------------------------------------------------------------------


def test_rows_are_counted_cut_and_joined() -> None:
    assert count_rows((torch.zeros(3, 2), 1)) == 3
    assert count_rows({"text": ["a", "b"]}) == 2
    with pytest.raises(DataError, match="cannot be counted"):
        count_rows(object())
    rows = Rows((torch.arange(5), {"y": torch.arange(5) * 2}))
    x, rest = joined([rows[3:], rows[:2]]).data
    assert (x.tolist(), rest["y"].tolist()) == ([3, 4, 0, 1], [6, 8, 0, 2])
    with pytest.raises(DataError, match=r"cannot be cut"):
        Rows((torch.arange(4), object()))[:2]


def test_fingerprints_tell_samples_apart() -> None:
    samples = [
        1,
        2,
        1.5,
        "a",
        torch.tensor([1.0, 2.0]),
        torch.tensor([1.0, 3.0]),
        {"x": torch.ones(2, dtype=torch.bfloat16)},
    ]
    assert len({fingerprint(sample) for sample in samples}) == len(samples)
    assert fingerprint((torch.ones(2).t(), "x")) == fingerprint([torch.ones(2), "x"])
    assert fingerprint(object()) == fingerprint(torch.empty(0)) == 0
