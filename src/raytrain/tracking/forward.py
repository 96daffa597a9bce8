"""The callback that goes into a foreign trainer's ``RunConfig``: it runs on Ray Train's controller and only forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.train import UserCallback

from raytrain.tracking.reported import Reported, Start, plain, settings

_FAILURE_CHARS = 1500


class Forward(UserCallback):  # type: ignore[misc]
    """Hands what all workers reported to a mailbox; holds its handle, no client and no secret. Never waits, never raises.

    Ray pickles it into the controller, and with the trainer's configuration into each worker, before the user's function begins:
    there its arrival makes the worker's own MLflow functions refuse, see ``mlflow_guard``.

    Args:
        mailbox: Handle of the actor.
        guard: Whether a worker's own MLflow functions are to refuse.
    """

    def __init__(self, mailbox: Any, guard: bool) -> None:
        self._mailbox, self._guard = mailbox, guard
        self._fit, self._order = "", 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self._mailbox, self._guard, _process())

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        """Forward the numbers, and where the checkpoint is."""
        with contextlib.suppress(Exception):
            known = [plain(values) for values in metrics]
            others = {name: kind for _, kinds in known for name, kind in kinds.items()}
            workers = run_context.scaling_config.num_workers
            self._send(
                run_context,
                Reported(
                    run_context.run_id,
                    0,
                    ranks=[numbers for numbers, _ in known],
                    others=others,
                    checkpoint="" if checkpoint is None else uri_of(checkpoint.filesystem, checkpoint.path),
                    num_workers=workers if isinstance(workers, int) else 0,
                ),
            )

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Forward what failed, which may be retried."""
        with contextlib.suppress(Exception):
            self._send(run_context, Reported(run_context.run_id, 0, failure=failures(worker_exceptions)))

    def _send(self, context: Any, message: Reported) -> None:
        if self._fit != message.fit:
            self._fit, self._order = message.fit, 0
            message = replace(message, start=_start(context))
        self._mailbox.put.remote(replace(message, order=self._order))
        self._order += 1


def _process() -> str:
    worker_id: str = ray.get_runtime_context().get_worker_id()
    return worker_id


def _arrive(mailbox: Any, guard: bool, driver: str) -> Forward:
    if guard and _process() != driver:
        from raytrain.mlflow_guard import refuse_mlflow

        refuse_mlflow()
    return Forward(mailbox, guard)


def _start(context: Any) -> Start:
    run, scaling = context.run_config, context.scaling_config
    params = {f"train_loop_config.{name}": value for name, value in settings(context.train_loop_config).items()}
    params["scaling.num_workers"], params["scaling.use_gpu"] = str(scaling.num_workers), scaling.use_gpu
    folder = ""
    with contextlib.suppress(Exception):
        storage = run.storage_context
        folder = uri_of(storage.storage_filesystem, storage.experiment_fs_path)
    controller = None
    with contextlib.suppress(Exception):
        controller = ray.get_runtime_context().current_actor
    return Start(run.name or "", folder, "cuda" if scaling.use_gpu else "cpu", params, controller)


def uri_of(filesystem: Any, path: str) -> str:
    """A place as text: the path of a local folder, a URI elsewhere."""
    kind = str(filesystem.type_name).rpartition("::")[2].removeprefix("fsspec+")
    return path if kind in ("local", "file") else f"{ {'gcs': 'gs', 'abfs': 'abfs'}.get(kind, kind) }://{path}"


def failures(by_rank: Mapping[int, Exception]) -> str:
    """What each worker failed with, and the first one's trace."""
    lines = []
    for rank, error in sorted(by_rank.items()):
        base = getattr(error, "_base_exc", error)
        lines.append(f"rank {rank}: {type(base).__name__}: {base}".splitlines()[0][:_FAILURE_CHARS])
    first = str(by_rank[min(by_rank)]) if by_rank else ""
    return "\n".join([*lines, first[-_FAILURE_CHARS:]])
