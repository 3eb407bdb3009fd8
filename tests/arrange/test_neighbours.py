"""Steps distributed over groups of neighbours, and over every rank of the world."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.arrange.balancing import greedy, in_groups
from overlord.stream.facts import Samples
from overlord.testing import assert_strategy_conserves
from tests.small_sources import Numbered, job_of, read_all, tokens_of

COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.01)
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)


def grouped(axis, group_size: int, equal_counts: bool = True) -> ol.Strategy:
    def strategy(graph: ol.DGraph) -> ol.Plan:
        graph = graph.cost(COST)
        if graph.batch.layout == "padded":
            graph = graph.pack()
        return graph.distribute(axis, group_size).balance(equal_counts=equal_counts).plan()

    return strategy


def dealt(graph: ol.DGraph) -> ol.Plan:
    return graph.pack().distribute("world", 2).deal().plan()


@given(LENGTHS, st.integers(1, 3), st.integers(1, 4), st.sampled_from(["packed", "padded"]))
def test_neighbours_run_as_many_microbatches_and_no_sample_is_lost(lengths, num_groups, group_size, layout):
    batch = ol.Batch(samples=len(lengths), sequence_length=64, layout=layout)
    mesh = ol.Mesh(dp=num_groups * group_size)
    plan = assert_strategy_conserves(grouped("dp", group_size, equal_counts=False), lengths, batch, mesh)
    assert plan.num_groups == mesh.dp
    assert (plan.counts.reshape(-1, group_size) == plan.counts[::group_size, None]).all()
    if layout == "packed":
        assert plan.micro_places().max() <= max(96, max(lengths))


@given(LENGTHS, st.sampled_from(["dp", "cp", "world"]), st.integers(1, 2), st.integers(1, 2), st.integers(1, 2))
def test_every_axis_conserves_the_samples_and_equal_counts_stay_equal(lengths, axis, dp, cp, tp):
    batch = ol.Batch(samples=len(lengths), sequence_length=64)
    group_size = 2 if dp * {"dp": 1, "cp": cp, "world": cp * tp}[axis] % 2 == 0 else 1
    plan = assert_strategy_conserves(grouped(axis, group_size), lengths, batch, ol.Mesh(dp=dp, cp=cp, tp=tp))
    assert len(set(plan.counts.tolist())) == 1


@given(LENGTHS, st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_groups_are_balanced_like_bins_and_members_within_them(lengths, num_groups, group_size, has_slow):
    costs, sizes = np.array(lengths, float), np.array(lengths)
    slowness = np.linspace(1, 1.5, num_groups * group_size) if has_slow else None
    bins = in_groups(greedy, group_size, slowness)(costs, num_groups * group_size, sizes, None)
    if slowness is None:
        assert (bins // group_size).tolist() == greedy(costs, num_groups, sizes).tolist()
    times = np.bincount(bins, costs, num_groups * group_size) * (1 if slowness is None else slowness)
    for inside in times.reshape(num_groups, group_size):  # no item would end sooner on another member of its group
        assert inside.max() - inside.min() <= costs.max() * 1.5 + 0.02 * times.max()


def test_replicas_of_short_documents_run_more_microbatches_than_those_of_long_ones():
    lengths = np.array([64] * 8 + [4] * 64)
    steep = ol.TransformerCost(per_token=1.0, per_length_squared=1.0)
    batch = ol.Batch(samples=len(lengths), sequence_length=64)
    graph = ol.DGraph(Samples.of_lengths(lengths), batch, ol.ClientPlaceTree(ol.Mesh(dp=4)))
    plan = ol.strategies.long_short(steep, equal_counts=False, group_size=2)(graph)
    assert plan.counts[0] == plan.counts[1]
    assert plan.counts[2] == plan.counts[3]
    assert plan.max_over_mean(steep(plan.samples)) < 1.1


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        (dealt, ol.Mesh(dp=2, tp=2)),
        (grouped("world", 1), ol.Mesh(pp=2, dp=2, tp=2)),
        (grouped("world", 4, equal_counts=False), ol.Mesh(pp=2, cp=2, tp=2, order=("dp", "tp", "pp", "cp"))),
    ],
)
def test_every_rank_of_the_world_trains_on_samples_of_its_own_and_together_on_all(strategy, mesh):
    source = {"a": Numbered(first=1), "b": Numbered(first=100, longest=9)}
    alone, _ = read_all(job_of(source), 5)
    with ol.start(job_of(source, mesh=mesh, strategy=strategy)) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(mesh.world_size)]
        for expected in alone:
            steps = [next(client) for client in clients]
            assert sorted(np.concatenate([tokens_of(step) for step in steps]).tolist()) == expected.tolist()
            assert all({"tokens", "labels"} <= micro.keys() for step in steps for micro in step)
            assert sum(int((micro["labels"] >= 0).sum()) for step in steps for micro in step) == steps[0].loss_tokens
        assert all(len(document.ranks) == 1 for document in loader.documents(0) or ())


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (lambda g: g.distribute("world").deal().broadcast_at("tp").plan(), "along the world every rank has samples"),
        (lambda g: g.distribute("dp", 3).deal().plan(), "group_size must divide the 2 places"),
    ],
)
def test_what_cannot_be_run_is_refused(strategy, message):
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2, tp=2), strategy=strategy)
    with ol.start(job) as loader, pytest.raises(ol.errors.SpecError, match=message):
        next(loader.client(0))
