"""A worker's own ``mlflow.log_metric`` is refused: it would make a store in the worker's folder, or a second run.

It cannot join the run: MLflow would end it as FINISHED when the worker's process ends, whatever happened; steps that are replayed
after a failure would be there twice; and each worker would need the store's credentials.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from raytrain.errors import TrackingError

_CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
# Where raytrain is not installed as a package MLflow does not know its scheme: the URI itself, which MLflow shows, must do.
REFUSAL = "raytrain://workers-report-by-ray.train.report-and-not-by-mlflow.log_metric"


def refuse_mlflow() -> None:
    """In a worker: MLflow's functions raise from now on, unless the user's code sets a tracking URI of its own."""
    for name in _CREDENTIALS:
        os.environ.pop(name, None)
    os.environ["MLFLOW_TRACKING_URI"] = REFUSAL


def refuse(store_uri: Any = None, artifact_uri: Any = None) -> NoReturn:
    """What MLflow calls for a store of this scheme (entry point ``mlflow.tracking_store``).

    Raises:
        TrackingError: Always, with the cure.
    """
    raise TrackingError(
        "a worker does not write to MLflow: the driver alone does, so that the run has one value per step and a true end. Report "
        "the numbers instead (ray.train.report, Session.log or the metrics of Task.loss); they are averaged over the workers and "
        "written to the run. To write to a run of your own, call mlflow.set_tracking_uri(...) in the worker first."
    )
