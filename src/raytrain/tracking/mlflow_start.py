"""The beginning of an MLflow run: made once, found again, told where it comes from. All of it may be done twice."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain.tracking.base import RunInfo
from raytrain.tracking.mlflow_inputs import dataset_inputs
from raytrain.tracking.mlflow_store import MlflowStore
from raytrain.tracking.names import INFINITE, clean, fit, param_values, tag_values
from raytrain.tracking.provenance import facts, without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Param, Run

_MAX_PARAMS = 100
_CHANGE_CHARS = 500


@dataclass
class Opened:
    """An MLflow run as it was found or made.

    Attributes:
        run_id: Its id.
        seen: Highest step of each of its series.
        num_starts: Starts of workers that it knows of.
        last_start: The event that was counted last, as ``attempt.number``.
        infinite: Tags that tell of infinite values.
        tags: Tags that it has.
        is_past: A later start went on with it: what an earlier one still has to say must not change how it stands now.
    """

    run_id: str
    seen: dict[str, int] = field(default_factory=dict)
    num_starts: int = 0
    last_start: str = ""
    infinite: set[str] = field(default_factory=set)
    is_past: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)


class MlflowStart:
    """Opens the MLflow run of one start.

    Args:
        store: Where; checked.
        run: The start.
        tell: Says a warning, once for each second argument.
    """

    def __init__(self, store: MlflowStore, run: RunInfo, tell: Callable[[str, str], None]) -> None:
        self._store, self._client, self._run, self._tell = store, store.client, run, tell
        self.run_id = ""  # known before all of it is done

    def open(self) -> Opened:
        """Make the run or go on with it."""
        before = self.existing()
        self.run_id = "" if before is None else before.info.run_id
        opened = self._create() if before is None else self._go_on(before)
        self.run_id = opened.run_id
        changes = self._log_params(self._run.params, before.data.params if before else {})
        if not opened.is_past:
            self._set_tags(self.run_id, {**changes, "raytrain.attempt": self._run.attempt})  # last: the start is told
            self._log_datasets(opened.run_id)
            self._upload(self._texts())
        return opened

    def add_params(self, params: Mapping[str, Any]) -> None:
        """Params that are known only later, and all of them as an artifact."""
        changes = self._log_params(params, self._client.get_run(self.run_id).data.params)
        self._set_tags(self.run_id, changes)
        self._upload({"params.json": without_secrets(json.dumps(params, indent=1, default=str))})

    def twins(self, run_id: str) -> list[str]:
        """Empty runs of the same key: made by a request whose answer was lost before the run that is in use."""
        found = self._of_key(10) if self._run.run_key else []
        return [run.info.run_id for run in found if run.info.run_id != run_id and not run.data.metrics]

    def existing(self) -> Run | None:
        """The run of the starts before, or of a try that was not answered."""
        run_id = self._run.previous.get("mlflow_run_id")
        found = self._of_id(run_id) if run_id else None
        if found is None and self._run.run_key:
            found = next(iter(self._of_key(1)), None)
        if found is None and run_id:
            text = f"the MLflow run {run_id} of the earlier start is not at {self._store.uri}, or deleted; a new one begins."
            self._tell(text, text)
        return found

    def _of_id(self, run_id: str) -> Run | None:
        from mlflow.exceptions import MlflowException

        try:
            found = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise  # a server in trouble must not make a second run of one experiment
            return None
        return None if found.info.lifecycle_stage == "deleted" else found

    def _of_key(self, limit: int) -> list[Run]:
        wanted = f"tags.`raytrain.key` = '{self._run.run_key}'"
        experiments = [self._store.experiment_id]
        return list(
            self._client.search_runs(experiments, wanted, max_results=limit, order_by=["attributes.start_time ASC"])
        )

    def _create(self) -> Opened:
        run = self._run
        data = {f"raytrain.data.{d['name']}.num_rows": d["num_rows"] for d in run.datasets if "num_rows" in d}
        own = {**self._origin(), "raytrain.attempt": run.attempt, "raytrain.folder": run.folder, **data}
        tags = tag_values({**own, **({"raytrain.key": run.run_key} if run.run_key else {}), **run.tags})
        start_ms = int(run.started_s * 1000) or None
        made = self._client.create_run(self._store.experiment_id, start_ms, tags, run.name)
        return Opened(made.info.run_id)

    def _origin(self) -> Mapping[str, str]:
        return self._run.origin or facts(self._run.job_source)

    def _go_on(self, before: Run) -> Opened:
        tags, last_attempt = before.data.tags, int(before.data.tags.get("raytrain.attempt", "0"))
        opened = Opened(
            before.info.run_id,
            # MLflow's latest point of a metric is the one with the highest step; its public view drops the step.
            {point.key: point.step for point in before.data.to_proto().metrics},
            int(tags.get("raytrain.worker_starts", "0")),
            tags.get("raytrain.worker_starts.last", ""),
            {name for name in tags if name.startswith(INFINITE)},
            self._run.attempt < last_attempt,
            tags,
        )
        if self._run.attempt > last_attempt:
            self._client.update_run(opened.run_id, status="RUNNING")
            if "raytrain.error" in tags:
                self._set_tags(opened.run_id, {"raytrain.error.before": tags["raytrain.error"]})
                self._client.delete_tag(opened.run_id, "raytrain.error")
            commit, now = "mlflow.source.git.commit", self._origin()
            moved = {"raytrain.changed.commit": f"{tags.get(commit)} -> {now.get(commit)}"}
            self._set_tags(opened.run_id, moved if tags.get(commit) != now.get(commit) else {})
        return opened

    def _log_params(self, params: Mapping[str, Any], present: Mapping[str, str]) -> dict[str, str]:
        """Params cannot change in MLflow: what a later start changed becomes a tag, which is returned."""
        from mlflow.entities import Param

        wanted = param_values(params)
        new = [Param(name, value) for name, value in wanted.items() if name not in present]
        for start in range(0, len(new), _MAX_PARAMS):
            self._send_params(self.run_id, new[start : start + _MAX_PARAMS])
        return {
            clean(f"raytrain.changed.{name}"): f"{fit(present[name], _CHANGE_CHARS)} -> {fit(value, _CHANGE_CHARS)}"
            for name, value in wanted.items()
            if present.get(name, value) != value and not name.startswith("run.")
        }

    def _send_params(self, run_id: str, params: Sequence[Param]) -> None:
        """One refused param must not lose the others: then each goes alone, and what is refused is told."""
        from mlflow.exceptions import MlflowException

        try:
            self._client.log_batch(run_id, params=params)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            if len(params) > 1:
                for param in params:
                    self._send_params(run_id, [param])
            else:
                self._tell(f"MLflow did not take the param {params[0].key!r}: {str(error)[:200]}", params[0].key)

    def _set_tags(self, run_id: str, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        if tags:
            self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tag_values(tags).items()])

    def _log_datasets(self, run_id: str) -> None:
        """Dataset inputs; MLflow keeps one entry per digest, so a later start adds only what has changed."""
        try:
            if self._run.datasets:
                self._client.log_inputs(run_id, dataset_inputs(self._run.datasets))
        except Exception as error:
            if self._store.is_outage(error):
                raise
            self._tell(f"MLflow did not take the facts of the datasets: {str(error)[:200]}", "datasets")

    def _texts(self) -> dict[str, str]:
        run, source = self._run, Path(self._run.job_source or "")
        texts = {"config.yaml": without_secrets(run.config_yaml)} if run.config_yaml else {}
        if run.job_text or (run.job_source and source.is_file()):
            texts[source.name] = run.job_text or source.read_text(encoding="utf-8")
        return texts

    def _upload(self, texts: Mapping[str, str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in texts.items():
                file = Path(folder, name)
                file.write_text(text, encoding="utf-8")
                try:
                    self._client.log_artifact(self.run_id, str(file), "job")
                except Exception as error:
                    if self._store.is_outage(error):
                        raise
                    self._tell(f"MLflow did not take the artifact {name}: {str(error)[:200]}", name)
