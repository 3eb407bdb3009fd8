"""A planner that is lost between any two asks is made anew from its log, and nobody can tell from the stream."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import StorageError
from overlord.planlog.append_log import read_frames
from overlord.planlog.records import fold
from tests.buckets import s3_bucket
from tests.roles.mortal import Mortal, free_log, key_of, planner_of, stream_of
from tests.roles.recovering import JOBS, STEPS, A, B, log_of, segment_of
from tests.small_sources import Numbered, job_of, read_all, same, tokens_of


@settings(max_examples=25)
@given(st.sampled_from(range(len(JOBS))), st.sets(st.integers(1, 80), max_size=8), st.sampled_from([1, 3, 1000]))
def test_a_planner_lost_between_any_two_asks_leaves_no_trace(tmp_path_factory, undisturbed, which, losses, every):
    engine = Mortal(losses)
    with ol.start(JOBS[which], engine=engine, log=log_of(tmp_path_factory.mktemp("run"), every=every)) as loader:
        assert stream_of(loader, STEPS) == undisturbed[which]
    keys = {}
    for plan in engine.plans:  # a plan that was handed out before a loss is the very plan that is handed out after
        assert keys.setdefault((plan.step, plan.group), key_of(plan)) == key_of(plan)


@settings(max_examples=10)
@given(st.sampled_from(range(len(JOBS))), st.sets(st.integers(1, 80), max_size=4))
def test_without_a_log_a_lost_planner_draws_everything_again_and_the_stream_is_the_same(undisturbed, which, losses):
    with ol.start(JOBS[which], engine=Mortal(losses)) as loader:
        assert stream_of(loader, STEPS) == undisturbed[which]


def test_a_planner_made_anew_goes_on_where_the_lost_one_was_and_reads_nothing_older(tmp_path):
    read: list[int] = []
    source = Recorded(rows=400, first=1, read_units=read, shuffle=False)
    engine = Mortal()
    with ol.start(job_of({"a": source}), engine=engine, log=log_of(tmp_path)) as loader:
        client = loader.client(0)
        for _ in range(20):
            next(client)
        engine.lose("planner")
        status = loader.status()
        assert status.reached >= 20
        assert status.oldest_needed >= 17
        state = loader.state_dict()
        assert state["step"] == 20
        read.clear()
        assert next(client).number == 20
        assert not [unit for unit in read if unit < 10], "drawing from step 0 would read the first units again"


@dataclass(frozen=True)
class Recorded(Numbered):
    """Notes the units that are read."""

    read_units: list[int] = field(default_factory=list)

    def read(self, unit: ol.Unit) -> pa.Table:
        self.read_units.append(unit.index)
        return super().read(unit)


def test_every_step_that_some_rank_still_needs_can_be_given(tmp_path):
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        plain = [key_of(loader.plan(step)) for step in range(8)]
    engine = Mortal()
    with ol.start(job, engine=engine, log=log_of(tmp_path, every=2)) as loader:
        ahead, behind = loader.client(0, timeout_s=30), loader.client(1, timeout_s=30)
        next(behind)
        for _ in range(5):
            next(ahead)
        for _ in range(3):
            engine.lose("planner")
            assert [key_of(loader.plan(step)) for step in range(1, 8)] == plain[1:]
            assert next(behind).number == behind.step - 1
            assert loader.state_before(behind.step)["step"] == behind.step


# The place of a run in its log


def test_a_run_resumed_from_its_log_goes_on_with_a_step_that_not_all_are_known_to_have_taken(tmp_path):
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2))
    uncut, end = read_all(job, 12)
    loader = ol.start(job, engine=Mortal(), log=log_of(tmp_path))
    clients = [loader.client(0), loader.client(1)]
    for _ in range(6):
        for client in clients:
            next(client)
    next(clients[0])
    free_log(loader)  # neither loader nor engine is closed: this is a kill
    with ol.start(job, resume="log", log=log_of(tmp_path)) as resumed:
        first = resumed.start_step
    assert 6 - job.prefetch - 1 <= first <= 6
    steps, state = read_all(job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=3)), 12 - first, resume="log", log=log_of(tmp_path))
    assert same(steps, uncut[first:])
    assert state == end
    loader.close()


def test_a_finite_run_resumed_from_its_log_again_and_again_gives_every_step_and_ends(tmp_path):
    job = job_of({"a": Numbered(rows=60, first=1, repeat=False)}, prefetch=1)
    uncut, _ = read_all(job, 1000)
    reached = 0
    while reached < len(uncut):
        with ol.start(job, resume="log", log=log_of(tmp_path)) as loader:
            first = loader.start_step
            assert max(reached - 2, 0) <= first <= reached
            steps = [step for step in islice(loader.client(0), 4)]
        assert [step.number for step in steps] == list(range(first, min(first + 4, len(uncut))))
        assert same([np.sort(tokens_of(step)) for step in steps], uncut[first : first + 4])
        reached = max(reached, first + len(steps))


def test_a_state_decides_where_a_run_goes_on_whatever_the_log_says(tmp_path):
    job = job_of({"a": A, "b": B})
    uncut, _ = read_all(job, 10)
    _, state = read_all(job, 3)
    read_all(job, 8, log=log_of(tmp_path))
    assert same(read_all(job, 7, resume=state, log=log_of(tmp_path))[0], uncut[3:])


def test_a_run_without_a_state_begins_at_step_0_and_says_what_the_log_knows(tmp_path, caplog):
    job = job_of({"a": A, "b": B})
    uncut, _ = read_all(job, 5, log=log_of(tmp_path))
    with caplog.at_level(logging.WARNING, "overlord.planlog"):
        assert same(read_all(job, 5, log=log_of(tmp_path))[0], uncut)
    assert "but this run begins at step 0; resume='log' would continue at step" in caplog.text


def test_loading_a_state_begins_a_new_era_that_a_lost_planner_goes_on_in(tmp_path):
    job = job_of({"a": A, "b": B})
    engine = Mortal()
    with ol.start(job, engine=engine, log=log_of(tmp_path)) as loader:
        client = loader.client(0)
        first = [next(client).number for _ in range(3)]
        state = client.state_dict()
        following = stream(client, 4)
        client.load_state_dict(state)
        engine.lose("planner")
        assert stream(client, 2) == following[:2]
        engine.lose("planner")
        assert stream(client, 2) == following[2:]
        assert first == [0, 1, 2]


def test_what_was_drawn_before_another_state_was_loaded_is_not_taken_up_again(tmp_path):
    sources = {"a": A, "b": B}
    _, other = read_all(job_of(sources, mixture=ol.Mixture({"a": 1, "b": 9})), 2)
    job = job_of(sources, mixture=ol.Mixture({"a": 9, "b": 1}))
    with ol.start(job, resume=other) as loader:
        expected = stream(loader.client(0), 5)
    engine = Mortal()
    with ol.start(job, engine=engine, log=log_of(tmp_path)) as loader:
        client = loader.client(0)
        before = stream(client, 7)
        client.load_state_dict(other)
        found = stream(client, 1)
        engine.lose("planner")
        found += stream(client, 4)
        assert found == expected != before[2:]


def stream(client: ol.Client, num_steps: int) -> list[list]:
    return [[micro["tokens"].tolist() for micro in next(client)] for _ in range(num_steps)]


def test_resuming_from_a_log_without_saying_where_it_is_says_so():
    with pytest.raises(ol.errors.SpecError, match="resume='log' continues from a log: say where it is"):
        ol.start(job_of({"a": A}), resume="log")


# Logs in object stores


@pytest.fixture(scope="module")
def bucket() -> Iterator[dict[str, str]]:
    with s3_bucket("runs") as options:
        yield options


@pytest.mark.parametrize("sync_s", [0.02, 1000.0])
def test_a_log_in_a_bucket_whose_end_is_lost_with_the_planner_costs_time_and_nothing_else(bucket, undisturbed, sync_s):
    log = ol.Log(f"s3://runs/{sync_s}/log", snapshot_every=3, sync_s=sync_s, storage_options=bucket)
    with ol.start(JOBS[0], engine=Mortal({7, 20, 33}), log=log) as loader:
        assert stream_of(loader, STEPS) == undisturbed[0]
    with ol.start(JOBS[0], resume="log", log=log) as loader:
        first = loader.start_step
        assert first <= STEPS, "what the last planner was not told anew before the end may be given again, never skipped"
        assert stream_of(loader, STEPS - first) == undisturbed[0][first:]


def test_closing_makes_all_of_a_log_in_a_bucket_safe(bucket, undisturbed):
    log = ol.Log("s3://runs/closed/log", snapshot_every=3, sync_s=1000.0, storage_options=bucket)
    with ol.start(JOBS[0], log=log) as loader:
        stream_of(loader, STEPS - 1)
    with ol.start(JOBS[0], resume="log", log=log) as loader:
        assert loader.start_step >= STEPS - 1 - JOBS[0].prefetch - 1
        assert stream_of(loader, 1) == [undisturbed[0][loader.start_step]]


# Faults while a step is drawn


@settings(max_examples=25)
@given(st.sets(st.integers(0, 40), max_size=10), st.sampled_from([0, 1]), st.booleans())
def test_a_source_that_fails_while_a_step_is_drawn_loses_nothing(tmp_path_factory, undisturbed, failures, which, logged):
    engine = Failing(failures)
    log = log_of(tmp_path_factory.mktemp("run")) if logged else None
    with ol.start(JOBS[which], engine=engine, log=log) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(loader.tree.world_size)]
        for step in range(STEPS):
            for client, expected in zip(clients, undisturbed[which][step], strict=True):
                while True:
                    try:
                        taken = next(client)
                        break
                    except StorageError:
                        pass
                assert [micro["tokens"].tobytes() for micro in taken] == [b for n, b in expected[2] if n == "tokens"]


class Failing(Mortal):
    """Fails some asks for facts, as a loader does whose storage is gone for a while."""

    def __init__(self, failures: set[int]) -> None:
        super().__init__()
        self.failures = failures
        self.num_described = 0

    def call(self, name, method, /, *args, **kwargs):
        if method.__name__ == "describe":
            self.num_described += 1
            if self.num_described in self.failures:
                raise StorageError("storage did not answer")
        return super().call(name, method, *args, **kwargs)


# What a planner keeps


def test_looking_at_plans_without_reading_keeps_no_more_than_a_few():
    with ol.start(job_of({"a": A, "b": B})) as loader:
        for step in range(200):
            loader.plan(step)
        assert loader.status().num_kept <= 4
        planner = planner_of(loader)
        assert len(planner._window._before) <= 12


@pytest.mark.parametrize("mesh", [ol.Mesh(dp=2), ol.Mesh(cp=2)])
def test_a_rank_that_leaves_while_a_step_is_planned_for_it_holds_nobody_back(mesh):
    engine = Leaving()
    with ol.start(job_of({"a": A}, mesh=mesh, prefetch=0), engine=engine) as loader:
        left, right = loader.client(0, timeout_s=20), loader.client(1, timeout_s=20)
        next(left)
        next(right)
        engine.leave_during_plan = right.close
        next(right)  # that step was on its way
        assert engine.leave_during_plan is None
        assert [next(left).number for _ in range(20)] == list(range(1, 21))


class Leaving(Mortal):
    """Lets a client leave while a plan for its group is on its way back to the constructor."""

    leave_during_plan: Callable[[], None] | None = None

    def call(self, name, method, /, *args, **kwargs):
        if method.__name__ == "plan" and self.leave_during_plan is not None:
            leave, self.leave_during_plan = self.leave_during_plan, None
            leave()
        return super().call(name, method, *args, **kwargs)


def test_status_says_how_far_the_planner_and_its_log_are(tmp_path):
    with ol.start(job_of({"a": A}, prefetch=0), log=log_of(tmp_path)) as loader:  # so that nothing goes on beside
        client = loader.client(0)
        for _ in range(4):
            next(client)
        status = loader.status()
        assert (status.start, status.reached, status.oldest_needed, status.end) == (0, 4, 3, None)
        assert status.num_kept == 1
        assert status.log is not None
        assert status.log.segment.endswith("segment-00000001.log")
        assert status.log.num_bytes == segment_of(tmp_path).stat().st_size
        records = [orjson.loads(body) for body in read_frames(segment_of(tmp_path).read_bytes()).bodies]
        assert fold(records[1:]).reached == status.reached
    with ol.start(job_of({"a": A})) as loader:
        assert loader.status().log is None
