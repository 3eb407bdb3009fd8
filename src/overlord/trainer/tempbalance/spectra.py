"""From weights to alphas: Gram matrices of the short side, their eigenvalues in batches of equal size, then Hill.

A weight is a stack of matrices whose eigenvalues are pooled, as the authors do for the kernel positions of a convolution; a
linear layer is a stack of one. The squared singular values of a matrix are the eigenvalues of its Gram matrix, which is as
large as the short side. Squaring halves the number of digits, so everything is in float64. That costs no time on a GPU,
where small eigenvalue problems are bound by kernel launches, not by arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch
from torch import Tensor

from overlord.errors import SpecError
from overlord.trainer.tempbalance.cuda_graph import CudaGraphed
from overlord.trainer.tempbalance.hill import hill_alphas, tail_size
from overlord.trainer.tempbalance.tridiagonal import largest_eigenvalues_together

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

StackShape: TypeAlias = tuple[int, int, int]
"""The shape of a stack: matrices, rows, columns."""

_BATCH_BYTES = 512 << 20  # the most Gram matrices solved at once
_TOGETHER_MIN_BATCH = 12  # fewer or larger matrices are as fast one by one (measured on an H200)
_TOGETHER_MAX_SIDE = 2048


class Spectrum(Protocol):
    """Which matrices the spectrum of a weight is computed from."""

    def pieces(self, stack: Tensor) -> Tensor:
        """The stack of matrices to measure in place of `stack`."""
        ...

    def pieces_shape(self, shape: StackShape) -> StackShape:
        """The shape of `pieces` for a stack of this shape."""
        ...


@dataclass(frozen=True, slots=True)
class WholeMatrix:
    """The spectrum of the whole matrix: the default."""

    def pieces(self, stack: Tensor) -> Tensor:
        return stack

    def pieces_shape(self, shape: StackShape) -> StackShape:
        return shape


@dataclass(frozen=True, slots=True)
class FixedAspectRatio:
    """The pooled spectra of windows of one aspect ratio (FARMS, arXiv 2506.06280).

    The spectrum of a random matrix depends on its aspect ratio, so the alphas of layers of different shapes are not
    comparable. Windows of one aspect ratio are.
    """

    columns_per_row: float = 1.0
    """The aspect ratio of a window."""
    rows: int | None = None
    """Rows of a window; None for as many as fit."""
    windows: int = 5
    """The most windows along each side, evenly spaced."""

    def __post_init__(self) -> None:
        if self.columns_per_row <= 0 or self.windows < 1 or (self.rows is not None and self.rows < 2):
            raise SpecError(f"columns_per_row must be positive, windows at least 1, rows at least 2, got {self}")

    def pieces(self, stack: Tensor) -> Tensor:
        num_rows, num_columns = stack.shape[1:]
        rows, columns = self._window(num_rows, num_columns)
        windows = [
            stack[:, top : top + rows, left : left + columns]
            for top in self._starts(num_rows - rows)
            for left in self._starts(num_columns - columns)
        ]
        return torch.cat(windows)

    def pieces_shape(self, shape: StackShape) -> StackShape:
        num_matrices, num_rows, num_columns = shape
        rows, columns = self._window(num_rows, num_columns)
        num_windows = len(self._starts(num_rows - rows)) * len(self._starts(num_columns - columns))
        return num_matrices * num_windows, rows, columns

    def _window(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        rows = min(num_rows, int(num_columns / self.columns_per_row + 1e-9))
        rows = max(1, rows if self.rows is None else min(rows, self.rows))
        return rows, max(1, min(num_columns, int(rows * self.columns_per_row + 1e-9)))

    def _starts(self, room: int) -> list[int]:
        if self.windows == 1:
            return [0]
        return sorted({room * i // (self.windows - 1) for i in range(self.windows)})


def num_eigenvalues(shape: StackShape) -> int:
    return shape[0] * min(shape[1], shape[2])


def gram_matrices(stack: Tensor) -> Tensor:
    """The Gram matrices of a stack, [matrices, s, s] in float64, where s is the short side. A matrix with values that are
    not finite becomes zeros, which have no alpha."""
    if stack.device.type not in ("cpu", "cuda"):
        stack = stack.cpu()  # other devices may lack float64
    wide = stack.to(torch.float64)
    grams = wide @ wide.mT if wide.shape[1] <= wide.shape[2] else wide.mT @ wide
    finite = torch.isfinite(grams).flatten(1).all(1)
    return torch.where(finite[:, None, None], grams, 0.0)


class AlphaSolver:
    """Computes alphas. It takes stacks one at a time, keeps only their Gram matrices, and solves these in batches."""

    def __init__(self, tail: float, batch_bytes: int = _BATCH_BYTES) -> None:
        self._tail = tail
        self._batch_bytes = batch_bytes
        self._graphed = CudaGraphed(largest_eigenvalues_together)

    def alphas(self, stacks: Iterable[tuple[int, Tensor]], num_alphas: int) -> Tensor:
        """The alpha of each stack, at the index that comes with it, in float64 on the CPU; zero at all other indexes."""
        found = torch.zeros(num_alphas, dtype=torch.float64)
        waiting: dict[int, list[tuple[int, Tensor]]] = {}
        for number, stack in stacks:
            grams = gram_matrices(stack)
            same_size = waiting.setdefault(grams.shape[1], [])
            same_size.append((number, grams))
            if sum(each.nbytes for _, each in same_size) >= self._batch_bytes:
                self._solve(waiting.pop(grams.shape[1]), found)
        for same_size in waiting.values():
            self._solve(same_size, found)
        return found

    def _solve(self, same_size: Sequence[tuple[int, Tensor]], found: Tensor) -> None:
        grams = torch.cat([each for _, each in same_size])
        counts = [len(each) for _, each in same_size]
        side = grams.shape[1]
        # A pooled spectrum may have its whole tail in one matrix. A single matrix needs only its own tail.
        num_largest = tail_size(side, self._tail) if max(counts) == 1 else side
        spectra = self._largest(grams, num_largest).cpu()  # torch has no deterministic cumsum on a GPU
        if max(counts) == 1:
            alphas = hill_alphas(spectra, side, self._tail)
        else:
            pooled = [each.flatten().sort(descending=True).values for each in spectra.split(counts)]
            alphas = torch.cat([hill_alphas(each[None], len(each), self._tail) for each in pooled])
        found[[number for number, _ in same_size]] = alphas

    def _largest(self, grams: Tensor, num_largest: int) -> Tensor:
        batch, side, _ = grams.shape
        if grams.is_cuda and batch >= _TOGETHER_MIN_BATCH and side <= _TOGETHER_MAX_SIDE:
            return self._graphed(grams, num_largest)
        return torch.linalg.eigvalsh(grams).flip(1)[:, :num_largest]
