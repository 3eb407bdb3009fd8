"""Pipelines: the simulator agrees with what is known in closed form, orders never do harm, levels keep every document."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.arrange.cost import TransformerCost
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.ordering import (
    best_orders,
    level,
    levels,
    order,
)
from overlord.arrange.pipelines.simulator import Pipeline, play, simulate, times_of
from overlord.arrange.strategies import long_short
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.stream.facts import Samples
from overlord.stream.packing import best_fit

STEEP = TransformerCost(per_token=1.0, per_length_squared=0.05)

pipelines = st.builds(
    Pipeline,
    stages=st.integers(2, 6),
    virtual=st.integers(1, 3),
    backward=st.floats(0.5, 3),
    hop=st.sampled_from([0.0, 0.1]),
)
costs_of_groups = st.lists(st.lists(st.floats(0.01, 50), min_size=1, max_size=9), min_size=1, max_size=5)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 5), st.floats(0.1, 10), st.floats(0.1, 4))
def test_equal_microbatches_take_the_time_that_is_known_for_1f1b_and_for_interleaving(
    stages, virtual, rounds, cost, backward
):
    virtual = 1 if stages == 1 else virtual
    count = rounds * stages
    pipeline = Pipeline(stages, virtual, backward)
    expected = (count + (stages - 1) / virtual) * cost / stages
    assert times_of(np.full((1, count), cost), pipeline)[0] == pytest.approx(expected)
    timing = simulate(np.full(2 * count, cost), np.array([count, count]), pipeline)
    assert timing.bubble == pytest.approx((stages - 1) / virtual / (count + (stages - 1) / virtual))


def test_one_stage_is_a_sum_and_the_step_waits_for_the_slowest_group():
    timing = simulate(np.array([3.0, 1.0, 2.0]), np.array([2, 1]), Pipeline(1))
    assert timing.group_times.tolist() == [4.0, 2.0]
    assert timing.step_time == 4.0
    assert timing.bubble == pytest.approx(1 - 6 / 8)


def test_handing_on_takes_its_time_on_the_way_down_and_up():
    with_hops = times_of(np.ones((1, 1)), Pipeline(4, hop=0.25))[0]
    assert with_hops == pytest.approx(1.0 + 6 * 0.25)


@given(costs_of_groups, pipelines)
def test_no_step_is_quicker_than_its_busiest_rank_or_its_longest_microbatch_and_none_slower_than_all_in_turn(
    groups, pipeline
):
    costs, counts = np.concatenate([np.array(group) for group in groups]), np.array([len(group) for group in groups])
    times = simulate(costs, counts, pipeline).group_times
    sums, most = np.array([sum(group) for group in groups]), np.array([max(group) for group in groups])
    blocks = pipeline.stages * pipeline.virtual
    hops = 2 * (blocks - 1) * pipeline.hop * (counts + pipeline.stages)
    assert (times >= np.maximum(sums / pipeline.stages, most) - 1e-9).all()
    assert (times <= sums + hops + 1e-9).all()


@given(costs_of_groups, pipelines)
def test_pipelines_without_a_ring_play_as_they_are_simulated_and_a_ring_makes_none_quicker(groups, pipeline):
    costs, counts = np.concatenate([np.array(group) for group in groups]), np.array([len(group) for group in groups])
    forward = costs / (pipeline.stages * pipeline.virtual * (1 + pipeline.backward))
    alone = play(forward, forward * pipeline.backward, counts, pipeline, np.full(len(costs), -1))
    simulated = simulate(costs, counts, pipeline).group_times
    if pipeline.stages > 1:
        assert np.allclose(alone, simulated)
    first = np.cumsum(counts) - counts
    rings = np.full(len(costs), -1)
    rings[first] = 0  # all pipelines share their first microbatch
    together = simulate(costs, counts, pipeline, rings).group_times
    assert (together >= simulated - 1e-9).all()


@given(costs_of_groups, pipelines)
def test_an_order_is_one_of_the_groups_own_microbatches_and_never_slower_than_the_one_given(groups, pipeline):
    costs, counts = np.concatenate([np.array(group) for group in groups]), np.array([len(group) for group in groups])
    number, told_before, told_after = best_orders(costs, counts, pipeline)
    first = np.cumsum(counts) - counts
    ordered = np.empty_like(costs)
    ordered[np.repeat(first, counts) + number] = costs
    for begin, count in zip(first.tolist(), counts.tolist(), strict=True):
        assert sorted(number[begin : begin + count]) == list(range(count))
    before, after = (simulate(each, counts, pipeline).group_times for each in (costs, ordered))
    assert (after <= before + 1e-9).all()
    assert np.allclose(told_before, before)
    assert np.allclose(told_after, after)


@given(st.lists(st.floats(0.05, 20), min_size=2, max_size=6), st.integers(2, 5))
@settings(max_examples=40)
def test_orders_are_near_the_best_of_all_orders(costs, stages):
    given_costs = np.array(costs)
    everything = np.array(list(permutations(range(len(costs)))))
    best = times_of(given_costs[everything], Pipeline(stages)).min()
    number = best_orders(given_costs, np.array([len(costs)]), Pipeline(stages)).number
    ordered = np.empty_like(given_costs)
    ordered[number] = given_costs
    assert times_of(ordered[None], Pipeline(stages))[0] <= best * 1.12


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(1, 6), pipelines)
def test_levels_keep_to_the_token_limit_and_give_every_pipeline_one_stretch_of_falling_costs(lengths, num_groups, pipeline):
    tokens = np.array(lengths)
    costs = STEEP(Samples.of_lengths(tokens))
    found = levels(costs, tokens, num_groups, 64, pipeline)
    if found is None:
        return
    assert (found.counts >= 1).all()
    slot = (np.cumsum(found.counts) - found.counts)[found.group] + found.micro
    assert np.bincount(slot, tokens).max() <= 64
    lowest = [costs[found.group == group].min() for group in range(num_groups)]
    highest = [costs[found.group == group].max() for group in range(num_groups)]
    assert all(low >= high for low, high in zip(lowest, highest[1:], strict=False))


def _graph(seed: int, pp: int) -> DGraph:
    rng = np.random.default_rng(seed)
    batch = Batch(tokens=8 * 8 * 4096, sequence_length=4096)
    lengths = np.minimum(np.exp(rng.normal(5.5, 1.6, 4000)).astype(np.int64) + 8, 4096)
    lengths = lengths[np.cumsum(lengths) <= (batch.tokens or 0)]
    rows = best_fit(lengths, batch.num_rows or 1, batch.sequence_length)
    return DGraph(Samples.of_lengths(lengths[rows >= 0]), batch, ClientPlaceTree(Mesh(dp=8, pp=pp)), rows[rows >= 0])


@pytest.mark.parametrize("pipeline", [Pipeline(4), Pipeline(8), Pipeline(4, 2)])
@pytest.mark.parametrize("equal_counts", [True, False])
def test_a_strategy_that_knows_the_pipeline_is_quicker_on_it_with_the_same_samples(pipeline, equal_counts):
    cost = TransformerCost(per_token=0.0046, per_length_squared=4e-6)
    gains = []
    for seed in range(3):
        graph = _graph(seed, pipeline.stages)
        blind, aware = (long_short(cost, equal_counts=equal_counts, pipeline=each)(graph) for each in (None, pipeline))
        assert np.array_equal(np.sort(blind.order), np.sort(aware.order))
        assert (aware.counts % pipeline.count_multiple == 0).all()
        costs = cost(graph.samples)
        before, after = (simulate(plan.micro_costs(costs), plan.counts, pipeline).step_time for plan in (blind, aware))
        assert after <= before * (1 + 1e-9)
        gains.append(before / after)
    assert max(gains) > 1.005


def test_a_pipeline_that_cannot_be_and_a_graph_that_is_not_handed_out_are_refused():
    with pytest.raises(SpecError, match="at least 1 stage"):
        Pipeline(0)
    with pytest.raises(SpecError, match="several stages"):
        Pipeline(1, virtual=2)
    with pytest.raises(SpecError, match="backward"):
        Pipeline(2, backward=float("nan"))
    with pytest.raises(SpecError, match="deal or balance"):
        order(_graph(0, 2).cost(STEEP).distribute("dp"), Pipeline(2))
    with pytest.raises(SpecError, match="not pack"):
        level(_graph(0, 2).cost(STEEP).pack().distribute("dp"), Pipeline(2))
