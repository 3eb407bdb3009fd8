"""The ranks: who reads, where each stands, who is silent, and whose a rank is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.service.ranks import RankRegistry


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_rank_is_silent_only_when_nothing_was_heard_for_long_and_it_had_not_left():
    clock = Clock()
    ranks = RankRegistry(clock)
    for rank in range(3):
        ranks.note_request(rank, "session-a", 0)
    ranks.note_leave(2, "session-a")
    clock.now = 5.0
    ranks.note_heartbeat(1, "session-a")
    clock.now = 8.0
    assert ranks.silent(6.0) == [0]
    ranks.note_request(0, "session-a", 0)
    assert ranks.silent(6.0) == []


def test_steps_are_those_that_were_handed_out_not_those_asked_for():
    ranks = RankRegistry()
    ranks.note_request(0, "session-a", 4)
    assert ranks.reading() == {0: 4}
    ranks.note_delivery(0, "session-a", 4)
    assert ranks.reading() == {0: 5}
    ranks.note_leave(0, "session-a")
    assert ranks.reading() == {}
    assert ranks.last() == {0: 5}
    ranks.forget()
    assert ranks.last() == {}


def test_what_an_old_client_says_changes_nothing_for_the_new_one():
    ranks = RankRegistry()
    ranks.note_request(0, "session-a", 4)
    ranks.note_request(0, "session-b", 2)
    ranks.note_delivery(0, "session-a", 4)
    assert not ranks.note_leave(0, "session-a")
    assert ranks.reading() == {0: 2}
    with pytest.raises(ol.errors.ClosedError, match="another client has taken the place"):
        ranks.note_heartbeat(0, "session-a")


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9)), min_size=1))
def test_a_rank_belongs_to_the_newest_of_its_clients_and_never_goes_back(asks):
    ranks = RankRegistry()
    order: list[str] = []
    for name, step in asks:
        session = f"session-{name}"
        if session in order[:-1]:
            with pytest.raises(ol.errors.ClosedError):
                ranks.note_request(0, session, step)
        else:
            order = order if session in order else [*order, session]
            ranks.note_request(0, session, step)
            assert ranks.reading() == {0: step}


def test_waiting_for_ranks_to_leave_counts_only_those_that_came():
    ranks = RankRegistry()
    ranks.note_request(1, "session-a", 0)
    assert not ranks.wait_for_leave([1], 0.0)
    ranks.note_leave(1, "session-a")
    assert ranks.wait_for_leave([1], 0.0)
    assert not ranks.wait_for_leave([1, 2], 0.0)
    ranks.note_leave(2, "session-b")  # it came to say that it does not read
    assert ranks.wait_for_leave([1, 2], 0.0)


@pytest.mark.strangers
def test_a_rank_that_never_came_is_late_and_not_gone_until_its_peers_have_waited_for_it():
    clock = Clock()
    ranks = RankRegistry(clock)
    ranks.expect([0, 1])
    clock.now += 1000.0
    assert ranks.silent(60.0) == [], "nobody has come yet: a service may wait for its trainers as long as they take"
    ranks.note_request(0, "session-a", 0)
    clock.now += 59.0
    assert ranks.silent(60.0) == []
    clock.now += 2.0
    ranks.note_request(0, "session-a", 1)
    assert ranks.silent(60.0) == [1]
    assert ranks.note_leave(1)
    assert ranks.silent(60.0) == []
    assert not ranks.note_leave(1)


@pytest.mark.strangers
def test_ranks_that_read_are_expected_again_when_the_run_is_moved():
    clock = Clock()
    ranks = RankRegistry(clock)
    for rank in range(2):
        ranks.note_request(rank, f"session-{rank}", 0)
    ranks.forget()
    ranks.note_request(0, "session-0", 0)
    clock.now += 61.0
    ranks.note_request(0, "session-0", 1)
    assert ranks.silent(60.0) == [1]
