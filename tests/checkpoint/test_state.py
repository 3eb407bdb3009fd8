"""The saved state: plain, small, equal on all ranks, and refused where it would mean something else."""

import functools
import json
import operator
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import overlord as ol
from overlord.checkpoint.fingerprint import Fingerprint
from overlord.checkpoint.form import contents_of
from overlord.checkpoint.state import from_state
from tests.checkpoint.edited import edited
from tests.checkpoint.older import job as older
from tests.service.served import served
from tests.small_sources import Numbered, job_of, read_all, same

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


@pytest.mark.strangers
def test_a_name_is_not_accepted_for_being_part_of_a_string():
    state = saved(job_of({"a": A}))
    with pytest.raises(ol.errors.StateError, match="seed was 0, is 3"):
        ol.start(job_of({"a": A}, seed=3), resume=state, accept_changes="seeds")
    ol.start(job_of({"a": A}, seed=3), resume=state, accept_changes="seed").close()


@pytest.mark.strangers
def test_loss_weights_are_part_of_a_sources_declaration():
    state = saved(job_of({"a": A}))
    with pytest.raises(ol.errors.StateError, match="source 'a' is declared differently"):
        ol.start(job_of({"a": replace(A, loss_weights="w")}), resume=state)


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
        with pytest.raises(ol.errors.ClosedError, match="call load_state_dict on the client of rank 1 too"):
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
    with pytest.raises(ol.errors.StateError, match=message):
        ol.start(job, resume=state)
    ol.start(job, resume=state, accept_changes=True).close()


def test_one_difference_can_be_accepted_by_the_name_that_the_error_gives():
    state = saved(job_of({"a": A, "b": B}))
    job = job_of({"a": A, "b": B}, seed=7)
    with pytest.raises(ol.errors.StateError, match=r"accept_changes=\['seed'\]"):
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
    with pytest.raises(ol.errors.StateError, match=message):
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


FEEDBACK = ol.Mixture({"a": 1, "b": 1}, feedback=ol.policies.Feedback(every=2, lag=3))
JOBS = {
    "packed": job_of({"a": A, "b": B}, ol.Batch(tokens=96, sequence_length=32)),
    "cut": job_of({"a": A, "b": B}, ol.Batch(tokens=64, sequence_length=16, cut_documents=True)),
    "samples": job_of({"a": A, "b": B}, ol.Batch(samples=7, sequence_length=16)),
    "delayed": job_of(
        {"a": A, "b": B}, ol.Batch(tokens=64, sequence_length=16, outliers=ol.policies.OutlierDelay((10,), together=4))
    ),
    "learning": job_of({"a": A, "b": B}, ol.Batch(samples=6, sequence_length=16), mixture=FEEDBACK),
}


def state_of(job: ol.Job) -> dict:
    """The contents of a state in which as much has happened as may."""
    with ol.start(job) as loader:
        client = loader.client(0, timeout_s=30)
        loader.set_weights({"a": 3, "b": 1}, from_step=2)
        loader.set_weights({"a": 1, "b": 3}, from_step=20)
        for _ in range(6):
            next(client)
            if job.mix.feedback is not None:
                client.feedback(losses={"a": 2.0, "b": 1.5}, tokens={"a": 30, "b": 20})
        return contents_of(client.state_dict())


@pytest.mark.strangers
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_every_edit_of_a_state_is_refused(job):
    contents = state_of(job)
    fingerprint = Fingerprint.of(job, {name: source.units() for name, source in job.sources.items()})
    from_state(contents, job, fingerprint)
    went_on, num_edits = [], 0
    for what, other in edited(contents):
        num_edits += 1
        try:
            from_state(other, job, fingerprint)
        except ol.errors.StateError:
            continue
        went_on.append(what)
    assert num_edits > 800
    assert went_on == []


@pytest.mark.strangers
def test_every_edit_of_what_state_dict_returns_is_refused():
    job = JOBS["packed"]
    state = saved(job)
    with ol.start(job) as loader:
        client = loader.client(0, timeout_s=30)
        for _, other in edited(state):
            with pytest.raises(ol.errors.StateError):
                client.load_state_dict(other)
        assert client.step == 0
        client.load_state_dict(dict(reversed(state.items())))  # the order of keys says nothing
        assert client.step == 3


