"""Small models for the tests of what runs in the trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.attention(x))
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Tiny(nn.Module):
    """Embedding, numbered blocks, head: the shape of every transformer, without the attention."""

    def __init__(self, width: int = 12, num_blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 20)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def tiny(seed: int = 0, **shape: Any) -> Tiny:
    """With weights that differ from block to block, so that alphas do."""
    torch.manual_seed(seed)
    model = Tiny(**shape)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            for weight in block_weights(layer):
                weight.copy_(heavy_tailed(*weight.shape, shape=1.5 + 1.5 * number))
    return model


def block_weights(block: nn.Module) -> list[Tensor]:
    assert isinstance(block, Block)
    return [block.attention.weight, block.up.weight, block.down.weight]


def heavy_tailed(rows: int, columns: int, shape: float) -> Tensor:
    """Symmetric Pareto entries: the smaller `shape`, the heavier the tail."""
    size = torch.rand(rows, columns).clamp(min=1e-6) ** (-1 / shape)
    return 0.05 * size * torch.sign(torch.randn(rows, columns))


def loss_of(model: nn.Module, step: int) -> Tensor:
    """On tokens that depend on the step alone."""
    tokens = torch.randint(0, 20, (4, 7), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens), tokens.roll(1, 1).flatten())


def weights_of(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_weights(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
