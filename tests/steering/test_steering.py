"""Weights that change while a run goes on, by hand or by reported losses: recorded before anything follows from them, so
that the stream is the same after every loss, cut and move."""

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import StorageError
from overlord.messages import WeightChange
from overlord.runtime.embedded import Embedded
from overlord.steering.decisions import WEIGHTS
from tests.full_disk import full_disk
from tests.roles.mortal import Mortal, key_of
from tests.small_sources import job_of, planned, read_all, same, tokens_of
from tests.steering.steered import HISTORIES, SOURCES, STEPS, History, job_with, lived

BATCHES = st.sampled_from(
    [
        ol.Batch(tokens=64, sequence_length=16),
        ol.Batch(tokens=64, sequence_length=16, cut_documents=True),
        ol.Batch(samples=9, sequence_length=16),
    ]
)


@settings(max_examples=6)
@given(BATCHES, HISTORIES, st.sets(st.integers(1, 120), max_size=6), st.sampled_from([1, 3, 1000]))
def test_planners_lost_at_any_ask_leave_no_trace_in_a_stream_that_is_steered(
    tmp_path_factory, batch, history, losses, every
):
    job = job_with(batch, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        undisturbed = lived(loader, history, STEPS, {})
        decided = loader.decisions()
    log = ol.Log(str(tmp_path_factory.mktemp("run") / "log"), snapshot_every=every)
    engine = Mortal(losses)
    with ol.start(job, engine=engine, log=log) as loader:
        assert same(lived(loader, history, STEPS, {}), undisturbed)
        assert [(d.step, d.value["weights"]) for d in loader.decisions()] == [(d.step, d.value["weights"]) for d in decided]
    keys = {}
    for plan in engine.plans:
        assert keys.setdefault((plan.step, plan.group), key_of(plan)) == key_of(plan)


@settings(max_examples=6)
@given(BATCHES, HISTORIES, st.lists(st.integers(1, STEPS - 1), max_size=3), st.booleans(), st.sampled_from([1, 2]))
def test_a_steered_run_cut_anywhere_goes_on_as_if_it_had_not_been(tmp_path_factory, batch, history, cuts, logged, dp):
    with ol.start(job_with(batch, mesh=ol.Mesh(dp=2))) as loader:
        undisturbed = lived(loader, history, STEPS, {})
    folder = tmp_path_factory.mktemp("run")
    found: list[np.ndarray] = []
    state: Any = None
    made: dict[int, int] = {}
    for number, cut in enumerate([*sorted(set(cuts)), STEPS]):
        # The reports of two ranks come from two ranks, however many there are: so the mesh stays as wide.
        mesh = ol.Mesh(dp=2) if dp == 2 else ol.Mesh(cp=2)
        log = str(folder / "log") if logged and number % 2 else None
        with ol.start(job_with(batch, mesh=mesh), resume=state, log=log) as loader:
            found += lived(loader, history, cut, made)
            state = orjson.loads(orjson.dumps(loader.state_dict()))
            assert state["step"] == cut
    assert same(found, undisturbed)


@settings(max_examples=5)
@given(HISTORIES, st.integers(1, STEPS - 1), st.sampled_from([ol.Mesh(dp=3), ol.Mesh(dp=2, cp=2), ol.Mesh(dp=1, tp=2)]))
def test_a_steered_run_is_the_same_after_a_resize(history, at, mesh):
    with ol.start(job_with(mesh=ol.Mesh(dp=2))) as loader:
        undisturbed = lived(loader, history, STEPS, {})
    made: dict[int, int] = {}
    with ol.start(job_with(mesh=ol.Mesh(dp=2))) as loader:
        found = lived(loader, history, at, made)
        loader.resize(mesh)
        taken: list[np.ndarray] = []
        clients = [loader.client(rank, timeout_s=60) for rank in range(loader.tree.world_size)]
        distinct = [loader.tree.rank_of(dp=dp, cp=cp) for dp in range(mesh.dp) for cp in range(mesh.cp)]
        for number in range(at, STEPS):
            if number in history.changes and number not in made:
                weights, later = history.changes[number]
                made[number] = loader.set_weights(weights, from_step=number + 12 + later)
            steps = [next(client) for client in clients]
            taken.append(np.sort(np.concatenate([tokens_of(steps[rank]) for rank in distinct])))
            for client, losses in zip(clients, history.losses.get(number, ()), strict=False):
                client.feedback(losses=losses, tokens=dict.fromkeys(losses, 7 + client.rank))
    assert same(found + taken, undisturbed)


# Changes by hand


def test_weights_hold_from_the_step_that_is_told_and_are_seen_in_the_report_and_in_plans():
    with ol.start(job_with(feedback=None)) as loader:
        client = loader.client(0, timeout_s=60)
        next(client)
        step = loader.set_weights({"a": 1, "c": 3})
        assert step > 1
        while client.step < step + 5:
            next(client)
        before, after = loader.plan(step - 1), loader.plan(step)
        assert before is not None
        assert after is not None
        assert before.step.weights.tolist() == [1 / 3] * 3
        assert after.step.weights.tolist() == [0.25, 0, 0.75]
        assert {name: mix.weight for name, mix in loader.report().mix.items()} == {"a": 0.25, "b": 0.0, "c": 0.75}
        assert loader.report(step).mix["b"].weight == pytest.approx(1 / 3)
        assert not (after.plan.samples.source == 1).any()


def test_steps_before_a_change_are_those_of_a_run_that_never_changed():
    uncut, _ = read_all(job_with(feedback=None), 12)
    with ol.start(job_with(feedback=None)) as loader:
        client = loader.client(0, timeout_s=60)
        found = [np.sort(tokens_of(next(client))) for _ in range(2)]
        step = loader.set_weights({"c": 1}, from_step=9)
        found += [np.sort(tokens_of(next(client))) for _ in range(10)]
    assert step == 9
    assert same(found[:9], uncut[:9])
    assert not same(found[9:], uncut[9:])


def test_a_step_that_is_drawn_cannot_change_and_the_error_says_which_can():
    with ol.start(job_with(feedback=None)) as loader:
        client = loader.client(0, timeout_s=60)
        for _ in range(5):
            next(client)
        with pytest.raises(ol.errors.SpecError, match=r"step 3 is drawn already; weights can change from step (\d+) on"):
            loader.set_weights({"a": 1}, from_step=3)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"d": 1}, "there is no source 'd'; the job's sources are 'a', 'b', 'c'"),
        ({"a": -1}, "the weight of 'a' must be a number >= 0, got -1"),
        ({"a": math.nan}, "must be a number >= 0, got nan"),
        ({"a": 0}, "every weight is 0"),
        ({}, "every weight is 0"),
    ],
)
def test_weights_that_make_no_sense_are_refused_and_nothing_changes(weights, message):
    with ol.start(job_with(feedback=None)) as loader:
        with pytest.raises(ol.errors.SpecError, match=message):
            loader.set_weights(weights)
        assert loader.decisions() == ()


