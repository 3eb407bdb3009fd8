"""A run that learns costs from the times that its trainers report: arrangement follows, membership never does."""

import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.steering.decisions import COSTS
from tests.roles.mortal import Mortal, key_of
from tests.small_sources import Numbered, job_of, planned, read_all, same, tokens_of

A = Numbered(rows=400, unit_rows=50, first=1, longest=200)
B = Numbered(rows=300, unit_rows=50, first=1000, longest=12)
SOURCES = {"a": A, "b": B}
TRUE = ol.TransformerCost(per_token=1e-3, per_length_squared=1e-5, constant=0.0)
WRONG = ol.TransformerCost(per_token=1.0, per_length_squared=0.0, constant=0.0)
DP = 4


def job_with(cost: Any, **fields: Any) -> ol.Job:
    strategy = ol.strategies.long_short(cost, equal_counts=False, max_tokens=2048)
    batch = ol.Batch(tokens=4096, sequence_length=256, micro_tokens=512)
    return job_of(SOURCES, batch, mesh=ol.Mesh(dp=DP), strategy=strategy, **fields)


def learned(every: int = 5) -> ol.LearnedCost:
    return ol.LearnedCost(WRONG, every=every)


def seconds_of(step: ol.Step, slow: float = 1.0) -> list[float]:
    """What each microbatch would take on a machine whose costs are the true ones."""
    return [
        slow * (1e-4 + sum(n * TRUE.per_token + n * n * TRUE.per_length_squared for n in micro["document_lengths"].tolist()))
        for micro in step
    ]


def trained(loader: ol.Loader, steps: int, slow: dict[int, float], whole: bool = False) -> list[np.ndarray]:
    """Read and report. Gives the tokens of each step."""
    clients = [loader.client(rank, timeout_s=60) for rank in range(DP)]
    found = []
    for _ in range(steps):
        parts = [next(client) for client in clients]
        found.append(np.sort(np.concatenate([tokens_of(part) for part in parts])))
        for client, part in zip(clients, parts, strict=True):
            seconds = seconds_of(part, slow.get(client.rank, 1.0))
            client.feedback(seconds=sum(seconds) if whole else seconds)
    return found


def straggler(loader: ol.Loader, step: int, slow: dict[int, float]) -> float:
    """By the true costs."""
    planned = loader.plan(step)
    assert planned is not None
    seconds = planned.plan.group_costs(TRUE(planned.plan.samples)) * [slow.get(group, 1.0) for group in range(DP)]
    return float(seconds.max() / seconds.mean())


@pytest.mark.parametrize("whole", [False, True])
def test_a_wrong_cost_is_learned_a_slow_rank_gets_less_and_what_is_in_steps_stays_the_same(whole):
    slow = {2: 1.5}
    with ol.start(job_with(learned())) as loader:
        found = trained(loader, 50, slow, whole)
        begun = np.mean([straggler(loader, step, slow) for step in range(4)])
        ended = np.mean([straggler(loader, step, slow) for step in range(46, 50)])
        costs = loader.decisions()[-1]
        assert costs.name == COSTS
        per_token, per_square, _ = costs.value["modules"]["model"]
        tokens = planned(loader, 49).plan.group_costs(planned(loader, 49).plan.samples.tokens.astype(float))
    assert begun > 1.15
    assert ended < 1.05
    assert per_square / per_token == pytest.approx(TRUE.per_length_squared / TRUE.per_token, rel=0.1)
    assert costs.value["slow"] == {"2": pytest.approx(1.5, rel=0.05)}
    assert tokens.argmin() == 2
    assert same(found, read_all(job_with(WRONG), 50)[0])


def test_explain_shows_the_groups_by_the_time_that_they_are_expected_to_take():
    with ol.start(job_with(learned())) as loader:
        trained(loader, 40, {1: 1.6})
        last = planned(loader, 39).plan.stages[-1]
        assert last.bucket_costs is not None
        assert last.bucket_costs.max() / last.bucket_costs.mean() < 1.05
        assert "balance by time" in " ".join(stage.detail for stage in planned(loader, 39).plan.stages)


