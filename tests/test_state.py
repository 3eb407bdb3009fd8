"""The saved state: plain, small, equal on all ranks, and refused where it would mean something else."""

import json

import pytest

import overlord as ol
from tests.sources import Numbered, job_of, read_all, same

A = Numbered(rows=40, first=1)
B = Numbered(rows=23, unit_rows=4, first=100, longest=16)


def saved(job: ol.Job, steps: int = 3) -> dict:
    return read_all(job, steps)[1]


def test_a_state_survives_json_and_is_equal_on_all_ranks():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2, cp=2))
    with ol.start(job) as loader:
        clients = [loader.client(rank) for rank in range(4)]
        for client in clients:
            next(client)
            next(client)
        states = [client.state_dict() for client in clients]
        assert all(state == states[0] for state in states)
        assert json.loads(json.dumps(states[0])) == states[0]
        assert loader.state_dict() == states[0]
        assert states[0]["step"] == 2


def test_a_state_after_json_resumes_the_very_stream():
    job = job_of({"a": A, "b": B})
    uncut, _ = read_all(job, 6)
    state = json.loads(json.dumps(saved(job, 3)))
    assert same(read_all(job, 3, resume=state)[0], uncut[3:])


def test_the_state_of_300_sources_stays_under_64_kilobytes():
    sources = {f"source-{i:03}": Numbered(rows=10, first=1 + 10 * i) for i in range(300)}
    mixture = ol.Mixture({name: i + 1 for i, name in enumerate(sources)}, unit="tokens")
    state = saved(job_of(sources, ol.Batch(tokens=4096, sequence_length=64), mixture=mixture))
    assert len(json.dumps(state)) < 64_000


def test_load_state_dict_moves_a_running_loader_and_all_clients_must_follow():
    job = job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        left, right = loader.client(0), loader.client(1)
        state = left.state_dict()
        first = [[m["tokens"].tolist() for m in next(client)] for client in (left, right)]
        for client in (left, right):
            next(client)
        left.load_state_dict(state)
        with pytest.raises(ol.ClosedError, match="call load_state_dict on the client of rank 1 too"):
            next(right)
        right.load_state_dict(state)
        assert [[m["tokens"].tolist() for m in next(client)] for client in (left, right)] == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 5}, r"seed was 0, is 5"),
        ({"batch": ol.Batch(tokens=64, sequence_length=32)}, r"batch.sequence_length was 16, is 32"),
        ({"batch": ol.Batch(tokens=128, sequence_length=16)}, r"batch.tokens was 64, is 128"),
        (
            {"sources": {"a": Numbered(rows=45, first=1, unit_rows=5), "b": B}},
            r"source 'a' is declared differently",
        ),
        (
            {"sources": {"a": Numbered(rows=40, first=1, window=2), "b": B}},
            r"source 'a' is declared differently",
        ),
    ],
)
def test_a_state_of_another_job_is_refused_saying_what_differs(change, message):
    state = saved(job_of({"a": A, "b": B}))
    fields = {"sources": {"a": A, "b": B}, "batch": ol.Batch(tokens=64, sequence_length=16), **change}
    job = ol.Job(**fields)
    with pytest.raises(ol.StateError, match=message):
        ol.start(job, resume=state)
    ol.start(job, resume=state, accept_changes=True).close()


def test_one_difference_can_be_accepted_by_the_name_that_the_error_gives():
    state = saved(job_of({"a": A, "b": B}))
    job = job_of({"a": A, "b": B}, seed=7)
    with pytest.raises(ol.StateError, match=r"accept_changes=\['seed'\]"):
        ol.start(job, resume=state)
    ol.start(job, resume=state, accept_changes=["seed"]).close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "not an Overlord state"),
        ({"overlord": 99}, "version 99; this release reads versions 1 and 2"),
        ({"overlord": 1, "fingerprint": {}}, "the state is damaged: the state lacks 'step', 'unit', 'sources', 'carried'"),
    ],
)
def test_something_that_is_no_state_is_refused(state, message):
    with pytest.raises(ol.StateError, match=message):
        ol.start(job_of({"a": A}), resume=state)


def test_new_weights_a_new_source_and_a_removed_one_leave_the_others_exactly_where_they_were():
    first = job_of({"a": A, "b": B}, ol.Batch(samples=10, sequence_length=16), mixture=ol.Mixture({"a": 3, "b": 1}))
    before, state = read_all(first, 4)
    c = Numbered(rows=9, first=500)
    second = job_of({"a": A, "c": c}, ol.Batch(samples=10, sequence_length=16), mixture=ol.Mixture({"a": 1, "c": 1}))
    after, _ = read_all(second, 4, resume=state)
    tokens = [t for step in before + after for t in step.tolist()]
    of_a = [t // 1000 for t in tokens if t < 100_000 and t % 1000 == 0]
    expected = 30 + 20  # three quarters of 40 samples, then half of 40
    assert abs(len(of_a) - expected) <= 2
    assert max(of_a.count(d) for d in set(of_a)) - min(of_a.count(d) for d in range(1, 41)) <= 1, (
        "over one epoch and a bit every document of 'a' came once before any came twice"
    )
    assert any(t >= 500_000 for t in tokens)


def test_resuming_on_a_mesh_of_another_shape_needs_no_permission():
    state = saved(job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=4)))
    ol.start(job_of({"a": A, "b": B}, mesh=ol.Mesh(dp=1, cp=2, tp=2)), resume=state).close()
