"""What can be known before anything is started: a bad setting ends here, in the first second, on the driver."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle

from raytrain.cadence import Limit
from raytrain.config import RunConfig, ScalingConfig, TrainConfig
from raytrain.data import DataPlan, plan_eval, plan_train
from raytrain.errors import ConfigError, DataError
from raytrain.loop import named
from raytrain.schedules import check_schedule
from raytrain.storage import Storage
from raytrain.task import LoopTask, Task


@dataclass(frozen=True)
class Findings:
    """What preflight has learnt.

    Attributes:
        lines: One line for each thing that was checked.
        plan: Of the training data, or None when it was not opened.
        total_steps: Optimizer steps of the whole run, or None when unknown.
        eval_plans: Of the evaluation sets, by name.
    """

    lines: tuple[str, ...]
    plan: DataPlan | None = None
    total_steps: int | None = None
    eval_plans: tuple[tuple[str, DataPlan], ...] = ()


def inspect(task: Task, train: TrainConfig, scaling: ScalingConfig, run: RunConfig, storage: Storage) -> Findings:
    """Check settings against each other, the task, its data and the storage.

    Raises:
        ConfigError: Settings that cannot work together, or a task that cannot travel to the workers.
        DataError: Data that cannot be trained on.
        StorageError: A storage that cannot be written.
    """
    check_pairs(train, scaling)
    lines = ["settings fit together"]
    if scaling.worker_range[1] > 0:
        lines.append(f"the task travels to workers ({check_pickle(task)} bytes)")
    plan: DataPlan | None = None
    eval_plans: tuple[tuple[str, DataPlan], ...] = ()
    if run.check_data and not isinstance(task, LoopTask):
        plan = check_data(task, train, scaling)
        eval_plans = check_eval(task, train)
        check_best_metric(train, [name for name, _ in eval_plans])
        lines.append(str(plan))
        lines += [f"evaluation set {name!r}: {p.num_rows} samples" for name, p in eval_plans]
    storage.check_writable()
    lines.append(f"storage is writable: {storage.uri}")
    total = Limit.of(train, plan.steps_per_epoch).steps if plan else None
    if plan:
        check_schedule(train, total, plan.steps_per_epoch)
    return Findings(tuple(lines), plan, total, eval_plans)


def check_pairs(train: TrainConfig, scaling: ScalingConfig) -> None:
    """Settings of different groups that exclude each other.

    Raises:
        ConfigError: They do.
    """
    if train.sync_batchnorm and not scaling.use_gpu:
        raise ConfigError(
            "train.sync_batchnorm = True needs scaling.use_gpu = true: torch's SyncBatchNorm does not take CPU tensors. "
            "On CPUs leave it off: BatchNorm then uses each worker's own rows."
        )
    if scaling.use_gpu and scaling.worker_range[1] == 0:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                "scaling.use_gpu = True, but torch sees no GPU in this process. Leave it off, or use workers."
            )


def check_pickle(task: Task) -> int:
    """That the task can travel; its size in bytes.

    Raises:
        ConfigError: It cannot; the field is named.
    """
    try:
        return len(cloudpickle.dumps(task))
    except Exception as error:
        fields: tuple[Any, ...] = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
        for field in fields:
            value = getattr(task, field.name)
            if not _pickles(value):
                raise ConfigError(
                    f"task.{field.name} = {value!r} cannot travel to the workers ({type(error).__name__}: {error}). Keep plain "
                    "values in fields; open files, locks and connections in model() or train_data(), which run there."
                ) from None
        raise ConfigError(
            f"{type(task).__name__} cannot travel to the workers: {type(error).__name__}: {error}. It must not refer to open "
            "files, locks or connections of the job's module."
        ) from None


def _pickles(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True


def check_best_metric(train: TrainConfig, sets: Sequence[str]) -> None:
    """That the metric that counts belongs to a set that is evaluated; its own name is checked before the first step.

    Raises:
        ConfigError: It does not; the sets are listed.
    """
    groups = [*sets, "train"]
    if train.best_metric is not None and train.best_metric.partition("/")[0] not in groups:
        allowed = ", ".join(f"{group}/..." for group in groups)
        raise ConfigError(f"train.best_metric = {train.best_metric!r} is of no set that there is. Allowed: {allowed}.")


def check_data(task: Task, train: TrainConfig, scaling: ScalingConfig) -> DataPlan:
    """That the training data is trained on exactly once, in at least one step, with a row for each worker.

    Raises:
        DataError, ConfigError: It is not; with the numbers and the cure.
    """
    workers = max(1, scaling.worker_range[1])
    try:
        data = task.train_data()
    except (ValueError, RuntimeError) as error:
        if "process group" in str(error):
            raise DataError(
                f"train_data() asks for the process group ({error}), which the driver does not have. Leave DistributedSampler and "
                "ranks out of it: raytrain shares the samples out by itself."
            ) from None
        raise
    return plan_train(
        data,
        batch_size=train.batch_size,
        shuffle=train.shuffle,
        drop_last=train.drop_last,
        world_size=workers,
        accumulate=train.accumulate,
    )


def check_eval(task: Task, train: TrainConfig) -> tuple[tuple[str, DataPlan], ...]:
    """That each evaluation set has samples.

    Raises:
        DataError: One has none.
    """
    size = train.eval_batch_size or min(train.batch_size or 256, 256)
    plans = []
    for name, data in named(task.eval_data()).items():
        try:
            plans.append((name, plan_eval(data, batch_size=size)))
        except DataError as error:
            raise DataError(f"evaluation set {name!r}: {error}") from None
    return tuple(plans)
