"""Alphas against numpy's singular values and the published formulae, and what makes an alpha unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.trainer import FixedAspectRatio
from overlord.trainer.tempbalance.hill import hill_alphas, tail_size
from overlord.trainer.tempbalance.spectra import AlphaSolver, WholeMatrix, gram_matrices, num_eigenvalues
from overlord.trainer.tempbalance.tridiagonal import largest_eigenvalues_together
from tests.trainer.models import heavy_tailed


def published_alpha(matrix: np.ndarray, tail: float, rank: int | None = None) -> float:
    """The paper's formula, with k = n - 1 eigenvalues above x_min, and the authors' n in the numerator."""
    eigenvalues = np.sort(np.linalg.svd(matrix.astype(np.float64), compute_uv=False) ** 2)[-rank if rank else 0 :]
    first = int(len(eigenvalues) * (1 - tail) + 1e-9)
    x_min, above = eigenvalues[first], eigenvalues[first + 1 :]
    n = len(eigenvalues) - first
    return 1 + n / sum(math.log(value / x_min) for value in above)


def alpha_of(*stacks: torch.Tensor, tail: float = 0.5, batch_bytes: int = 1 << 20) -> list[float]:
    return AlphaSolver(tail, batch_bytes).alphas(enumerate(stacks), len(stacks)).tolist()


MATRICES = {
    "gaussian": lambda rows, columns: torch.randn(rows, columns),
    "uniform": lambda rows, columns: torch.rand(rows, columns) - 0.5,
    "heavy": lambda rows, columns: heavy_tailed(rows, columns, 1.2),
    "spiked": lambda rows, columns: torch.randn(rows, columns) + 30 * torch.randn(rows, 1) @ torch.randn(1, columns),
}


@pytest.mark.parametrize("kind", MATRICES)
@pytest.mark.parametrize("shape", [(60, 60), (50, 130), (130, 50)])
@pytest.mark.parametrize("tail", [0.5, 1 / 3])
def test_alphas_are_those_of_numpys_singular_values(kind, shape, tail):
    torch.manual_seed(1)
    matrix = MATRICES[kind](*shape)
    assert alpha_of(matrix[None], tail=tail) == pytest.approx([published_alpha(matrix.numpy(), tail)], rel=1e-9)


@settings(max_examples=30)
@given(rows=st.integers(4, 70), columns=st.integers(4, 70), pareto=st.floats(0.7, 6), seed=st.integers(0, 99))
def test_alphas_agree_for_any_shape_and_any_tail(rows, columns, pareto, seed):
    torch.manual_seed(seed)
    matrix = heavy_tailed(rows, columns, pareto)
    assert alpha_of(matrix[None]) == pytest.approx([published_alpha(matrix.numpy(), 0.5)], rel=1e-6)


@settings(max_examples=20)
@given(exponent=st.floats(1.5, 5), seed=st.integers(0, 99))
def test_the_exponent_of_a_pareto_spectrum_is_found(exponent, seed):
    """Eigenvalues drawn from a density x^-exponent have that alpha, up to the error of 1,000 draws."""
    draws = np.random.default_rng(seed).pareto(exponent - 1, 2000) + 1
    spectrum = torch.from_numpy(np.sort(draws)[::-1].copy())[None]
    alpha = hill_alphas(spectrum, 2000, 0.5).item()
    assert alpha == pytest.approx(exponent, abs=5 * (exponent - 1) / math.sqrt(1000))


def test_a_matrix_of_low_rank_is_judged_by_the_eigenvalues_it_has():
    torch.manual_seed(2)
    low = torch.randn(80, 20, dtype=torch.float64) @ torch.randn(20, 60, dtype=torch.float64)
    assert alpha_of(low[None]) == pytest.approx([published_alpha(low.numpy(), 0.5, rank=20)], rel=1e-6)
    assert alpha_of(low.float()[None]) == pytest.approx(alpha_of(low[None]), rel=1e-4)


@pytest.mark.parametrize(
    "matrix",
    [
        torch.zeros(20, 20),
        torch.full((20, 20), torch.nan),
        torch.full((20, 20), torch.inf),
        torch.ones(20, 20),
        torch.eye(20),
        torch.linalg.qr(torch.randn(64, 64)).Q,
    ],
    ids=["zeros", "nan", "inf", "rank one", "identity", "orthogonal"],
)
def test_without_a_tail_there_is_no_alpha_and_its_neighbours_in_the_batch_keep_theirs(matrix):
    torch.manual_seed(3)
    fine = torch.randn_like(matrix)
    before, unknown, after = alpha_of(fine[None], matrix[None], fine[None])
    assert math.isnan(unknown)
    assert before == after == pytest.approx(published_alpha(fine.numpy(), 0.5), rel=1e-9)


def test_alpha_does_not_depend_on_scale_or_on_how_matrices_are_batched():
    torch.manual_seed(4)
    matrices = [torch.randn(1, 40, 40 + 10 * (i % 3)) for i in range(9)]
    at_once = alpha_of(*matrices)
    assert alpha_of(*(2.0**-13 * m for m in matrices)) == pytest.approx(at_once, rel=1e-9)
    assert alpha_of(*matrices, batch_bytes=1) == pytest.approx(at_once, rel=1e-12)


def test_a_stack_pools_the_eigenvalues_of_its_matrices():
    torch.manual_seed(5)
    stack = torch.randn(9, 16, 24)
    pooled = np.concatenate([np.linalg.svd(m.numpy().astype(np.float64), compute_uv=False) ** 2 for m in stack])
    tail = np.sort(pooled)[len(pooled) // 2 :]
    expected = 1 + len(tail) / np.log(tail / tail[0]).sum()
    assert alpha_of(stack) == pytest.approx([expected], rel=1e-9)


def test_xmin_pos_of_the_authors_is_a_tail_of_one_minus_its_inverse():
    for count in range(3, 1000):
        assert tail_size(count, 0.5) == count - int(count / 2)
        assert tail_size(count, 1 / 3) == count - int(count / 1.5)


def test_gram_matrices_are_of_the_short_side_and_float64():
    assert gram_matrices(torch.randn(2, 5, 90, dtype=torch.bfloat16)).shape == (2, 5, 5)
    assert gram_matrices(torch.randn(2, 90, 5)).dtype == torch.float64


def test_fixed_aspect_ratio_removes_the_bias_of_shape():
    """Gaussian matrices differ by shape alone; whole, their alphas do too, and by windows they do not."""
    torch.manual_seed(6)
    square, wide = torch.randn(1, 96, 96), torch.randn(1, 96, 96 * 4)
    whole = alpha_of(square, wide)
    farms = FixedAspectRatio()
    by_windows = alpha_of(farms.pieces(square), farms.pieces(wide))
    assert abs(whole[0] - whole[1]) > 0.8
    assert abs(by_windows[0] - by_windows[1]) < 0.1
    assert by_windows[0] == whole[0]


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(2, 40), st.integers(2, 40)),
    ratio=st.sampled_from([0.5, 1.0, 2.0]),
    rows=st.none() | st.integers(2, 50),
    windows=st.integers(1, 6),
)
def test_windows_have_the_shape_they_announce_and_the_ratio_they_promise(shape, ratio, rows, windows):
    farms = FixedAspectRatio(ratio, rows, windows)
    pieces = farms.pieces(torch.randn(shape))
    assert tuple(pieces.shape) == farms.pieces_shape(shape)
    if min(pieces.shape[1:]) > 4:
        assert pieces.shape[2] / pieces.shape[1] == pytest.approx(ratio, rel=0.25)
    assert WholeMatrix().pieces_shape(shape) == shape
    assert num_eigenvalues(shape) == shape[0] * min(shape[1:])


@settings(max_examples=20)
@given(batch=st.integers(1, 3), side=st.integers(2, 70), inner=st.integers(1, 90), seed=st.integers(0, 99))
def test_eigenvalues_found_together_are_lapacks(batch, side, inner, seed):
    torch.manual_seed(seed)
    matrices = torch.randn(batch, side, inner, dtype=torch.float64)
    grams = matrices @ matrices.mT
    expected = torch.linalg.eigvalsh(grams).flip(1)
    wanted = max(1, side // 2)
    found = largest_eigenvalues_together(grams.clone(), wanted)
    error = (found - expected[:, :wanted]).abs()
    assert bool((error <= 1e-7 * expected[:, :wanted].abs() + 1e-13 * expected[:, :1]).all())


def test_eigenvalues_found_together_of_zero_and_diagonal_matrices():
    diagonal = torch.diag(torch.arange(1.0, 41, dtype=torch.float64))
    found = largest_eigenvalues_together(torch.stack((torch.zeros(40, 40, dtype=torch.float64), diagonal)), 5)
    assert found[0].tolist() == [0.0] * 5
    assert found[1].tolist() == pytest.approx([40, 39, 38, 37, 36], rel=1e-7)
