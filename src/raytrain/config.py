"""The settings of a run, checked when they are made. No torch, no Ray, no MLflow here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from raytrain.durations import Duration
from raytrain.errors import ConfigError

Precision = Literal["full", "bf16", "fp16"]
ScheduleName = Literal["constant", "linear", "cosine"]


def _check(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} = {value!r} is not possible. Allowed: {allowed}.")


def _one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    _check(value in allowed, name, value, ", ".join(repr(a) for a in allowed))


def _duration(name: str, value: str | None) -> None:
    if value is None:
        return
    try:
        Duration.parse(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


@dataclass(frozen=True)
class TrainConfig:
    """How to train: length, batch, numerics and cadences. Nothing in it depends on the number of workers."""

    epochs: int | None = None
    """Stop after this many epochs (1 when neither epochs, steps nor time is given)."""
    steps: int | None = None
    """Stop after this many optimizer steps."""
    time: str | None = None
    """Stop after this wall time, such as '10min' or '2h'."""
    batch_size: int | None = None
    """Global batch size: samples per optimizer step over all workers. Default: that of the task's DataLoader, else 32."""
    accumulate: int = 1
    """Micro-batches per optimizer step on each worker; the result is the same, the memory is less."""
    eval_batch_size: int | None = None
    """Samples per forward pass in evaluation. Default: the global batch size, at most 256."""
    shuffle: bool | None = None
    """New order of samples in each epoch. Default: as the task's DataLoader says, else yes."""
    drop_last: bool | None = None
    """Leave out the last short batch of an epoch. Default: as the task's DataLoader says, else no."""
    loader_workers: int = 0
    """Loader processes per worker, for a dataset that came without a DataLoader."""
    seed: int = 0
    """Seed of weights, order and random streams."""
    deterministic: bool = False
    """Only deterministic kernels (slower on GPUs; CPU runs repeat bit for bit anyway)."""
    precision: Precision = "full"
    """'full' (as the model is), 'bf16' or 'fp16' autocast; fp16 scales the loss."""
    compile: bool = False
    """Run the model through torch.compile."""
    clip_norm: float | None = None
    """Clip the gradient to this global norm, after accumulation and unscaling."""
    clip_value: float | None = None
    """Clip each element of the gradient to [-value, value]."""
    schedule: ScheduleName = "constant"
    """Learning rate over the run, when the task has no schedule() of its own."""
    warmup: str | None = None
    """Length of the linear warm-up before the schedule, such as '100st' or '0.1ep'."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate by batch_size / lr_base_batch, or by its square root."""
    lr_base_batch: int | None = None
    """The global batch size that the learning rate was chosen for; needed by lr_scaling."""
    sync_batchnorm: bool = False
    """BatchNorm statistics over the whole global batch (GPUs only)."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights, and evaluate with it."""
    nan_policy: Literal["stop", "skip"] = "stop"
    """On a gradient that is not finite: end the run with an error, or skip that optimizer step on all ranks."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Options for DistributedDataParallel, such as find_unused_parameters."""
    log_every: str = "10st"
    """One point per metric for each such stretch of steps: the mean over it."""
    eval_every: str | None = "1ep"
    """Evaluate this often; none to evaluate never."""
    checkpoint_every: str | None = "1ep"
    """Save a checkpoint this often; one is always saved at the end, unless none."""
    best_metric: str | None = None
    """Metric that picks the best checkpoint and drives patience, such as 'val/accuracy'. Default: the evaluation loss."""
    best_mode: Literal["min", "max"] | None = None
    """Whether less or more is better. Default: 'max' for names with acc, auc, f1, precision, recall, r2 or score; else 'min'."""
    patience: int | None = None
    """Stop after this many evaluations in a row without a new best."""

    def __post_init__(self) -> None:
        for name in ("epochs", "steps", "batch_size", "eval_batch_size", "accumulate", "patience", "lr_base_batch"):
            value = getattr(self, name)
            _check(value is None or value >= 1, f"train.{name}", value, "a whole number of at least 1")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            _check(value is None or (value > 0 and math.isfinite(value)), f"train.{name}", value, "a number above 0")
        _check(self.loader_workers >= 0, "train.loader_workers", self.loader_workers, "0 or more")
        _check(0 <= self.seed < 2**63, "train.seed", self.seed, "a whole number from 0 to 2**63 - 1")
        _check(self.ema_decay is None or 0 < self.ema_decay < 1, "train.ema_decay", self.ema_decay, "above 0, below 1")
        _one_of("train.precision", self.precision, ("full", "bf16", "fp16"))
        _one_of("train.schedule", self.schedule, ("constant", "linear", "cosine"))
        _one_of("train.lr_scaling", self.lr_scaling, ("none", "linear", "sqrt"))
        _one_of("train.nan_policy", self.nan_policy, ("stop", "skip"))
        _check(self.best_mode in (None, "min", "max"), "train.best_mode", self.best_mode, "'min', 'max'")
        for name in ("eval_every", "checkpoint_every"):
            if str(getattr(self, name)).lower() in ("none", "never"):
                object.__setattr__(self, name, None)
        for name in ("time", "warmup", "log_every", "eval_every", "checkpoint_every"):
            _duration(f"train.{name}", getattr(self, name))
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.time is not None:
            _check(Duration.parse(self.time).unit == "s", "train.time", self.time, "wall time, such as '10min'")
        _check(Duration.parse(self.log_every).unit != "s", "train.log_every", self.log_every, "steps or epochs")
        if self.lr_scaling != "none" and self.lr_base_batch is None:
            raise ConfigError(
                f"train.lr_scaling = {self.lr_scaling!r} needs train.lr_base_batch: "
                "the global batch size that the learning rate was chosen for."
            )


