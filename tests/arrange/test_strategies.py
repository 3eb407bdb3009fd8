"""Whatever the strategy, batch and mesh: the step's samples, each once, within the limits, and balanced if so
asked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.arrange.balancing import karmarkar_karp
from overlord.arrange.cost import TransformerCost
from overlord.arrange.explain import explain
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.pipelines.simulator import Pipeline
from overlord.arrange.plan import Plan
from overlord.arrange.strategies import long_short, multimodal, plain
from overlord.arrange.vision.images import PatchGrid, VisionTransformerCost
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.stream.facts import ImageSizes, Samples
from overlord.stream.packing import best_fit, padded_lengths

COST = TransformerCost(per_token=0.0046, per_length_squared=1.7e-07)
STEEP = TransformerCost(per_token=1.0, per_length_squared=0.05)
PATCHES = VisionTransformerCost(per_patch=1.0, per_patches_squared=0.02)
GRID = PatchGrid()
CONTEXT = 64

strategies = st.sampled_from(
    [
        plain(),
        plain(cost=STEEP),
        long_short(STEEP),
        long_short(STEEP, max_tokens=4 * CONTEXT),
        long_short(STEEP, equal_counts=False),
        long_short(STEEP, method=karmarkar_karp),
        long_short(STEEP, pipeline=Pipeline(3)),
        long_short(STEEP, equal_counts=False, pipeline=Pipeline(3)),
        multimodal(STEEP, PATCHES, grid=GRID),
        multimodal(STEEP, PATCHES, grid=GRID, exchange="cp"),
        multimodal(STEEP, PATCHES, grid=GRID, exchange="world"),
    ]
)


@st.composite
def steps(draw: st.DrawFn) -> DGraph:
    """A step as membership gives it: whole documents that are known to fit, a number of samples, or exact
    tokens."""
    lengths = np.array(draw(st.lists(st.integers(1, CONTEXT), max_size=80)), np.int64)
    images = draw(st.sampled_from([0, 3]))  # so many for every third sample

    def samples_of(lengths: np.ndarray) -> Samples:
        sizes = [[(14 + 5 * (number % 9), 40)] * (images if number % 3 == 0 else 0) for number in range(len(lengths))]
        return Samples.of_lengths(lengths, images=ImageSizes.of(sizes) if images else None)

    place = ClientPlaceTree(Mesh(dp=draw(st.integers(1, 9)), tp=2))
    micro_tokens = draw(st.sampled_from([None, CONTEXT, 2 * CONTEXT]))
    kind = draw(st.sampled_from(["tokens", "samples", "padded", "cut"]))
    if kind in ("samples", "padded"):
        batch = Batch(
            samples=draw(st.integers(max(1, len(lengths)), 90)),
            sequence_length=CONTEXT,
            micro_tokens=micro_tokens,
            layout="padded" if kind == "padded" else "packed",
        )
        return DGraph(samples_of(lengths), batch, place)
    num_rows = draw(st.integers(1, 30))
    multiple = draw(st.sampled_from([1, 4])) if kind == "tokens" else 1
    batch = Batch(
        tokens=num_rows * CONTEXT,
        sequence_length=CONTEXT,
        micro_tokens=micro_tokens,
        cut_documents=kind == "cut",
        document_multiple=multiple,
    )
    if kind == "cut":
        lengths = lengths[np.cumsum(lengths) <= num_rows * CONTEXT]
        return DGraph(samples_of(lengths), batch, place)
    rows = best_fit(padded_lengths(lengths, multiple), num_rows, CONTEXT)
    return DGraph(samples_of(lengths[rows >= 0]), batch, place, rows[rows >= 0])


def _tokens(samples: Samples) -> list[tuple[int, int]]:
    columns = zip(samples.row.tolist(), samples.start.tolist(), samples.stop.tolist(), strict=True)
    return sorted((row, token) for row, start, stop in columns for token in range(start, stop))


@given(steps(), strategies)
def test_a_plan_holds_every_token_of_the_step_once(graph, strategy):
    plan = strategy(graph)
    groups = [plan.for_group(0, g) for g in range(plan.num_groups)]
    handed_out = [token for g in groups for micro in g.microbatches for token in _tokens(micro.samples)]
    assert plan.num_groups == graph.place.mesh.dp
    assert sorted(handed_out) == _tokens(graph.samples)
    assert plan.loss_tokens == graph.samples.loss_tokens.sum()
    assert {g.loss_tokens for g in groups} == {plan.loss_tokens}


@given(steps(), strategies)
def test_rows_hold_no_more_than_they_can_and_lie_in_their_microbatch(graph, strategy):
    plan = strategy(graph)
    for group in range(plan.num_groups):
        for micro in plan.for_group(0, group).microbatches:
            held = np.bincount(
                micro.row, padded_lengths(micro.samples.tokens, graph.batch.document_multiple), micro.num_rows
            )
            assert len(held) == micro.num_rows
            assert (np.diff(micro.row) >= 0).all()
            if micro.row_tokens:
                assert held.max(initial=0) <= micro.row_tokens
            else:
                assert micro.num_rows == 1 or graph.batch.layout == "padded"


@given(steps(), strategies)
def test_planning_twice_gives_the_same_plan_and_explains_it(graph, strategy):
    first, second = strategy(graph), strategy(graph)
    for name in ("order", "offsets", "row", "counts"):
        assert np.array_equal(getattr(first, name), getattr(second, name))
    assert explain(first) == explain(second)


@given(steps())
def test_long_short_keeps_to_max_tokens_and_leaves_no_microbatch_empty_without_need(graph):
    if graph.batch.layout == "padded":
        return
    plan = long_short(STEEP)(graph)
    cap = (graph.batch.micro_tokens or CONTEXT) * 3 // 2
    held = plan.micro_costs(padded_lengths(plan.samples.tokens, graph.batch.document_multiple).astype(float))
    assert held.max() <= cap
    assert len(set(plan.counts.tolist())) == 1
    if plan.stages[-1].detail.startswith("even cost") and len(graph.samples) >= len(held):
        assert (np.diff(plan.offsets) > 0).all()


def _heavy_tail(seed: int, batch: Batch) -> tuple[Samples, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(rng.normal(7.5, 1.8, 40_000)).astype(np.int64) + 16, batch.sequence_length)
    lengths = lengths[np.cumsum(lengths) <= (batch.tokens or 0)]
    rows = best_fit(lengths, batch.num_rows or 1, batch.sequence_length)
    return Samples.of_lengths(lengths[rows >= 0]), rows[rows >= 0]


def _straggler(plan: Plan) -> float:
    costs = COST(plan.samples)
    bound = max(float(costs.sum()) / plan.num_groups, float(costs.max()))
    return float(plan.group_costs(costs).max()) / bound


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dp", [8, 64])
@pytest.mark.parametrize("equal_counts", [True, False])
def test_long_short_ends_within_two_percent_of_the_lower_bound(seed, dp, equal_counts):
    batch = Batch(tokens=4 * dp * 131_072, sequence_length=131_072)
    samples, rows = _heavy_tail(seed, batch)
    graph = DGraph(samples, batch, ClientPlaceTree(Mesh(dp=dp)), rows)
    assert _straggler(long_short(COST, equal_counts=equal_counts)(graph)) <= 1.02
    assert _straggler(plain()(graph)) > 1.02


def test_plain_deals_rows_in_turn_and_pads_groups_that_are_short_of_rows():
    lengths = np.array([64, 60, 50])
    batch = Batch(tokens=3 * CONTEXT, sequence_length=CONTEXT)
    plan = plain()(DGraph(Samples.of_lengths(lengths), batch, ClientPlaceTree(Mesh(dp=2)), np.arange(3)))
    assert plan.counts.tolist() == [2, 2]
    held = [m.samples.tokens.tolist() for g in range(2) for m in plan.for_group(0, g).microbatches]
    assert held == [[64], [50], [60], []]
    assert plan.row_tokens == CONTEXT


def test_padded_samples_of_a_group_make_one_microbatch_unless_its_tokens_are_given():
    lengths = np.arange(1, 11)
    place = ClientPlaceTree(Mesh(dp=4))
    whole = Batch(samples=10, sequence_length=CONTEXT, layout="padded")
    plan = plain()(DGraph(Samples.of_lengths(lengths), whole, place))
    assert (plan.counts.tolist(), plan.rows_per_microbatch, plan.row_tokens) == ([1] * 4, 3, 0)
    fixed = Batch(samples=10, sequence_length=CONTEXT, layout="padded", pad_to="sequence_length")
    assert plain()(DGraph(Samples.of_lengths(lengths), fixed, place)).row_tokens == CONTEXT
    in_twos = Batch(samples=10, sequence_length=CONTEXT, layout="padded", micro_tokens=2 * CONTEXT)
    plan = plain()(DGraph(Samples.of_lengths(lengths), in_twos, place))
    assert (plan.counts.tolist(), plan.rows_per_microbatch) == ([2] * 4, 2)


@pytest.mark.parametrize("strategy", [plain(), long_short(COST), long_short(COST, equal_counts=False)])
@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_fewer_samples_than_ranks_still_make_a_plan_with_a_microbatch_for_each(strategy, num_samples):
    lengths = np.full(num_samples, 10)
    batch = Batch(tokens=4 * CONTEXT, sequence_length=CONTEXT)
    rows = np.zeros(num_samples, np.int64)
    plan = strategy(DGraph(Samples.of_lengths(lengths), batch, ClientPlaceTree(Mesh(dp=8)), rows))
    assert plan.counts.tolist() == [1] * 8
    assert len(plan.order) == num_samples


def test_broadcast_axes_reach_every_group_plan():
    lengths = np.full(4, 10)
    batch = Batch(samples=4, sequence_length=CONTEXT)
    graph = DGraph(Samples.of_lengths(lengths), batch, ClientPlaceTree(Mesh(dp=2, tp=2)))
    assert long_short(COST, broadcast=("tp",))(graph).for_group(0, 1).broadcast == {"tp"}
