"""Eigenvalues of many symmetric matrices at once, for GPUs.

Torch solves a batch of eigenvalue problems one by one, and each is a long chain of tiny kernels that leaves a GPU idle.
Here every kernel works on the whole batch. Householder reflections bring all matrices to tridiagonal form, in panels, so
that most of the arithmetic is matrix products. Then all eigenvalues are bracketed together: for a shift, the pivots of the
tridiagonal matrix tell how many eigenvalues lie below it (Sturm), and every round divides every bracket into `_SECTIONS`.

All control flow depends on shapes alone, so the whole computation can be captured as a CUDA graph and replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PANEL = 32
_SHIFTS = 2048  # in the first round, over the whole range
_SECTIONS = 16
_ROUNDS = 5  # 16 ** 5 cuts of a first bracket of 1.6 % leave 1.5e-8, relative
_SMALLEST = 1e-14  # relative to the largest; smaller eigenvalues are rounding errors


def largest_eigenvalues_together(matrices: Tensor, num_largest: int) -> Tensor:
    """The largest eigenvalues of positive semi-definite [batch, n, n], in descending order. Overwrites `matrices`."""
    diagonal, beside = tridiagonalize(matrices)
    return _bracket_eigenvalues(diagonal, beside, num_largest)


def tridiagonalize(a: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal [batch, n] and off-diagonal [batch, n - 1] of a matrix similar to each of `a`, which is overwritten."""
    batch, n, _ = a.shape
    diagonal, beside = a.new_empty(batch, n), a.new_empty(batch, n - 1)
    for start in range(0, n - 1, _PANEL):
        width = min(_PANEL, n - 1 - start)
        # Reflections of this panel, not yet applied to `a`: the matrix is a - 2 * left @ right^T from row `start` on, with
        # pairs of columns (u, w) in left and (w, u) in right.
        left = a.new_zeros(batch, n - start, 2 * width)
        right = a.new_zeros(batch, n - start, 2 * width)
        for j in range(width):
            k, done = start + j, 2 * j
            column = a[:, k:, k].unsqueeze(2)
            if done:
                column = torch.baddbmm(column, left[:, j:, :done], right[:, j, :done].unsqueeze(2), alpha=-2)
            diagonal[:, k] = column[:, 0, 0]
            u = column[:, 1:]
            length = torch.linalg.vector_norm(u, dim=1)
            end = torch.copysign(length, u[:, 0])
            beside[:, k] = end[:, 0]  # its sign does not matter for eigenvalues
            u = torch.cat((u[:, :1] + end.unsqueeze(1), u[:, 1:]), dim=1)
            u = torch.nn.functional.normalize(u, dim=1, eps=torch.finfo(u.dtype).tiny)
            p = torch.bmm(a[:, k + 1 :, k + 1 :], u)
            if done:
                seen = torch.bmm(right[:, j + 1 :, :done].mT, u)
                p = torch.baddbmm(p, left[:, j + 1 :, :done], seen, alpha=-2)
            w = torch.baddbmm(p, u, torch.bmm(u.mT, p), alpha=-1)
            torch.cat((u, w), dim=2, out=left[:, j + 1 :, done : done + 2])
            torch.cat((w, u), dim=2, out=right[:, j + 1 :, done : done + 2])
        rest = a[:, start + width :, start + width :]
        torch.baddbmm(rest, left[:, width:], right[:, width:].mT, alpha=-2, out=rest)
    diagonal[:, n - 1] = a[:, n - 1, n - 1]
    return diagonal, beside


def _bracket_eigenvalues(diagonal: Tensor, beside: Tensor, num_largest: int) -> Tensor:
    batch, n = diagonal.shape
    wanted = torch.arange(n - 1, n - 1 - num_largest, -1, device=diagonal.device).expand(batch, -1).contiguous()
    steps = torch.logspace(1, 0, _SHIFTS, base=_SMALLEST, dtype=diagonal.dtype, device=diagonal.device)
    shifts = torch.nn.functional.pad(_upper_bound(diagonal, beside) * steps, (1, 0))
    below = _num_below(diagonal, beside, shifts)
    place = torch.searchsorted(below, wanted, right=True).clamp(1, _SHIFTS)
    low, high = shifts.gather(1, place - 1), shifts.gather(1, place)
    cuts = torch.arange(1, _SECTIONS, dtype=low.dtype, device=low.device) / _SECTIONS
    for _ in range(_ROUNDS):
        shifts = low.unsqueeze(2) + (high - low).unsqueeze(2) * cuts
        below = _num_below(diagonal, beside, shifts.flatten(1)).view_as(shifts)
        section = (below <= wanted.unsqueeze(2)).sum(2)
        width = (high - low) / _SECTIONS
        low = low + width * section
        high = low + width
    return (low + high) / 2


def _upper_bound(diagonal: Tensor, beside: Tensor) -> Tensor:
    """Gershgorin's upper bound of the eigenvalues, slightly widened, [batch, 1]."""
    edge = torch.nn.functional.pad(beside.abs(), (1, 1))
    return (diagonal + edge[:, 1:] + edge[:, :-1]).amax(1, keepdim=True) * (1 + 1e-12)


def _num_below(diagonal: Tensor, beside: Tensor, shifts: Tensor) -> Tensor:
    """The number of eigenvalues below each shift of [batch, shifts]: the number of negative pivots of T - shift."""
    squares = beside.square().clamp(min=torch.finfo(beside.dtype).tiny)  # never 0 / 0
    pivot = diagonal[:, :1] - shifts
    count = torch.signbit(pivot).to(torch.int64)
    for k in range(1, diagonal.shape[1]):
        pivot = torch.addcdiv(diagonal[:, k : k + 1] - shifts, squares[:, k - 1 : k].expand_as(shifts), pivot, value=-1)
        count += torch.signbit(pivot)
    return count
