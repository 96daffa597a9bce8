"""Samplers of the user's: taken for what they are, alike on all ranks and after a resume, refused where that cannot be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from raytrain.data import eval_loader, plan_eval, plan_train, train_loader
from raytrain.errors import ConfigError, DataError
from tests.unit.data_kit import Ids, global_batches, ids, take


class Private(Sampler[int]):
    """Draws from a stream that it keeps to itself."""

    def __init__(self, stream: Any, draw: Callable[[Any], list[int]]) -> None:
        self.stream, self.draw = stream, draw

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.stream))


class Counting(Sampler[int]):
    """Knows its epoch by how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter([self.asked, 0, 0, 0])


class Told(Sampler[int]):
    """Knows its epoch because it is told."""

    epoch = -1

    def __len__(self) -> int:
        return 4

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch, 0, 0, 0])


PRIVATE: dict[str, Callable[[], Sampler[int]]] = {
    "torch": lambda: Private(torch.Generator(), lambda g: torch.randperm(12, generator=g).tolist()),
    "numpy": lambda: Private(np.random.default_rng(0), lambda g: g.permutation(12).tolist()),
    "numpy, old": lambda: Private(np.random.RandomState(0), lambda g: g.permutation(12).tolist()),
    "random": lambda: Private(random.Random(0), lambda g: g.sample(range(12), 12)),
    "global torch": lambda: Private(None, lambda _: torch.randperm(12).tolist()),
    "global numpy": lambda: Private(None, lambda _: np.random.permutation(12).tolist()),
    "replacement": lambda: RandomSampler(Ids(12), replacement=True, num_samples=12),
    "own generator": lambda: WeightedRandomSampler([0.5] * 12, 12, generator=torch.Generator()),
    "counting": lambda: Counting(),
    "told": lambda: Told(),
}


@pytest.mark.parametrize("kind", PRIVATE)
def test_an_epoch_of_any_sampler_is_the_same_on_all_ranks_and_after_a_resume(kind: str) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Ids(12), batch_size=4, sampler=PRIVATE[kind]())

    steps = plan_train(loader()).steps_per_epoch
    whole = global_batches(loader(), 1, 4 * steps, seed=3)
    assert whole == global_batches(loader(), 2, 4 * steps, seed=3)
    for position in range(4 * steps):
        epoch, index = divmod(position, steps)
        resumed = global_batches(loader(), 2, 4 * steps - position, epoch, index, seed=3)
        assert resumed == whole[position:]
    epochs = [whole[e * steps : (e + 1) * steps] for e in range(4)]
    assert all(one != other for i, one in enumerate(epochs) for other in epochs[:i])


