"""Balancers are even, deterministic, and keep to capacities where they can."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.arrange.balancing import (
    greedy,
    karmarkar_karp,
    least_possible_cost,
    max_over_mean,
)

costs_of = st.lists(st.floats(0, 1e4), max_size=60).map(lambda values: np.array(values, np.float64))
balancers = pytest.mark.parametrize("method", [greedy, karmarkar_karp])


@balancers
@given(costs=costs_of, num_bins=st.integers(1, 9))
def test_no_bin_is_over_the_mean_by_more_than_the_costliest_item(method, costs, num_bins):
    sizes = np.ones(len(costs), np.int64)
    bins = method(costs, num_bins, sizes, None)
    totals = np.bincount(bins, costs, num_bins)
    assert len(totals) == num_bins
    assert totals.max() <= costs.sum() / num_bins + costs.max(initial=0.0) + 1e-6
    assert totals.max() >= least_possible_cost(costs, num_bins) * (1 - 1e-9)
    assert np.array_equal(bins, method(costs, num_bins, sizes, None))


@given(
    costs=st.one_of(
        st.lists(st.sampled_from([0.0, 1.0, 2.0, 1e3]), max_size=400),
        st.integers(0, 1000).map(lambda seed: np.exp(np.random.default_rng(seed).normal(0, 2, 900)).tolist()),
    ).map(lambda values: np.array(values, np.float64)),
    num_bins=st.sampled_from([1, 5, 31, 32, 40, 100]),
)
def test_greedy_takes_the_costliest_item_left_to_the_cheapest_bin(costs, num_bins):
    """One item at a time, as the definition says: resumed and restarted planners must make the same plans."""
    totals = [0.0] * num_bins
    expected = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        expected[i] = min(range(num_bins), key=lambda b: (totals[b], b))
        totals[expected[i]] += costs[i]
    assert greedy(costs, num_bins, np.ones(len(costs), np.int64), None).tolist() == expected


@balancers
@given(costs=costs_of, num_bins=st.integers(1, 9))
def test_items_of_one_size_are_shared_in_equal_numbers(method, costs, num_bins):
    most = -(-len(costs) // num_bins)
    bins = method(costs, num_bins, np.ones(len(costs), np.int64), most)
    assert np.bincount(bins, minlength=num_bins).max() <= most


@balancers
def test_a_bin_with_one_costly_item_is_not_made_to_hold_cheap_ones(method):
    costs = np.array([100.0] + [1.0] * 100)
    bins = method(costs, 2, np.ones(101, np.int64), None)
    assert (bins[1:] != bins[0]).all()


def test_largest_differencing_beats_greedy_where_items_are_few():
    costs = np.array([8.0, 7.0, 6.0, 5.0, 4.0])
    sizes = np.ones(5, np.int64)
    assert np.bincount(greedy(costs, 2, sizes), costs).max() == 17
    assert np.bincount(karmarkar_karp(costs, 2, sizes), costs).max() == 16


def test_greedy_passes_over_bins_without_room():
    costs = np.array([5.0, 4.0, 3.0])
    assert greedy(costs, 2, np.array([1, 9, 5]), 10).tolist() == [0, 1, 0]


def test_what_fits_nowhere_goes_to_the_roomiest_bin():
    sizes = np.array([8, 6, 5])
    assert greedy(np.array([3.0, 2.0, 1.0]), 2, sizes, 10).tolist() == [0, 1, 1]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10)), max_size=40), st.integers(1, 6), st.integers(10, 40))
def test_greedy_goes_over_a_capacity_only_when_no_bin_had_room(items, num_bins, capacity):
    costs = np.array([cost for cost, _ in items])
    sizes = np.array([size for _, size in items], np.int64)
    held = np.bincount(greedy(costs, num_bins, sizes, capacity), sizes, num_bins)
    if held.max(initial=0) > capacity:
        assert sizes.sum() > num_bins * (capacity - sizes.max())


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 3))
def test_no_arrangement_is_below_the_least_possible_cost(values, num_bins):
    costs = np.array(values, float)
    best = min(np.bincount(np.array(bins), costs, num_bins).max() for bins in product(range(num_bins), repeat=len(values)))
    assert least_possible_cost(costs, num_bins) <= best + 1e-9


def test_the_straggler_of_nothing_is_one():
    assert max_over_mean(np.array([])) == 1.0
    assert max_over_mean(np.zeros(4)) == 1.0
    assert max_over_mean(np.array([3.0, 1.0])) == 1.5
