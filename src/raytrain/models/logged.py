"""Models that are in MLflow, opened again without executing pickled code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from raytrain.checkpoint import open_checkpoint
from raytrain.config import TrackingConfig
from raytrain.errors import CheckpointError, ConfigError, TrackingError
from raytrain.models import rebuild, weights
from raytrain.models.loading import Opened, open_checkpointed
from raytrain.models.package import WEIGHTS
from raytrain.storage import Storage
from raytrain.task import Task
from raytrain.tracking.mlflow_models import COPIED, FLAVOR, REFERENCE, REFERRED, reason
from raytrain.tracking.mlflow_store import MlflowStore


def open_logged(
    uri: str,
    map_location: Any = "cpu",
    *,
    task: Task | None = None,
    flags: Sequence[str] = (),
    trusted: bool = False,
    tracking_uri: str | None = None,
) -> Opened:
    """The model that a ``models:/`` or ``runs:/`` URI names: as raytrain logged it, or as ``mlflow.pytorch`` did.

    Raises:
        ConfigError: There is no such model, or it can only be loaded by executing pickled code.
        TrackingError: MLflow does not answer.
    """
    folder = fetch(uri, tracking_uri)
    described = yaml.safe_load((folder / "MLmodel").read_text(encoding="utf-8"))
    flavour = described.get("flavors", {}).get(FLAVOR)
    if flavour is None:
        return Opened(_foreign(folder, described, uri, map_location, trusted), uri, None, None, None)
    if flavour["form"] == REFERENCE:
        checkpoint = flavour["checkpoint"]
        try:
            saved = open_checkpoint(checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{uri} refers to the checkpoint {checkpoint}, which is not there: {error}") from None
        return open_checkpointed(saved, Storage(flavour["run"]), map_location, task, flags)
    data = Storage(str(folder / flavour["data"]))
    settings = None if task else rebuild.settings(data, flags)
    task = task or (settings.task if settings else None)
    assert task is not None
    model = weights.fill(weights.make(task), _state(data, map_location), uri)
    return Opened(model.to(map_location), uri, settings, task, flavour.get("step"))


def fetch(uri: str, tracking_uri: str | None = None) -> Path:
    """The files of a model of MLflow, in a folder of this machine.

    Raises:
        ConfigError: There is no such model.
        TrackingError: MLflow does not answer.
    """
    from mlflow.artifacts import download_artifacts
    from mlflow.exceptions import MlflowException

    store = MlflowStore(TrackingConfig(uri=tracking_uri), "runs")
    store.check_uri()
    try:
        with store.patient():
            place = _place(store.client, uri)
            folder = Path(download_artifacts(artifact_uri=place, tracking_uri=store.raw_uri))
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise ConfigError(f"{uri} is not in MLflow at {store.uri}: {reason(error)}") from None
        raise TrackingError(f"{uri} cannot be fetched from MLflow at {store.uri}: {reason(error)}") from None
    except OSError as error:
        raise ConfigError(f"the files of {uri} are not there: {reason(error)}") from None
    if not (folder / "MLmodel").is_file():
        raise ConfigError(f"{uri} is no MLflow model: it has no file MLmodel.")
    return folder


def _place(client: Any, uri: str) -> str:
    """Where the files are. MLflow itself finds them only at its process-wide address, which is left alone here."""
    scheme, _, rest = uri.partition(":/")
    rest = rest.lstrip("/")
    if scheme == "runs":
        run_id, _, name = rest.partition("/")
        experiment = client.get_run(run_id).info.experiment_id
        models = client.search_logged_models([experiment], f"source_run_id = '{run_id}'")
        referred = name.replace(COPIED, REFERRED, 1)  # what a run has that keeps no copies
        found = [m for m in models if m.name == name] or [m for m in models if m.name == referred]
        if found:
            return str(max(found, key=lambda model: model.creation_timestamp).artifact_location)
        return f"{client.get_run(run_id).info.artifact_uri}/{name}"
    source = rest if rest.startswith("m-") and "/" not in rest else _version(client, uri, rest).source
    model_id = source.removeprefix("models:/")
    if model_id.startswith("m-"):
        return str(client.get_logged_model(model_id).artifact_location)
    return _place(client, source) if source.startswith("runs:/") else str(source)


def _version(client: Any, uri: str, rest: str) -> Any:
    name, at, alias = rest.partition("@")
    if at:
        return client.get_model_version_by_alias(name, alias)
    name, _, number = rest.partition("/")
    if not number.isdigit():
        raise ConfigError(
            f"{uri!r} is not understood. Allowed: models:/NAME@ALIAS, models:/NAME/VERSION, runs:/ID/NAME."
        )
    return client.get_model_version(name, number)


def _state(data: Storage, map_location: Any) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(io.BytesIO(data.read(WEIGHTS)), map_location=map_location, weights_only=True)
        return state
    except Exception as error:
        raise CheckpointError(
            f"{data.child(WEIGHTS).uri} cannot be read: {reason(error)}. The file is cut or damaged."
        ) from None


def _foreign(folder: Path, described: dict[str, Any], uri: str, map_location: Any, trusted: bool) -> nn.Module:
    """A model of ``mlflow.pytorch``: an exported program that MLflow has looked through, or whatever is trusted."""
    flavour = described.get("flavors", {}).get("pytorch")
    if flavour is None:
        kinds = ", ".join(described.get("flavors", {})) or "none"
        raise ConfigError(f"{uri} is no PyTorch model (flavours: {kinds}).")
    exported = (folder / flavour["model_data"] / "model.pt2").is_file()
    if not trusted and not exported:
        raise ConfigError(
            f"{uri} is a pickled model: loading it executes code that came with it. If you trust who logged it: "
            "raytrain.load(..., trusted=True), or --trusted."
        )
    mlflow_pytorch = importlib.import_module("mlflow.pytorch")
    if not trusted and not hasattr(mlflow_pytorch, "_validate_pt2_archive_is_pickle_free"):
        raise ConfigError(
            f"this MLflow cannot see whether {uri} holds pickled code: update mlflow, or give trusted=True."
        )
    try:
        with _pickles(trusted):
            model: nn.Module = mlflow_pytorch.load_model(str(folder))
    except Exception as error:
        raise ConfigError(f"{uri} cannot be loaded: {reason(error)}") from error
    return model if exported else model.to(map_location).eval()


@contextlib.contextmanager
def _pickles(allowed: bool) -> Iterator[None]:
    """MLflow's own guard for the block."""
    name = "MLFLOW_ALLOW_PICKLE_DESERIALIZATION"
    before = os.environ.get(name)
    os.environ[name] = str(allowed).lower()
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
