"""The order of samples: a permutation for every epoch, random enough, in constant memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.data.order import Order, key_of, share, shuffled

LENGTHS = st.one_of(st.integers(1, 300), st.sampled_from([65535, 65536, 65537, 70001, 131072]))


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_every_epoch_is_a_permutation_and_a_pure_function(length: int, seed: int, epoch: int) -> None:
    whole = Order(length, seed, shuffle=True).slice(epoch, 0, length)
    assert np.array_equal(np.sort(whole), np.arange(length))
    again = Order(length, seed, shuffle=True)
    start, stop = length // 3, length - length // 4
    again.slice(epoch + 1, 0, min(5, length))
    assert np.array_equal(again.slice(epoch, start, stop), whole[start:stop])


@pytest.mark.parametrize("length", [1000, 100_003])
def test_epochs_and_seeds_are_unlike_each_other(length: int) -> None:
    orders = [
        Order(length, seed, True).slice(epoch, 0, length) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2))
    ]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert np.mean(one == other) < 5 / length + 5 / length**0.5 / 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 5 / length**0.5


@pytest.mark.parametrize("length", [5, 24, 1000])
def test_small_orders_are_uniform(length: int) -> None:
    """Each sample is first equally often (chi-square, far below the 1e-6 quantile of a good order)."""
    draws = 4000
    counts = np.bincount([Order(length, 3, True).slice(epoch, 0, 1)[0] for epoch in range(draws)], minlength=length)
    expected = draws / length
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert chi2 < length + 6 * (2 * length) ** 0.5 + 10


def test_large_orders_have_no_visible_structure() -> None:
    length = 1_000_003
    head = Order(length, 9, True).slice(0, 0, 50_000)
    buckets = np.bincount(head * 100 // length, minlength=100)
    assert float(((buckets - 500) ** 2 / 500).sum()) < 100 + 6 * 200**0.5
    steps = np.diff(head)
    assert len(np.unique(steps)) > 0.95 * len(steps)
    assert abs(np.corrcoef(head[:-1], head[1:])[0, 1]) < 0.03


def test_a_billion_samples_cost_no_memory() -> None:
    tracemalloc.start()
    head = Order(10**9, 1, True).slice(0, 999_999_000, 10**9)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(head)) == 1000
    assert peak_bytes < 20e6


def test_without_shuffling_the_order_is_as_stored() -> None:
    assert Order(10, 0, shuffle=False).slice(3, 2, 6).tolist() == [2, 3, 4, 5]


def test_an_empty_slice() -> None:
    assert Order(10, 0, True).slice(0, 4, 4).tolist() == []


def test_the_order_of_today_is_the_order_of_tomorrow() -> None:
    """Checkpoints hold positions in it: another order in a later version would repeat and skip samples."""
    assert shuffled(np.arange(8), 8, seed=0, epoch=0).tolist() == [7, 1, 6, 0, 3, 5, 4, 2]
    assert Order(70_000, 0, True).slice(1, 0, 4).tolist() == [28091, 63937, 58874, 35942]
    assert key_of(1, 2, 3) == 9812528628958509896


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_contiguous_and_even(num_rows: int, num_parts: int) -> None:
    parts = [share(num_rows, part, num_parts) for part in range(num_parts)]
    assert parts[0][0] == 0
    assert parts[-1][1] == num_rows
    assert all(before[1] == after[0] for before, after in zip(parts, parts[1:], strict=False))
    sizes = [stop - start for start, stop in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