def test_none_goes_back_to_what_is_declared_schedule_and_all():
    mixture = ol.Mixture({0: {"a": 1}, 10: {"b": 1}})
    with ol.start(job_of(SOURCES, mixture=mixture)) as loader:
        loader.set_weights({"c": 1}, from_step=5)
        loader.set_weights(None, from_step=12)
        shares = [planned(loader, step).step.weights.tolist() for step in (0, 4, 5, 10, 11, 12)]
    assert [row.index(1.0) for row in shares] == [0, 0, 2, 2, 2, 1]


def test_a_change_that_is_asked_for_twice_is_made_once():
    change = WeightChange({"a": 1}, None, "x" * 8)
    with ol.start(job_with(feedback=None)) as loader:
        first = loader.change_weights(change)
        client = loader.client(0, timeout_s=60)
        for _ in range(8):
            next(client)
        assert loader.change_weights(change) == first
        assert len(loader.decisions()) == 1


def test_a_change_that_cannot_be_written_down_is_refused_and_never_followed(tmp_path):
    uncut, _ = read_all(job_with(feedback=None), 12)
    engine = Mortal()
    with ol.start(job_with(feedback=None), engine=engine, log=str(tmp_path / "log")) as loader:
        client = loader.client(0, timeout_s=60)
        found = [np.sort(tokens_of(next(client))) for _ in range(3)]
        with full_disk(10), pytest.raises(StorageError, match="cannot be written"):
            loader.set_weights({"a": 1})
        found += [np.sort(tokens_of(next(client))) for _ in range(4)]
        engine.lose("planner")  # what waited for the disk was written, and taken back
        found += [np.sort(tokens_of(next(client))) for _ in range(5)]
        assert loader.decisions() == ()
    assert same(found, uncut)


