"""PL_Alpha_Hill: the power-law exponent of the tail of a spectrum, by the Hill estimator in the authors' form.

With N eigenvalues in ascending order and i = int(N * (1 - tail)), x = eigenvalue i (from 0) and n = N - i:

    alpha = 1 + n / (sum of ln(eigenvalue) from i on - n * ln(x))

The paper sums over the k eigenvalues above x and counts k. The authors' code, followed here, also counts x itself: the
sum is the same, n is k + 1. Their `xmin_pos` p is a tail of 1 - 1/p: 2 (images) is a tail of one half, 1.5 (GLUE) one third.
The exponent does not depend on the scale of a matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ALPHA = 1000.0
"""Alphas above this count as none. So flat a tail (an orthogonal matrix) has no exponent; only rounding errors decide it."""


def tail_size(num_eigenvalues: int, tail: float) -> int:
    """The number of eigenvalues in the tail."""
    # 1e-9 makes up for binary fractions: one third of 768 is 256
    return num_eigenvalues - int(num_eigenvalues * (1 - tail) + 1e-9)


def hill_alphas(largest: Tensor, num_eigenvalues: int, tail: float) -> Tensor:
    """The alphas of spectra. Each row of `largest` has at least the tail of one, in descending order. NaN where there is
    none.

    Eigenvalues below the rounding error of a matrix count as zeros. A matrix in which they reach into the tail has low rank,
    and its spectrum is the eigenvalues above them.
    """
    floor = largest[:, :1] * num_eigenvalues * torch.finfo(largest.dtype).eps
    n = tail_size(num_eigenvalues, tail)
    rank = (largest > floor).sum(1)
    size = torch.full_like(rank, n)
    for row in torch.nonzero(rank < n).flatten().tolist():
        size[row] = tail_size(int(rank[row]), tail)
    last = (size - 1).clamp(min=0).unsqueeze(1)
    logs = largest.clamp(min=torch.finfo(largest.dtype).tiny).log()
    above = logs.cumsum(1).gather(1, last) - size.unsqueeze(1) * logs.gather(1, last)
    alphas = (1 + size.unsqueeze(1) / above).squeeze(1)
    usable = (size > 1) & torch.isfinite(alphas) & (alphas > 1) & (alphas < MAX_ALPHA)
    return torch.where(usable, alphas, torch.nan)
