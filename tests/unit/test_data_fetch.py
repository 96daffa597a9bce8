"""Fetching: the user's code under streams of its own, whole tensors where they are the same, errors that say where."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)

from raytrain.data import eval_loader, plan_train, sample_generator, seed_everything, train_loader
from raytrain.data.fetch import tensor_rows
from raytrain.errors import DataError
from tests.unit.data_kit import Ids, take


class Augmented(Ids):
    """Two random numbers per item, each from the item's own stream."""

    def __getitem__(self, index: int) -> Any:
        draws = [torch.rand((), generator=sample_generator()).item() for _ in range(2)]
        return (index, *draws)


def draws_of(data: Any, world_size: int = 1, loader_workers: int = 0) -> dict[int, tuple[float, ...]]:
    """The numbers that each sample drew in epoch 0."""
    found = {}
    for rank in range(world_size):
        loader = train_loader(data, batch_size=4, rank=rank, world_size=world_size, loader_workers=loader_workers)
        for batch in take(loader, loader.steps_per_epoch):
            if batch.num_rows:
                for index, *numbers in zip(*(column.tolist() for column in batch.data), strict=True):
                    found[index] = tuple(numbers)
        loader.close()
    return found


def test_two_augmentations_of_a_sample_draw_different_numbers() -> None:
    assert all(one != other for one, other in draws_of(Augmented(8)).values())


def test_the_stream_of_a_sample_is_there_within_torchs_wrappers() -> None:
    part, rest = random_split(Augmented(12), [8, 4], torch.Generator().manual_seed(0))
    assert len(draws_of(part)) == 8
    assert draws_of(Subset(rest, [0, 2])).keys() <= draws_of(rest).keys()
    stacked = StackDataset(Augmented(8))
    batch = take(train_loader(stacked, batch_size=8), 1)[0]
    assert len(set(batch.data[0][1].tolist())) == 8


def test_the_stream_of_a_sample_depends_on_nothing_else() -> None:
    part = Subset(Augmented(12), list(range(11)))
    assert draws_of(part) == draws_of(part, world_size=3) == draws_of(part, world_size=2, loader_workers=1)


def mixed_up(samples: list[int]) -> tuple[torch.Tensor, float, float, float]:
    return torch.tensor(samples), torch.rand(()).item(), float(np.random.rand()), random.random()


def test_random_numbers_of_a_collate_function_belong_to_the_batch() -> None:
    def fetched(loader_workers: int, index: int = 0) -> dict[tuple[int, int], Any]:
        loader = train_loader(DataLoader(Ids(12), batch_size=4, num_workers=loader_workers, collate_fn=mixed_up))
        got = {(b.epoch, b.index): (b.data[0].tolist(), *b.data[1:]) for b in take(loader, 6 - index, 0, index)}
        loader.close()
        return got

    seed_everything(1)
    want = torch.rand(()).item(), np.random.rand(), random.random()
    seed_everything(1)
    here = fetched(0)
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == want
    assert fetched(1) == here
    assert fetched(2, index=2) == {place: value for place, value in here.items() if place >= (0, 2)}
    assert len({value[1:] for value in here.values()}) == 6


