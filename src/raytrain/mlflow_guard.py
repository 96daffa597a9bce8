"""A worker's own ``mlflow.log_metric`` is refused: it would make a store in the worker's folder, or a second run.

It cannot join the run: MLflow would end it as FINISHED when the worker's process ends, whatever happened; steps that are replayed
after a failure would be there twice; and each worker would need the store's credentials.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from typing import Any, NoReturn

from raytrain.errors import TrackingError

_CREDENTIALS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN")
_SCHEME = "raytrain-worker"
_REGISTRIES = {
    "mlflow.tracking._tracking_service.utils": "_tracking_store_registry",
    "mlflow.tracking._model_registry.utils": "_model_registry_store_registry",
}


def refuse_mlflow() -> None:
    """In a worker: MLflow's functions raise from now on, unless the user's code sets a tracking URI of its own."""
    for name in _CREDENTIALS:
        os.environ.pop(name, None)
    os.environ["MLFLOW_TRACKING_URI"] = f"{_SCHEME}://"
    for module, name in _REGISTRIES.items():
        registry = getattr(sys.modules.get(module), name, None)
        if registry is not None:  # MLflow has asked for plugins already
            registry.register(_SCHEME, refuse)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def refuse(store_uri: Any = None, artifact_uri: Any = None, tracking_uri: Any = None) -> NoReturn:
    """What MLflow calls for a store of our scheme.

    Raises:
        TrackingError: Always, with the cure.
    """
    raise TrackingError(
        "a worker does not write to MLflow: the driver alone does, so that the run has one value per step and a true end. Report "
        "the numbers instead (ray.train.report, Session.log or the metrics of Task.loss); they are averaged over the workers and "
        "written to the run. To write to a run of your own, call mlflow.set_tracking_uri(...) in the worker first."
    )


class _Plugin(Distribution):
    """MLflow finds stores by entry points of installed packages; raytrain may not be installed but shipped with a Ray job."""

    def read_text(self, filename: str) -> str | None:
        entry = f"{_SCHEME} = {__name__}:{refuse.__name__}"
        texts = {
            "METADATA": "Metadata-Version: 2.1\nName: raytrain-mlflow-guard\nVersion: 0\n",
            "entry_points.txt": f"[mlflow.tracking_store]\n{entry}\n[mlflow.model_registry_store]\n{entry}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _Finder(DistributionFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """It finds no modules."""

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        if getattr(context, "name", None) in (None, "raytrain-mlflow-guard"):
            yield _Plugin()
