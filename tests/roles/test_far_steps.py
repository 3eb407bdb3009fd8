"""A wrong step number is refused, or drawn towards in small pieces: nobody else waits for it, and memory does not grow."""

import threading
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

import overlord as ol
from overlord.roles.plan_window import PlanWindow
from overlord.roles.planner import MOST_AHEAD, MOST_LOOKED_AHEAD
from overlord.service import wire
from overlord.service.run_api import StateBeforeRequest
from overlord.stream.progress import Progress
from tests.roles.mortal import key_of, planner_of
from tests.service.served import Raw, streams, two_sources, undisturbed
from tests.small_sources import Numbered, job_of, tokens_of

pytestmark = pytest.mark.strangers
FAR = 10**9


@pytest.fixture
def loader():
    with ol.start(two_sources()) as loader:
        yield loader


@pytest.mark.parametrize("step", [FAR, MOST_AHEAD + 100, 2**52])
def test_a_step_too_far_away_is_refused_wherever_it_is_asked_for(loader, step):
    client = loader.client(0, timeout_s=20)
    next(client)
    client.rejoin(at=step)
    wrong = (
        f"step ({step:,}|{MOST_LOOKED_AHEAD + step:,}) is too far away: this run has drawn the steps before .*resume='log'"
    )
    for call in (
        lambda: next(client),
        client.state_dict,
        lambda: loader.state_before(step),
        lambda: loader.plan(MOST_LOOKED_AHEAD + step),
        lambda: loader.report(MOST_LOOKED_AHEAD + step),
    ):
        with pytest.raises(ol.errors.SpecError, match=wrong):
            call()
    client.rejoin(at=1)
    with pytest.raises(ol.errors.SpecError, match=r"at=\d+ is not between them"):
        loader.resize(ol.Mesh(), at=step)
    assert next(client).number == 1
    assert loader.status().reached < 100


def test_a_service_refuses_a_step_too_far_away_and_serves_on(loader):
    address = loader.serve()
    client = ol.connect(address, rank=0, timeout_s=20)
    client.rejoin(at=FAR)
    with pytest.raises(ol.errors.SpecError, match="too far away"):
        next(client)
    with pytest.raises(ol.errors.SpecError, match="too far away"):
        client.state_dict()
    raw = Raw(address)
    with pytest.raises(ol.errors.SpecError, match=f"step {2**31:,} is too far away"):
        raw.act("state_before", wire.pack(StateBeforeRequest(raw.hello()["job"], 2**31)))
    with pytest.raises(Exception, match="not a StateBeforeRequest of overlord's wire"):
        raw.act("state_before", wire.pack({"job": "x", "step": 2**60}))
    client.rejoin(at=0)
    assert next(client).number == 0


def test_a_wrong_step_does_not_mark_the_steps_before_it_as_taken(tmp_path):
    with ol.start(two_sources(), log=tmp_path / "log") as loader:
        client = loader.client(0, timeout_s=20)
        next(client)
        client.rejoin(at=FAR)
        with pytest.raises(ol.errors.SpecError):
            next(client)
        client.rejoin(at=1)
        next(client)
    with ol.start(two_sources(), log=tmp_path / "log", resume="log") as loader:
        assert loader.start_step <= 2


def test_readers_are_served_while_somebody_looks_far_ahead():
    job = two_sources(mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        planner = planner_of(loader)
        looks = threading.Thread(target=loader.plan, args=(1500,))
        looks.start()
        while loader.status().reached < 20:  # it is under way
            pass
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = streams(clients, 6)
        assert looks.is_alive(), "what was far away is still being drawn"
        assert loader.report().step <= 6
        looks.join(120)
        assert not looks.is_alive()
        for steps, more in zip(found, streams(clients, 2), strict=True):
            steps += more
        assert found == undisturbed(job, 8)
        assert loader.status().reached > 1500
        assert len(planner._window._before) < 80
        assert len(planner._window._plans) < 40


def test_several_can_look_far_apart_at_once_and_all_see_the_same_plans():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        plain = {step: key_of(loader.plan(step)) for step in (150, 700, 950)}
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        found: dict[int, str] = {}
        threads = [
            threading.Thread(target=lambda step=step: found.update({step: key_of(loader.plan(step))})) for step in plain
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == plain


def test_what_is_no_step_is_refused_at_every_door(loader):
    client = loader.client(0, timeout_s=20)
    doors = [
        loader.plan,
        loader.report,
        loader.state_before,
        lambda step: client.rejoin(at=step),
        lambda step: client.feedback(seconds=1.0, step=step if step != -1 else "-1"),  # a report of no step is only told of
        lambda step: loader.resize(ol.Mesh(), at=step),
        lambda step: loader.set_weights({"a": 1}, from_step=step),
    ]
    for door in doors:
        for step in (True, 1.0, "1", b"1", -1, np.float64(1), 2**53, 10**5000):
            with pytest.raises(
                ol.errors.SpecError, match=r"must be (a whole number|at least 0|below 2\*\*53), got|at=-1 is"
            ):
                door(step)


def test_numpys_whole_numbers_are_steps(loader):
    assert loader.plan(np.int64(2)) is not None
    assert loader.state_before(np.uint8(2))["step"] == 2
    client = loader.client(np.int32(0), timeout_s=20)
    client.rejoin(at=np.int64(1))
    assert next(client).number == 1


@pytest.mark.parametrize("engine", [None, ol.Processes(1)], ids=["embedded", "processes"])
def test_a_client_far_behind_another_of_its_rank_is_not_drawn_for_from_the_start_each_time(engine):
    job = job_of({"a": Numbered(rows=2000, unit_rows=20, first=1)}, ol.Batch(samples=2, sequence_length=16))
    with ol.start(job) as loader:
        expected = [tokens_of(step).tolist() for step in islice(loader.client(0), 320)]
    with ol.start(job) if engine is None else ol.start(job, engine=engine) as loader:
        first = loader.client(0, timeout_s=60)
        assert [tokens_of(next(first)).tolist() for _ in range(280)] == expected[:280]
        second = loader.client(0, timeout_s=60)
        assert [tokens_of(next(second)).tolist() for _ in range(200)] == expected[:200]
        before = loader.metrics().sources["a"].num_chunks
        for turn in range(10):
            for client, begin in ((second, 200 + 2 * turn), (first, 280 + 2 * turn)):
                assert [tokens_of(next(client)).tolist() for _ in range(2)] == expected[begin : begin + 2]
        made = loader.metrics().sources["a"].num_chunks - before
    assert made < 28, "drawing from the start in each turn would make about fifty chunks"


def test_a_step_of_a_long_run_is_near_a_kept_one_and_few_are_kept():
    start = Progress.start(("a",))
    window = PlanWindow(start, ol.ClientPlaceTree(ol.Mesh()), 4, logged={})
    for step in range(1, 50_001):
        window.keep_progress(step, lambda step=step: replace(start, step=step))
        if step % 100 == 0:
            window.note_request(0, step - 1, step - 1, is_late=False)
            window.release()
    kept = [window.nearest(step) for step in range(0, 50_000, 77)]
    assert max(step - near for step, near in zip(range(0, 50_000, 77), kept, strict=True)) <= 50_000 // 32
    assert len(set(kept)) <= 64
    assert all(
        progress is not None and progress().step == step for step in set(kept) for progress in [window.progress(step)]
    )
