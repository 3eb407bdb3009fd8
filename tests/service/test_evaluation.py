"""Evaluations: fixed, finite, the same for every evaluation, and nothing that the training stream notices."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import SpecError
from tests.contract.streams import part
from tests.small_sources import Numbered, documents_of

HELD_OUT = Numbered(rows=23, first=101)
WRONG: Any = {"a": 1}
HALF: Any = 1.5


def job_with(mesh: ol.Mesh | None = None, **options: Any) -> ol.Job:
    declared = ol.Eval(sources={"held out": HELD_OUT}, **{"every": 2, **options})
    return ol.Job(
        sources={"web": Numbered(first=1)},
        batch=ol.Batch(tokens=64, sequence_length=16),
        evals={"val": declared, "rare": ol.Eval(sources={"web": Numbered(rows=4, first=201)}, every=6, limit=1)},
        mesh=mesh or ol.Mesh(),
        num_workers=0,
    )


def evaluated(clients: list[ol.Client], name: str = "val") -> list[list[Any]]:
    """Every field of every step, rank by rank, read in turn."""
    parts = [client.evaluate(name) for client in clients]
    return [[part(step) for step in steps] for steps in zip(*parts, strict=True)]


def documents(steps: list[list[Any]]) -> list[int]:
    found: list[int] = []
    for ranks in steps:
        for _, _, micros in ranks:
            for micro in micros:
                dtype, _, data = micro["tokens"]
                starts = np.frombuffer(micro["document_starts"][2], np.int32)
                found += (np.frombuffer(data, dtype).take(starts) // 1000).tolist()
    return found


meshes = st.sampled_from([ol.Mesh(), ol.Mesh(dp=2), ol.Mesh(dp=3), ol.Mesh(dp=2, tp=2)])


@settings(deadline=None, max_examples=15)
@given(
    mesh=meshes,
    before=st.integers(0, 3),
    between=st.integers(0, 3),
    batch=st.sampled_from([None, ol.Batch(samples=5, sequence_length=16), ol.Batch(tokens=32, sequence_length=32)]),
    limit=st.sampled_from([None, 1, 2, 100]),
)
def test_every_evaluation_has_the_same_samples_and_training_does_not_notice(mesh, before, between, batch, limit):
    job = job_with(mesh, batch=batch, limit=limit)

    def run(evaluates: bool) -> tuple[list[Any], list[Any], Any]:
        trained, found = [], []
        with ol.start(job) as loader:
            clients = [loader.client(rank, timeout_s=30) for rank in range(mesh.world_size)]
            for count in (before, between, 2):
                trained += [[part(next(client)) for client in clients] for _ in range(count)]
                if evaluates:
                    found.append(evaluated(clients))
            return trained, found, loader.state_dict()

    trained, found, state = run(evaluates=True)
    assert (trained, [], state) == run(evaluates=False)
    assert found[0] == found[1] == found[2]
    distinct = [ranks[:: mesh.tp] for ranks in found[0]]
    if limit is None or len(found[0]) < limit:
        assert sorted(documents(distinct)) == sorted(documents_of(HELD_OUT))
    else:
        assert len(found[0]) == limit


def test_evaluations_are_due_by_every():
    with ol.start(job_with()) as loader:
        client = loader.client(0, timeout_s=30)
        assert [client.evals_due(step) for step in range(6)] == [[], ["val"], [], ["val"], [], ["val", "rare"]]
        assert len(list(client.evaluate("rare"))) == 1


@pytest.mark.parametrize("engine", [None, "processes"])
def test_trainers_in_other_processes_get_the_same_evaluation(engine):
    job = job_with(ol.Mesh(dp=2))
    with ol.start(job) as loader:
        expected = evaluated([loader.client(rank, timeout_s=30) for rank in range(2)])
    with ol.start(job, engine=ol.Processes(1) if engine else None) as loader:
        address = loader.serve(token="secret")
        clients = [ol.connect(address, rank=rank, token="secret", timeout_s=60) for rank in range(2)]
        first = [part(next(client)) for client in clients]
        for _ in range(2):
            assert evaluated(clients) == expected
        with pytest.raises(SpecError, match="there is no evaluation 'test'; the job has 'val', 'rare'"):
            clients[0].evaluate("test")
        second = [part(next(client)) for client in clients]
        assert [number for number, _, _ in first + second] == [0, 0, 1, 1]
        for client in clients:
            client.close()


def test_a_rank_may_be_behind_in_its_evaluation():
    with ol.start(job_with(ol.Mesh(dp=2), limit=2)) as loader:
        first, second = (loader.client(rank, timeout_s=30) for rank in range(2))
        both = evaluated([first, second])
        alone = [part(step) for step in first.evaluate("val")]
        again = [part(step) for step in first.evaluate("val")]
        assert alone == again == [ranks[0] for ranks in both]
        assert [part(step) for step in second.evaluate("val")] == [ranks[1] for ranks in both]


def test_after_a_resize_evaluations_are_for_the_new_mesh():
    with ol.start(job_with()) as loader:
        client = loader.client(0, timeout_s=30)
        next(client)
        before = sorted(documents(evaluated([client])))
        loader.resize(ol.Mesh(dp=2))
        clients = [client, loader.client(1, timeout_s=30)]
        assert sorted(documents(evaluated(clients))) == before


def test_a_state_does_not_depend_on_evaluations():
    job = job_with()
    with ol.start(job) as loader:
        next(loader.client(0, timeout_s=30))
        state = loader.state_dict()
    other = ol.Job(sources=job.sources, batch=job.batch, num_workers=0)
    with ol.start(other, resume=state) as loader:
        client = loader.client(0, timeout_s=30)
        assert next(client).number == 1
        with pytest.raises(SpecError, match=r"no evaluation 'val'; the job has none: declare them with Job\(evals="):
            client.evaluate("val")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ol.Eval(sources={}), "an Eval needs at least one source"),
        (lambda: ol.Eval(sources=WRONG), "names with an overlord.Source each"),
        (lambda: ol.Eval(sources={"a": HELD_OUT}, every=0), "every must be at least 1, got 0"),
        (lambda: ol.Eval(sources={"a": HELD_OUT}, limit=HALF), "limit must be a whole number"),
        (lambda: ol.Job(**{**_fields(), "evals": {"val": HELD_OUT}}), "an overlord.Eval each"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(make, message):
    with pytest.raises(SpecError, match=message):
        make()


def _fields() -> dict[str, Any]:
    return {"sources": {"web": Numbered()}, "batch": ol.Batch(tokens=64, sequence_length=16)}
