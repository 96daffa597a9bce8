"""What goes into a run, as MLflow shows it: its params, its datasets, its configuration and its job."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain.tracking.base import RunInfo
from raytrain.tracking.provenance import without_secrets

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Param
    from mlflow.tracking import MlflowClient

_DIGEST_CHARS = 36
Tell = Callable[[str, str], None]


def send_params(client: MlflowClient, run_id: str, params: Sequence[Param], tell: Tell) -> None:
    """One refused param must not lose the others: then each goes alone, and what is refused is told."""
    from mlflow.exceptions import MlflowException

    try:
        client.log_batch(run_id, params=params)
    except MlflowException as error:
        if error.error_code != "INVALID_PARAMETER_VALUE":
            raise
        if len(params) > 1:
            for param in params:
                send_params(client, run_id, [param], tell)
        else:
            tell(f"MLflow did not take the param {params[0].key!r}: {str(error)[:200]}", params[0].key)


def log_datasets(client: MlflowClient, run_id: str, run: RunInfo, tell: Tell) -> None:
    """Dataset inputs; MLflow keeps one entry per digest, so a later start adds only what has changed."""
    try:
        if run.datasets:
            client.log_inputs(run_id, dataset_inputs(run.datasets))
    except Exception as error:
        tell(f"MLflow did not take the facts of the datasets: {str(error)[:200]}", "datasets")


def log_job(client: MlflowClient, run_id: str, run: RunInfo, tell: Tell) -> None:
    """The effective configuration and the job's file, as artifacts."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        config.write_text(without_secrets(run.config_yaml), encoding="utf-8")
        for file in [config, *([Path(run.job_source)] if run.job_source else [])]:
            try:
                client.log_artifact(run_id, str(file), "job")
            except Exception as error:
                tell(f"MLflow did not take the artifact {file.name}: {str(error)[:200]}", file.name)


def dataset_inputs(datasets: Sequence[Mapping[str, Any]]) -> list[DatasetInput]:
    """Plain facts of datasets (see ``RunInfo.datasets``) as MLflow's inputs."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for data in datasets:
        name, num_rows = str(data["name"]), data.get("num_rows")
        digest = str(data.get("digest") or num_rows)[:_DIGEST_CHARS]
        profile = json.dumps({"num_rows": num_rows})
        dataset = Dataset(name, digest, *_source(str(data.get("source", ""))), _schema(data.get("schema", {})), profile)
        context = "training" if name == "train" else "evaluation"
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    return inputs


def _schema(types: Mapping[str, str]) -> str | None:
    # "mlflow_colspec" is what MLflow's page shows as a table of columns; the types are the data's own names for them.
    columns = [{"name": name, "type": kind, "required": True} for name, kind in types.items()]
    return json.dumps({"mlflow_colspec": columns}) if columns else None


def _source(source: str) -> tuple[str, str]:
    """MLflow's type and text of where data is: a place, or the class that makes it."""
    source = without_secrets(source)
    if source.startswith("/"):
        return "local", json.dumps({"uri": source})
    if "://" in source:
        return source.partition("://")[0], json.dumps({"uri": source})
    return "code", json.dumps({"tags": {"mlflow.source.name": source}})
