"""Costs fitted to reported times: right within 50 steps from ten times wrong, whatever else is reported."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.arrange.balancing import bin_sums, greedy, max_over_mean, with_slowness
from overlord.steering.cost_fit import (
    CostFit,
    FittedCosts,
    fit_times,
)
from overlord.steering.planned_work import summed_features
from overlord.stream.facts import Floats

TRUE = np.array([2e-6, 1e-10, 5e-5])  # seconds per token, per squared length, per document
DP = 16
BESIDE = 0.02  # what a step takes beside its documents


def documents(rng: np.random.Generator) -> Floats:
    """Features of a step's documents: long-tailed, up to 32,768 tokens."""
    lengths = np.minimum(rng.lognormal(6.5, 1.4, 1200), 32_768).astype(np.int64) + 1
    return np.column_stack([lengths, lengths**2, np.ones(len(lengths))]).astype(np.float64)


def trained(known: Floats, steps: int, seed: int, slow: dict[int, float] | None = None, noise: float = 0.03) -> FittedCosts:
    """A run that begins with some coefficients, arranges each step by those it has, and refits every ten steps. One time in
    twenty is nonsense."""
    rng = np.random.default_rng(seed)
    fit = CostFit(3)
    found = None
    for step in range(steps):
        features = documents(rng)
        group = greedy(features @ known, DP, features[:, 0].astype(np.int64))
        of_group = summed_features(features, group, DP)
        for rank, row in enumerate(of_group):
            seconds = (float(row @ TRUE) + BESIDE) * (slow or {}).get(rank, 1.0) * float(np.exp(noise * rng.normal()))
            if rng.random() < 0.05:
                seconds *= float(rng.choice([0.01, 5.0, 100.0]))
            fit.add(step, rank, np.append(row, 4.0), seconds)
        if step % 10 == 9:
            found = fit.solve(known)
            assert found is not None
            known = found.coefficients
    assert found is not None
    return found


def straggler(coefficients: Floats) -> float:
    """How long the slowest rank takes over the mean, in steps that are arranged by some coefficients, and last by the true
    ones."""
    rng = np.random.default_rng(99)
    found = []
    for _ in range(10):
        features = documents(rng)
        group = greedy(features @ coefficients, DP, features[:, 0].astype(np.int64))
        found.append(max_over_mean(bin_sums(group, features @ TRUE, DP)))
    return float(np.mean(found))


def ratio(coefficients: Floats) -> float:
    """Of the cost of attention to that of tokens, over the true one."""
    return float(coefficients[1] / coefficients[0] / (TRUE[1] / TRUE[0]))


@pytest.mark.parametrize("factor", [10.0, 0.1])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_coefficient_that_is_ten_times_wrong_is_right_after_50_steps(which, factor):
    known = TRUE.copy()
    known[which] *= factor
    if which < 2:
        assert straggler(known) > 1.1, "the model is wrong to begin with"
    for seed in range(3):
        found = trained(known * 1e9, 50, seed).coefficients  # in whatever unit
        assert straggler(found) < 1.02
        assert ratio(found) == pytest.approx(1, abs=0.15)


def test_all_coefficients_wrong_at_once_are_right_after_50_steps():
    wrong = TRUE * [10, 0.1, 10]
    assert straggler(wrong) > 1.1
    assert straggler(trained(wrong, 50, 7).coefficients) < 1.02


def test_slow_and_fast_ranks_are_told_apart_from_costly_work():
    found = trained(TRUE, 50, 3, slow={3: 1.4, 7: 0.8})
    assert found.slowness[3] == pytest.approx(1.4, rel=0.05)
    assert found.slowness[7] == pytest.approx(0.8, rel=0.05)
    assert all(abs(found.slowness[rank] - 1) < 0.05 for rank in range(DP) if rank not in (3, 7))
    assert straggler(found.coefficients) < 1.02


def test_a_model_that_changes_is_followed_and_the_old_one_forgotten():
    fit = CostFit(3)
    rng = np.random.default_rng(5)
    for step in range(60):
        features = summed_features(documents(rng), rng.integers(0, DP, 1200), DP)
        true = TRUE if step < 10 else TRUE * [1, 10, 1]  # flash attention was turned off
        for rank, row in enumerate(features):
            fit.add(step, rank, np.append(row, 4.0), float(row @ true) + BESIDE)
    found = fit.solve(TRUE)
    assert found is not None
    assert found.coefficients[1] / found.coefficients[0] == pytest.approx(10 * TRUE[1] / TRUE[0], rel=0.1)


def test_too_few_times_say_nothing():
    fit = CostFit(3)
    assert fit.solve(TRUE) is None
    for step in range(5):
        fit.add(step, 0, np.array([100.0, 1e4, 3.0, 1.0]), 1.0)
    assert fit.solve(TRUE) is None


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 5), st.floats(1e-9, 8e4), st.integers(0, 10**6), st.integers(0, 50)),
        min_size=20,
        max_size=80,
    ),
    st.lists(st.floats(0, 1e9), min_size=3, max_size=3),
)
def test_whatever_is_reported_coefficients_are_finite_and_never_negative(times, known):
    fit = CostFit(3)
    for step, rank, seconds, tokens, count in times:
        fit.add(step, rank, np.array([tokens, tokens * 37.0, count, 1.0]), seconds)
    found = fit.solve(np.array(known))
    if found is not None:
        assert np.isfinite(found.coefficients).all()
        assert (found.coefficients >= 0).all()
        assert all(np.isfinite(value) and value > 0 for value in found.slowness.values())


def test_times_measured_one_by_one_give_coefficients_and_what_lies_beside_documents():
    lengths = [[n] * (65_536 // n) for n in (128, 512, 2048, 8192, 32_768)] + [[n] for n in (128, 1024, 8192)]
    features = np.array([[sum(n), sum(x * x for x in n), len(n)] for n in lengths], float)
    coefficients, beside = fit_times(features, features @ TRUE + 0.004)
    np.testing.assert_allclose(coefficients, TRUE, rtol=1e-2)
    assert beside == pytest.approx(0.004, rel=1e-2)


# Ranks that are not equally fast


@settings(max_examples=40)
@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=200),
    st.lists(st.sampled_from([1.0, 1.0, 1.0, 1.3, 2.0, 0.8]), min_size=1, max_size=12),
)
def test_work_is_shared_by_speed_within_one_item_of_even(costs, slowness):
    items, slow = np.array(costs), np.array(slowness)
    bins = with_slowness(greedy, slow)(items, len(slow), np.ones(len(items), np.int64), None)
    done = bin_sums(bins, items, len(slow)) * slow
    even = items.sum() / (1 / slow).sum()
    assert done.max() <= (even + items.max() * slow.max()) * 1.05


def test_bins_with_no_room_are_passed_over_and_equal_bins_keep_their_balancer():
    costs, sizes = np.arange(1.0, 41.0), np.ones(40, np.int64)
    slow = np.array([1.0, 1.0, 1.5, 1.0])
    bins = with_slowness(greedy, slow)(costs, 4, sizes, 10)
    assert np.bincount(bins).tolist() == [10, 10, 10, 10]
    assert bin_sums(bins, costs, 4)[2] == bin_sums(bins, costs, 4).min()
    assert with_slowness(greedy, None) is greedy
