"""Ray's own config objects, taken as they are: each field is carried over, or refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytrain.config import RunConfig, ScalingConfig, TrainConfig
from raytrain.errors import ConfigError


@dataclass(frozen=True)
class Adopted:
    """A run's configuration after Ray's objects were read.

    Attributes:
        filesystem: The pyarrow filesystem of Ray's RunConfig, or None.
        callbacks: The user's own Ray Train callbacks.
    """

    train: TrainConfig
    scaling: ScalingConfig
    run: RunConfig
    filesystem: Any = None
    callbacks: Sequence[Any] = ()


def adopt(train: TrainConfig, scaling: Any, run: Any) -> Adopted:
    """Read ours or Ray's ScalingConfig and RunConfig (with its CheckpointConfig and FailureConfig).

    Raises:
        ConfigError: Another type, or a field of Ray's that has no meaning here.
    """
    scaling = _scaling(scaling)
    if run is None or isinstance(run, RunConfig):
        return Adopted(train, scaling, run or RunConfig())
    if type(run).__module__.split(".")[0] != "ray":
        raise ConfigError(f"run is a {type(run).__name__}. Allowed: raytrain.RunConfig or ray.train.RunConfig.")
    return _run(train, scaling, run)


def _scaling(scaling: Any) -> ScalingConfig:
    if scaling is None or isinstance(scaling, ScalingConfig):
        return scaling or ScalingConfig()
    if type(scaling).__module__.split(".")[0] != "ray":
        raise ConfigError(
            f"scaling is a {type(scaling).__name__}. Allowed: raytrain.ScalingConfig or ray.train.ScalingConfig."
        )
    for name in ("label_selector", "topology", "use_tpu"):
        if getattr(scaling, name, None):
            raise ConfigError(f"ScalingConfig({name}={getattr(scaling, name)!r}) is not supported: leave it out.")
    workers = scaling.num_workers
    return ScalingConfig(
        num_workers=f"{workers[0]}:{workers[1]}" if isinstance(workers, tuple) else workers,
        use_gpu=bool(scaling.use_gpu),
        resources_per_worker=scaling.resources_per_worker,
        placement_strategy=scaling.placement_strategy,
        accelerator_type=scaling.accelerator_type,
    )


def _run(train: TrainConfig, scaling: ScalingConfig, run: Any) -> Adopted:
    checkpoint, failure = run.checkpoint_config, run.failure_config
    if checkpoint.checkpoint_score_attribute is not None:
        train = replace(
            train, best_metric=checkpoint.checkpoint_score_attribute, best_mode=checkpoint.checkpoint_score_order
        )
    if run.worker_runtime_env:
        raise ConfigError(
            "RunConfig(worker_runtime_env=...) is not supported: give it to `ray job submit` or ray.init."
        )
    ours = RunConfig(
        name=run.name,
        storage=str(run.storage_path),
        max_failures=failure.max_failures,
        keep=checkpoint.num_to_keep or RunConfig().keep,
    )
    return Adopted(train, scaling, ours, run.storage_filesystem, tuple(run.callbacks or ()))
