"""Mappings: published values, their range, and the guard against spreading noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.trainer import Linear, Log2, Normalised, Rank, Sigmoid, Sqrt
from overlord.trainer.tempbalance.mappings import compute_factors

ALPHAS = np.array([2.0, 4.0, 3.0, 6.0])
many_alphas = st.lists(st.floats(1.05, 20), min_size=1, max_size=30).map(np.array)


def test_published_values():
    assert Linear()(ALPHAS).tolist() == [0.5, 1.0, 0.75, 1.5]
    assert Linear(0.6, 1.4)(ALPHAS).tolist() == pytest.approx([0.6, 1.0, 0.8, 1.4])
    assert Rank()(ALPHAS).tolist() == [0.5, 1.0, 0.75, 1.25]
    roots = np.sqrt(ALPHAS)
    assert Sqrt()(ALPHAS).tolist() == pytest.approx((4 * roots / roots.sum()).tolist())
    assert Log2()(np.array([2.0, 8.0])).tolist() == pytest.approx([0.5, 1.5])


def test_published_sigmoid():
    """10 ** (s * (1 / (1 + exp(-10 (alpha - mean))) - 1/2)): far from the mean at most 10 ** (s/2), at the mean 1."""
    assert Sigmoid()(np.array([0.0, 50.0, 100.0]) + 2).tolist() == pytest.approx([10**-0.5, 1.0, 10**0.5])
    assert Sigmoid(0.5)(np.array([2.0, 52.0])).tolist() == pytest.approx([10**-0.25, 10**0.25])
    assert Sigmoid(1, strength_below=2)(np.array([2.0, 52.0])).tolist() == pytest.approx([0.1, 10**0.5])
    near = 10 ** (1 / (1 + np.exp(-10 * np.array([-0.05, 0.05]))) - 0.5)
    assert Sigmoid()(np.array([3.0, 3.1])).tolist() == pytest.approx(near.tolist())


@pytest.mark.parametrize("mapping", [Linear(), Rank(), Sigmoid(), Sqrt(), Log2(), Normalised(Linear())], ids=repr)
@given(alphas=many_alphas)
def test_a_larger_alpha_never_gets_a_smaller_factor(mapping, alphas):
    factors = compute_factors(mapping, alphas)
    order = np.argsort(alphas, kind="stable")
    assert np.all(np.diff(factors[order]) >= -1e-12)


@pytest.mark.parametrize("mapping", [Linear(), Rank(), Sigmoid(), Sqrt(), Log2(), Linear(0.6, 1.6)], ids=repr)
@given(alpha=st.floats(1.5, 20), count=st.integers(1, 20), noise=st.floats(0, 1e-9))
def test_nearly_equal_alphas_leave_every_layer_at_the_base_rate(mapping, alpha, count, noise):
    alphas = alpha + noise * np.linspace(0, 1, count)
    assert mapping(alphas) == pytest.approx(np.ones(count), abs=1e-6)


@given(alphas=many_alphas, low=st.floats(0, 1), width=st.floats(0, 2))
def test_linear_is_the_published_formula_above_the_guard_and_continuous_at_it(alphas, low, width):
    published = Linear(low, low + width, min_spread=0)(alphas)
    spread = np.ptp(alphas)
    if spread > 0:
        assert published == pytest.approx(low + (alphas - alphas.min()) / spread * width)
        assert Linear(low, low + width, min_spread=spread)(alphas) == pytest.approx(published)
        assert Linear(low, low + width, min_spread=2 * spread)(alphas) == pytest.approx((1 + published) / 2)


@given(alphas=many_alphas)
def test_normalised_factors_have_mean_one(alphas):
    assert Normalised(Linear(0.8, 2.0))(alphas).mean() == pytest.approx(1)


def test_a_mapping_that_gives_no_rates_is_refused_with_what_it_gave():
    with pytest.raises(ol.errors.SpecError, match=r"one finite factor >= 0 per alpha"):
        compute_factors(lambda alphas: -alphas, ALPHAS)
    with pytest.raises(ol.errors.SpecError, match="0 <= low <= high"):
        Linear(2, 1)
    with pytest.raises(ol.errors.SpecError, match="positive"):
        Sigmoid(-1)
