"""Loaders: each sample once, the user's settings kept, positions and random streams that are values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from raytrain.data import (
    Order,
    eval_loader,
    get_rng_state,
    plan_train,
    sample_generator,
    seed_everything,
    set_rng_state,
    train_loader,
)
from raytrain.errors import ConfigError, DataError
from tests.unit.data_kit import Ids, global_batches, ids, take


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3), st.booleans(), st.integers(0, 30))
def test_global_batches_are_slices_of_one_order_on_any_number_of_ranks(
    length: int, batch_size: int, world_size: int, accumulate: int, shuffle: bool, position: int
) -> None:
    batch_size = max(batch_size, world_size)
    steps = -(-length // batch_size)
    epoch, index = divmod(position, steps)
    got = global_batches(
        Ids(length),
        world_size,
        2 * steps,
        epoch,
        index,
        batch_size=batch_size,
        accumulate=accumulate,
        shuffle=shuffle,
        seed=5,
    )
    order, want = Order(length, 5, shuffle), []
    for k in range(2 * steps):
        e, i = divmod(position + k, steps)
        want.append(order.slice(e, i * batch_size, min((i + 1) * batch_size, length)).tolist())
    assert got == want


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_do_the_same_micro_batches_and_their_scales_add_up(world_size: int) -> None:
    ranks = [
        take(train_loader(Ids(10), batch_size=4, accumulate=3, rank=r, world_size=world_size), 3)
        for r in range(world_size)
    ]
    for batches in zip(*ranks, strict=True):
        assert len({(b.epoch, b.index, b.micro, b.num_micros, b.global_rows, b.is_last) for b in batches}) == 1
    scales: dict[int, float] = {}
    for batch in sum(ranks, []):
        scales[batch.index] = scales.get(batch.index, 0.0) + batch.scale
    assert scales == pytest.approx(dict.fromkeys(range(3), world_size))


def test_a_rank_without_rows_borrows_some_of_weight_zero() -> None:
    last = take(train_loader(Ids(10), batch_size=8, shuffle=False, rank=2, world_size=3), 2)[-1]
    assert (last.num_rows, last.scale, last.global_rows) == (0, 0.0, 2)
    assert last.data.tolist() == [8, 9]


def test_orders_differ_by_epoch_and_seed_and_repeat_for_the_same(  # case A2
) -> None:
    for world_size in (1, 2):
        epochs = [global_batches(Ids(16), world_size, 4, epoch, batch_size=4, seed=1) for epoch in range(3)]
        flat = [sum(batches, []) for batches in epochs]
        assert all(sorted(order) == list(range(16)) for order in flat)
        assert len({tuple(order) for order in flat}) == 3
        assert epochs[1] == global_batches(Ids(16), world_size, 4, 1, batch_size=4, seed=1)
        assert epochs[1] != global_batches(Ids(16), world_size, 4, 1, batch_size=4, seed=2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("length", "batch_size"), [(5, 1), (5, 4), (7, 2)])
def test_evaluation_sees_each_sample_once(world_size: int, length: int, batch_size: int) -> None:  # case A1
    seen = [
        ids(batch)
        for rank in range(world_size)
        for batch in eval_loader(Ids(length), batch_size=batch_size, rank=rank, world_size=world_size).batches()
    ]
    flat = sorted(sum(seen, []))
    assert flat == list(range(length))
    assert sum(flat) / len(flat) == sum(range(length)) / length


@pytest.mark.parametrize(  # case A7
    ("data", "options", "words"),
    [
        (
            Ids(3),
            {"batch_size": 8, "drop_last": True, "world_size": 2},
            ["3 samples", "batch of 8", "2 workers", "drop_last"],
        ),
        (Ids(0), {"batch_size": 8}, ["Ids is empty", "0 samples"]),
        (Ids(9), {"batch_size": 2, "world_size": 3}, ["2 samples", "3 workers", "train.batch_size"]),
        (None, {}, ["NoneType", "map-style"]),
        ({"a": 1}, {}, ["dict", "map-style"]),
        (iter([1]), {}, ["iterator", "map-style"]),
        (DataLoader(Ids(8), batch_size=None), {}, ["batch_size=None"]),
        (DataLoader(Ids(8), batch_size=4), {"batch_size": 2}, ["batch_size=4", "train.batch_size = 2"]),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused_with_the_numbers(
    data: Any, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises((DataError, ConfigError)) as caught:
        plan_train(data, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_one_sample_on_two_ranks_is_trained_once() -> None:
    assert global_batches(Ids(1), 2, 1, batch_size=8) == [[0]]


# -- the user's DataLoader: case A5 ------------------------------------------------------------------------------------


def test_a_batch_sampler_of_torch_keeps_its_batches() -> None:
    data = Ids(18)
    loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, True))
    plan = plan_train(loader)
    assert (plan.batch_size, plan.steps_per_epoch, plan.dropped_rows, plan.shuffle) == (4, 4, 2, True)
    batches = global_batches(loader, 2, 4)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert len(set(sum(batches, []))) == 16


class Pairs(Sampler[list[int]]):
    """A batch sampler of its own kind: batches of unequal size."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[list[int]]:
        first = torch.randint(0, 100, (1,)).item()
        yield [int(first), 1]
        yield [2, 3, 4]
        yield [int(np.random.randint(100)), random.randrange(100)]


