"""When something is due, without waiting for it."""

from __future__ import annotations

import pytest

from raytrain.cadence import Cadence, Limit
from raytrain.config import TrainConfig


def due_steps(every: str | None, steps_per_epoch: int = 4, upto: int = 12) -> list[int]:
    cadence = Cadence(every, steps_per_epoch)
    return [step for step in range(1, upto + 1) if cadence.due(step, clock_s=0.0)]


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("1ep", [4, 8, 12]),
        ("5st", [5, 10]),
        ("0.5ep", [2, 4, 6, 8, 10, 12]),
        (None, []),
        ("0.01ep", list(range(1, 13))),
    ],
)
def test_epochs_and_steps(every: str | None, steps: list[int]) -> None:
    assert due_steps(every) == steps


def test_wall_time_is_due_once_per_stretch_of_the_shared_clock() -> None:
    cadence = Cadence("10s", 4)
    clock = [0.0, 9.9, 10.0, 10.1, 19.0, 21.0, 22.0]
    assert [cadence.due(step, at) for step, at in enumerate(clock, 1)] == [
        False,
        False,
        True,
        False,
        False,
        True,
        False,
    ]


def test_wall_time_goes_on_from_a_resumed_clock() -> None:
    cadence = Cadence("10s", 4, start_s=100.0)
    assert [cadence.due(1, at) for at in (105.0, 110.0)] == [False, True]


@pytest.mark.parametrize(
    ("config", "steps", "seconds"),
    [
        (TrainConfig(), 4, None),
        (TrainConfig(epochs=3), 12, None),
        (TrainConfig(steps=7), 7, None),
        (TrainConfig(epochs=3, steps=7), 7, None),
        (TrainConfig(time="2min"), None, 120.0),
        (TrainConfig(time="2min", epochs=2), 8, 120.0),
    ],
)
def test_the_first_limit_ends_the_run(config: TrainConfig, steps: int | None, seconds: float | None) -> None:
    limit = Limit.of(config, steps_per_epoch=4)
    assert (limit.steps, limit.seconds) == (steps, seconds)


def test_limit_is_reached_by_steps_or_by_time() -> None:
    limit = Limit(steps=5, seconds=10.0)
    assert [limit.reached(step, at) for step, at in ((4, 9.9), (5, 0.0), (0, 10.0))] == [False, True, True]
