"""IterableDataset: each sample once in any world, the same order after a resume, and clear errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raytrain.data import Batch, eval_loader, iterable, plan_eval, plan_train, train_loader
from raytrain.data.shards import allotted
from raytrain.errors import ConfigError, DataError


class Shuffled(IterableDataset[dict[str, Any]]):
    """Numbers in an order that it draws itself, told the epoch or not."""

    def __init__(self, length: int, said: int | None = None) -> None:
        self.length, self.said, self.epoch = length, length if said is None else said, -1

    def __len__(self) -> int:
        return self.said

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for n in torch.randperm(self.length).tolist():
            yield {"id": n, "epoch": self.epoch, "noise": random.random() + np.random.rand()}


class ByWorker(Shuffled):
    """One that shards over the processes of a loader, as torch's documentation shows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        yield from ({"id": n} for n in range(number, self.length, count))


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def ids(batch: Batch) -> list[int]:
    return [int(n) for n in batch.data["id"][: batch.num_rows]]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_each_sample_once_in_any_world_and_after_any_resume(data: st.DataObject) -> None:
    rows, batch = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    world, accumulate = data.draw(st.integers(1, min(4, batch))), data.draw(st.integers(1, 3))
    drop_last = data.draw(st.booleans()) and rows >= batch
    whole = train_loader(Shuffled(rows), batch_size=batch, seed=4, drop_last=drop_last)
    steps = whole.steps_per_epoch
    order = [ids(b) for b in whole.batches(0, 0, stop=2 * steps)]
    if not drop_last:
        assert sorted(sum(order[:steps], [])) == sorted(sum(order[steps:], [])) == list(range(rows))
    start = data.draw(st.integers(0, steps - 1))
    seen: dict[tuple[int, int], list[int]] = {}
    scales: dict[tuple[int, int], float] = {}
    for rank in range(world):
        loader = train_loader(
            Shuffled(rows),
            batch_size=batch,
            accumulate=accumulate,
            seed=4,
            rank=rank,
            world_size=world,
            drop_last=drop_last,
        )
        for b in loader.batches(0, start, stop=2 * steps - start):
            seen.setdefault((b.epoch, b.index), []).extend(ids(b))
            scales[b.epoch, b.index] = scales.get((b.epoch, b.index), 0.0) + b.scale / world
    expected = {(n // steps, n % steps): sorted(batch_ids) for n, batch_ids in enumerate(order) if n >= start}
    assert {place: sorted(found) for place, found in seen.items()} == expected
    assert all(abs(scale - 1) < 1e-12 for scale in scales.values())


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("kind", [Shuffled, ByWorker])
def test_loader_processes_do_not_repeat_or_lose_samples(kind: Any, loader_workers: int) -> None:  # case A4
    data = DataLoader(kind(10), batch_size=4, num_workers=loader_workers)
    seen = []
    for rank in range(2):
        loader = train_loader(data, seed=1, rank=rank, world_size=2)
        seen += [n for b in loader.batches(0, 0, stop=3) for n in ids(b)]
    assert sorted(seen) == list(range(10))


def test_the_streams_are_the_datasets_own() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = list(train_loader(Shuffled(9), batch_size=4, seed=1).batches(0, 0, stop=6))
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(5)
    again = list(train_loader(Shuffled(9), batch_size=4, seed=1).batches(0, 0, stop=6))
    assert [ids(b) for b in first] == [ids(b) for b in again]
    assert all(torch.equal(a.data["noise"], b.data["noise"]) for a, b in zip(first, again, strict=True))
    assert [ids(b) for b in first[:3]] != [ids(b) for b in first[3:]]
    assert first[0].data["epoch"].tolist() == [0] * 4
    assert first[3].data["epoch"].tolist() == [1] * 4


@pytest.mark.parametrize(("said", "found"), [(12, "only 10"), (9, "at least 10")])
def test_a_wrong_length_is_told_with_both_numbers(said: int, found: str) -> None:
    loader = train_loader(Shuffled(10, said), batch_size=4)
    with pytest.raises(DataError, match=rf"said to have {said} samples, but yielded {found} in epoch 0"):
        list(loader.batches(0, 0, stop=4))


def test_what_cannot_be_known_is_refused_with_the_cure() -> None:
    assert plan_train(Endless(), batch_size=4).steps_per_epoch is None
    assert plan_train(iterable(Endless(), num_rows=10), batch_size=4, drop_last=True).steps_per_epoch == 2
    with pytest.raises(DataError, match="batch_size=None"):
        plan_train(DataLoader(Shuffled(4), batch_size=None))
    with pytest.raises(ConfigError, match=r"batch_size=4, but train\.batch_size = 8"):
        plan_train(DataLoader(Shuffled(4), batch_size=4), batch_size=8)
    with pytest.raises(ConfigError, match=r"train\.shuffle = true, but Shuffled"):
        plan_train(Shuffled(4), batch_size=2, shuffle=True)
    with pytest.raises(DataError, match="0 samples"):
        plan_train(Shuffled(0), batch_size=2)
    with pytest.raises(ConfigError, match="cannot be shared by 3 workers"):
        plan_train(Shuffled(4), batch_size=2, world_size=3)


class Failing(Shuffled):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"id": 0}
        raise KeyError("lost")


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_an_error_in_the_dataset_names_it(loader_workers: int) -> None:
    loader = train_loader(DataLoader(Failing(4), batch_size=2, num_workers=loader_workers))
    with pytest.raises(DataError, match=r"of Failing in epoch 0 failed: KeyError: 'lost'"):
        next(loader.batches(0, 0))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_sees_each_sample_once(world: int) -> None:
    assert plan_eval(Shuffled(5), batch_size=2).num_rows == 5
    batches = [
        b
        for rank in range(world)
        for b in eval_loader(Shuffled(5), batch_size=2, rank=rank, world_size=world).batches()
    ]
    assert sorted(n for b in batches for n in ids(b)) == [0, 1, 2, 3, 4]
    assert sorted(b.index for b in batches) == [0, 1, 2]


def test_a_dataset_that_shards_itself_is_left_alone_on_one_rank() -> None:
    data = iterable(DataLoader(ByWorker(10), batch_size=4, num_workers=2), own_shards=True)
    loader = train_loader(data)
    batches = list(loader.batches(0, 0, stop=6))
    assert [b.global_rows for b in batches] == [4, 4, 2] * 2
    assert sorted(n for b in batches[:3] for n in ids(b)) == list(range(10))
    again = list(train_loader(data).batches(0, 1, stop=2))
    assert [ids(b) for b in again] == [ids(b) for b in batches[1:3]]
    evaluated = eval_loader(data, batch_size=4)
    assert sorted(n for b in evaluated.batches() for n in ids(b)) == list(range(10))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 20))
def test_allotments_are_full_and_even(ready: list[int], batch_size: int) -> None:
    given_rows = allotted(ready, batch_size)
    assert sum(given_rows) == min(batch_size, sum(ready))
    assert all(0 <= g <= have for g, have in zip(given_rows, ready, strict=True))
    if all(have >= batch_size for have in ready):
        assert max(given_rows) - min(given_rows) <= 1
