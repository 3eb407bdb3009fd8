"""Costs that are learned under hybrid data parallelism and with images: coefficients, communication and slow ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import overlord as ol
from overlord.arrange.graph import DGraph
from overlord.arrange.hdp.rings import Rings
from overlord.arrange.learned_cost import COMMUNICATION, CostsInForce
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import Plan
from overlord.arrange.vision.encoding import Encoding
from overlord.arrange.vision.images import Images, VisionTransformerCost, images_of
from overlord.messages import StepReport
from overlord.simulate.presets import LlavaLike
from overlord.steering.learning import Learning
from overlord.steering.planned_work import PlannedWork
from overlord.stream.facts import Floats, Samples
from overlord.stream.packing import best_fit
from tests.roles.mortal import key_of
from tests.small_sources import Numbered, job_of, planned, read_all, same, tokens_of

TRUE = ol.TransformerCost(per_token=1e-3, per_length_squared=1e-5, constant=0.0)
WRONG = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)
"""Attention is ten times too dear."""
RECEIVED = 2e-4
SOURCES = {
    "short": Numbered(rows=400, unit_rows=50, first=1, longest=120),
    "long": Numbered(rows=300, unit_rows=50, first=1000, longest=500),
}
SLOW = {5: 1.2}
MESH = ol.Mesh(dp=2, cp=4)


def job_with(cost: Any, **options: Any) -> ol.Job:
    batch = ol.Batch(tokens=8192, sequence_length=512)
    strategy = ol.strategies.hdp(cost, capacity=128, **options)
    mixture = ol.Mixture({"short": 12, "long": 1})
    return job_of(SOURCES, batch, mesh=MESH, strategy=strategy, mixture=mixture)


def learned(every: int = 5) -> ol.LearnedCost:
    return ol.LearnedCost(WRONG, every=every)


def seconds_of(step: list[Any], rank: int) -> list[float]:
    """What each microbatch takes on this rank alone."""
    found = []
    for micro in step:
        wholes, tokens, parts = micro["whole_lengths"], micro["document_lengths"], len(micro["hdp_ranks"])
        share = tokens / np.maximum(1, wholes)
        work = share * (TRUE.per_token * wholes + TRUE.per_length_squared * wholes.astype(float) ** 2)
        found.append(float((work + RECEIVED * wholes * share * (parts - 1)).sum()) * SLOW.get(rank, 1.0))
    return found


def played(steps: list[list[Any]]) -> tuple[list[list[float]], float]:
    """What each rank reports, the wait for others in rings included, and the time of the step over the mean rank's work."""
    own = [seconds_of(step, rank) for rank, step in enumerate(steps)]
    free, at, reported = [0.0] * len(own), [0] * len(own), [[] for _ in own]
    while any(len(seconds) > at[rank] for rank, seconds in enumerate(own)):
        waiting = {}
        for rank, seconds in enumerate(own):
            while at[rank] < len(seconds) and steps[rank][at[rank]]["hdp_number"] < 0:
                free[rank] += seconds[at[rank]]
                reported[rank].append(seconds[at[rank]])
                at[rank] += 1
            if at[rank] < len(seconds):
                waiting[steps[rank][at[rank]]["hdp_number"]] = steps[rank][at[rank]]["hdp_ranks"].tolist()
        if waiting:
            ranks = waiting[min(waiting)]
            end = max(free[rank] for rank in ranks) + max(own[rank][at[rank]] for rank in ranks)
            for rank in ranks:
                reported[rank].append(end - free[rank])
                free[rank] = end
                at[rank] += 1
    return reported, max(free) / float(np.mean([sum(seconds) for seconds in own]))


def trained(loader: ol.Loader, steps: int) -> tuple[list[np.ndarray], list[float]]:
    clients = [loader.client(rank, timeout_s=60) for rank in range(8)]
    tokens, stragglers = [], []
    for _ in range(steps):
        parts = [next(client) for client in clients]
        tokens.append(np.sort(np.concatenate([tokens_of(part) for part in parts])))
        reported, straggler = played([list(part) for part in parts])
        stragglers.append(straggler)
        for client, seconds in zip(clients, reported, strict=True):
            client.feedback(seconds=seconds)
    return tokens, stragglers