def test_a_custom_batch_sampler_gives_the_global_batches_and_is_the_same_on_all_ranks() -> None:
    one = global_batches(DataLoader(Ids(100), batch_sampler=Pairs()), 1, 6)
    two = global_batches(DataLoader(Ids(100), batch_sampler=Pairs()), 2, 6)
    assert one == two
    assert [len(batch) for batch in one] == [2, 3, 2] * 2
    assert one[:3] != one[3:]


def test_a_weighted_sampler_keeps_its_distribution_over_ranks() -> None:
    labels = torch.arange(1000) % 2
    weights = torch.where(labels == 0, 0.9, 0.1)
    data = TensorDataset(torch.arange(1000), labels)
    counts: Counter[int] = Counter()
    for rank in range(2):
        loader = DataLoader(data, batch_size=50, sampler=WeightedRandomSampler(weights, 4000))
        for batch in take(train_loader(loader, rank=rank, world_size=2), 80):
            counts.update(batch.data[1].tolist())
    assert counts.total() == 4000
    assert 0.88 < counts[0] / 4000 < 0.92


def test_other_samplers_are_drawn_anew_in_each_epoch_alike_on_all_ranks() -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Ids(20), batch_size=4, sampler=SubsetRandomSampler(range(10, 18)))

    one, two = (global_batches(loader(), world_size, 4) for world_size in (1, 2))
    assert one == two
    assert sorted(sum(one[:2], [])) == sorted(sum(one[2:], [])) == list(range(10, 18))
    assert one[:2] != one[2:]


def test_a_distributed_sampler_of_the_user_is_not_sharded_again() -> None:
    sampler: DistributedSampler[int] = DistributedSampler(Ids(9), num_replicas=2, rank=1, shuffle=False)
    assert global_batches(DataLoader(Ids(9), batch_size=4, sampler=sampler), 2, 3) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_a_sampler_without_a_length_is_refused() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

    with pytest.raises(DataError, match="no length"):
        plan_train(DataLoader(Ids(9), batch_size=4, sampler=Endless()))


def worker_init(worker_id: int) -> None:
    """Does nothing, but must survive."""


def collate(samples: list[int]) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor(samples)}


def test_all_loader_settings_survive() -> None:
    loader = DataLoader(
        Ids(24),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=4,
        multiprocessing_context="fork",
        timeout=20,
        worker_init_fn=worker_init,
        collate_fn=collate,
    )
    ours = train_loader(loader)
    inner = ours.inner
    assert inner is not None
    for name in (
        "num_workers",
        "persistent_workers",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
    ):
        assert getattr(inner, name) == getattr(loader, name), name
    try:
        batches = take(ours, 8)
        assert [sorted(batch.data) for batch in batches] == [["x"]] * 8
        assert sorted(sum((b.data["x"].tolist() for b in batches[:6]), [])) == list(range(24))
    finally:
        ours.close()


# -- random streams -----------------------------------------------------------------------------------------------------


