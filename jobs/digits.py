"""Classify the 1,797 handwritten digits that scikit-learn ships, with a small network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import raytrain


@dataclass(frozen=True)
class Digits(raytrain.Task):
    """Classify scanned digits with a small network."""

    hidden: int = 128  # width of the two hidden layers
    dropout: float = 0.3  # share of hidden units left out in training
    lr: float = 2e-3  # learning rate of AdamW
    weight_decay: float = 1e-2  # decay of AdamW
    held_out: float = 0.2  # share of the digits that is kept for evaluation

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)

    def train_data(self) -> TensorDataset:
        return self._split()[0]

    def eval_data(self) -> TensorDataset:
        return self._split()[1]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        pixels, digits = batch  # [B, 64] in [0, 1], [B]
        scores = model(pixels)
        accuracy = (scores.argmax(1) == digits).float().mean()
        return F.cross_entropy(scores, digits), {"accuracy": accuracy}

    def _split(self) -> tuple[TensorDataset, TensorDataset]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        pixels = torch.tensor(digits.data / 16, dtype=torch.float32)
        labels = torch.tensor(digits.target)
        train, test = train_test_split(range(len(labels)), test_size=self.held_out, stratify=labels, random_state=0)
        return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


if __name__ == "__main__":
    raytrain.main(
        Digits,
        train=raytrain.TrainConfig(epochs=60, batch_size=64, schedule="cosine", best_metric="val/accuracy"),
    )