def test_under_hdp_a_cost_that_is_ten_times_wrong_and_a_slow_rank_are_learned_and_the_steps_stay_the_same():
    with ol.start(job_with(learned())) as loader:
        tokens, stragglers = trained(loader, 50)
        costs = loader.decisions()[-1]
        state = loader.state_dict()
        here = key_of(loader.plan(50))
        detail = " ".join(stage.detail for stage in planned(loader, 49).plan.stages)
    assert np.mean(stragglers[:8]) > 1.05
    assert np.mean(stragglers[-10:]) < 1.03
    per_token, per_square, _ = costs.value["modules"]["model"]
    assert per_square / per_token == pytest.approx(TRUE.per_length_squared / TRUE.per_token, rel=0.1)
    assert costs.value["modules"][COMMUNICATION][0] / per_token == pytest.approx(RECEIVED / TRUE.per_token, rel=0.25)
    assert costs.value["slow"] == {"5": pytest.approx(1.2, abs=0.03)}
    assert "dp-balance" in detail
    assert same(tokens, read_all(job_with(WRONG), 50)[0])
    with ol.start(job_with(learned()), resume=state) as again:
        assert key_of(again.plan(50)) == here


def test_a_step_time_that_contains_the_wait_for_a_ring_is_refused_and_said_so(caplog):
    with ol.start(job_with(learned())) as loader, caplog.at_level(logging.WARNING):
        clients = [loader.client(rank, timeout_s=60) for rank in range(8)]
        parts = [next(client) for client in clients]
        ringed = next(rank for rank, part in enumerate(parts) if max(m["hdp_number"] for m in part) >= 0 and len(part) > 1)
        clients[ringed].feedback(seconds=1.0)
    assert "report the seconds of each microbatch" in caplog.text


