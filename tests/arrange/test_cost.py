"""Costs follow the model's shape, and the shape's costs follow measured times."""

import numpy as np
import pytest

from overlord.arrange.cost import TransformerCost
from overlord.errors import SpecError
from overlord.stream.facts import Samples

# Milliseconds, forward and backward, on one H200: two blocks (hidden 4096, 32 heads, 8 kv heads, ffn 14336)
# over 131,072 tokens packed as documents of one length.
MEASURED_MS = {512: 608.7, 2048: 642.6, 8192: 788.4, 32768: 1338.5, 131072: 3581.2}


def _step_cost(cost: TransformerCost, length: int) -> float:
    return float(cost(Samples.of_lengths(np.full(131072 // length, length))).sum())


def test_cost_from_fitted_coefficients_is_within_5_percent_of_measured_times():
    cost = TransformerCost(per_token=0.00460315203602369, per_length_squared=1.736619437507047e-07)
    for length, measured in MEASURED_MS.items():
        assert _step_cost(cost, length) == pytest.approx(measured, rel=0.05)


def test_cost_from_the_model_shape_has_the_ratios_of_measured_times():
    cost = TransformerCost.of(hidden=4096, layers=2, heads=32, kv_heads=8, ffn=14336)
    for length, measured in MEASURED_MS.items():
        ratio = _step_cost(cost, length) / _step_cost(cost, 8192)
        assert ratio == pytest.approx(measured / MEASURED_MS[8192], rel=0.05)


def test_experts_and_vocabulary_add_to_the_cost_of_a_token_and_not_to_attention():
    dense = TransformerCost.of(hidden=1024, layers=4)
    larger = TransformerCost.of(hidden=1024, layers=4, vocab=50_000, active_experts=2)
    assert larger.per_token > dense.per_token
    assert larger.per_length_squared == dense.per_length_squared


def test_the_constant_is_added_once_a_document():
    cost = TransformerCost(1.0, 0.0, constant=10.0)
    assert cost(Samples.of_lengths(np.array([5, 0]))).tolist() == [15.0, 10.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformerCost(-1.0, 0.0), "per_token must be a number >= 0, got -1.0"),
        (lambda: TransformerCost(1.0, float("nan")), "per_length_squared must be a number >= 0"),
        (lambda: TransformerCost(0.0, 0.0), "makes every document free"),
        (lambda: TransformerCost.of(hidden=0, layers=1), "needs hidden >= 1, got 0"),
        (lambda: TransformerCost.of(hidden=256, layers=1, heads=8, kv_heads=3), "3 does not divide 8"),
    ],
)
def test_a_cost_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()
