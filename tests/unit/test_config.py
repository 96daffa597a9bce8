"""Settings are checked when they are made: each bad value is named with its field and what is allowed."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from raytrain import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.errors import ConfigError

WHOLE = "a whole number of at least 1"
BAD: list[tuple[type, str, Any, str]] = [
    *[
        (TrainConfig, name, value, WHOLE)
        for name in ("epochs", "steps", "batch_size", "accumulate")
        for value in (0, -1)
    ],
    *[(TrainConfig, name, 0, WHOLE) for name in ("eval_batch_size", "patience", "lr_base_batch")],
    *[(TrainConfig, "clip_norm", value, "a number above 0") for value in (0.0, -1.0, float("inf"), float("nan"))],
    *[(TrainConfig, "clip_value", value, "a number above 0") for value in (0.0, -1.0, float("inf"), float("nan"))],
    (TrainConfig, "loader_workers", -1, "0 or more"),
    (TrainConfig, "seed", -1, "from 0 to 2**63 - 1"),
    (TrainConfig, "seed", 2**63, "from 0 to 2**63 - 1"),
    *[(TrainConfig, "ema_decay", value, "above 0, below 1") for value in (0.0, 1.0, -0.5, float("nan"))],
    (TrainConfig, "precision", "bf32", "'full', 'bf16', 'fp16'"),
    (TrainConfig, "schedule", "step", "'constant', 'linear', 'cosine'"),
    (TrainConfig, "lr_scaling", "cubic", "'none', 'linear', 'sqrt'"),
    (TrainConfig, "nan_policy", "ignore", "'stop', 'skip'"),
    (TrainConfig, "best_mode", "mean", "'min', 'max'"),
    *[(TrainConfig, n, "soon", "'500st'") for n in ("time", "warmup", "log_every", "eval_every", "checkpoint_every")],
    *[(TrainConfig, n, "0st", "'500st'") for n in ("warmup", "log_every", "eval_every", "checkpoint_every")],
    (TrainConfig, "time", "3ep", "wall time"),
    (TrainConfig, "log_every", "10s", "steps or epochs"),
    *[(ScalingConfig, "num_workers", value, "'MIN:MAX'") for value in (-1, "two", "8:2", "1.5", "2:", ":2", "")],
    (ScalingConfig, "num_workers", "0:2", "MIN at least 1"),
    (ScalingConfig, "placement_strategy", "TIGHT", "'PACK', 'SPREAD', 'STRICT_PACK', 'STRICT_SPREAD'"),
    (ScalingConfig, "resources_per_worker", {"CPU": -1}, "0 or more"),
    *[
        (RunConfig, "name", value, "a file name without slashes")
        for value in ("", " ", "a/b", "a\\b", "..", ".", "a\0b")
    ],
    *[(RunConfig, "storage", value, "a folder or a URI") for value in ("", " ")],
    (RunConfig, "resume", "maybe", "'auto', 'never', 'must'"),
    (RunConfig, "resume", "must", "together with run.name"),
    (RunConfig, "max_failures", -2, "-1 for without limit"),
    (RunConfig, "keep", 0, "1 or more"),
    (TrackingConfig, "log_model", "first", "'none', 'best', 'last', 'both'"),
    (TrackingConfig, "model_format", "zip", "'pt2', 'weights', 'pickle'"),
    *[(TrackingConfig, "register", value, "a name without") for value in ("", " ", "a/b", "a:b", "a@b")],
]
GROUPS: dict[type, str] = {TrainConfig: "train", ScalingConfig: "scaling", RunConfig: "run", TrackingConfig: "tracking"}


@pytest.mark.parametrize(("cls", "name", "value", "allowed"), BAD)
def test_a_bad_value_is_named_with_what_is_allowed(cls: type, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cls(**{name: value})
    text = str(caught.value)
    shown = next(iter(value.values())) if isinstance(value, dict) else value
    assert f"{GROUPS[cls]}.{name}" in text
    assert (repr(shown) in text) or str(shown) in text
    assert allowed in text


# Every value of these is possible: switches, names of things elsewhere, and options that torch or MLflow check.
FREE = {
    *(
        f"train.{name}"
        for name in ("shuffle", "drop_last", "deterministic", "compile", "sync_batchnorm", "ddp", "best_metric")
    ),
    *("scaling.use_gpu", "scaling.accelerator_type", "run.check_data"),
    *(f"tracking.{name}" for name in ("mlflow", "uri", "experiment", "tags", "progress", "strict")),
}


def test_every_field_has_a_bad_value_above_or_is_free() -> None:
    checked = {f"{GROUPS[cls]}.{name}" for cls, name, _, _ in BAD}
    assert checked | FREE == {f"{group}.{f.name}" for cls, group in GROUPS.items() for f in dataclasses.fields(cls)}
    assert not checked & FREE


def test_a_scaled_learning_rate_needs_its_base() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr_scaling = 'linear' needs train\.lr_base_batch"):
        TrainConfig(lr_scaling="linear")
    assert TrainConfig(lr_scaling="sqrt", lr_base_batch=32).lr_base_batch == 32


@pytest.mark.parametrize("text", ["none", "None", "never", None])
def test_never_is_no_cadence(text: str | None) -> None:
    config = TrainConfig(eval_every=text, checkpoint_every=text)
    assert (config.eval_every, config.checkpoint_every) == (None, None)


@pytest.mark.parametrize(
    ("num_workers", "kept", "low_high"),
    [(0, 0, (0, 0)), (3, 3, (3, 3)), ("3", 3, (3, 3)), ("2:8", "2:8", (2, 8)), ("2:2", "2:2", (2, 2))],
)
def test_worker_range(num_workers: str | int, kept: str | int, low_high: tuple[int, int]) -> None:
    config = ScalingConfig(num_workers=num_workers)
    assert (config.num_workers, config.worker_range) == (kept, low_high)


@pytest.mark.parametrize("config", [TrainConfig(), ScalingConfig(), RunConfig(), TrackingConfig()])
def test_a_config_travels_and_is_frozen(config: Any) -> None:
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, dataclasses.fields(config)[0].name, 1)
