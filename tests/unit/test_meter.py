"""Metrics are sums and weights: nothing is averaged twice, nothing is lost between windows."""

from __future__ import annotations

import math

import pytest
import torch

from raytrain.errors import RaytrainError
from raytrain.meter import Means, Meter
from raytrain.peers import Peers
from raytrain.weighted import Value, read_loss, read_values


def test_batches_of_unequal_size_are_weighted_by_their_rows() -> None:
    meter, means = Meter(Peers()), Means()
    for mean, rows in ((1.0, 4), (1.0, 4), (10.0, 1)):
        meter.add({"loss": Value(torch.tensor(mean), rows)})
        meter.end_step()
    steps, _ = meter.reduce([])
    for sums in steps:
        means.add(sums)
    assert sum(weight for step in steps for _, weight in step.values()) == 9
    assert means.take() == {"loss": 2.0}


def test_micro_batches_of_one_step_add_up() -> None:
    meter = Meter(Peers())
    meter.add({"loss": Value(1.0, 3)})
    meter.add({"loss": Value(torch.tensor(5.0, dtype=torch.float64), 1)})
    meter.end_step()
    (sums,), _ = meter.reduce([])
    assert sums == {"loss": (8.0, 4.0)}


def test_a_sum_is_not_multiplied_by_its_weight_again() -> None:
    meter = Meter(Peers())
    meter.add({"loss": Value(torch.tensor(12.0), torch.tensor(6), is_sum=True)})
    meter.end_step()
    assert meter.reduce([])[0] == [{"loss": (12.0, 6.0)}]


def test_weight_zero_does_not_count_even_when_the_value_is_nan() -> None:
    meter = Meter(Peers())
    meter.add({"loss": Value(math.nan, 0), "other": Value(1.0, 1)})
    meter.end_step()
    assert meter.reduce([])[0] == [{"other": (1.0, 1.0)}]


def test_values_do_not_depend_on_where_windows_end() -> None:
    values = [0.1 * k + 0.01 for k in range(12)]
    results = []
    for window in (1, 5, 12):
        meter, means = Meter(Peers()), Means()
        for k, value in enumerate(values, start=1):
            meter.add({"loss": Value(torch.tensor(value, dtype=torch.float64), 3), f"only/{k % 2}": Value(value, 1)})
            meter.end_step()
            if k % window == 0:
                for sums in meter.reduce([])[0]:
                    means.add(sums)
        for sums in meter.reduce([])[0]:
            means.add(sums)
        results.append(means.take())
    assert results[0] == results[1] == results[2]


def test_running_means_go_on_from_a_checkpoint() -> None:
    unbroken, first, second = Means(), Means(), Means()
    for total in (0.3, 0.7):
        unbroken.add({"loss": (total, 2.0)})
        first.add({"loss": (total, 2.0)})
    second.load_state_dict(first.state_dict())
    for means in (unbroken, second):
        means.add({"loss": (0.11, 1.0)})
    assert second.take() == unbroken.take()
    assert second.take() == {}


def test_control_words_come_back_by_rank() -> None:
    assert Meter(Peers()).reduce([1.0, 0.25])[1] == [[1.0, 0.25]]


@pytest.mark.parametrize(
    ("output", "amount", "weight", "is_sum"),
    [
        (torch.tensor(2.0), 2.0, 5, False),
        ((torch.tensor(10.0), 4), 10.0, 4.0, True),
        ((torch.tensor(10.0), torch.tensor(4)), 10.0, 4, True),
        ((torch.tensor(2.0), {"accuracy": 0.5}), 2.0, 5, False),
        (((torch.tensor(10.0), 4), {"accuracy": (3, 4)}), 10.0, 4.0, True),
        (torch.tensor([2.0]), 2.0, 5, False),
    ],
)
def test_each_form_of_a_loss_is_read(output: object, amount: float, weight: float, is_sum: bool) -> None:
    value = read_loss(output, num_rows=5).value
    assert (float(value.amount), float(value.weight), value.is_sum) == (amount, weight, is_sum)


def test_metrics_beside_a_loss_are_read_and_detached() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    loss = read_loss((x * 2, {"a": x, "b": (x, 7)}), num_rows=5)
    assert loss.metrics["a"].weight == 5
    assert not loss.metrics["a"].amount.requires_grad
    assert (loss.metrics["b"].weight, loss.metrics["b"].is_sum) == (7.0, True)
    assert loss.value.amount.requires_grad


@pytest.mark.parametrize("output", [None, "x", torch.zeros(2), (1, 2, 3), 1.0, {"loss": 1.0}])
def test_another_form_is_refused_with_the_allowed_ones(output: object) -> None:
    with pytest.raises(RaytrainError, match="Allowed: a scalar tensor"):
        read_loss(output, num_rows=5)


def test_logged_values_are_means_or_pairs() -> None:
    values = read_values({"a": 0.5, "b": (3.0, 6)}, num_rows=4)
    assert (values["a"].weight, values["a"].is_sum) == (4, False)
    assert (values["b"].amount, values["b"].weight, values["b"].is_sum) == (3.0, 6.0, True)


def test_what_is_counted_in_borrowed_rows_does_not_count() -> None:
    x = torch.ones(())
    loss = read_loss(((x * 6, 3), {"a": (x, 7), "b": x}), num_rows=0)
    assert [value.weight for value in (loss.value, *loss.metrics.values())] == [0, 0, 0]
    assert read_values({"a": (5.0, 2)}, num_rows=0)["a"].weight == 0