def graph_of(lengths: np.ndarray, mesh: ol.Mesh, in_force: CostsInForce | None = None) -> DGraph:
    longest = int(lengths.max())
    batch = ol.Batch(tokens=-(-int(lengths.sum()) // longest) * longest, sequence_length=longest)
    return DGraph(Samples.of_lengths(lengths), batch, ClientPlaceTree(mesh), in_force=in_force)


def test_communication_that_was_declared_in_another_unit_is_scaled_to_learned_seconds():
    cost = learned()
    in_seconds = CostsInForce(cost.digest, {"model": tuple(value / 1000 for value in WRONG.coefficients)})
    lengths = np.array([400, 300, 50, 60, 70] * 4)
    plans = [
        ol.strategies.hdp(cost, capacity=128, communication=2.0)(graph_of(lengths, MESH, known))
        for known in (None, in_seconds)
    ]
    rings = [plan.part(Rings) for plan in plans]
    assert rings[0] is not None
    assert rings[1] is not None
    assert rings[1].communication == pytest.approx(2.0 / 1000)
    assert np.array_equal(rings[0].members, rings[1].members)


@pytest.mark.parametrize("cp", [1, 4])
def test_the_work_of_all_ranks_together_is_that_of_the_whole_documents(cp):
    cost = learned()
    lengths = np.arange(1, 200) * 3
    plan = ol.strategies.hdp(cost, capacity=128)(graph_of(lengths, ol.Mesh(dp=8 // cp, cp=cp)))
    work = PlannedWork.of(plan, cost)
    place = ClientPlaceTree(ol.Mesh(dp=8 // cp, cp=cp))
    found = sum((work.of_rank(rank, place).features.sum(axis=0) for rank in range(8)), np.zeros(4))
    assert found[:3] == pytest.approx(cost.features(Samples.of_lengths(lengths)).sum(axis=0))
    rings = plan.part(Rings)
    assert rings is not None
    sizes = np.diff(rings.bounds)
    assert len(sizes)
    whole = [rings.whole[plan.order[plan.offsets[int(np.flatnonzero(rings.of_micro == k)[0])]]] for k in range(len(sizes))]
    assert found[3] == pytest.approx(((sizes - 1) * np.array(whole)).sum())


# Images

MIX = LlavaLike()
TRUE_ENCODER = VisionTransformerCost(2e-4, 3e-8, 1e-4)
WRONG_ENCODER = VisionTransformerCost(2e-5, 3e-8, 1e-4)
BACKBONE = ol.TransformerCost(per_token=5e-5, per_length_squared=1e-9)


def image_graph(seed: int, mesh: ol.Mesh, in_force: CostsInForce | None) -> DGraph:
    tokens = mesh.dp * 4 * 8192
    samples = MIX.samples(tokens // 200, 8192, seed)
    samples = samples.take(np.flatnonzero(np.cumsum(samples.tokens) <= tokens))
    rows = best_fit(samples.tokens, mesh.dp * 4, 8192)
    kept = np.flatnonzero(rows >= 0)
    batch = ol.Batch(tokens=tokens, sequence_length=8192)
    return DGraph(samples.take(kept), batch, ClientPlaceTree(mesh), rows[kept], in_force=in_force)


def image_seconds(plan: Plan, rank: int, place: ClientPlaceTree, slow: float) -> list[float]:
    """The encoder's and the backbone's time of each microbatch, without the code that learning uses."""
    images, at = images_of(plan.samples, MIX.grid), place.coordinates(rank)
    costs, first = TRUE_ENCODER(images), int(plan.counts[: at.dp].sum())
    micro_of = np.empty(len(plan.samples), np.int64)
    micro_of[plan.order] = plan.micro_of_order()
    backbone = plan.micro_costs(BACKBONE(plan.samples))
    encoding = plan.part(Encoding)
    found = []
    for number in range(int(plan.counts[at.dp])):
        seconds = backbone[first + number] / place.mesh.pp
        if encoding is None:
            seconds += costs[micro_of[images.sample] == first + number].sum() if at.pp == 0 else 0.0
        elif at.pp == 0:
            slot = number * encoding.num_places + at.dp * place.mesh.cp + at.cp
            mine = encoding.by_place[encoding.bounds[slot] : encoding.bounds[slot + 1]]
            patches = encoding.images.patches[mine].astype(float)
            seconds += (
                TRUE_ENCODER.constant + patches * (TRUE_ENCODER.per_patch + TRUE_ENCODER.per_patches_squared * patches)
            ).sum()
        found.append((float(seconds) + 1e-4) * slow)
    return found


@pytest.mark.parametrize("exchange", [None, "cp"])
@pytest.mark.parametrize("pp", [1, 2])
def test_encoder_and_backbone_are_learned_from_one_time_and_the_slow_rank_gets_less_of_both(exchange, pp):
    mesh = ol.Mesh(dp=8, pp=pp)
    place = ClientPlaceTree(mesh)
    slow_rank = place.rank_of(dp=3)
    cost = ol.LearnedCost(BACKBONE, every=5)
    strategy = ol.strategies.multimodal(cost, WRONG_ENCODER, grid=MIX.grid, exchange=exchange)
    learning, known, stragglers = Learning(place, is_safe=True), None, []
    for step in range(30):
        plan = strategy(image_graph(step, mesh, known))
        learning.note_plan(step, plan)
        seconds = [image_seconds(plan, rank, place, 1.2 if rank == slow_rank else 1.0) for rank in range(place.world_size)]
        first_stage = [sum(seconds[place.rank_of(dp=dp)]) for dp in range(8)]
        stragglers.append(max(first_stage) / float(np.mean(first_stage)))
        for rank, times in enumerate(seconds):
            assert learning.report(StepReport.of(step, rank, None, None, times)) == []
        if learning.is_due(step + 1):
            value = learning.fit_costs(step + 1, known)
            assert value is not None
            known = learning.in_force(value)
    assert known is not None
    assert np.mean(stragglers[:5]) > 1.1
    assert np.median(stragglers[-10:]) < 1.03, "a step whose long samples do not fit in equal counts may be worse"
    assert known.slow == {slow_rank: pytest.approx(1.2, abs=0.03)}
    per_patch, per_token = known.modules["encoder"][0], known.modules["model"][0] * pp
    assert per_patch / per_token == pytest.approx(TRUE_ENCODER.per_patch / BACKBONE.per_token, rel=0.15) or pp == 2


def in_patches(images: Images) -> Floats:
    return images.patches.astype(np.float64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ol.strategies.multimodal(ol.LearnedCost(BACKBONE), in_patches, grid=MIX.grid),
            "learns the cost of the encoder too",
        ),
        (
            lambda: ol.strategies.multimodal(ol.LearnedCost({"encoder": BACKBONE}), TRUE_ENCODER, grid=MIX.grid),
            "another name",
        ),
        (lambda: ol.LearnedCost({"communication": BACKBONE}), "messages of rings"),
    ],
)
def test_what_cannot_be_learned_is_refused_with_the_reason(make: Callable[[], Any], message: str):
    with pytest.raises(ol.errors.SpecError, match=message):
        make()


def test_slow_groups_of_an_older_release_are_those_of_all_their_ranks():
    place = ClientPlaceTree(ol.Mesh(dp=2, cp=2))
    learning = Learning(place, is_safe=True)
    mesh = [2, 2, 1, 1, *place.mesh.order]
    old = {"of": "x", "modules": {}, "slow": {"1": 1.5}, "mesh": mesh}
    assert learning.in_force(old).slow == {2: 1.5, 3: 1.5}
    assert learning.in_force({**old, "slow_of": "ranks"}).slow == {1: 1.5}
    assert learning.in_force({**old, "mesh": [4, 1, 1, 1, *place.mesh.order]}).slow == {}
