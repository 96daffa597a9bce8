"""Models of a run in MLflow: logged ones, references to checkpoints, and versions in the registry. Knows nothing of torch."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain.tracking.names import MAX_TAG, clean, tag_values
from raytrain.tracking.provenance import without_secrets

if TYPE_CHECKING:
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

FLAVOR = "raytrain"
FORM, FORMAT, STEP, CHECKPOINT, RUN, WEIGHTS = (
    f"raytrain.{key}" for key in ("form", "format", "step", "checkpoint", "folder", "weights_sha256")
)
COPY, REFERENCE = "copy", "reference"
COPIED, REFERRED = "model", "checkpoint"  # names of logged models; with -last for the last one beside the best
_NOT_SCORES = ("train/", "time/", "rank/", "system/")
_TAG = "raytrain.checkpoint"


@dataclass(frozen=True)
class Kept:
    """A checkpoint as trackers know it: where it is, its step and its metrics."""

    uri: str
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def scores(self) -> dict[str, float]:
        """Its metrics over evaluation sets."""
        return {name: value for name, value in self.metrics.items() if not name.startswith(_NOT_SCORES)}

    def tags(self, kind: str) -> dict[str, Any]:
        """As tags of the run: URI, step, and the metrics as JSON, the evaluation's first, as many as fit."""
        rest = {name: value for name, value in self.metrics.items() if name.startswith("train/")}
        items = [*sorted(self.scores.items()), *sorted(rest.items())]
        while len(shown := json.dumps(dict(items))) > MAX_TAG:
            items.pop()
        return {f"{_TAG}.{kind}": self.uri, f"{_TAG}.{kind}.step": self.step, f"{_TAG}.{kind}.metrics": shown}


def kept_in(tags: Mapping[str, str]) -> dict[str, Kept]:
    """The checkpoints that the tags of a run tell of, by ``best`` and ``last``."""
    found: dict[str, Kept] = {}
    for kind in ("best", "last"):
        with contextlib.suppress(KeyError, ValueError):  # written by hand, or before there was a step
            values = json.loads(tags.get(f"{_TAG}.{kind}.metrics", "{}"))
            found[kind] = Kept(tags[f"{_TAG}.{kind}"], int(tags[f"{_TAG}.{kind}.step"]), values)
    return found