class ByBatch(Ids):
    """Fetches many samples at once."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        if 7 in indices:
            raise KeyError("no such file")
        return [index * 10 for index in indices]


def test_a_dataset_that_fetches_batches_is_asked_for_them() -> None:
    assert take(train_loader(ByBatch(6), batch_size=3, shuffle=False), 1)[0].data.tolist() == [0, 10, 20]
    assert take(train_loader(Subset(ByBatch(6), [4, 5]), batch_size=2, shuffle=False), 1)[0].data.tolist() == [40, 50]


def uneven(samples: list[int]) -> torch.Tensor:
    return torch.stack([torch.zeros(sample) for sample in samples])


class Broken(Ids):
    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise KeyError("no such file")
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "collate_fn", "words"),
    [
        (Broken(9), None, ["sample 7 of Broken", "KeyError", 'raise KeyError("no such file")']),
        (ByBatch(9), None, ["samples 6, 7, 8 of ByBatch", 'raise KeyError("no such file")']),
        (Ids(9), uneven, ["collating samples 0, 1, 2 of Ids", "equal size", "torch.stack([torch.zeros"]),
    ],
)
def test_a_failing_fetch_names_the_samples_and_the_users_line(
    data: Any, collate_fn: Any, words: list[str], num_workers: int
) -> None:
    loader = train_loader(DataLoader(data, batch_size=3, collate_fn=collate_fn, num_workers=num_workers))
    with pytest.raises(DataError) as caught:
        take(loader, 3)
    loader.close()
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Curriculum(Ids):
    """Its items tell the epoch that it was told, and the process that it is in."""

    epoch = -1
    told: ClassVar[list[int]] = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __getitem__(self, index: int) -> int:
        return self.epoch


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_dataset_is_told_the_epoch_in_every_process(loader_workers: int) -> None:
    loader = train_loader(Curriculum(8), batch_size=4, loader_workers=loader_workers)
    batches = take(loader, 5, epoch=1)
    loader.close()
    assert [batch.data.tolist() for batch in batches] == [[1] * 4] * 2 + [[2] * 4] * 2 + [[3] * 4]


def test_evaluation_does_not_touch_the_epoch_of_the_dataset() -> None:
    data = Curriculum(4)
    data.set_epoch(5)
    assert next(iter(eval_loader(data, batch_size=4).batches())).data.tolist() == [5] * 4


# -- loader processes -------------------------------------------------------------------------------------------------------


class Pid(Ids):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


def pids(batches: Any) -> set[int]:
    return {pid for batch in batches for pid in batch.data.tolist()}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("persistent", [True, False])
def test_loader_processes_serve_all_epochs_end_with_close_and_start_again(persistent: bool) -> None:
    loader = train_loader(DataLoader(Pid(8), batch_size=2, num_workers=2, persistent_workers=persistent))
    first = pids(take(loader, 12))
    assert len(first) == 2
    assert os.getpid() not in first
    loader.close()
    assert not any(alive(pid) for pid in first)
    again = pids(take(loader, 4, epoch=3))
    assert len(again) == 2
    loader.close()
    loader.close()
    assert not any(alive(pid) for pid in again)


def test_an_evaluation_that_is_left_early_can_be_repeated() -> None:
    loader = eval_loader(DataLoader(Ids(40), batch_size=2, num_workers=2, persistent_workers=True), batch_size=2)
    try:
        assert next(iter(loader.batches())).index == 0
        assert [batch.data.tolist() for batch in loader.batches()] == [[i, i + 1] for i in range(0, 40, 2)]
    finally:
        loader.close()


def test_batches_keep_their_order_whatever_in_order_says() -> None:
    loader = train_loader(DataLoader(Ids(40), batch_size=2, num_workers=2, in_order=False), accumulate=2)
    assert loader.inner is not None
    assert loader.inner.in_order
    places = [(batch.index, batch.micro) for batch in take(loader, 20)]
    loader.close()
    assert places == [(index, micro) for index in range(20) for micro in range(2)]


def test_loader_processes_can_be_spawned() -> None:
    data = Subset(TensorDataset(torch.arange(8)), range(4))
    ours = DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    loader = train_loader(ours)
    try:
        assert [batch.data[0].tolist() for batch in take(loader, 2)] == [[0, 1], [2, 3]]
    finally:
        loader.close()


def test_a_loader_that_changes_what_is_yielded_is_refused() -> None:
    class Doubled(DataLoader[int]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return (batch * 2 for batch in super().__iter__())

    class Renamed(DataLoader[int]):
        """Only settings."""

    with pytest.raises(DataError, match="Doubled changes what a DataLoader yields"):
        plan_train(Doubled(Ids(4), batch_size=2))
    assert plan_train(Renamed(Ids(4), batch_size=2)).steps_per_epoch == 2


# -- whole tensors ------------------------------------------------------------------------------------------------------------


TENSORS = {
    "floats": torch.randn(30, 3),
    "bools": torch.rand(30) > 0.5,
    "complex": torch.randn(30, 2, dtype=torch.complex64),
    "half": torch.randn(30, 2).to(torch.bfloat16),
    "transposed": torch.randn(4, 30).t(),
    "channels last": torch.randn(30, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": torch.randn(1, 6).expand(30, 6),
    "every second": torch.randn(60, 2)[::2],
    "conjugated": torch.randn(30, 2, dtype=torch.complex64).conj(),
    "no columns": torch.empty(30, 0),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("part", [None, [3, -1, 3, 0, 29], np.arange(5), range(4, 9), torch.tensor([2, 1])])
def test_rows_of_tensors_are_what_collating_items_gives(name: str, part: Any) -> None:
    data: Dataset[Any] = TensorDataset(TENSORS[name], torch.arange(30))
    if part is not None:
        data = Subset(data, part)
    rows = tensor_rows(data, default_collate)
    assert rows is not None
    indices = np.array([1, 0, 1])
    got, want = rows(indices), default_collate([data[i] for i in indices])
    assert type(got) is type(want)
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


def test_other_datasets_are_fetched_item_by_item() -> None:
    class Own(TensorDataset):
        """Could do anything."""

    class Marked(torch.Tensor):
        """Could be anything."""

    base = TensorDataset(torch.arange(4))
    assert tensor_rows(base, lambda samples: samples) is None
    assert tensor_rows(Own(torch.arange(4)), default_collate) is None
    assert tensor_rows(TensorDataset(torch.arange(4.0).requires_grad_()), default_collate) is None
    assert tensor_rows(TensorDataset(torch.arange(4).as_subclass(Marked)), default_collate) is None
    assert tensor_rows(TensorDataset(torch.eye(4).to_sparse()), default_collate) is None
    with pytest.raises(DataError, match="sample 1 of Subset failed: IndexError"):
        take(train_loader(Subset(base, [0, 9]), batch_size=2, shuffle=False), 1)
