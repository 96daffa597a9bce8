"""The worker's side of a run: prepared parts, batches that know their position, true values, save and restore.

A Task's loop is written on it, and so is any loop of the user's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from raytrain.cadence import Cadence, Limit
from raytrain.config import TrainConfig
from raytrain.data import Batch, EvalBatches, TrainBatches, eval_loader, seed_everything, train_loader
from raytrain.data.device import ahead
from raytrain.data.shared import SharedEvalLoader
from raytrain.durations import Duration
from raytrain.errors import DataError
from raytrain.evaluation import eval_batch_size, evaluating, exact_means
from raytrain.journal import Journal
from raytrain.keeper import Keeper
from raytrain.optim import bare, prepare_for_training
from raytrain.peers import Peers
from raytrain.report import Row
from raytrain.runtime import Runtime
from raytrain.stream import Stream, check_world
from raytrain.weighted import Value, read_values

_DDP_DEFAULTS = {"gradient_as_bucket_view": True}  # the gradients live in the buckets: one copy less per step


class Session:
    """One worker among all. Every method is called on all ranks, in the same order.

    Attributes:
        rank: World rank, from 0.
        world_size: Number of workers.
        device: This worker's device.
        is_main: Whether this is rank 0.
        config: The run's TrainConfig.
    """

    def __init__(self, runtime: Runtime, config: TrainConfig, keeper: Keeper, peers: Peers) -> None:
        place = runtime.placement
        self.rank, self.world_size, self.device = place.rank, place.world_size, place.device
        self.is_main = self.rank == 0
        self.config = config
        self._runtime, self._keeper, self._peers = runtime, keeper, peers
        self._cursor = keeper.cursor
        self._models: list[nn.Module] = []
        self._journal: Journal | None = None
        self._stream: Stream | None = None
        self._open: Batch | None = None
        self._stopping = False
        self._clock_s = self._cursor.elapsed_s
        self._began = time.monotonic() - self._cursor.elapsed_s
        self._step_began = time.perf_counter()
        self._data_wait_s = 0.0
        seed_everything(config.seed)

    @property
    def step(self) -> int:
        """Optimizer steps (global batches) that are finished, over all attempts."""
        return self._cursor.step

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""
        return self._cursor.epoch

    @property
    def ended_epoch(self) -> int:
        """Epochs that are finished, if one ended with the last step; else 0."""
        return 0 if self._cursor.index else self._cursor.epoch

    @property
    def resumed(self) -> bool:
        """Whether this session goes on from a checkpoint."""
        return self._keeper.resumed

    @property
    def clock_s(self) -> float:
        """Training time over all attempts, as all ranks last agreed on it."""
        return self._clock_s

    @property
    def should_stop(self) -> bool:
        """Whether all ranks agreed to stop early; ``epochs`` and ``batches`` then end by themselves."""
        return self._stopping

    @property
    def last(self) -> Mapping[str, float]:
        """The latest value of each metric, averaged over all workers."""
        return self._journal.last if self._journal else {}

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """The model on its device, with SyncBatchNorm and compilation as configured, in DDP when there are several workers."""
        model = prepare_for_training(model, self.config, self.device)
        wrapped = self._runtime.wrap_model(model, {**_DDP_DEFAULTS, **self.config.ddp})
        self._models.append(bare(wrapped))
        return wrapped

    def prepare_loader(self, data: Any, batch_size: int | None = None, accumulate: int | None = None) -> TrainBatches:
        """Training batches of this rank from a Dataset or DataLoader; ``batch_size`` counts over all workers.

        Raises:
            DataError: The data cannot be trained on exactly once per epoch; the text says why.
        """
        config = self.config
        loader = train_loader(
            data,
            batch_size=batch_size or config.batch_size,
            accumulate=accumulate or config.accumulate,
            seed=config.seed,
            shuffle=config.shuffle,
            drop_last=config.drop_last,
            rank=self.rank,
            world_size=self.world_size,
            loader_workers=config.loader_workers,
        )
        loader.adopt(self._runtime.adopt_loader)
        self._peers.same_on_all("the training data (samples, batch size, steps per epoch)", loader.plan)
        return loader

    def prepare_eval(self, data: Any, batch_size: int | None = None) -> EvalBatches:
        """Evaluation batches of this rank: every sample once, no padding, whole batches dealt to the ranks."""
        size = batch_size or eval_batch_size(self.config)
        return eval_loader(
            data,
            batch_size=size,
            rank=self.rank,
            world_size=self.world_size,
            loader_workers=self.config.loader_workers,
            seed=self.config.seed,
        )

    def register(self, **parts: Any) -> None:
        """Name what belongs to the state (models, optimizers, anything with state_dict and load_state_dict).

        When the run resumes, each part is restored at once.

        Raises:
            CheckpointError: A part is not in the checkpoint, or does not fit it.
        """
        self._keeper.register(parts, self.device)

    def epochs(self, num_epochs: int | None = None) -> Iterator[int]:
        """The epochs from where the run stands up to ``num_epochs`` (None: ``train.epochs``, or 1)."""
        num_epochs = num_epochs or self.config.epochs or 1
        while self._cursor.epoch < num_epochs and not self._stopping:
            epoch = self._cursor.epoch
            yield epoch
            self._close_step()
            if self._cursor.epoch == epoch and not self._stopping:
                self._cursor.next_epoch()

    def batches(self, loader: TrainBatches) -> Iterator[Batch]:
        """What is left of the epoch under way, as micro-batches on the device.

        A step is closed when the body after its last micro-batch ends, or at the first ``end_step``, ``save`` or
        ``evaluate`` in it. A batch with ``num_rows`` 0 holds borrowed rows so that collectives match: its ``scale`` is 0.
        """
        stream = self._stream_of(loader)
        epoch = self._cursor.epoch
        while self._cursor.epoch == epoch and not self._stopping:
            began = time.perf_counter()
            batch = stream.next()
            self._data_wait_s += time.perf_counter() - began
            if batch.is_last:
                self._open = batch
            yield batch
            self._close_step()

    def log(self, values: Mapping[str, Any], num_rows: int = 1) -> None:
        """Values of the step under way, averaged over all ranks by weight. Nothing waits, no tensor is read.

        Args:
            values: By name (``group/name``): ``(sum, weight)``, a ``Value``, or a mean over ``num_rows`` samples.
            num_rows: What plain numbers are means over.
        """
        self.log_values(read_values(values, num_rows))

    def log_values(self, values: Mapping[str, Value]) -> None:
        """As ``log``, for what is read and detached already."""
        self._the_journal().log(values)

    def constant(self, name: str, value: float) -> None:
        """A value that is the same on all ranks, such as the learning rate."""
        self._the_journal().constant(name, value)

    def end_step(self) -> None:
        """Close the step under way: the cursor moves, and when a window is over the ranks agree."""
        self._close_step()

    def evaluate(
        self,
        fn: Callable[[Batch], Mapping[str, Any]],
        loader: EvalBatches,
        name: str = "val",
        model: nn.Module | None = None,
        log: bool = True,
    ) -> dict[str, float]:
        """Exact means over all samples of all ranks: the same bits on any number of workers.

        Args:
            fn: Values of one batch, as ``log`` takes them, a plain number being a mean over the batch's samples.
            loader: From ``prepare_eval``.
            name: Group of the metrics.
            model: What is evaluated, when it is not among the prepared models (an averaged copy).
            log: Make a row of the values; otherwise the caller does, with ``add_row``.

        Returns:
            ``name/key`` to mean, and ``name/samples``, on all ranks.
        """
        self._close_step()
        self.flush()
        models = [*self._models, *([model] if model is not None else [])]
        with evaluating(models, self.world_size):
            rows = [
                (batch.index, batch.num_rows, read_values(fn(batch), batch.num_rows))
                for batch in ahead(loader.batches(), self.device)
            ]
        if isinstance(loader, SharedEvalLoader):
            loader.check()
        means = exact_means(rows, self._peers)
        if not means["samples"]:
            raise DataError(f"the evaluation set {name!r} has no samples on any worker. Check what it reads.")
        values = {f"{name}/{key}": value for key, value in means.items()}
        if log:
            self.add_row(values)
        self._restart_step_clock()
        return values

    def add_row(self, values: Mapping[str, float]) -> None:
        """Log values that are global already at the step that was finished last."""
        self._the_journal().add_row(Row(self.step, self._epoch_fraction(), dict(values)))

    def save(self, best: bool = False) -> None:
        """Write a checkpoint at this step in the background; waits when the one before is still being written."""
        self._close_step()
        self.flush()
        journal = self._the_journal()
        self._keeper.save(self._cursor.at(self._clock_s), journal, dict(journal.last), best)
        self._restart_step_clock()

    def note(self, text: str) -> None:
        """A line for the user, from rank 0."""
        self._the_journal().event("note", self.step, text=text)

    def flush(self) -> None:
        """Make all finished steps global and agree with the other ranks."""
        clock_s = time.monotonic() - self._began
        journal = self._the_journal()
        for event in self._keeper.take_published():
            journal.add_event(event)
        agreed = journal.flush(clock_s, self._keeper.failure())
        self._clock_s = agreed.clock_s
        self._stopping = self._stopping or agreed.stop

    def close(self) -> None:
        """Write and send what is left. Called by raytrain when the loop has returned."""
        self._close_step()
        journal = self._the_journal()
        self._keeper.wait()
        self.flush()
        journal.event("finished", self.step, reason="stopped" if self._stopping else "done", epoch=self.epoch)
        journal.flush(time.monotonic() - self._began, self._keeper.failure(), final=True)
        self._keeper.keep_rows(self.step, journal)
        if self._stream is not None:
            self._stream.close()
        self._runtime.close()

    def cadence(self, every: str | None, loader: TrainBatches) -> Cadence:
        """Something that is due every so many epochs, steps or seconds."""
        return Cadence(every, loader.steps_per_epoch, self._clock_s)

    def limit(self, loader: TrainBatches) -> Limit:
        """The end of training that the configuration states."""
        return Limit.of(self.config, loader.steps_per_epoch)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _the_journal(self, loader: TrainBatches | None = None) -> Journal:
        if self._journal is None:
            steps_per_epoch = loader.steps_per_epoch if loader else 1
            log_every = Duration.parse(self.config.log_every).in_steps(steps_per_epoch) or 1
            self._journal = Journal(self._peers, self._runtime, log_every)
            self._journal.event("started", self.step, world_size=self.world_size, device=str(self.device))
            self._keeper.restore_journal(self._journal)
        return self._journal

    def _stream_of(self, loader: TrainBatches) -> Stream:
        self._the_journal(loader)
        stream = self._stream
        if stream is None or not stream.stands_at(loader, self._cursor):
            check_world(loader, self._cursor, None if stream else self._keeper.world_size_before, self.world_size)
            if stream is not None:
                stream.close()
            elif not self._keeper.restore_rng():
                seed_everything(self.config.seed, self.rank)
            self._stream = stream = Stream(loader, self._cursor, self.device)
            self._restart_step_clock()
        return stream

    def _close_step(self) -> None:
        batch, self._open = self._open, None
        if batch is None:
            return
        journal, now = self._the_journal(), time.perf_counter()
        journal.log(
            {
                "time/step_s": Value(now - self._step_began, 1.0),
                "time/data_wait_s": Value(self._data_wait_s, 1.0),
            }
        )
        ends = self._stream is None or self._stream.ends(batch)
        self._cursor.advance(ends)
        journal.end_step(self.step, self._epoch_fraction(), ends, batch.global_rows)
        if journal.full():
            self.flush()
        self._restart_step_clock()

    def _restart_step_clock(self) -> None:
        self._step_began, self._data_wait_s = time.perf_counter(), 0.0

    def _epoch_fraction(self) -> float:
        cursor = self._cursor
        steps = (self._stream.steps_per_epoch if self._stream else None) or cursor.length
        return cursor.epoch + (min(1.0, cursor.index / steps) if steps else 0.0)
