"""Lengths in epochs, steps and time: what is read, what is refused, and how many steps it is."""

from __future__ import annotations

import pytest

from raytrain.durations import Duration, Unit
from raytrain.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("3ep", 3, "ep"),
        ("0.5ep", 0.5, "ep"),
        ("500st", 500, "st"),
        ("2.0st", 2, "st"),
        ("90s", 90, "s"),
        ("90sec", 90, "s"),
        ("10min", 600, "s"),
        ("1.5h", 5400, "s"),
        ("1d", 86400, "s"),
        (" 3 EP ", 3, "ep"),
    ],
)
def test_what_is_read(text: str, amount: float, unit: Unit) -> None:
    assert Duration.parse(text) == Duration(amount, unit)


def test_a_duration_is_taken_as_it_is() -> None:
    duration = Duration(3, "ep")
    assert Duration.parse(duration) is duration


@pytest.mark.parametrize(
    "text", ["", "3", "ep", "3 epochs", "3ms", "-3ep", "3ep4st", "1e3st", "nanep", "infs", "three ep"]
)
def test_what_is_no_duration_is_named_with_what_is(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Duration.parse(text)
    assert repr(text) in str(caught.value)
    assert "'3ep' (epochs), '500st' (optimizer steps)" in str(caught.value)


@pytest.mark.parametrize("text", ["0ep", "0st", "0.0h"])
def test_nothing_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match="must be above zero"):
        Duration.parse(text)


@pytest.mark.parametrize(("amount", "unit"), [(float("nan"), "s"), (-1.0, "ep")])
def test_amounts_that_are_not_above_zero(amount: float, unit: Unit) -> None:
    with pytest.raises(ConfigError, match="must be above zero"):
        Duration(amount, unit)


def test_steps_are_whole() -> None:
    with pytest.raises(ConfigError, match=r"whole numbers, not 1\.5st"):
        Duration.parse("1.5st")


@pytest.mark.parametrize(
    ("text", "steps"),
    [("3ep", 30), ("0.5ep", 5), ("0.01ep", 1), ("0.26ep", 3), ("7st", 7), ("1h", None)],
)
def test_in_steps_of_ten_per_epoch(text: str, steps: int | None) -> None:
    assert Duration.parse(text).in_steps(10) == steps


@pytest.mark.parametrize("text", ["3ep", "0.5ep", "500st", "90s", "1234567st", "100000000st"])
def test_text_is_read_back_to_the_same(text: str) -> None:
    duration = Duration.parse(text)
    assert Duration.parse(str(duration)) == duration
