"""What can be known before anything is started: a bad setting ends here, in the first second, on the driver."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch.distributed as dist

from raytrain.cadence import Limit
from raytrain.config import RunConfig, ScalingConfig, TrackingConfig, TrainConfig
from raytrain.data import DataPlan, get_rng_state, plan_eval, plan_train, seed_everything, set_rng_state
from raytrain.data.describe import describe
from raytrain.data.ray_data import RayStream, is_ray_dataset, ray_stream
from raytrain.errors import ConfigError, DataError
from raytrain.evaluation import eval_batch_size
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
        datasets: Plain facts of each set: ``name``, ``num_rows``, ``source``, ``digest``, and what else is known.
        ray_sets: Those that are Ray Datasets, which travel through Ray.
        streams: What the workers need to know of these.
    """

    lines: tuple[str, ...]
    plan: DataPlan | None = None
    total_steps: int | None = None
    eval_plans: tuple[tuple[str, DataPlan], ...] = ()
    datasets: tuple[Mapping[str, Any], ...] = ()
    ray_sets: Mapping[str, Any] = field(default_factory=dict)
    streams: Mapping[str, RayStream] = field(default_factory=dict)


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
    datasets: tuple[Mapping[str, Any], ...] = ()
    ray_sets: dict[str, Any] = {}
    streams: dict[str, RayStream] = {}
    if run.check_data and not isinstance(task, LoopTask):
        with seeded(train.seed):
            sets = {"train": opened(task), **named(task.eval_data())}
        ray_sets = {name: data for name, data in sets.items() if is_ray_dataset(data)}
        check_ray_data(ray_sets, scaling)
        streams = {name: ray_stream(name, data) for name, data in ray_sets.items()}
        data, *_ = (sets | streams).values()
        eval_sets = {name: of for name, of in (sets | streams).items() if name != "train"}
        plan = check_data(data, train, scaling)
        eval_plans = check_eval(eval_sets, train)
        plans = dict(eval_plans) | {"train": plan}
        datasets = tuple(
            {"name": name, "num_rows": _count(plans[name].num_rows), **describe(of)}
            for name, of in {"train": data, **eval_sets}.items()
        )
        check_best_metric(train, [name for name, _ in eval_plans])
        lines.append(str(plan))
        lines += [f"evaluation set {name!r}: {_count(p.num_rows)} samples" for name, p in eval_plans]
    storage.check_writable()
    lines.append(f"storage is writable: {storage.uri}")
    total = Limit.of(train, plan.steps_per_epoch).steps if plan else None
    if plan:
        check_schedule(train, total, plan.steps_per_epoch, type(task).schedule is not Task.schedule)
    return Findings(tuple(lines), plan, total, eval_plans, datasets, ray_sets, streams)


def check_ray_data(sets: Mapping[str, Any], scaling: ScalingConfig) -> None:
    """That Ray Datasets go to Ray's workers.

    Raises:
        ConfigError: There are none.
    """
    if sets and (scaling.worker_range[1] == 0 or dist.is_initialized()):
        raise ConfigError(
            f"{', '.join(sets)} is a Ray Dataset, which only Ray's workers can read. Set scaling.num_workers to 1 or more, and "
            "start the job without torchrun; or return a dataset of raytrain.data or torch."
        )


def _count(num_rows: int | None) -> int | str:
    return "unknown" if num_rows is None else num_rows


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


def check_models(task: Task, train: TrainConfig, tracking: TrackingConfig) -> None:
    """That there will be a model to log, when one is wanted.

    Raises:
        ConfigError: There will be none.
    """
    log = f"tracking.log_model = {tracking.log_model!r}"
    if tracking.log_model != "none" and type(task).model is Task.model:
        raise ConfigError(f"{log} needs a Task with model(); a loop function has none. Leave it at 'none'.")
    if tracking.log_model != "none" and train.checkpoint_every is None:
        raise ConfigError(f"{log} needs checkpoints: set train.checkpoint_every, such as '1ep'.")


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


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The streams that the workers begin with, so that data made from random numbers is theirs; afterwards as before."""
    before = get_rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(before)


def opened(task: Task) -> Any:
    """The task's training data.

    Raises:
        DataError: It asks for a process group, which the driver does not have.
    """
    try:
        return task.train_data()
    except (ValueError, RuntimeError) as error:
        if "process group" in str(error):
            raise DataError(
                f"train_data() asks for the process group ({error}), which the driver does not have. Leave DistributedSampler and "
                "ranks out of it: raytrain shares the samples out by itself. Data that deals to ranks itself "
                "(raytrain.data.own_shards) asks only where torch.distributed.is_initialized()."
            ) from None
        raise


def check_data(data: Any, train: TrainConfig, scaling: ScalingConfig) -> DataPlan:
    """That the training data is trained on exactly once, in at least one step, with a row for each worker.

    Raises:
        DataError, ConfigError: It is not; with the numbers and the cure.
    """
    return plan_train(
        data,
        batch_size=train.batch_size,
        shuffle=train.shuffle,
        drop_last=train.drop_last,
        world_size=max(1, scaling.worker_range[1]),
        accumulate=train.accumulate,
    )


def check_eval(sets: Mapping[str, Any], train: TrainConfig) -> tuple[tuple[str, DataPlan], ...]:
    """That each evaluation set has samples.

    Raises:
        DataError: One has none.
    """
    size = eval_batch_size(train)
    plans = []
    for name, data in sets.items():
        try:
            plans.append((name, plan_eval(data, batch_size=size)))
        except DataError as error:
            raise DataError(f"evaluation set {name!r}: {error}") from None
    return tuple(plans)