def test_a_sampler_within_a_batch_sampler_is_told_the_epoch_and_seeded_as_well() -> None:
    class Halves(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            yield from list(super().__iter__())[::-1]

    def loader(inner: Sampler[int]) -> DataLoader[int]:
        return DataLoader(Ids(12), batch_sampler=Halves(inner, 2, False))

    assert global_batches(loader(Told()), 1, 4) == [[0, 0], [0, 0], [0, 0], [1, 0]]
    private = [global_batches(loader(PRIVATE["numpy"]()), world_size, 12) for world_size in (1, 2)]
    assert private[0] == private[1]
    assert private[0][:6] != private[0][6:]


def test_drawing_leaves_the_global_streams_alone() -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    want = torch.rand(2).tolist(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    global_batches(DataLoader(Ids(12), batch_size=4, sampler=RandomSampler(Ids(12), replacement=True)), 1, 6)
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == want


def test_an_order_of_a_part_of_the_dataset_stays_one() -> None:
    for sampler in (RandomSampler(range(6)), SequentialSampler(range(6)), DistributedSampler(Ids(6), 2, 0)):
        batches = global_batches(DataLoader(Ids(10), batch_size=3, sampler=sampler), 2, 2)
        assert sorted(sum(batches, [])) == list(range(6)), sampler


def test_a_random_sampler_of_some_samples_draws_so_many() -> None:
    plan = plan_train(DataLoader(Ids(20), batch_size=4, sampler=RandomSampler(Ids(20), num_samples=8)))
    assert (plan.num_rows, plan.steps_per_epoch) == (8, 2)


def test_drop_last_of_samplers_and_loaders() -> None:
    weighted = WeightedRandomSampler([1.0] * 10, 10)
    plan = plan_train(DataLoader(Ids(10), batch_size=4, sampler=weighted, drop_last=True))
    assert (plan.steps_per_epoch, plan.dropped_rows) == (2, 2)
    even: DistributedSampler[int] = DistributedSampler(Ids(10), 2, 0, drop_last=True)
    assert plan_train(DataLoader(Ids(10), batch_size=4, sampler=even)).dropped_rows == 2
    assert plan_train(DataLoader(Ids(10), batch_size=4, drop_last=True), drop_last=False).steps_per_epoch == 3


class Sharded(DistributedSampler[int]):
    """A DistributedSampler with an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 10, self.num_replicas))


class Listed(Sampler[Any]):
    """Yields what it is given."""

    def __init__(self, entries: list[Any], says: int | None = None) -> None:
        self.entries, self.says = entries, says

    def __len__(self) -> int:
        return len(self.entries) if self.says is None else self.says

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)


class Sorted(BatchSampler):
    """A batch sampler of the user's over any sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return (sorted(batch) for batch in super().__iter__())


class Endless(Sampler[int]):
    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


def sampled(sampler: Any) -> DataLoader[int]:
    return DataLoader(Ids(10), batch_size=4, sampler=sampler)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sampled(Sharded(Ids(10), 2, 0)), ["Sharded", "2 ranks", "num_replicas=1"]),
        (
            lambda: DataLoader(Ids(10), batch_sampler=Sorted(DistributedSampler(Ids(10), 2, 0), 2, False)),
            ["DistributedSampler", "2 ranks"],
        ),
        (lambda: sampled(SequentialSampler(range(11))), ["SequentialSampler", "11 samples", "dataset has 10"]),
        (lambda: sampled(Listed([1, 2, 10, 3])), ["Listed yielded 10", "10 samples", "0 to 9"]),
        (lambda: sampled(Listed([1, -1])), ["Listed yielded -1"]),
        (lambda: sampled(Listed(["a", "b"])), ["whole numbers"]),
        (lambda: sampled(Listed([1, 2], says=3)), ["says that it has 3", "yielded 2"]),
        (lambda: sampled(Endless()), ["says that it has 6", "yielded more"]),
        (lambda: DataLoader(Ids(10), batch_sampler=Listed([[1, 2], [], [3]])), ["empty batch", "Listed"]),
    ],
)
def test_samplers_that_cannot_be_followed_are_refused(make: Callable[[], DataLoader[int]], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        take(train_loader(make()), 1)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("loader", "options", "words"),
    [
        (
            sampled(WeightedRandomSampler([1.0], 4)),
            {"shuffle": False},
            ["train.shuffle = False", "WeightedRandomSampler"],
        ),
        (
            DataLoader(Ids(9), batch_sampler=Listed([[1], [2]])),
            {"drop_last": True},
            ["train.drop_last = True", "Listed"],
        ),
        (DataLoader(Ids(9), batch_sampler=Listed([[1], [2]])), {"batch_size": 2}, ["train.batch_size = 2", "Listed"]),
    ],
)
def test_settings_that_the_users_sampler_decides_are_refused_beside_it(
    loader: DataLoader[int], options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_train(loader, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


# -- evaluation -----------------------------------------------------------------------------------------------------------


def evaluated(make: Callable[[], Any], world_size: int) -> dict[int, list[int]]:
    return {
        batch.index: ids(batch)
        for rank in range(world_size)
        for batch in eval_loader(make(), batch_size=7, rank=rank, world_size=world_size).batches()
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_takes_the_samples_that_a_sampler_picks_and_no_others(world_size: int) -> None:
    def loader() -> DataLoader[int]:
        return DataLoader(Ids(20), batch_size=4, sampler=SubsetRandomSampler(range(10, 17)))

    batches = evaluated(loader, world_size)
    assert sorted(sum(batches.values(), [])) == list(range(10, 17))
    assert batches == evaluated(loader, 1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_evaluation_goes_through_shuffled_and_short_batches_in_order(world_size: int) -> None:
    batches = evaluated(lambda: DataLoader(Ids(10), batch_size=4, shuffle=True, drop_last=True), world_size)
    assert batches == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9]}
    own = evaluated(lambda: DataLoader(Ids(10), batch_sampler=Listed([[5, 4], [3], [9, 8, 7]])), world_size)
    assert own == {0: [5, 4], 1: [3], 2: [9, 8, 7]}


def test_an_evaluation_repeats_the_same_samples() -> None:
    loader = eval_loader(sampled(RandomSampler(Ids(10), replacement=True)), batch_size=4)
    first, second = ([ids(batch) for batch in loader.batches()] for _ in range(2))
    assert first == second


def test_the_plan_says_how_the_loader_was_understood() -> None:
    assert "SubsetRandomSampler" in plan_eval(sampled(SubsetRandomSampler([1])), batch_size=4).note
    assert "short batch" in plan_eval(DataLoader(Ids(9), batch_size=4, drop_last=True), batch_size=4).note
    assert "in_order" in plan_train(DataLoader(Ids(9), batch_size=4, num_workers=1, in_order=False)).note
    assert plan_train(DataLoader(Ids(9), batch_size=4)).note == ""