@settings(max_examples=4)
@given(st.sets(st.integers(1, 150), max_size=5))
def test_a_planner_that_is_lost_gives_the_very_plans_that_it_had_promised(tmp_path_factory, losses):
    engine = Mortal(losses)
    log = ol.Log(str(tmp_path_factory.mktemp("run") / "log"), snapshot_every=7)
    with ol.start(job_with(learned()), engine=engine, log=log) as loader:
        found = trained(loader, 25, {0: 1.3})
        again = [key_of(loader.plan(step)) for step in range(20, 25)]
        engine.lose("planner")
        assert [key_of(loader.plan(step)) for step in range(20, 25)] == again
    keys = {}
    for plan in engine.plans:
        assert keys.setdefault((plan.step, plan.group), key_of(plan)) == key_of(plan)
    assert same(found, read_all(job_with(WRONG), 25)[0])


def test_a_state_brings_along_what_was_learned_and_another_mesh_forgets_who_was_slow():
    with ol.start(job_with(learned())) as loader:
        trained(loader, 30, {1: 1.5})
        state = loader.state_dict()
        here = key_of(loader.plan(30))
    with ol.start(job_with(learned()), resume=state) as loader:
        assert key_of(loader.plan(30)) == here
    wider = job_of(
        SOURCES,
        job_with(learned()).batch,
        mesh=ol.Mesh(dp=3),
        strategy=ol.strategies.long_short(learned(), equal_counts=False, max_tokens=2048),
    )
    with ol.start(wider, resume=state) as loader:
        plan = planned(loader, 30).plan
        assert "balance by time" not in " ".join(stage.detail for stage in plan.stages)
        assert plan.max_over_mean(TRUE(plan.samples)) < 1.05, "the coefficients still hold"


def test_another_initial_cost_begins_anew():
    with ol.start(job_with(learned())) as loader:
        trained(loader, 30, {})
        state = loader.state_dict()
    other = ol.LearnedCost(ol.TransformerCost(2.0, 0.0, 0.0), every=5)
    with ol.start(job_with(other), resume=state) as loader, ol.start(job_with(WRONG), resume=state) as plain:
        assert key_of(loader.plan(30)) == key_of(plain.plan(30))


NONSENSE = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=6),
    st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.nan]),
)


@settings(max_examples=5)
@given(st.lists(st.tuples(NONSENSE, st.integers(-5, 60)), min_size=20, max_size=60))
def test_no_report_however_wrong_breaks_a_run_or_changes_a_step(reports):
    with ol.start(job_with(learned(every=2))) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(DP)]
        found = []
        for number in range(8):
            found.append(np.sort(np.concatenate([tokens_of(next(client)) for client in clients])))
            for i, (seconds, step) in enumerate(reports):
                clients[i % DP].feedback(seconds=seconds, step=step if i % 3 else number)
        assert loader.plan(9) is not None
    assert same(found, read_all(job_with(WRONG), 8)[0])


def test_modules_have_coefficients_of_their_own():
    short = ol.TransformerCost(1.0, 0.0, 0.0)
    cost = ol.LearnedCost({"text": short, "more": ol.TransformerCost(0.0, 1.0, 0.0)}, every=5)
    with ol.start(job_with(cost)) as loader:
        trained(loader, 20, {})
        modules = loader.decisions()[-1].value["modules"]
    assert set(modules) == {"text", "more"}
    assert all(len(values) == 3 for values in modules.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cast("Any", ol.LearnedCost)(lambda samples: samples.tokens), "initial is a TransformerCost"),
        (lambda: ol.LearnedCost(WRONG, every=0), "every is a number of steps"),
    ],
)
def test_a_learned_cost_that_cannot_work_is_refused(make, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()