class Noisy(Dataset[tuple[int, float, float, float, float]]):
    """Random augmentation by all streams that users reach for."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[int, float, float, float, float]:
        own = torch.rand((), generator=sample_generator()).item()
        return index, own, torch.rand(()).item(), float(np.random.rand()), random.random()


def noisy(world_size: int, loader_workers: int, index: int = 0, seed: int = 3) -> dict[tuple[int, int], list[float]]:
    found = {}
    for rank in range(world_size):
        loader = train_loader(
            Noisy(), batch_size=4, rank=rank, world_size=world_size, loader_workers=loader_workers, seed=seed
        )
        for batch in take(loader, 6 - index, 0, index):
            for row in zip(*(column.tolist() for column in batch.data), strict=True):
                found[(batch.epoch, row[0])] = list(row[1:])
        loader.close()
    return found


def test_a_fetch_is_the_same_in_this_process_in_a_loader_process_and_after_a_resume() -> None:
    here, there, later = noisy(1, 0), noisy(1, 1), noisy(1, 0, index=2)
    assert here == there
    assert later == {place: here[place] for place in later}
    assert here[(0, 1)] != here[(1, 1)]
    assert here != noisy(1, 0, seed=4)


def test_streams_of_a_sample_do_not_depend_on_the_number_of_ranks() -> None:
    one, two = noisy(1, 0), noisy(2, 0)
    assert {place: values[0] for place, values in one.items()} == {place: values[0] for place, values in two.items()}
    assert len({values[0] for values in one.values()}) == 24


def test_fetching_leaves_the_streams_of_the_model_alone() -> None:
    seed_everything(1)
    want = (torch.rand(3).tolist(), np.random.rand(), random.random())
    seed_everything(1)
    take(train_loader(Noisy(), batch_size=4), 3)
    assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == want


def test_sample_generator_elsewhere_is_an_error() -> None:
    with pytest.raises(DataError, match="inside __getitem__"):
        sample_generator()


def test_streams_are_saved_and_restored_and_load_with_weights_only(tmp_path: Any) -> None:
    seed_everything(5)
    torch.rand(7), np.random.randn(3), random.gauss(0, 1)
    torch.save(get_rng_state(), tmp_path / "rng.pt")
    want = (torch.rand(3).tolist(), np.random.randn(2).tolist(), random.gauss(0, 1), random.random())
    seed_everything(6)
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True))
    assert (torch.rand(3).tolist(), np.random.randn(2).tolist(), random.gauss(0, 1), random.random()) == want


def test_streams_of_gpus_that_are_no_longer_there_are_left_out() -> None:
    state = get_rng_state()
    num_devices = torch.cuda.device_count()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (num_devices + 1)
    set_rng_state(state)
    assert torch.equal(torch.get_rng_state(), state["torch"])


def test_model_streams_differ_by_rank_and_weights_do_not() -> None:
    draws = []
    for rank in (None, None, 0, 1):
        seed_everything(5, rank)
        draws.append(torch.rand(2).tolist())
    assert draws[0] == draws[1]
    assert draws[2] != draws[3]


# -- tensors at once ------------------------------------------------------------------------------------------------------


def test_whole_tensors_are_fetched_to_the_same_bits_as_items() -> None:
    tensors = (torch.randn(50, 3), torch.arange(50), torch.randn(50, 2, 2).to(torch.float16))
    data = Subset(Subset(TensorDataset(*tensors), list(range(40))[::-1]), list(range(5, 30)))
    fast = take(train_loader(data, batch_size=8, seed=1), 4)
    slow = take(
        train_loader(DataLoader(data, batch_size=8, shuffle=True, collate_fn=lambda s: default_collate(s)), seed=1), 4
    )
    for one, other in zip(fast, slow, strict=True):
        assert type(one.data) is type(other.data)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one.data, other.data, strict=True))


def test_a_failing_item_names_the_sample_and_the_users_line() -> None:
    class Broken(Ids):
        def __getitem__(self, index: int) -> int:
            if index == 7:
                raise KeyError("no such file")
            return index

    with pytest.raises(DataError) as caught:
        take(train_loader(Broken(9), batch_size=3, shuffle=False), 3)
    assert "sample 7 of Broken" in str(caught.value)
    assert 'raise KeyError("no such file")' in str(caught.value)
