"""A cost by length from a few measured times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.arrange.graph import DGraph
from overlord.stream.facts import Samples

LENGTHS = (512, 2048, 8192, 32_768)
EXACT = ol.TransformerCost(per_token=2.0, per_length_squared=1e-3)


def measured(cost: ol.TransformerCost) -> ol.MeasuredCost:
    samples = Samples.of_lengths(np.array(LENGTHS))
    return ol.MeasuredCost(LENGTHS, tuple(cost(samples).tolist()))


@given(st.lists(st.integers(512, 1 << 21), min_size=1))
def test_times_of_a_quadratic_model_give_back_the_model_between_and_beyond_the_lengths(lengths):
    samples = Samples.of_lengths(np.array(lengths))
    np.testing.assert_allclose(measured(EXACT)(samples), EXACT(samples), rtol=1e-9)


def test_documents_shorter_than_the_first_length_cost_as_much_a_token_as_it_does():
    cost = ol.MeasuredCost((100, 200), (50.0, 120.0))
    np.testing.assert_allclose(cost.of(np.array([1, 10, 100])), [0.5, 5.0, 50.0])


@given(st.lists(st.integers(1, 1 << 17), min_size=1), st.lists(st.floats(0.5, 2), min_size=4, max_size=4))
def test_the_cost_is_linear_in_the_table_so_that_it_can_be_learned(lengths, factors):
    rising = np.array(LENGTHS) * np.cumsum(factors)  # the cost per token rises
    cost = measured(EXACT).with_coefficients(tuple(rising.tolist()))
    samples = Samples.of_lengths(np.array(lengths))
    np.testing.assert_allclose(cost.features(samples) @ cost.coefficients, cost(samples), rtol=1e-9)


def test_a_table_is_made_from_another_cost_and_stays_above_0_where_a_fit_found_nothing():
    assert ol.MeasuredCost.like(EXACT, LENGTHS) == measured(EXACT)
    assert measured(EXACT).with_coefficients((0.0, 1.0, 0.0, 5.0)).costs[0] > 0


def test_a_bump_that_no_parabola_has_is_kept():
    cost = ol.MeasuredCost((1000, 4000, 16_000), (1000.0, 6000.0, 17_000.0))
    assert cost.of(np.array([4000]))[0] == 6000.0


def test_it_arranges_a_step_as_the_model_does_that_it_was_measured_on():
    samples = Samples.of_lengths(np.random.default_rng(0).integers(512, 30_000, 200))
    tokens = 1 << 22
    graph = DGraph(samples, ol.Batch(tokens=tokens, sequence_length=65_536), ol.ClientPlaceTree(ol.Mesh(dp=4)))
    plans = [ol.strategies.long_short(cost)(graph) for cost in (EXACT, measured(EXACT))]
    assert plans[0].order.tolist() == plans[1].order.tolist()


@pytest.mark.parametrize(
    ("lengths", "costs", "message"),
    [
        ((5,), (1.0,), "at least 2 lengths, got 1 and 1"),
        ((5, 9), (1.0,), "at least 2 lengths, got 2 and 1"),
        ((9, 5), (1.0, 2.0), "lengths are positive and rise"),
        ((0, 5), (1.0, 2.0), "lengths are positive and rise"),
        ((5, 9), (1.0, float("nan")), "costs are numbers above 0"),
    ],
)
def test_what_is_no_table_is_refused(lengths, costs, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        ol.MeasuredCost(lengths, costs)
