"""The primitives: what they decide, what they note, and what they refuse."""

import pickle
from dataclasses import replace

import numpy as np
import pytest

from overlord.arrange.balancing import greedy, karmarkar_karp
from overlord.arrange.cost import TransformerCost
from overlord.arrange.explain import explain
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import PlanStage
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.errors import SpecError
from overlord.stream.facts import Samples
from overlord.stream.packing import best_fit, concat_and_split

COST = TransformerCost(1.0, 0.01)
LENGTHS = np.array([90, 10, 50, 50, 30, 40, 20, 10])


def graph(dp: int = 2, batch: Batch | None = None, rows: list[int] | None = None) -> DGraph:
    batch = batch or Batch(tokens=400, sequence_length=100)
    if rows is None and batch.num_rows:
        rows = best_fit(LENGTHS, batch.num_rows, 100).tolist()
    reference = None if rows is None or batch.cut_documents else np.array(rows)
    return DGraph(Samples.of_lengths(LENGTHS), batch, ClientPlaceTree(Mesh(dp=dp)), reference)


def test_a_primitive_leaves_the_graph_it_was_called_on_as_it_was():
    before = graph()
    before.cost(COST).distribute("dp").balance()
    assert before.costs is None
    assert before.stages == ()


def test_a_misspelt_field_is_refused():
    with pytest.raises(TypeError, match="cannot change cost: no such field"):
        graph().with_stage(PlanStage("mine", "what it did"), cost=None)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"loss_tokens, not token$"):
        graph().samples.with_columns(token=0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda g: g.balance(), r"call distribute\('dp'\) before it"),
        (lambda g: g.deal(), r"call distribute\('dp'\) before it"),
        (lambda g: g.distribute("dp").balance(), r"call cost\(fn\) before it"),
        (lambda g: g.distribute("dp").plan(), r"call distribute\(...\) and then deal\(\) or balance"),
        (lambda g: g.distribute("dp").deal().deal(), "once"),
        (lambda g: g.distribute("dp").deal().pack(), "before deal or balance"),
        (lambda g: g.distribute("tp"), "dp, cp or world, not 'tp'"),
        (lambda g: g.broadcast_at("dp"), "tp, cp or pp, not 'dp'"),
        (lambda g: g.cost(lambda samples: np.ones(3)), r"one number per sample: 8, got shape \(3,\)"),
        (lambda g: g.cost(lambda samples: samples.tokens - 50), "finite numbers >= 0"),
        (lambda g: g.cost(COST).distribute().balance(max_tokens=80), "the longest sample .90., got 80"),
        (lambda g: g.pack(60, best_fit), "1 of 8 samples find no room in 7 rows of 60 tokens by best fit"),
    ],
)
def test_misuse_says_what_to_call_first(misuse, message):
    with pytest.raises(SpecError, match=message):
        misuse(graph())


def test_a_padded_batch_is_packed_first():
    padded = graph(batch=Batch(samples=8, sequence_length=100, layout="padded"))
    with pytest.raises(SpecError, match="call pack"):
        padded.distribute("dp").deal()


def test_costs_by_module_are_added_up():
    by_module = graph().cost(lambda s: {"encoder": np.ones(len(s)), "backbone": COST(s)})
    assert by_module.costs is not None
    assert np.allclose(by_module.costs, COST(graph().samples) + 1)


def test_balance_without_pack_gives_variable_rows_and_with_pack_whole_rows():
    variable = graph().cost(COST).distribute("dp").balance().plan()
    assert (variable.row_tokens, variable.rows_per_microbatch) == (0, 1)
    rows = graph().cost(COST).pack().distribute("dp").balance(karmarkar_karp).plan()
    assert (rows.row_tokens, rows.rows_per_microbatch) == (100, 1)
    assert rows.counts.tolist() == [2, 2]


def test_unequal_counts_give_each_group_what_its_samples_need():
    samples = Samples.of_lengths(np.array([100] + [10] * 60))
    step = DGraph(samples, Batch(samples=61, sequence_length=100), ClientPlaceTree(Mesh(dp=2)))
    steep = TransformerCost(1.0, 0.1)
    plan = step.cost(steep).distribute("dp").balance(equal_counts=False).plan()
    assert plan.counts.max() > plan.counts.min()
    assert np.diff(plan.offsets).min() > 0


def test_a_heuristic_that_ends_nowhere_falls_back_to_the_rows_as_drawn():
    """Longest first leaves 3 tokens without room, though the rows were drawn full to the last token."""
    lengths = np.array([6, 3, 3, 4, 4, 4])
    assert (best_fit(lengths, 2, 12) < 0).any()
    drawn = np.array([0, 0, 0, 1, 1, 1])
    step = DGraph(Samples.of_lengths(lengths), Batch(tokens=24, sequence_length=12), ClientPlaceTree(Mesh(dp=2)), drawn)
    plan = step.cost(TransformerCost(1.0, 0.0)).distribute("dp").balance(max_tokens=12).plan()
    assert plan.micro_costs(lengths.astype(float)).tolist() == [12, 12]
    assert plan.stages[-1].detail == "as drawn, up to 12 tokens, 1 to 1 a group"


def test_cutting_recomputes_costs_and_keeps_loss_tokens():
    step = graph(batch=Batch(tokens=300, sequence_length=75, cut_documents=True)).cost(COST)
    cut = step.pack(method=concat_and_split)
    assert cut.costs is not None
    assert len(cut.samples) > len(step.samples)
    assert len(cut.costs) == len(cut.samples)
    assert cut.samples.loss_tokens.sum() == step.samples.loss_tokens.sum()
    # Every token of the first piece of a cut document predicts the next one.
    first = np.flatnonzero((cut.samples.row == 0) & (cut.samples.start == 0))[0]
    assert cut.samples.tokens[first] == cut.samples.loss_tokens[first]


def test_lengths_count_the_padding_of_documents():
    batch = Batch(tokens=400, sequence_length=100, document_multiple=4)
    assert graph(batch=batch, rows=[0] * 8).lengths.tolist() == [92, 12, 52, 52, 32, 40, 20, 12]


def test_groups_along_the_world_are_named_in_the_plan():
    step = replace(graph(), place=ClientPlaceTree(Mesh(dp=2, tp=4)))
    plan = step.distribute("world", group_size=2).deal().plan()
    assert (plan.num_groups, plan.axis, plan.group_size) == (8, "world", 2)
    assert "8 along world, 2 together" in explain(plan)


def test_explain_tells_every_stage_and_costs_before_and_after():
    step = graph().mix(np.array([1.0]))
    plan = step.cost(COST).distribute("dp").balance(greedy).broadcast_at("tp").plan()
    text = explain(plan)
    for part in (
        "samples 1.000/1.000",
        "greedy over 2 groups",
        "even cost, up to 150 tokens",
        "x mean",
        "padding",
        "broadcast_at",
    ):
        assert part in text
    assert [stage.name for stage in plan.stages] == [
        "mix",
        "cost",
        "distribute",
        "balance",
        "pack",
        "broadcast_at",
    ]


def test_a_plan_can_be_sent_with_its_stages():
    plan = graph().mix(np.array([1.0])).cost(COST).distribute("dp").balance().plan()
    assert explain(pickle.loads(pickle.dumps(plan))) == explain(plan)