@dataclass(frozen=True)
class ScalingConfig:
    """Where to train: the workers and what each of them needs. The fields mirror Ray's own ScalingConfig."""

    num_workers: str | int = 1
    """Worker processes; '2:8' for as many as there are, from 2 to 8; 0 to train in this process without Ray."""
    use_gpu: bool = False
    """One GPU per worker and NCCL; otherwise CPUs and gloo."""
    resources_per_worker: Mapping[str, float] | None = None
    """Resources of one worker, such as {"CPU": 4, "GPU": 1}."""
    placement_strategy: str = "PACK"
    """PACK, SPREAD, STRICT_PACK or STRICT_SPREAD workers over nodes."""
    accelerator_type: str | None = None
    """Type of accelerator that a node must have, such as 'A10G'."""

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, str) and self.num_workers.strip().isdigit():
            object.__setattr__(self, "num_workers", int(self.num_workers))
        low, high = self.worker_range
        least = 0 if isinstance(self.num_workers, int) else 1
        allowed = "0 or more, or 'MIN:MAX' with MIN at least 1"
        _check(least <= low <= high, "scaling.num_workers", self.num_workers, allowed)
        strategies = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
        _one_of("scaling.placement_strategy", self.placement_strategy, strategies)
        for name, value in (self.resources_per_worker or {}).items():
            _check(value >= 0, f"scaling.resources_per_worker[{name!r}]", value, "0 or more")

    @property
    def worker_range(self) -> tuple[int, int]:
        """Least and greatest number of workers.

        Raises:
            ConfigError: The text is not ``MIN:MAX``.
        """
        if isinstance(self.num_workers, int):
            return self.num_workers, self.num_workers
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.num_workers.strip())
        if not match:
            raise ConfigError(
                f"scaling.num_workers = {self.num_workers!r} is not possible. Allowed: a whole number, or 'MIN:MAX'."
            )
        return int(match.group(1)), int(match.group(2) or match.group(1))


@dataclass(frozen=True)
class RunConfig:
    """Which run this is, where it is kept and how it goes on after a failure."""

    name: str | None = None
    """Name of the run: the same name again resumes it. Default: the job's name and the time."""
    storage: str = "runs"
    """Folder or URI (s3://bucket/path) for the runs; a relative folder is below the current one."""
    resume: Literal["auto", "never", "must"] = "auto"
    """'auto' goes on with a run of this name, 'never' refuses if there is one, 'must' refuses if there is none."""
    max_failures: int = 0
    """Restart the workers after this many failures; -1 for without limit."""
    keep: int = 2
    """Checkpoints to keep besides the best one."""
    check_data: bool = True
    """Open the task's data on the driver first, so that bad data fails at once."""

    def __post_init__(self) -> None:
        _one_of("run.resume", self.resume, ("auto", "never", "must"))
        _check(self.max_failures >= -1, "run.max_failures", self.max_failures, "0 or more, or -1 for without limit")
        _check(self.keep >= 1, "run.keep", self.keep, "1 or more")
        if self.name is not None:
            ok = bool(self.name.strip()) and not re.search(r"[/\\\0]", self.name) and self.name not in (".", "..")
            _check(ok, "run.name", self.name, "a file name without slashes")
        _check(bool(self.storage.strip()), "run.storage", self.storage, "a folder or a URI")
        _no_password("run.storage", self.storage, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use a role")
        _check(
            self.resume != "must" or self.name is not None, "run.resume", self.resume, "'must' together with run.name"
        )


@dataclass(frozen=True)
class TrackingConfig:
    """Where the metrics go."""

    mlflow: bool = True
    """Write the run to MLflow."""
    uri: str | None = None
    """MLflow tracking URI. Default: MLFLOW_TRACKING_URI, else a sqlite file in the storage folder (or ./runs)."""
    experiment: str | None = None
    """MLflow experiment. Default: MLFLOW_EXPERIMENT_NAME, else the name of the task."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags for the MLflow run."""
    progress: bool = True
    """Print progress lines."""
    strict: bool = False
    """Refuse to start when MLflow does not answer. Otherwise what it should get is kept on disk and sent when it is back."""
    log_model: Literal["none", "best", "last", "both"] = "none"
    """Checkpoints whose models are copied into MLflow at the end; 'none': only referred to. With register: 'best' by default."""
    register: str | None = None
    """Name in MLflow's model registry: each end of the run makes a version of it, under the alias 'best' or 'last'."""
    model_format: Literal["pt2", "weights", "pickle"] = "pt2"
    """Copies hold weights, job and settings; for mlflow.pytorch also a program ('pt2'), nothing ('weights') or a 'pickle'."""

    def __post_init__(self) -> None:
        _one_of("tracking.log_model", self.log_model, ("none", "best", "last", "both"))
        _one_of("tracking.model_format", self.model_format, ("pt2", "weights", "pickle"))
        if self.register is not None:
            ok = re.fullmatch(r"[^/:@]*[^/:@\s][^/:@]*", self.register) is not None
            _check(ok, "tracking.register", self.register, "a name without '/', ':' and '@'")
            object.__setattr__(self, "log_model", "best" if self.log_model == "none" else self.log_model)
        _check(self.mlflow or self.log_model == "none", "tracking.log_model", self.log_model, "'none' without MLflow")
        _no_password(
            "tracking.uri",
            self.uri or "",
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_URI",
        )


def _no_password(name: str, uri: str, cure: str) -> None:
    """Settings are written down (in the run's folder, as params): none may hold a password."""
    user, at, _ = uri.partition("://")[2].partition("/")[0].rpartition("@")
    if at and ":" in user:
        raise ConfigError(
            f"{name} holds a password, and settings are written down with the run. Leave it out of the URI and put it into {cure}."
        )