def test_a_state_from_before_a_change_is_followed_by_it_when_the_run_goes_back():
    with ol.start(job_with(feedback=None)) as loader:
        client = loader.client(0, timeout_s=60)
        next(client)
        state = client.state_dict()
        loader.set_weights({"c": 1}, from_step=9)
        first = [np.sort(tokens_of(next(client))) for _ in range(12)]
        client.load_state_dict(state)
        assert same([np.sort(tokens_of(next(client))) for _ in range(12)], first)


def test_a_run_that_begins_again_with_its_log_follows_what_was_decided_even_for_its_first_step(tmp_path):
    def begun() -> list[np.ndarray]:
        client = loader.client(0, timeout_s=60)
        return [np.sort(tokens_of(next(client))) for _ in range(5)]

    with ol.start(job_with(feedback=None), log=str(tmp_path)) as loader:
        state = loader.state_dict()
        assert loader.set_weights({"c": 1}) == 0
        first = begun()
    for resume in (None, state):
        with ol.start(job_with(feedback=None), log=str(tmp_path), resume=resume) as loader:
            assert same(begun(), first)


def test_what_was_decided_about_another_mixture_lapses_and_that_is_said(caplog):
    with ol.start(job_with(feedback=None)) as loader:
        loader.set_weights({"c": 1})
        state = loader.state_dict()
    changed = job_of(SOURCES, mixture=ol.Mixture({"a": 1}, unit="tokens"))
    with caplog.at_level(logging.WARNING, "overlord.planlog"), ol.start(changed, resume=state) as loader:
        assert planned(loader, 0).step.weights.tolist() == [1, 0, 0]
    assert "1 decisions about weights were made for another mixture" in caplog.text


class Cluster(Embedded):
    """An engine that says that its roles can be lost one by one."""

    keeps_planner = False

    @property
    def num_hosts(self) -> int:
        return 1


def test_where_a_planner_can_be_lost_nothing_is_decided_without_a_log(tmp_path):
    written = pytest.raises(ol.errors.SpecError, match=r"only if that is written down.*start\(log=...\)")
    with ol.start(job_with(feedback=None), engine=Cluster()) as loader, written:
        loader.set_weights({"a": 1})
    with pytest.raises(ol.errors.SpecError, match=r"feedback.*start\(log=...\)"):
        ol.start(job_with(), engine=Cluster())
    by_function = replace(job_with(), mixture=ol.Mixture(lambda step, progress: {"a": 1.0}))
    with pytest.raises(ol.errors.SpecError, match=r"that is a function decides.*start\(log=...\)"):
        ol.start(by_function, engine=Cluster())
    with ol.start(job_with(), engine=Cluster(), log=str(tmp_path / "log")) as loader:
        assert loader.set_weights({"a": 1}) == 0


def test_decisions_about_weights_are_all_kept_in_the_log(tmp_path):
    log = ol.Log(str(tmp_path / "log"), snapshot_every=2)
    history = History(losses={n: ({"a": 1.0, "b": n % 3, "c": 2.0},) for n in range(STEPS)})
    with ol.start(job_with(), log=log) as loader:
        state = loader.state_dict()
        first = lived(loader, history, STEPS, {})
        decided = [d for d in loader.decisions() if d.name == WEIGHTS]
    assert len(decided) == 5
    # From a state of long before, without a single report: what was decided then is followed.
    with ol.start(job_with(), log=log, resume=state) as loader:
        assert same(lived(loader, History(), STEPS, {}), first)
