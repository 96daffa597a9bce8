"""Mending the runs of a storage: an end for those whose driver died, and what was left on disk sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from raytrain.errors import RaytrainError, TrackingError
from raytrain.identity import RunRecord
from raytrain.liveness import lives
from raytrain.storage import Storage
from raytrain.tracking.base import RunInfo
from raytrain.tracking.mlflow import MlflowTracker
from raytrain.tracking.sending import send
from raytrain.tracking.spool import spool_folder, spools_in

DIED = "the driver died"


@dataclass
class Repair:
    """What was found and done; one line each.

    Attributes:
        done: What was mended, or need not be.
        failed: What could not be mended now.
    """

    done: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def repair(place: str, warn: Callable[[str], None]) -> Repair:
    """Mend all runs of a storage: KILLED where the record says RUNNING and the driver lives no more; spools are sent.

    The end of such a run is the last time that its driver was heard of.
    """
    storage, report = Storage(place), Repair()
    for name in storage.names():
        folder = storage.child(name)
        try:
            record = RunRecord.load(folder)
            if record is not None:
                _mend(folder, record, report, warn)
        except RaytrainError as error:
            report.failed.append(f"{name}: {error}")
    return report


def _mend(folder: Storage, record: RunRecord, report: Repair, warn: Callable[[str], None]) -> None:
    is_open = record.status == "RUNNING"
    if is_open and lives(record.driver, record.updated_s):
        report.done.append(f"{record.name}: left alone, its driver lives ({_driver(record)})")
        return
    spools = spool_folder(folder, record.key)
    if record.key and spools_in(spools):
        sent = send(spools, warn)
        report.done.append(f"{record.name}: sent {sum(one.num_items for one in sent)} items to MLflow")
    if is_open:
        # MLflow first: if it is away, the record stays open and the next repair tries again.
        in_mlflow = _end_in_mlflow(folder, record)
        record.ended("KILLED", error=DIED).save(folder)
        report.done.append(f"{record.name}: KILLED, {DIED} ({_driver(record)}){'' if in_mlflow else '; not in MLflow'}")


def _end_in_mlflow(folder: Storage, record: RunRecord) -> bool:
    place = {name: record.trackers.get(f"mlflow_{name}", "") for name in ("uri", "experiment", "folder")}
    if not place["uri"]:
        return False
    run = RunInfo(
        record.name,
        record.task,
        record.attempts,
        params={},
        config_yaml="",
        job_source=None,
        folder=folder.uri,
        previous=record.trackers,
        run_key=record.key,
    )
    try:
        return MlflowTracker.at(place).mend(run, "KILLED", DIED, record.updated_s)
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(f"MLflow at {place['uri']} did not take the end: {type(error).__name__}: {error}") from None


def _driver(record: RunRecord) -> str:
    return f"process {record.driver.get('pid', '?')} on {record.driver.get('host', '?')}"
