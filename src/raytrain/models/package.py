"""A model as MLflow keeps it: weights, the task's source and settings, and beside them what ``mlflow.pytorch`` loads."""

from __future__ import annotations

import hashlib
import inspect
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raytrain.models.example import Example
from raytrain.models.exporting import first_lines
from raytrain.models.rebuild import CONFIG
from raytrain.tracking.mlflow_models import COPY, FLAVOR
from raytrain.tracking.provenance import without_secrets

DATA, WEIGHTS = "raytrain", "weights.pt"


@dataclass(frozen=True)
class Package:
    """What is written for one model.

    Attributes:
        model: In evaluation mode, on the CPU.
        weights: Its weights by name.
        facts: Plain facts for the flavour: step, name of the run.
        sources: ``job.py`` and ``config.yaml`` as far as they are known.
        example: What it is called with, or None.
        form: ``pt2``, ``weights`` or ``pickle``.
        tell: Where a note goes.
    """

    model: nn.Module
    weights: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    sources: Mapping[str, bytes]
    example: Example | None
    form: str
    tell: Callable[[str], None]

    def write(self, described: Any, folder: Path) -> None:
        """Fill a folder that is not there yet; ``described`` is MLflow's own ``Model``."""
        if not self._flavoured(described, folder):
            folder.mkdir(parents=True)
            if self.example is not None:
                described.signature = _signature(self.model, self.example)
        data = folder / DATA
        data.mkdir()
        torch.save(dict(self.weights), data / WEIGHTS)
        for name, source in self.sources.items():
            text = without_secrets(source.decode(errors="replace")).encode() if name == CONFIG else source
            (data / name).write_bytes(text)
        sha256 = hashlib.sha256((data / WEIGHTS).read_bytes()).hexdigest()
        described.add_flavor(FLAVOR, form=COPY, data=DATA, sha256=sha256, torch=str(torch.__version__), **self.facts)
        described.save(str(folder / "MLmodel"))

    def _flavoured(self, described: Any, folder: Path) -> bool:
        """Whether ``mlflow.pytorch`` wrote its part."""
        import mlflow.pytorch

        knows_pt2 = "serialization_format" in inspect.signature(mlflow.pytorch.save_model).parameters
        options: dict[str, Any] = {"pip_requirements": _requirements()}
        if self.example is not None:
            options["signature"] = _signature(self.model, self.example)
        if self.form == "pickle":
            options |= {"serialization_format": "pickle"} if knows_pt2 else {}
        elif self.form == "pt2" and (inputs := self._inputs(knows_pt2)) is not None:
            options |= {"serialization_format": "pt2", "input_example": inputs}
        else:
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mlflow.pytorch.save_model(self.model, str(folder), mlflow_model=described, **options)
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            self.tell(f"mlflow.pytorch cannot keep the model ({type(error).__name__}: {first_lines(error)}); {_REST}")
            return False
        return True

    def _inputs(self, knows_pt2: bool) -> Any:
        """The example as MLflow takes it for an exported program; None, told, where there can be none."""
        example = self.example
        if example is None:
            return None
        if not knows_pt2:
            self.tell(f"this MLflow cannot keep exported programs; {_REST}")
            return None
        if example.kwargs or not all(isinstance(arg, torch.Tensor) and arg.dtype in _NUMPY for arg in example.args):
            self.tell(
                f"MLflow's exported programs take plain tensors by position, and this model takes others; {_REST}"
            )
            return None
        arrays = tuple(arg.detach().numpy() for arg in example.args)
        return arrays if len(arrays) > 1 else arrays[0]


_REST = (
    "it is logged as weights and source: raytrain.load reads it, mlflow.pytorch only with tracking.model_format=pickle."
)
_NUMPY = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def _requirements() -> list[str]:
    import mlflow

    return [f"mlflow=={mlflow.__version__}", f"torch=={str(torch.__version__).partition('+')[0]}"]


def _signature(model: nn.Module, example: Example | None) -> Any:
    """Input and output tensors, their first dimension free; None when MLflow has no words for them."""
    from mlflow.models import ModelSignature
    from mlflow.types import Schema

    assert example is not None
    try:
        named = inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments
        inputs = _specs(dict(named))
        answers = pytree.tree_leaves(example.call(model))
        outputs = _specs({f"output_{i}": answer for i, answer in enumerate(answers)})
        return ModelSignature(Schema(inputs), Schema(outputs) if outputs else None)
    except Exception:
        return None


def _specs(tensors: Mapping[str, Any]) -> list[Any]:
    from mlflow.types import TensorSpec

    if not all(isinstance(value, torch.Tensor) and value.dtype in _NUMPY for value in tensors.values()):
        raise TypeError("not plain tensors")
    alone = len(tensors) == 1
    return [
        TensorSpec(value.detach().numpy().dtype, (-1, *value.shape[1:]), None if alone else name)
        for name, value in tensors.items()
    ]
