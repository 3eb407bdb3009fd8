"""Rotary positions from the `position_ids` of a microbatch, which every pipeline stage gets.

Positions count from the beginning of a document, also in a piece of it on another rank, so nothing here depends on how the
step was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overlord.errors import SpecError


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotates queries and keys of `head_dim` numbers by their positions. `angles` once for each microbatch, `rotate` in
    every layer.

    The two halves of a head form the pairs that are rotated, as in Llama's weights of Hugging Face.
    """

    head_dim: int
    theta: float = 10_000.0
    rates: tuple[float, ...] | None = None
    """The angle per token of each pair. Default: theta ** (-2 i / head_dim). Models that stretch positions change them."""

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise SpecError(f"rotary positions turn pairs of numbers: head_dim must be even, got {self.head_dim}")
        if self.rates is not None and len(self.rates) != self.head_dim // 2:
            raise SpecError(
                f"a head of {self.head_dim} has {self.head_dim // 2} pairs, but {len(self.rates)} rates are given"
            )

    def angles(self, position_ids: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Cosine and sine for each token and pair, [tokens, 1, head_dim / 2].

        The angle is computed in double precision: two million tokens into a document, single precision is off by a tenth.
        """
        exact = position_ids.to(torch.float64)
        if self.rates is None:
            rates = self.theta ** (
                -torch.arange(0, self.head_dim, 2, device=exact.device, dtype=torch.float64) / self.head_dim
            )
        else:
            rates = torch.tensor(self.rates, device=exact.device, dtype=torch.float64)
        angle = exact[:, None, None] * rates
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def rotate(self, heads: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate queries or keys [tokens, heads, head_dim]."""
        cos, sin = (each.to(heads.dtype) for each in angles)
        left, right = heads.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)