class ModelBook:
    """The models of one MLflow run.

    Args:
        client: Of the store.
        run_id: The run; it may have ended.
        experiment_id: Its experiment.
    """

    def __init__(self, client: MlflowClient, run_id: str, experiment_id: str) -> None:
        self._client, self._run_id, self._experiment_id = client, run_id, experiment_id

    def models(self, form: str) -> list[LoggedModel]:
        """The run's logged models of a form (``copy`` or ``reference``), newest first."""
        return [model for model in self._all() if model.tags.get(FORM) == form]

    def _all(self) -> list[LoggedModel]:
        return list(self._client.search_logged_models([self._experiment_id], f"source_run_id = '{self._run_id}'"))

    def put(
        self, name: str, kept: Kept, tags: Mapping[str, Any], write: Callable[[Any, Path], None]
    ) -> tuple[LoggedModel, bool]:
        """Log a model, unless the run has it already.

        Args:
            name: Of the logged model.
            kept: The checkpoint that it is of.
            tags: What tells it from others: a model of this name with these tags is taken as it is.
            write: Writes the files, ``MLmodel`` among them, into an empty folder; gets MLflow's model and the folder.

        Returns:
            The model, and whether it is new.
        """
        tags = tag_values({**tags, STEP: kept.step})
        for model in self.models(str(tags[FORM])):
            if model.name == name and model.status.name == "READY" and tags.items() <= model.tags.items():
                return model, False
        model = self._client.create_logged_model(self._experiment_id, name, self._run_id, tags)
        try:
            self._fill(model, kept, write)
        except BaseException:
            with contextlib.suppress(Exception):  # the error itself matters more
                self._client.finalize_logged_model(model.model_id, "FAILED")
            raise
        return self._client.finalize_logged_model(model.model_id, "READY"), True

    def _fill(self, model: LoggedModel, kept: Kept, write: Callable[[Any, Path], None]) -> None:
        from mlflow.entities import LoggedModelOutput
        from mlflow.models import Model

        with tempfile.TemporaryDirectory() as folder:
            described = Model(
                artifact_path=model.artifact_location,
                run_id=self._run_id,
                model_uuid=model.model_id,
                model_id=model.model_id,
            )
            write(described, Path(folder, "model"))
            self._client.log_model_artifacts(model.model_id, str(Path(folder, "model")))
        self._client.log_outputs(self._run_id, [LoggedModelOutput(model.model_id, kept.step)])
        self._link(model.model_id, kept)

    def _link(self, model_id: str, kept: Kept) -> None:
        """The run's own points of the checkpoint's metrics, with their times: so they stay one point in the run."""
        from mlflow.entities import Metric

        points = []
        for name in kept.scores:
            history = self._client.get_metric_history(self._run_id, clean(name))
            past = [point for point in history if point.step <= kept.step]
            if past:
                point = max(past, key=lambda point: point.step)
                points.append(Metric(point.key, point.value, point.timestamp, point.step, model_id=model_id))
        if points:
            self._client.log_batch(self._run_id, metrics=points)

    def refer(self, wanted: Mapping[str, Kept], folder: str) -> None:
        """Keep one reference for each checkpoint, by name; drop those that are of none and that no version points to."""
        keep = {self.refer_to(name, kept, folder).model_id for name, kept in wanted.items()}
        stale = [model for model in self.models(REFERENCE) if model.model_id not in keep]
        if stale:
            used = {model_id for model_id, _ in self._versions()}
            for model in stale:
                if model.model_id not in used:
                    self._client.delete_logged_model(model.model_id)

    def refer_to(self, name: str, kept: Kept, folder: str) -> LoggedModel:
        """The reference to a checkpoint, made when there is none."""
        place = {"checkpoint": kept.uri, "run": folder, "step": kept.step}

        def write(model: Any, to: Path) -> None:
            model.add_flavor(FLAVOR, form=REFERENCE, **place)
            to.mkdir()
            model.save(str(to / "MLmodel"))

        return self.put(name, kept, {FORM: REFERENCE, CHECKPOINT: kept.uri, RUN: folder}, write)[0]

    def register(self, name: str, model: LoggedModel, aliases: Sequence[str], tags: Mapping[str, Any]) -> str:
        """The model's version under a registered name, made when there is none, with the aliases; returns the version."""
        self._make_name(name)
        version = next((v for model_id, v in self._versions() if v.name == name and model_id == model.model_id), None)
        if version is None:
            # Not models:/ID: a registry in this process would look for it at MLflow's process-wide address.
            version = self._client.create_model_version(
                name, str(model.artifact_location), run_id=self._run_id, tags=tag_values(tags), model_id=model.model_id
            )
        for alias in aliases:
            self._client.set_registered_model_alias(name, alias, str(version.version))
        return str(version.version)

    def _make_name(self, name: str) -> None:
        from mlflow.exceptions import MlflowException

        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def referring(self) -> dict[str, list[str]]:
        """URIs of checkpoints that versions in the registry refer to, with these versions as ``NAME/3``."""
        places = {model.model_id: model.tags.get(CHECKPOINT, "") for model in self.models(REFERENCE)}
        found: dict[str, list[str]] = {}
        for model_id, version in self._versions():
            if model_id in places:
                found.setdefault(places[model_id], []).append(f"{version.name}/{version.version}")
        return found

    def is_gone(self, version: str) -> bool:
        """Whether a version, ``NAME/3``, is in the registry no more."""
        from mlflow.exceptions import MlflowException

        name, _, number = version.rpartition("/")
        try:
            self._client.get_model_version(name, number)
        except MlflowException as error:
            return bool(error.error_code == "RESOURCE_DOES_NOT_EXIST")
        return False

    def _versions(self) -> Iterator[tuple[str, ModelVersion]]:
        """The versions that came of this run, with the ids of their logged models."""
        known = {source: m.model_id for m in self._all() for source in (m.artifact_location, f"models:/{m.model_id}")}
        for version in self._client.search_model_versions(f"run_id = '{self._run_id}'"):
            if version.source in known:
                yield known[version.source], version


def reason(error: BaseException) -> str:
    """What went wrong, in one line and without secrets."""
    return without_secrets(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
