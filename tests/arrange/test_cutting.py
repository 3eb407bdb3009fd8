"""The parts of constructors that are cut from a plan sorted by group are those that the plan itself returns."""

import pickle
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.arrange.cost import TransformerCost
from overlord.arrange.cutting import CutPlan, cut_plan, part_of
from overlord.arrange.graph import DGraph, deal_rows
from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
from overlord.arrange.plan import GroupPlan, Plan
from overlord.arrange.strategies import hdp
from overlord.declare.batch import Batch
from overlord.declare.mesh import Axis, Mesh
from overlord.stream.facts import ImageSizes, Samples

COST = TransformerCost(per_token=1.0, per_length_squared=0.01)


def as_values(plan: GroupPlan) -> Any:
    micros = [
        (
            micro.samples.table.tolist(),
            {name: column.tolist() for name, column in micro.samples.sizes.items()},
            None if micro.samples.images is None else micro.samples.images.to_lists(),
            micro.row.tolist(),
            micro.num_rows,
            micro.row_tokens,
            [(type(part).__name__, getattr(part, "number", None)) for part in micro.parts],
        )
        for micro in plan.microbatches
    ]
    return plan.step, plan.group, plan.loss_tokens, plan.broadcast, plan.counts, plan.axis, micros


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, ClientPlaceTree]:
    axes: list[Axis] = ["pp", "dp", "cp", "tp"]
    order = tuple(draw(st.permutations(axes)))
    mesh = Mesh(dp=draw(st.integers(1, 4)), cp=draw(st.integers(1, 2)), tp=draw(st.integers(1, 2)), order=order)
    place = ClientPlaceTree(mesh)
    lengths = np.array(draw(st.lists(st.integers(1, 32), min_size=mesh.world_size, max_size=60)), np.int64)
    images = ImageSizes.of([[(n % 5 + 1, n % 3 + 1)] * (n % 3) for n in lengths.tolist()])
    with_images = draw(st.booleans())
    samples = Samples.of_lengths(lengths, sizes={"weight": lengths * 2}, images=images if with_images else None)
    batch = Batch(samples=len(lengths), sequence_length=32)
    graph = DGraph(samples, batch, place)
    buckets: list[Bucket] = ["dp", "cp", "world"]
    axis = draw(st.sampled_from(buckets))
    how = draw(st.sampled_from(["rows", "deal", "balance", "hdp"]))
    if how == "rows":
        return deal_rows(graph), place
    if how == "hdp":
        return hdp(COST, capacity=16)(graph), place
    graph = graph.cost(COST).distribute(axis)
    return (graph.deal() if how == "deal" else graph.balance(equal_counts=False)).plan(), place


@settings(max_examples=100, deadline=None)
@given(plans(), st.data())
def test_every_group_gets_what_the_plan_has_for_it_from_the_whole_and_from_the_part_of_its_host(planned, data):
    plan, place = planned
    whole = cut_plan(plan, place)
    num_groups = place.mesh.dp
    hosts = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_groups, max_size=num_groups)))
    assert isinstance(whole, CutPlan) == (not plan.parts)
    for host in set(hosts.tolist()):
        groups = np.flatnonzero(hosts == host).tolist()
        part = pickle.loads(pickle.dumps(part_of(whole, 7, groups, place)))
        assert [part.has_group(group) for group in range(num_groups)] == [group in groups for group in range(num_groups)]
        for group in groups:
            expected = as_values(plan.for_constructor(7, group, place))
            assert as_values(whole.for_constructor(7, group, place)) == expected
            assert as_values(part.for_constructor(7, group, place)) == expected
