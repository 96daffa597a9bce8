"""Datasets as MLflow shows them among the inputs of a run; and the files that repeat it, among its artifacts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.tracking.provenance import without_secrets

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput

_DIGEST_CHARS = 36


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
