"""The training loop of a Task, on a Session. The optimizer step stands here as straight code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from raytrain.best import BestTracker, mode_of
from raytrain.config import TrainConfig
from raytrain.data import Batch, EvalBatches, Streamed, TrainBatches, seed_everything
from raytrain.data.device import ahead
from raytrain.errors import ConfigError
from raytrain.metrics import merged
from raytrain.optim import Ema, ExactStep, bare
from raytrain.peers import Peers
from raytrain.schedules import named_schedule, scale_lr
from raytrain.session import Session
from raytrain.task import LoopTask, Task
from raytrain.weighted import Value, detached, read_loss


@dataclass
class Parts:
    """What one Task trains with on this worker."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    step: ExactStep
    ema: Ema | None
    best: BestTracker
    loader: TrainBatches
    eval_loaders: Mapping[str, EvalBatches] = field(default_factory=dict)

    @property
    def eval_model(self) -> nn.Module:
        """The bare model that is evaluated: the averaged one when there is an EMA."""
        return self.ema.model if self.ema else bare(self.model)


def run_task(task: Task, session: Session, peers: Peers, streams: Mapping[str, Streamed] | None = None) -> None:
    """Train a task, or run a user's own loop, to its end or to an agreed stop.

    Args:
        streams: Sets that come from elsewhere than the task, by name.
    """
    if isinstance(task, LoopTask):
        seed_everything(session.config.seed)
        task.run(session)
    else:
        parts = build(task, session, peers, streams or {})
        train(task, session, parts, peers)


def build(task: Task, session: Session, peers: Peers, streams: Mapping[str, Streamed]) -> Parts:
    """Make the task's parts, alike on all ranks, and restore them when the run resumes."""
    config = session.config
    seed_everything(config.seed)
    loader = session.prepare_loader(streams["train"] if "train" in streams else task.train_data())
    sets = {name: streams.get(name, data) for name, data in named(task.eval_data()).items()}
    eval_loaders = {name: session.prepare_eval(data) for name, data in sets.items()}
    model = session.prepare_model(task.model())
    optimizer = task.optimizer(bare(model))
    scale_lr(optimizer, config, loader.plan.batch_size)
    num_steps = session.limit(loader).steps
    schedule = task.schedule(optimizer, num_steps or 0) if type(task).schedule is not Task.schedule else None
    schedule = schedule or named_schedule(optimizer, config, num_steps, loader.steps_per_epoch)
    step = ExactStep(model, optimizer, config, peers, session.device)
    ema = Ema(model, config.ema_decay) if config.ema_decay is not None else None
    metric = config.best_metric or (f"{next(iter(eval_loaders))}/loss" if eval_loaders else "train/loss")
    best = BestTracker(metric, config.best_mode or mode_of(metric))
    optional = {"schedule": schedule, "ema": ema, "scaler": step.scaler if step.scaler.is_enabled() else None}
    present = {name: part for name, part in optional.items() if part is not None}
    session.register(model=model, optimizer=optimizer, best=best, **present)
    parts = Parts(model, optimizer, schedule, step, ema, best, loader, eval_loaders)
    if config.best_metric is not None:
        check_best_metric(task, parts, session, peers)
    return parts


def train(task: Task, session: Session, parts: Parts, peers: Peers) -> None:
    """Step through the global batches; evaluate, save and stop when it is due, the same on all ranks."""
    config = session.config
    limit = session.limit(parts.loader)
    eval_due = session.cadence(config.eval_every if parts.eval_loaders else None, parts.loader)
    save_due = session.cadence(config.checkpoint_every, parts.loader)
    parts.model.train()
    over = limit.reached(session.step, session.clock_s, session.epoch) or out_of_patience(parts, config)
    while not over and not session.should_stop:
        for batch in session.batches(parts.loader):
            train_step(task, session, parts, batch)
            if not batch.is_last:
                continue
            session.end_step()
            step, clock_s, ended = session.step, session.clock_s, session.ended_epoch
            over = limit.reached(step, clock_s, session.epoch)
            evaluate_now = eval_due.due(step, clock_s, ended) or (over and eval_due.ever)
            new_best = evaluate_now and evaluate(task, session, parts, peers)
            over = over or out_of_patience(parts, config)
            if save_due.due(step, clock_s, ended) or (save_due.ever and (new_best or over or session.should_stop)):
                session.save(best=new_best)
            if over:
                break


