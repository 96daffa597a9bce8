"""Predictions for the rows of a file: Parquet, CSV or a numpy array in, one of them out, row by row in the same order."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyarrow import csv, parquet
from torch import nn

from raytrain.data import move
from raytrain.errors import ConfigError, DataError, RaytrainError
from raytrain.evaluation import autocast
from raytrain.models.exporting import first_lines
from raytrain.storage import Storage
from raytrain.task import Task

KINDS = (".parquet", ".csv", ".npy")


@dataclass(frozen=True)
class Rows:
    """The rows of a file, in order.

    Attributes:
        place: The file.
        columns: Which columns of a table, in which order; all when empty.
    """

    place: str
    columns: Sequence[str] = ()

    def batches(self, num_rows: int) -> Iterator[tuple[Any, int]]:
        """Batches with their numbers of rows: a tensor ``[B, ...]`` of an array; of a table a dict of tensors and lists.

        Raises:
            DataError: The file cannot be read, or a column not be used.
        """
        folder, name = split(self.place)
        kind_of(self.place)
        if not folder.exists(name):
            raise ConfigError(f"there is no file {self.place!r}.")
        try:
            if kind_of(self.place) == ".npy":
                array = np.load(io.BytesIO(folder.read(name)), allow_pickle=False)
                for start in range(0, len(array), num_rows):
                    part = torch.from_numpy(array[start : start + num_rows].copy())
                    yield part, len(part)
                return
            for batch in self._tables(folder, name, num_rows):
                yield {column: _tensor(column, batch[column]) for column in batch.schema.names}, batch.num_rows
        except (ValueError, pa.ArrowException, TypeError) as error:
            if isinstance(error, RaytrainError):
                raise
            raise DataError(f"{self.place} cannot be read: {type(error).__name__}: {error}") from None

    def _tables(self, folder: Storage, name: str, num_rows: int) -> Iterator[Any]:
        if kind_of(self.place) == ".csv":
            table = csv.read_csv(io.BytesIO(folder.read(name)))
            yield from table.select(self._checked(table.schema.names)).to_batches(num_rows)
            return
        with folder.open_input(name) as file:
            opened = parquet.ParquetFile(file)
            wanted = self._checked(opened.schema_arrow.names)
            for batch in opened.iter_batches(num_rows, columns=wanted):
                yield batch.select(wanted)

    def _checked(self, there: Sequence[str]) -> list[str]:
        missing = [name for name in self.columns if name not in there]
        if missing:
            raise DataError(f"{self.place} has no column {missing[0]!r}. There are: {', '.join(there)}.")
        return list(self.columns or there)


@dataclass
class Answers:
    """Predictions as they come, and the file that they become."""

    parts: list[Any] = field(default_factory=list)

    def add(self, answer: Any, num_rows: int) -> None:
        """Take those of one batch.

        Raises:
            RaytrainError: They are not one for each row.
        """
        named = answer if isinstance(answer, Mapping) else {"": answer}
        values = {str(name): _array(value) for name, value in named.items()}
        for name, value in values.items():
            if value.ndim == 0 or len(value) != num_rows:
                shape = f"{name} " if name else ""
                raise RaytrainError(
                    f"the prediction {shape}has shape {list(value.shape)} for {num_rows} rows: one answer for each row is "
                    "needed. Define predict(self, model, batch) in the task."
                )
        self.parts.append(values)

    def write(self, place: str) -> int:
        """Write all to a file, whole or not at all; returns the number of rows."""
        joined = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        folder, name = split(place)
        kind = kind_of(place)
        with folder.open_output(name) as file:
            if kind == ".npy":
                if len(joined) > 1:
                    raise ConfigError(
                        f"predict() gives {', '.join(joined)}: more than one array. Use --output FILE.parquet or .csv."
                    )
                np.save(file, next(iter(joined.values())), allow_pickle=False)
            else:
                table = pa.table(
                    {column: value for key, part in joined.items() for column, value in _columns(key, part)}
                )
                (parquet.write_table if kind == ".parquet" else csv.write_csv)(table, file)
        return len(next(iter(joined.values())))


def predict(
    task: Task | None, model: nn.Module, rows: Rows, batch_size: int, device: torch.device, precision: str = "full"
) -> Answers:
    """The task's ``predict`` over all rows, in evaluation mode and without gradients.

    Raises:
        DataError: There are no rows, or a column cannot be used.
        RaytrainError: The model does not take such a batch; with the cure.
    """
    own = task is not None and type(task).predict is not Task.predict
    answers = Answers()
    for batch, num_rows in rows.batches(batch_size):
        given = move(batch if own else _one_tensor(batch, model), device, non_blocking=False)
        with torch.no_grad(), autocast(precision, device):
            try:
                answer = task.predict(model, given) if own and task is not None else model(given)
            except Exception as error:
                if own:
                    raise
                raise RaytrainError(
                    f"model(batch) failed for a batch of {_shape(given)}: {type(error).__name__}: {first_lines(error)}. Define "
                    "predict(self, model, batch) in the task, which makes of the rows what the model takes."
                ) from error
        answers.add(answer, num_rows)
    if not answers.parts:
        raise DataError(f"{rows.place} has no rows.")
    return answers


def split(place: str) -> tuple[Storage, str]:
    """The folder and the name of a file."""
    file = Storage(place)
    return file.parent(), file.path.rpartition("/")[2]


def kind_of(place: str) -> str:
    """The kind of a file by its name.

    Raises:
        ConfigError: It is none that can be read and written.
    """
    path = place.partition("?")[0].lower()
    for kind in KINDS:
        if path.endswith(kind):
            return kind
    raise ConfigError(f"{place!r} is of no kind that is known. Allowed: names that end in {', '.join(KINDS)}.")


def _one_tensor(batch: Any, model: nn.Module) -> torch.Tensor:
    """What ``model(batch)`` gets: columns side by side, floats in the type of the weights."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    parts = []
    for name, column in batch.items():
        if not isinstance(column, torch.Tensor):
            raise DataError(
                f"column {name!r} is no number, and the task has no predict(self, model, batch) that makes one of it. Define it, "
                "or leave the column out with --columns."
            )
        parts.append(column.reshape(len(column), -1).to(dtype))
    return torch.cat(parts, 1)


def _tensor(name: str, column: Any) -> Any:
    """A column as a tensor ``[B]`` or ``[B, n]``, or as a list of what is no number."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return torch.tensor(np.array(column.to_pylist()))
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return column.to_pylist()
    if column.null_count and not pa.types.is_floating(kind):
        raise DataError(f"column {name!r} has {column.null_count} empty values among whole numbers: fill them first.")
    return torch.from_numpy(np.array(column.to_numpy(zero_copy_only=False)))


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return np.asarray(value)


def _columns(name: str, values: Any) -> Iterator[tuple[str, Any]]:
    """Columns of a table: ``prediction``, or ``prediction_0`` and on for each of ``[B, K]``."""
    name = name or "prediction"
    flat = values.reshape(len(values), -1)
    if values.ndim == 1 or flat.shape[1] == 1:
        yield name, pa.array(flat[:, 0])
        return
    for index in range(flat.shape[1]):
        yield f"{name}_{index}", pa.array(flat[:, index])


def _shape(batch: Any) -> str:
    return f"shape {list(batch.shape)} and type {str(batch.dtype).removeprefix('torch.')}"
