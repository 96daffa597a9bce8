"""A run that has ended, with its task and its MLflow run, for what is done to it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain.errors import ConfigError
from raytrain.models import rebuild
from raytrain.models.weights import record_of
from raytrain.options import Options
from raytrain.storage import Storage
from raytrain.tracking import MlflowTracker


@dataclass(frozen=True)
class EndedRun:
    """A run's folder, task and settings, and its MLflow run."""

    folder: Storage
    settings: Options
    tracker: MlflowTracker


def of_run(place: str, flags: Sequence[str] = ()) -> EndedRun:
    """The run in a folder.

    Raises:
        ConfigError: There is no run, its task cannot be made again, or it has no MLflow run.
        TrackingError: MLflow does not answer, or has lost the run.
    """
    folder = Storage(place)
    record = record_of(folder)
    run_id = record.trackers.get("mlflow_run_id")
    if run_id is None:
        raise ConfigError(f"{folder.uri} has no MLflow run: it was trained with tracking.mlflow=false.")
    settings = rebuild.settings(folder, flags)
    tracker = MlflowTracker(settings.tracking, folder.parent().uri)
    tracker.attach(run_id)
    return EndedRun(folder, settings, tracker)