@pytest.mark.strangers
@pytest.mark.parametrize("job", [JOBS["packed"], JOBS["delayed"], JOBS["learning"]], ids=["packed", "delayed", "learning"])
def test_an_edit_that_is_accepted_by_name_must_still_make_sense(job):
    contents = state_of(job)
    fingerprint = Fingerprint.of(job, {name: source.units() for name, source in job.sources.items()})
    for what, other in edited(contents):
        try:
            progress = from_state(other, job, fingerprint, ["checksum"])
        except ol.errors.StateError:
            continue
        arrays = (progress.chunk, progress.row, progress.samples, progress.tokens, progress.since, progress.weights)
        assert all((array >= 0).all() for array in arrays), what
        assert np.isfinite(progress.lead).all(), what
    moved = {**contents, "step": contents["step"] + 1}
    with pytest.raises(ol.errors.StateError, match=r"edited or damaged.*accept_changes=\['checksum'\]"):
        ol.start(job, resume=moved, accept_changes=True)
    with ol.start(job, resume=moved, accept_changes=["checksum"]) as loader:
        assert loader.start_step == contents["step"] + 1


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("sources.a.0", -1, r"sources\.a\[0\] \(chunk\) must be a whole number from 0, it is -1"),
        ("sources.a.5", float("nan"), r"sources\.a\[5\] \(lead\) must be a finite number, it is nan"),
        ("sources.c", [0, 0, 0, 0, 0, 0.0, 0.0, False], r"source 'c' is only in one of sources and fingerprint\.sources"),
        ("carried.rows.0.1", 900, r"carried\.rows holds row \d+ of chunk 900 of source"),
        ("carried", [], "carried must be a dict with text for keys, it is a list"),
        ("steered.decisions.0.0", "soon", r"steered\.decisions\[0\]\[0\] \(step\) must be a whole number"),
        ("step", 10**30, "step must be a whole number from 0, it is 1000000"),
        ("unit", "rows", "unit must be samples or tokens, it is 'rows'"),
    ],
)
def test_a_damaged_state_says_what_is_wrong_at_which_key(path, value, message):
    contents = state_of(JOBS["packed"])
    *around, last = [int(key) if key.isdecimal() else key for key in path.split(".")]
    functools.reduce(operator.getitem, around, contents)[last] = value
    with pytest.raises(ol.errors.StateError, match=message):
        ol.start(JOBS["packed"], resume=contents, accept_changes=["checksum"])


@pytest.mark.strangers
@pytest.mark.parametrize("nothing", [None, "null", b"null", "", "{}", "[]", "7", "log ", {}, [], 0, False, float("nan")])
def test_nothing_is_no_state(nothing):
    job = JOBS["packed"]
    with ol.start(job) as loader, served(job) as (_, address), ol.connect(address, rank=0) as remote:
        client = loader.client(0, timeout_s=30)
        for load in (client.load_state_dict, loader.load_state_dict, remote.load_state_dict):
            with pytest.raises(ol.errors.StateError):
                load(nothing)
    if nothing is not None:  # which says to start at step 0
        with pytest.raises(ol.errors.StateError):
            ol.start(job, resume=nothing)


@pytest.mark.strangers
def test_a_seed_of_any_size_and_strange_names_are_saved_and_resumed():
    job = ol.Job(sources={"a.b/'ü\n": A, 'b"': B}, batch=JOBS["packed"].batch, seed=2**100)
    uncut, _ = read_all(job, 5)
    state = json.loads(json.dumps(saved(job)))
    assert same(read_all(job, 2, resume=state)[0], uncut[3:])


@pytest.mark.strangers
def test_a_state_and_a_log_of_an_earlier_release_go_on_with_the_very_same_steps(tmp_path, monkeypatch):
    folder = tmp_path / "older"
    shutil.copytree(older.HERE, folder)
    monkeypatch.chdir(folder)
    expected = json.loads(Path("steps.json").read_text())
    for resume, log in ((json.loads(Path("state.json").read_text()), None), ("log", "log")):
        with ol.start(older.older_job(), resume=resume, log=log) as loader:
            first = loader.start_step
            assert first > 3
            assert older.steps_of(loader, len(expected) - first) == expected[first:]


@pytest.mark.strangers
def test_a_state_of_an_earlier_release_is_refused_for_what_that_release_compared(monkeypatch):
    monkeypatch.chdir(older.HERE)
    state = json.loads(Path("state.json").read_text())
    job = older.older_job()
    renamed = replace(job, sources={**job.sources, "a": replace(job.sources["a"], transform=ol.Pick("tokens"))})
    with pytest.raises(ol.errors.StateError, match="source 'a' is declared differently"):
        ol.start(renamed, resume=state)
    with pytest.raises(ol.errors.StateError, match=r"batch\.tokens was 96, is 192"):
        ol.start(replace(job, batch=ol.Batch(tokens=192, sequence_length=32)), resume=state)


@pytest.mark.strangers
def test_an_edited_state_of_an_earlier_release_never_ends_in_an_error_of_python(monkeypatch):
    monkeypatch.chdir(older.HERE)
    state = json.loads(Path("state.json").read_text())
    job = older.older_job()
    fingerprint = Fingerprint.of(job, {name: source.units() for name, source in job.sources.items()})
    taken = []
    num_refused = 0
    for _, other in edited(state):
        try:
            from_state(other, job, fingerprint)
            taken.append(other)
        except ol.errors.StateError:
            num_refused += 1
    assert num_refused > 6 * len(taken)
    for other in taken[::9]:  # it has no checksum: these might have been saved
        try:
            with ol.start(job, resume=other) as loader:
                older.steps_of(loader, 1)
        except ol.OverlordError:
            pass
