"""`serve(wait_for_all=True)`: a rank that never reads holds the others back, and their timeout names it."""

from __future__ import annotations

import pytest

import overlord as ol
from tests.service.served import served
from tests.small_sources import Numbered, job_of

SOURCES = {"a": Numbered(rows=400, first=1)}
IN_GROUP = "rank 1 of the same data-parallel group has not read a step yet, and all ranks are expected to; close the client"
OTHER_GROUP = "rank 1 (data-parallel group 1) did not read a step yet, and all ranks are expected to; close the client"


def read_until_held(client: ol.Client) -> str:
    """Read until the client is held back; returns why."""
    try:
        for _ in range(40):
            next(client)
    except ol.errors.WaitTimeoutError as held:
        return str(held)
    return "it was never held back"


@pytest.mark.parametrize(
    ("mesh", "reason"), [(ol.Mesh(tp=2), IN_GROUP), (ol.Mesh(dp=2), OTHER_GROUP)], ids=["in its group", "in another"]
)
@pytest.mark.parametrize("options", [{}, {"fetch_ahead": 4}], ids=["plain", "ahead"])
def test_a_rank_that_never_reads_is_named(mesh, reason, options):
    with served(job_of(SOURCES, mesh=mesh), wait_for_all=True) as (_, address):
        reading = ol.connect(address, rank=0, timeout_s=0.3, **options)
        absent = ol.connect(address, rank=1, timeout_s=30)
        assert reason in read_until_held(reading)
        at = reading.step
        assert 0 < at < 12
        assert [next(absent).number for _ in range(2)] == [0, 1]  # it comes late, and both go on
        assert next(reading).number == at
        reading.close()
        absent.close()


@pytest.mark.parametrize("mesh", [ol.Mesh(tp=2), ol.Mesh(dp=2)], ids=["tp", "dp"])
def test_a_rank_that_is_not_to_read_closes_its_client_and_nobody_waits(mesh):
    with served(job_of(SOURCES, mesh=mesh), wait_for_all=True) as (_, address):
        ol.connect(address, rank=1, timeout_s=30).close()
        with ol.connect(address, rank=0, timeout_s=30) as client:
            assert [next(client).number for _ in range(20)] == list(range(20))


def test_a_rank_that_never_connects_is_waited_for_longer_than_a_silent_one():
    job = job_of(SOURCES, mesh=ol.Mesh(dp=2))
    with (
        served(job, wait_for_all=True, leave_after_s=0.05) as (_, address),
        ol.connect(address, rank=0, timeout_s=0.6) as client,
    ):
        assert OTHER_GROUP in read_until_held(client)


def test_after_another_state_was_loaded_all_ranks_are_expected_again():
    with served(job_of(SOURCES, mesh=ol.Mesh(dp=2)), wait_for_all=True) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=1.0) for rank in range(2)]
        for client in clients * 2:
            next(client)
        state = clients[0].state_dict()
        for client in clients:
            client.load_state_dict(state)
        assert next(clients[0]).number == 2
        assert OTHER_GROUP in read_until_held(clients[0])
        assert next(clients[1]).number == 2
        for client in clients:
            client.close()


@pytest.mark.second_try(reason="worker processes must start within a minute")
def test_the_same_holds_where_constructors_are_in_worker_processes():
    job = job_of(SOURCES, mesh=ol.Mesh(dp=2, tp=2))
    with ol.start(job, engine=ol.Processes(2)) as loader:
        address = loader.serve(wait_for_all=True)
        clients = [ol.connect(address, rank=rank, timeout_s=3) for rank in (0, 1, 2)]
        for _ in range(2):
            for client in clients:
                next(client)
        # Rank 3 is absent: it holds rank 2 of its group, and by that all others.
        assert "waited" in read_until_held(clients[0])
        assert "waited" in read_until_held(clients[1])
        assert "rank 3 of the same data-parallel group has not read a step yet" in read_until_held(clients[2])
        assert all(client.step < 20 for client in clients)
        for client in clients:
            client.close()


def test_without_it_a_rank_counts_from_its_first_step_on():
    with served(job_of(SOURCES, mesh=ol.Mesh(dp=2))) as (_, address), ol.connect(address, rank=0, timeout_s=30) as client:
        assert [next(client).number for _ in range(20)] == list(range(20))


def test_wait_for_all_is_a_switch():
    with ol.start(job_of(SOURCES)) as loader, pytest.raises(ol.errors.SpecError, match="wait_for_all is True or False, got"):
        loader.serve(wait_for_all="yes")  # pyright: ignore[reportArgumentType]
