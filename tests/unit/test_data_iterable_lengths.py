"""Iterable datasets of known and unknown length that each rank reads in full: ends of epochs, resumes, loader processes, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from raytrain.data import plan_train, train_loader
from raytrain.errors import ConfigError, DataError
from tests.unit.data_kit import global_batches, ids, take
from tests.unit.iter_kit import Count, Lying, PerWorker, Sized, Told


@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    accumulate=st.integers(1, 3),
    cut=st.integers(0, 40),
    sized=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_each_id_once_per_epoch_over_any_resume(
    num_rows: int, batch_size: int, worlds: tuple[int, int], accumulate: int, cut: int, sized: bool
) -> None:
    batch_size = max(batch_size, *worlds)
    data = (Sized if sized else Count)(num_rows, shuffle=True)
    steps = -(-num_rows // batch_size)
    options: dict[str, Any] = {"batch_size": batch_size, "accumulate": accumulate, "seed": 5}
    cut = cut % (2 * steps)  # in the first or the second epoch
    before = global_batches(data, worlds[0], cut, **options) if cut else []
    after = global_batches(data, worlds[1], 2 * steps - cut, cut // steps, cut % steps, **options)
    whole = global_batches(data, 1, 2 * steps, **options)
    assert before + after == whole
    for epoch in (0, 1):
        assert sorted(sum(whole[epoch * steps : (epoch + 1) * steps], [])) == list(range(num_rows))
    assert [len(batch) for batch in whole[:steps]] == [
        min(batch_size, num_rows - i) for i in range(0, num_rows, batch_size)
    ]


def test_the_order_is_new_in_each_epoch_and_of_each_seed() -> None:
    data = Count(20, shuffle=True)
    first, second = global_batches(data, 2, 2, batch_size=20)
    assert first != second
    assert [first, second] == global_batches(data, 1, 2, batch_size=20)
    assert global_batches(data, 2, 1, batch_size=20, seed=1) != [first]


def test_the_models_streams_are_left_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    got = []
    for batch in train_loader(Count(9, shuffle=True), batch_size=3).batches(0, 0, 3):
        got.append(torch.rand(1))
        assert batch.num_rows == 3
    assert torch.equal(torch.cat(got), want)


def test_weights_of_a_short_last_batch_and_its_borrowed_rows() -> None:
    loaders = [train_loader(Count(5), batch_size=4, rank=rank, world_size=2) for rank in (0, 1)]
    (_, last_0), (_, last_1) = (take(loader, 2) for loader in loaders)
    assert (last_0.num_rows, last_0.global_rows, last_0.scale, last_0.ends_epoch) == (1, 1, 2.0, True)
    assert (last_1.num_rows, last_1.scale, last_1.ends_epoch) == (0, 0.0, True)
    assert last_1.data.tolist() == [4]


def test_plans() -> None:
    assert plan_train(Sized(10), batch_size=4).steps_per_epoch == 3
    assert plan_train(Sized(10), batch_size=4, drop_last=True).dropped_rows == 2
    unknown = plan_train(Count(10), batch_size=4)
    assert (unknown.num_rows, unknown.steps_per_epoch) == (None, None)
    assert str(unknown).startswith("an unknown number of samples in order in an unknown number of global batches of 4")


@pytest.mark.parametrize(
    ("yields", "text"), [(8, "10 samples, but yielded only 8 in epoch 0"), (13, "10.*at least 12")]
)
def test_a_wrong_length_is_told_with_both_counts(yields: int, text: str) -> None:
    for rank in (0, 1):
        with pytest.raises(DataError, match=text):
            take(train_loader(Lying(yields, says=10), batch_size=4, rank=rank, world_size=2), 4)


def test_an_empty_one_and_one_that_cannot_begin_again() -> None:
    with pytest.raises(DataError, match="empty in epoch 0: 0 samples"):
        take(train_loader(Count(0)), 1)
    with pytest.raises(DataError, match="empty: 0 samples"):
        plan_train(Sized(0))

    class Once(Count):
        def __init__(self) -> None:
            super().__init__(3)
            self.left = iter(range(3))

        def __iter__(self) -> Any:
            return self.left

    with pytest.raises(DataError, match=r"empty in epoch 1.*begin anew"):
        take(train_loader(Once(), batch_size=3), 2)


def test_drop_last_and_data_that_ended_before_the_position() -> None:
    assert global_batches(Count(10), 2, 3, batch_size=4, drop_last=True) == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    with pytest.raises(DataError, match="no full batch of 16"):
        take(train_loader(Count(10), batch_size=16, drop_last=True), 1)
    with pytest.raises(DataError, match=r"3 batches in epoch 0.*trained on 3 of.*must be the same"):
        list(train_loader(Count(10), batch_size=4).batches(0, 3, 1))


def test_set_epoch_is_called() -> None:
    batches = take(train_loader(Told(4), batch_size=2), 4)
    assert [ids(batch) for batch in batches] == [[0, 1], [2, 3], [100, 101], [102, 103]]


def collate(samples: list[int]) -> torch.Tensor:
    info = get_worker_info()
    return torch.tensor([1000 * (info is not None) + sample for sample in samples])


def started(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.num_workers == 1
    info.dataset.num_rows = 6  # as torch's documentation cuts datasets: found on the user's dataset


@pytest.mark.parametrize("kind", [Count, PerWorker])
def test_a_loaders_settings_are_kept_and_processes_repeat_nothing(kind: type[Count]) -> None:
    made = DataLoader(kind(10, shuffle=True), batch_size=4, num_workers=3, collate_fn=collate, prefetch_factor=1)
    loaders = [train_loader(made, rank=rank, world_size=2) for rank in (0, 1)]
    shares = [take(loader, 6) for loader in loaders]
    seen = [sum((ids(rank[step]) for rank in shares), []) for step in range(6)]
    assert sorted(sum(seen[:3], [])) == sorted(sum(seen[3:], [])) == list(range(1000, 1010))
    assert [[i - 1000 for i in batch] for batch in seen] == global_batches(kind(10, shuffle=True), 1, 6, batch_size=4)
    for loader in loaders:
        loader.close()


def test_worker_init_fn_finds_the_users_dataset() -> None:
    loader = train_loader(DataLoader(Count(10), batch_size=3, num_workers=2, worker_init_fn=started))
    assert [ids(batch) for batch in take(loader, 2)] == [[0, 1, 2], [3, 4, 5]]
    loader.close()


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.shuffle = true"):
        plan_train(Count(4), shuffle=True)
    with pytest.raises(ConfigError, match="batch_size=2, but train"):
        plan_train(DataLoader(Count(4), batch_size=2), batch_size=3)
    with pytest.raises(DataError, match="batch_size=None"):
        plan_train(DataLoader(Count(4), batch_size=None))
    with pytest.raises(ConfigError, match="cannot be shared by 4 workers"):
        plan_train(Count(4), batch_size=2, world_size=4)
