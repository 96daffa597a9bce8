"""The order of streamed rows: each once, the same at any number of workers and after a resume, and random enough."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain.data.lanes import Fragment, Lanes, Piece
from raytrain.data.order import Indices, Order


@dataclass(frozen=True)
class Case:
    group_rows: list[int]
    batch_size: int
    num_lanes: int
    block_rows: int
    seed: int
    shuffle: bool
    drop_last: bool

    def lanes(self) -> Lanes:
        return Lanes(
            self.group_rows,
            self.batch_size,
            seed=self.seed,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
            num_lanes=self.num_lanes,
            block_rows=self.block_rows,
        )


CASES = st.builds(
    Case,
    st.lists(st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 60)), max_size=12),
    st.integers(1, 40),
    st.integers(1, 10),
    st.integers(1, 30),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.booleans(),
)
WORLDS = st.integers(1, 9)
ACCUMULATE = st.integers(1, 4)


def rows_of(lanes: Lanes, epoch: int, pieces: tuple[Piece, ...]) -> list[int]:
    """The stored rows of these pieces, one by one: slow and plain."""
    order, size = lanes.order(epoch), lanes.block_rows
    return [
        int(order.rows(piece.lane, place // size)[place % size])
        for piece in pieces
        for place in range(piece.first, piece.last)
    ]


def global_batch(lanes: Lanes, epoch: int, index: int, world_size: int, accumulate: int) -> list[int]:
    """What all ranks get of a global batch, in the order of ranks and micro-batches; borrowed rows do not count."""
    together: list[int] = []
    counts = set()
    for rank in range(world_size):
        shares = lanes.shares(index, rank, world_size, accumulate)
        counts.add(len(shares))
        for part in shares:
            rows = rows_of(lanes, epoch, part.pieces)
            assert rows, "every rank has something to pass"
            assert part.num_rows in (0, len(rows))
            together += rows[: part.num_rows]
    assert len(counts) == 1
    return together


@settings(max_examples=150, deadline=None)
@given(CASES, st.integers(0, 3), WORLDS, ACCUMULATE)
def test_each_row_comes_once_in_an_epoch(case: Case, epoch: int, world_size: int, accumulate: int) -> None:
    lanes = case.lanes()
    batches = [global_batch(lanes, epoch, k, world_size, accumulate) for k in range(lanes.steps_per_epoch)]
    assert [len(batch) for batch in batches] == [lanes.rows_of(k) for k in range(lanes.steps_per_epoch)]
    rows = sorted(sum(batches, []))
    num_rows = sum(case.group_rows)
    if case.drop_last:
        assert len(rows) == len(set(rows)) == num_rows - num_rows % case.batch_size
        assert set(rows) <= set(range(num_rows))
    else:
        assert rows == list(range(num_rows))


@settings(max_examples=100, deadline=None)
@given(CASES, st.integers(0, 3), st.lists(st.tuples(WORLDS, ACCUMULATE), min_size=1, max_size=4), st.data())
def test_a_resume_on_other_workers_goes_on_with_the_same_batches(
    case: Case, epoch: int, starts: list[tuple[int, int]], data: st.DataObject
) -> None:
    undisturbed = case.lanes()
    alone = [global_batch(undisturbed, epoch, k, 1, 1) for k in range(undisturbed.steps_per_epoch)]
    index, resumed = 0, []
    for world_size, accumulate in starts:
        lanes = case.lanes()  # nothing but (epoch, index) is carried over
        stop = data.draw(st.integers(index, lanes.steps_per_epoch))
        resumed += [global_batch(lanes, epoch, k, world_size, accumulate) for k in range(index, stop)]
        index = stop
    assert resumed == alone[:index]


@settings(max_examples=100, deadline=None)
@given(CASES, st.integers(0, 3))
def test_positions_deal_from_the_lanes_in_turn(case: Case, epoch: int) -> None:
    lanes = case.lanes()
    for index in range(lanes.steps_per_epoch):
        start = index * case.batch_size
        places = [(p % lanes.num_lanes, p // lanes.num_lanes) for p in range(start, start + lanes.rows_of(index))]
        (part,) = lanes.shares(index, 0, 1, 1)
        assert [(piece.lane, o) for piece in part.pieces for o in range(piece.first, piece.last)] == sorted(places)


@settings(max_examples=100, deadline=None)
@given(CASES, st.integers(0, 3))
def test_blocks_are_fragments_of_row_groups_shuffled_among_themselves(case: Case, epoch: int) -> None:
    lanes = case.lanes()
    order = lanes.order(epoch)
    starts = np.cumsum([0, *case.group_rows])
    sequence: list[int] = []
    for lane in range(lanes.num_lanes):
        for block in range(-(-sum(case.group_rows) // case.block_rows)):
            fragments = list(order.fragments(lane, block))
            assert all(0 <= f.first < f.last <= case.group_rows[f.group] for f in fragments)
            stored = [int(starts[f.group]) + row for f in fragments for row in range(f.first, f.last)]
            permutation = order.permutation(lane, block)
            assert sorted(permutation.tolist()) == list(range(len(stored)))
            assert order.rows(lane, block).tolist() == [stored[place] for place in permutation]
            sequence += stored
    assert sorted(sequence) == list(range(sum(case.group_rows)))
    if not case.shuffle:
        assert sequence == sorted(sequence)


def test_without_shuffling_the_order_is_as_stored() -> None:
    lanes = Lanes([3, 0, 4, 2], 4, seed=5, shuffle=False, block_rows=2)
    assert [global_batch(lanes, 7, k, 2, 1) for k in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert list(lanes.order(0).fragments(0, 1)) == [Fragment(0, 2, 3), Fragment(2, 0, 1)]


def test_as_many_workers_as_lanes_read_one_lane_each() -> None:
    lanes = Lanes([1000] * 10, 64, seed=0, num_lanes=4)
    for index in range(lanes.steps_per_epoch - 1):
        for rank in range(4):
            (part,) = lanes.shares(index, rank, 4, 1)
            assert [piece.lane for piece in part.pieces] == [rank]


def test_blocks_that_only_dropped_rows_need_are_not_counted() -> None:
    kept = Lanes([100], 30, seed=0, drop_last=True, num_lanes=2, block_rows=5)
    assert [kept.num_blocks(lane) for lane in range(2)] == [9, 9]  # 45 of 50 rows
    assert [Lanes([3], 5, seed=0, num_lanes=5).num_blocks(lane) for lane in range(5)] == [1, 1, 1, 0, 0]


def test_no_rows_make_no_steps() -> None:
    assert Lanes([], 5, seed=0).steps_per_epoch == 0
    assert Lanes([0, 0], 5, seed=0).num_blocks(0) == 0


def test_the_order_of_today_is_the_order_of_tomorrow() -> None:
    """Checkpoints hold positions in it: another order in a later version would repeat and skip rows."""
    lanes = Lanes([5, 7, 4], 8, seed=3, num_lanes=2, block_rows=4)
    assert [global_batch(lanes, 1, k, 1, 1) for k in range(2)] == [
        [14, 12, 13, 15, 7, 6, 4, 5],
        [2, 0, 1, 3, 10, 8, 11, 9],
    ]


def test_a_trillion_rows_cost_no_memory() -> None:
    tracemalloc.start()
    lanes = Lanes([10**8] * 10_000, 1024, seed=1)
    head = lanes.order(0).rows(3, 7_000_000)
    shares = lanes.shares(lanes.steps_per_epoch - 1, 1, 2, 2)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(np.unique(head)) == lanes.block_rows
    assert len(shares) == 2
    assert peak_bytes < 5e6


def epoch_order(lanes: Lanes, epoch: int) -> Indices:
    """The stored row at every position of an epoch."""
    rows = np.empty(lanes.num_rows, np.int64)
    for lane in range(lanes.num_lanes):
        blocks = [lanes.order(epoch).rows(lane, block) for block in range(lanes.num_blocks(lane))]
        rows[lane :: lanes.num_lanes] = np.concatenate(blocks)
    return rows


def entropy_bits(labels: Indices) -> float:
    """Mean entropy of the labels within each batch: ``[batches, batch_size]``."""
    shares = np.stack([(labels == label).mean(1) for label in range(10)], 1)
    return float(-(shares * np.log2(np.maximum(shares, 1e-12))).sum(1).mean())


@pytest.mark.parametrize(("block_rows", "least_groups", "least_bits"), [(1638, 18.0, 2.8), (6553, 48.0, 3.2)])
def test_data_that_is_stored_sorted_is_mixed(block_rows: int, least_groups: float, least_bits: float) -> None:
    """The figures of the module's table, at a tenth of its size: blocks of 1.6 and 6.6 row groups of 1,000 rows."""
    num_rows, batch_size, seeds = 100_000, 256, 5
    groups, bits, full_bits, places, epochs = [], [], [], [], []
    for seed in range(seeds):
        lanes = Lanes([1000] * 100, batch_size, seed=seed, block_rows=block_rows)
        rows, later = epoch_order(lanes, 0), epoch_order(lanes, 1)
        batches = rows[: num_rows // batch_size * batch_size].reshape(-1, batch_size)
        full = Order(num_rows, seed, True).slice(0, 0, batches.size).reshape(batches.shape)
        groups.append(np.mean([len(np.unique(batch // 1000)) for batch in batches]))
        bits.append(entropy_bits(batches // 10_000))
        full_bits.append(entropy_bits(full // 10_000))
        places.append(abs(np.corrcoef(np.arange(num_rows), rows)[0, 1]))
        epochs.append(abs(np.corrcoef(np.argsort(rows), np.argsort(later))[0, 1]))
        assert np.mean(rows == later) < 0.001
    assert np.mean(groups) > least_groups
    assert least_bits < np.mean(bits) < np.mean(full_bits)
    assert np.mean(places) < 0.2  # 100 row groups in a random order correlate by 0.1 by chance
    assert np.mean(epochs) < 0.2
