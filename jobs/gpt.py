"""Train a small GPT on lines of English text that scikit-learn ships, with a loss that counts tokens, not lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import raytrain
from raytrain.metrics import SumMetric

PAD, START = 0, 1  # token 0 fills up short lines and is never predicted; 1 begins a line; characters follow


class Lines(Dataset[torch.Tensor]):
    """Lines of text as tokens ``[T]`` of unequal length."""

    def __init__(self, lines: list[str]) -> None:
        self.tokens = [torch.tensor([START, *(min(ord(c), 126) for c in line)]) for line in lines]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


def padded(lines: list[torch.Tensor]) -> torch.Tensor:
    """Lines ``[T_i]`` as one batch ``[B, max T_i]``, filled up with PAD."""
    return nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=PAD)


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, d))
        return x + self.feed(self.norm2(x))


class Gpt(nn.Module):
    """Tokens ``[B, T]`` to scores of the next token ``[B, T, 127]``."""

    def __init__(self, width: int, depth: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(127, width), nn.Embedding(max_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 127)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


@dataclass(frozen=True)
class SmallGpt(raytrain.Task):
    """A character-level language model."""

    width: int = 64  # width of the model
    depth: int = 2  # number of blocks
    heads: int = 4  # attention heads per block
    lr: float = 3e-3  # learning rate of AdamW
    max_length: int = 81  # longest line in tokens, the one that begins it included

    def model(self) -> nn.Module:
        return Gpt(self.width, self.depth, self.heads, self.max_length)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def train_data(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Lines(self._lines()[0]), batch_size=64, shuffle=True, collate_fn=padded)

    def eval_data(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Lines(self._lines()[1]), batch_size=64, collate_fn=padded)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        """Sum over the tokens of the batch and their number: each token counts the same on any number of workers."""
        scores, wanted = model(batch[:, :-1]), batch[:, 1:]
        real = wanted != PAD
        losses = F.cross_entropy(scores[real], wanted[real], reduction="sum")
        right = (scores.argmax(-1) == wanted)[real].sum()
        return (losses, real.sum()), {"accuracy": (right, real.sum())}

    def metrics(self) -> Mapping[str, Any]:
        return {"perplexity": SumMetric(lambda s: math.exp(s["loss"] / s["tokens"]))}

    def update_metrics(self, metrics: Mapping[str, Any], model: nn.Module, batch: Any) -> None:
        loss, tokens = self.loss(model, batch)[0]
        metrics["perplexity"].update(loss=loss, tokens=tokens)

    def _lines(self) -> tuple[list[str], list[str]]:
        """Lines to train on and lines held out: the descriptions of scikit-learn's datasets."""
        texts = [f.read_text() for f in files("sklearn.datasets.descr").iterdir() if f.name.endswith(".rst")]
        lines = {line.strip() for text in texts for line in text.splitlines()}
        kept = sorted(line for line in lines if 20 < len(line) < self.max_length and line.isascii())
        return [line for i, line in enumerate(kept) if i % 10], kept[::10]


if __name__ == "__main__":
    raytrain.main(SmallGpt, train=raytrain.TrainConfig(epochs=20, schedule="cosine", warmup="20st", clip_norm=1.0))
