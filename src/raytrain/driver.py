"""The driver's side of a run: its identity and folder, its trackers, its true end."""

from __future__ import annotations

import contextlib
import datetime
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from raytrain.adopt import Adopted
from raytrain.checkpoint import CheckpointStore
from raytrain.config import TrackingConfig
from raytrain.errors import ConfigError
from raytrain.history import read
from raytrain.identity import RunRecord, compare
from raytrain.ledger import Ledger
from raytrain.options import Options, dump, flatten
from raytrain.pins import keep_registered
from raytrain.preflight import Findings, check_models
from raytrain.report import Report, Row
from raytrain.result import Result
from raytrain.storage import Storage
from raytrain.task import Task
from raytrain.tracking import Collector, ConsoleTracker, MlflowTracker, RunInfo, Status, Tracker
from raytrain.tracking.provenance import facts, job_source
from raytrain.tracking.spool import Spool, left_by_earlier_starts, spool_folder, spools_in
from raytrain.work import Job

_OPEN_LIMIT_S = 5.0  # training does not wait longer for a tracking server
_LIMITS = ("train.epochs", "train.steps", "train.time")


class Driver:
    """One start of one run.

    Raises:
        ConfigError: The run exists and must not, or must and does not, or was another experiment.
    """

    def __init__(
        self, task: Task, options: Adopted, tracking: TrackingConfig, storage: Storage, findings: Findings
    ) -> None:
        name = options.run.name or f"{_kebab(type(task).__name__)}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        self._task, self._findings = task, findings
        self._options = Options(task, options.train, options.scaling, replace(options.run, name=name), tracking)
        self._folder = storage.child(name)
        self._store = CheckpointStore(self._folder.child("checkpoints"), keep=options.run.keep)
        self._facts = self._what_matters()
        before = RunRecord.load(self._folder)
        self._check_resume(before)
        check_models(task, options.train, tracking)
        self._before = before
        record = before or RunRecord.new(name=name, task=type(task).__name__, facts=self._facts)
        self._ledger = Ledger(self._folder, record)
        self._tracker = MlflowTracker(tracking, storage.uri) if tracking.mlflow else None
        self._history: Sequence[Row] = ()

    @property
    def _record(self) -> RunRecord:
        return self._ledger.record

    @property
    def job(self) -> Job:
        """What travels to the workers."""
        options = self._options
        attempt = self._record.attempts + 1
        folder, keep, streams = self._folder, options.run.keep, self._findings.streams
        return Job(options.task, options.train, folder, keep, attempt, options.scaling.use_gpu, streams)

    def check(self) -> list[str]:
        """What ``raytrain check`` tells about the run and its tracking."""
        lines = [f"run {self._record.name!r}: {'goes on' if self._before else 'is new'} in {self._folder.uri}"]
        if self._tracker is not None:
            self._tracker.check(self._record.task)
            lines.append(f"MLflow answers at {self._tracker.uri}")
        return lines

    def complete(self) -> Result | None:
        """The result of a run that has nothing left to do, or None."""
        before, total = self._before, self._findings.total_steps
        if before is None or before.status != "FINISHED":
            return None
        if before.facts.keys() and any(before.facts.get(k) != self._facts.get(k) for k in _LIMITS):
            if total is None or before.step < total:
                return None  # it was made longer
        elif total is not None and before.step < total and not before.stopped_early:
            return None
        print(
            f"run {before.name!r} is already complete: {before.step} optimizer steps. More train.epochs go on with it; "
            "another run.name starts anew.",
            flush=True,
        )
        if spools_in(unsent := spool_folder(self._folder, before.key)):
            print(f"MLflow did not get all of it yet: raytrain runs --send {shlex.quote(str(unsent))}", flush=True)
        self._history = read(self._folder)
        return self.result()

    @contextlib.contextmanager
    def running(self) -> Iterator[Callable[[Report], None]]:
        """Trackers open, the run recorded; at the end both closed with what really happened.

        Yields:
            Where the workers' reports go.
        """
        self._open()
        collector: Collector | None = None
        status: Status = "FAILED"
        error: str | None = None
        try:
            collector = self._collector()
            yield self._deliver_to(collector)
            status = "KILLED" if self._ledger.stopped else "FINISHED"
        except KeyboardInterrupt:
            status, error = "KILLED", "interrupted"
            raise
        except BaseException as caught:
            error = str(caught)
            raise
        finally:
            if collector is not None:
                collector.close(status, error)
                self._history = collector.history
            self._ledger.end(status, error, self._findings.total_steps)
            if collector is not None:
                self._hand_over()

    def result(self) -> Result:
        """The result, read from the run's folder and from what was collected."""
        saved = self._store.all()
        best = next((c for c in saved if c.step == self._record.best_step), None)
        metrics: dict[str, float] = {}
        for row in self._history:
            metrics.update(row.values)
        return Result(
            name=self._record.name,
            folder=self._folder.uri,
            status="stopped" if self._ledger.stopped else "finished",
            step=self._record.step,
            metrics=metrics,
            history=self._history,
            last_checkpoint=saved[-1] if saved else None,
            best_checkpoint=best,
            trackers=dict(self._record.trackers),
            task=self._task,
        )

    # -- inside ---------------------------------------------------------------------------------------------------

    def _what_matters(self) -> dict[str, Any]:
        plan = self._findings.plan
        data = {"data.num_rows": plan.num_rows} if plan and plan.num_rows is not None else {}
        order = {"data.order": plan.order} if plan and plan.order else {}
        return {**flatten(self._options), **data, **order}

    def _check_resume(self, before: RunRecord | None) -> None:
        run = self._options.run
        if before is None and run.resume == "must":
            raise ConfigError(f"run.resume = 'must', but there is no run {run.name!r} in {self._folder.uri}.")
        if before is not None and run.resume == "never":
            raise ConfigError(
                f"run {run.name!r} exists already in {self._folder.uri}. Choose another run.name, or run.resume=auto."
            )
        if before is not None:
            changes = compare(before.facts, self._facts)
            changes.refuse_harmful(run.name or "")
            if changes.harmless:
                print(f"run {run.name!r} goes on with changed settings: {changes.text()}", flush=True)

    def _open(self) -> None:
        self._history = read(self._folder) if self._before else ()
        where = self._tracker.place(self._record.task) if self._tracker is not None else {}
        self._ledger.begin(self._facts, {f"mlflow_{name}": value for name, value in where.items()})
        self._folder.write("config.yaml", dump(self._options).encode())
        source = job_source()
        if source is not None:
            self._folder.write("job.py", source.read_bytes())

    def _collector(self) -> Collector:
        """Trackers open or about to be, and what earlier starts kept but could not send on its way to MLflow."""
        info, tracking = self._info(), self._options.tracking
        trackers: list[Tracker] = [ConsoleTracker()] if tracking.progress else []
        if self._tracker is None:
            return Collector(trackers, history=self._history, opening=info)
        self._tracker.load()
        folder = spool_folder(self._folder, self._record.key)
        earlier = left_by_earlier_starts(folder)
        collector = Collector(
            [*trackers, self._tracker],
            history=self._history,
            opening=info,
            opened=self._ledger.told,
            spool=Spool(folder / f"start-{info.attempt:04d}-{int(info.started_s * 1000)}.jsonl", info),
            earlier=earlier,
        )
        collector.catch_up(self._tracker)
        may_take_long = self._tracker.may_hang or bool(earlier)
        collector.wait_open(_OPEN_LIMIT_S if may_take_long and not tracking.strict else None, tracking.strict)
        if self._before is not None and self._tracker.is_open:
            keep_registered(self._folder.child("checkpoints"), self._tracker.book)
        return collector

    def _deliver_to(self, collector: Collector) -> Callable[[Report], None]:
        def deliver(report: Report) -> None:
            # Seen here and not on a tracker's thread: what the run ended with must be known when the workers have ended.
            self._ledger.see(report)
            if any(event.kind == "resumed" for event in report.events):
                # Workers that died took rows with them that were on their way; the checkpoint's history has them.
                collector.put(Report(tuple(read(self._folder))))
            collector.put(report)

        return deliver

    def _info(self) -> RunInfo:
        source = job_source()
        return RunInfo(
            name=self._record.name,
            task=self._record.task,
            attempt=self._record.attempts,
            params=flatten(self._options),
            config_yaml=dump(self._options),
            job_source=str(source) if source else None,
            folder=self._folder.uri,
            tags=dict(self._options.tracking.tags),
            previous=dict(self._record.trackers),
            datasets=self._findings.datasets,
            run_key=self._record.key,
            started_s=time.time(),
            origin=facts(str(source) if source else None),
            job_text=source.read_text(encoding="utf-8") if source else "",
            place=self._tracker.place(self._record.task) if self._tracker is not None else {},
        )

    def _hand_over(self) -> None:
        """Models into MLflow, after the run has ended there: what fails is told and changes nothing."""
        tracking = self._options.tracking
        if self._tracker is not None and tracking.log_model != "none":
            from raytrain.models.handover import Order, hand_over_or_tell

            order = Order(tracking.log_model, tracking.register, tracking.model_format)
            hand_over_or_tell(self._folder, self._task, self._options.train, self._tracker, order)


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))
