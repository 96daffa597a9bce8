"""A model as a program of its own: torch.export or ONNX, with a free batch size, compared with the model before it is kept."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from raytrain.errors import ConfigError, RaytrainError
from raytrain.models.example import Example
from raytrain.storage import Storage


class ExportError(RaytrainError):
    """A model that cannot be exported, or whose export answers something else."""


def traced(model: nn.Module, example: Example) -> Any:
    """The model as a ``torch.export`` program whose batch size is free, where the example has two rows or more.

    Raises:
        ExportError: torch cannot trace it; with torch's reason.
    """
    try:
        return torch.export.export(model, example.args, dict(example.kwargs), dynamic_shapes=_shapes(model, example))
    except Exception as error:
        raise ExportError(
            f"torch.export cannot trace the model: {type(error).__name__}: {first_lines(error)} Keep Python that depends on data "
            "(if, .item()) out of forward, or set example(self) in the task if it is called with other inputs."
        ) from error


def export_pt2(model: nn.Module, example: Example) -> tuple[bytes, float]:
    """The bytes of a ``.pt2`` file, and the greatest difference from the model on the example and on twice its rows.

    Raises:
        ExportError: It cannot be exported, or differs.
    """
    file = io.BytesIO()
    torch.export.save(traced(model, example), file)
    file.seek(0)
    program = torch.export.load(file).module()
    return file.getvalue(), compare(model, lambda e: program(*e.args, **e.kwargs), example)


def export_onnx(model: nn.Module, example: Example) -> tuple[bytes, float]:
    """As ``export_pt2``, for ONNX; compared in onnxruntime, or without it in onnx's own evaluator.

    Raises:
        ConfigError: The packages are not installed.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"--format onnx needs {' and '.join(missing)}: pip install 'raytrain[onnx]'.")
    program = traced(model, example)
    try:
        with _quiet():
            made = torch.onnx.export(program, dynamo=True, verbose=False)
        assert made is not None
        data = made.model_proto.SerializeToString()
    except Exception as error:
        raise ExportError(f"torch.onnx cannot export it: {type(error).__name__}: {first_lines(error)}") from error
    return data, compare(model, lambda e: _run_onnx(data, e), example)


def compare(model: nn.Module, program: Any, example: Example) -> float:
    """The greatest difference between model and program over the example, and over twice its rows where rows are free.

    Raises:
        ExportError: It is more than rounding.
    """
    worst = 0.0
    for inputs in [example, *([example.repeated()] if _is_free(example) else [])]:
        want = [t for t in pytree.tree_leaves(inputs.call(model)) if isinstance(t, torch.Tensor)]
        with torch.no_grad():
            got = [torch.as_tensor(t) for t in pytree.tree_leaves(program(inputs))]
        if [t.shape for t in want] != [t.shape for t in got]:
            raise ExportError(
                f"the exported program answers shapes {[t.shape for t in got]}, the model {[t.shape for t in want]}."
            )
        for expected, answer in zip(want, got, strict=True):
            difference = (expected.double() - answer.double()).abs()
            worst = max([worst, *difference.flatten().tolist()])
            if not torch.allclose(expected.double(), answer.double(), rtol=1e-3, atol=1e-4, equal_nan=True):
                raise ExportError(
                    f"the exported program differs from the model by {difference.max().item():.3g} on the example. Is the model "
                    "random in evaluation mode?"
                )
    return worst


def first_lines(error: BaseException) -> str:
    """The first line of an error that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


def write_whole(place: str, data: bytes) -> None:
    """A file, or object, that is there with all its bytes, or not at all."""
    file = Storage(place)
    file.parent().write(file.path.rpartition("/")[2], data)


FORMATS = {"pt2": export_pt2, "onnx": export_onnx}


def _is_free(example: Example) -> bool:
    return example.rows is not None and example.rows > 1


def _shapes(model: nn.Module, example: Example) -> Any:
    """A free first dimension for each tensor; torch fixes a dimension of one row."""
    if not _is_free(example):
        return None
    batch = torch.export.Dim("batch")
    given: Any = example.args
    if example.kwargs:
        given = dict(inspect.signature(model.forward).bind(*example.args, **example.kwargs).arguments)
    return pytree.tree_map(lambda leaf: {0: batch} if isinstance(leaf, torch.Tensor) else None, given)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's remarks on itself."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


def _run_onnx(data: bytes, example: Example) -> Any:
    arrays = [
        t.detach().numpy()
        for t in pytree.tree_leaves((example.args, dict(example.kwargs)))
        if isinstance(t, torch.Tensor)
    ]
    if importlib.util.find_spec("onnxruntime") is not None:
        import onnxruntime

        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        names = [entry.name for entry in session.get_inputs()]
        return session.run(None, dict(zip(names, arrays, strict=True)))
    import onnx
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(onnx.load_from_string(data))
    return evaluator.run(None, dict(zip(evaluator.input_names, arrays, strict=True)))
