"""Iterating again after the end of a run: from step 0, on all ranks, also where the run was resumed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import overlord as ol
from tests.service.served import served
from tests.small_sources import Numbered, job_of, tokens_of

FINITE = {"a": Numbered(rows=40, first=1, repeat=False), "b": Numbered(rows=23, unit_rows=4, first=100, repeat=False)}
JOB = job_of(FINITE, mesh=ol.Mesh(dp=2))


def state_at(step: int) -> dict[str, Any]:
    with ol.start(JOB) as loader:
        loader.set_weights({"a": 1, "b": 3}, from_step=2)
        return loader.state_before(step)


def epochs(clients: list[ol.Client], num_epochs: int) -> list[list[list[list[int]]]]:
    """What each client reads in each epoch, every client in a thread of its own, as trainers are."""
    found: list[list[list[list[int]]]] = [[] for _ in clients]

    def read(index: int) -> None:
        for _ in range(num_epochs):
            found[index].append([tokens_of(step).tolist() for step in clients[index]])

    threads = [threading.Thread(target=read, args=(index,), daemon=True) for index in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_all_ranks_begin_the_next_epoch_at_step_0_though_the_run_was_resumed():
    with ol.start(JOB, resume=state_at(0)) as loader:
        expected = epochs([loader.client(rank, timeout_s=30) for rank in range(2)], 2)
    assert expected[0][0] == expected[0][1]
    with ol.start(JOB, resume=state_at(5)) as loader:
        here = epochs([loader.client(rank, timeout_s=30) for rank in range(2)], 3)
        decided = [decision.value["weights"] for decision in loader.decisions()]
    with served(JOB, resume=state_at(5)) as (_, address):
        clients = [ol.connect(address, rank=rank, timeout_s=30) for rank in range(2)]
        there = epochs(clients, 3)
        for client in clients:
            client.close()
    for rank in range(2):
        whole = expected[rank][0]
        assert here[rank] == there[rank] == [whole[5:], whole, whole]
    assert decided == [{"a": 0.25, "b": 0.75}]


def test_a_rank_that_begins_again_while_another_still_reads_waits_and_names_it():
    with ol.start(JOB, resume=state_at(5)) as loader:
        first, second = loader.client(0, timeout_s=0.3), loader.client(1, timeout_s=30)
        next(second)
        while (step := next(first, None)) is not None:
            if second.step <= step.number:
                next(second)
        with pytest.raises(ol.errors.WaitTimeoutError, match=r"rank 0 has come to the end .* rank 1 still reads it after 0"):
            iter(first)
        assert all(step.number >= 5 for step in second)
        assert next(iter(first)).number == 0
        assert next(iter(second)).number == 0


def test_the_state_before_step_0_of_a_run_that_was_resumed_is_the_beginning_of_the_job():
    with ol.start(JOB, resume=state_at(5)) as loader, ol.start(JOB, resume=loader.state_before(0)) as fresh:
        assert fresh.client(0).step == 0
        assert fresh.decisions() == loader.decisions()
        with pytest.raises(ol.OverlordError, match="this run starts at step 5; it has no step 3"):
            loader.state_before(3)