def train_step(task: Task, session: Session, parts: Parts, batch: Batch) -> None:
    """One micro-batch; after the last one of a global batch, the optimizer step."""
    step = parts.step
    if batch.micro == 0:
        step.zero()
    with step.forward(batch):
        with step.autocast():
            loss = read_loss(task.loss(parts.model, batch.data), batch.num_rows)
        step.backward(loss, batch)
    values = {"train/loss": detached(loss.value), **{f"train/{name}": value for name, value in loss.metrics.items()}}
    if not batch.is_last:
        session.log_values(values)
        return
    norm, made = step.apply()
    session.constant("train/lr", parts.optimizer.param_groups[0]["lr"])
    if made and parts.schedule is not None:
        parts.schedule.step()
    if made and parts.ema is not None:
        parts.ema.update()
    values["train/grad_norm"] = Value(norm, 1.0)
    if not made:
        values["train/skipped_steps"] = Value(1.0, 1.0)
    session.log_values(values)


def evaluate(task: Task, session: Session, parts: Parts, peers: Peers) -> bool:
    """Evaluate on every named set; whether the metric that counts is a new best."""
    model = parts.eval_model
    scores: dict[str, float] = {}
    for name, loader in parts.eval_loaders.items():
        metrics = task.metrics()

        def values_of(batch: Batch, metrics: Mapping[str, Any] = metrics) -> Mapping[str, Any]:
            with parts.step.autocast():
                return batch_values(task, model, batch, metrics)

        scores |= session.evaluate(values_of, loader, name, model=model, log=False)
        scores |= {f"{name}/{key}": value for key, value in (merged(metrics, peers) if metrics else {}).items()}
    session.add_row(scores)
    return parts.best.update(session.step, session.last)


def batch_values(task: Task, model: nn.Module, batch: Batch, metrics: Mapping[str, Any]) -> dict[str, Value]:
    """What one evaluation batch adds to the means; metrics with a state take it in."""
    loss = read_loss(task.loss(model, batch.data), batch.num_rows)
    if metrics:
        task.update_metrics(metrics, model, batch.data)
    return {"loss": loss.value, **loss.metrics}


def check_best_metric(task: Task, parts: Parts, session: Session, peers: Peers) -> None:
    """Look at the names that the first evaluation batch gives, before anything is trained. A collective.

    Raises:
        ConfigError: The metric that counts is not among them; they are listed.
    """
    group, _, key = parts.best.metric.partition("/")
    loader = parts.eval_loaders.get(group)
    if loader is None:
        return  # a training metric
    batch = next(ahead(loader.batches(), session.device), None)
    names = set(task.metrics())
    if batch is not None:
        with torch.no_grad(), parts.step.autocast():
            parts.eval_model.eval()
            names |= {"loss", *read_loss(task.loss(parts.eval_model, batch.data), batch.num_rows).metrics}
    everywhere = {name for names in peers.gather_objects(names) for name in names}
    if key.split("/")[0] not in everywhere:
        known = ", ".join(sorted(f"{group}/{name}" for name in everywhere))
        raise ConfigError(f"train.best_metric = {parts.best.metric!r} is not among the metrics. Allowed: {known}.")


def out_of_patience(parts: Parts, config: TrainConfig) -> bool:
    """Whether the best metric has not improved for ``train.patience`` evaluations."""
    return config.patience is not None and parts.best.since >= config.patience


def named(data: Any) -> dict[str, Any]:
    """Evaluation data by name: a single one is ``val``.

    Raises:
        ConfigError: A name is not usable as the group of a metric.
    """
    if data is None:
        return {}
    sets = dict(data) if isinstance(data, Mapping) else {"val": data}
    for name in sets:
        if not str(name).strip() or "/" in str(name) or name in ("train", "time"):
            raise ConfigError(
                f"eval_data() names a set {name!r}. Allowed: a name without '/', other than 'train' and 'time'."
            )
    return sets
