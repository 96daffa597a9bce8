"""Learning rates: schedules by name with a warm-up, and scaling with the batch size."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raytrain.cadence import Cadence
from raytrain.config import TrainConfig
from raytrain.durations import Duration
from raytrain.errors import ConfigError


def named_schedule(
    optimizer: Optimizer, config: TrainConfig, num_steps: int | None, steps_per_epoch: int | None
) -> LRScheduler | None:
    """The schedule of ``train.schedule`` and ``train.warmup``, or None for a constant rate.

    The rate of optimizer step k (from 0) is the optimizer's own times ``factor(k)``.

    Raises:
        ConfigError: The schedule needs an end, or the warm-up is longer than the run.
    """
    warmup = _warmup_steps(config, num_steps, steps_per_epoch)
    if config.schedule == "constant" and not warmup:
        return None
    return LambdaLR(optimizer, factor(config.schedule, warmup, num_steps))


def _warmup_steps(config: TrainConfig, num_steps: int | None, steps_per_epoch: int | None) -> int:
    warmup = _in_steps("train.warmup", config.warmup, steps_per_epoch) if config.warmup else 0
    if warmup is None:
        raise ConfigError(f"train.warmup = {config.warmup!r}: give it in steps or epochs, such as '100st'.")
    if config.schedule != "constant" and num_steps is None:
        cure = "train.epochs or train.steps beside train.time" if steps_per_epoch else "train.steps"
        raise ConfigError(
            f"train.schedule = {config.schedule!r} must know its end: give {cure}.{_why(steps_per_epoch)}"
        )
    if num_steps is not None and warmup >= num_steps:
        raise ConfigError(
            f"train.warmup = {config.warmup!r} is {warmup} steps, but the whole run is {num_steps} steps."
        )
    return warmup


def factor(name: str, warmup: int, num_steps: int | None) -> Callable[[int], float]:
    """Factor of the learning rate at a step: linear up to 1 over ``warmup`` steps, then constant or down to 0."""

    def at(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if name == "constant" or num_steps is None:
            return 1.0
        done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        return 1.0 - done if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))

    return at


def scale_lr(optimizer: Optimizer, config: TrainConfig, batch_size: int) -> float:
    """Apply ``train.lr_scaling`` to all parameter groups (Goyal et al. 2017 for linear, Krizhevsky 2014 for sqrt).

    Returns:
        The factor that was applied; 1.0 when scaling is off.

    Raises:
        ConfigError: The batch size is not known.
    """
    if config.lr_scaling == "none" or config.lr_base_batch is None:
        return 1.0
    if not batch_size:
        raise ConfigError(
            f"train.lr_scaling = {config.lr_scaling!r} needs the global batch size, but the data brings batches of its own. "
            "Give train.batch_size: the samples of a step over all workers."
        )
    ratio = batch_size / config.lr_base_batch
    by = ratio if config.lr_scaling == "linear" else math.sqrt(ratio)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * by
        if "initial_lr" in group:
            group["initial_lr"] = group["initial_lr"] * by
    return by


def check_schedule(
    config: TrainConfig, num_steps: int | None, steps_per_epoch: int | None, own_schedule: bool = False
) -> None:
    """See that the schedule and its warm-up fit the run, and that what is counted in epochs can be.

    Args:
        config: The settings.
        num_steps: Optimizer steps of the whole run, or None.
        steps_per_epoch: None when the training data does not say.
        own_schedule: The task has a ``schedule()`` of its own, which is given ``num_steps``.

    Raises:
        ConfigError: They do not.
    """
    if own_schedule and num_steps is None and steps_per_epoch is None:
        raise ConfigError(f"schedule() is given the run's number of steps: give train.steps.{_why(steps_per_epoch)}")
    _warmup_steps(config, num_steps, steps_per_epoch)
    _in_steps("train.log_every", config.log_every, steps_per_epoch)
    for name in ("eval_every", "checkpoint_every"):
        try:
            Cadence(getattr(config, name), steps_per_epoch)
        except ConfigError as error:
            raise ConfigError(f"train.{name}: {error}") from None


def _in_steps(name: str, length: str, steps_per_epoch: int | None) -> int | None:
    try:
        return Duration.parse(length).in_steps(steps_per_epoch)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _why(steps_per_epoch: int | None) -> str:
    """Why epochs do not help."""
    return " The training data does not say how long an epoch is (no __len__)." if steps_per_epoch is None else ""
