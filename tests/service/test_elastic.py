"""The mesh of a served run follows its trainers, and every step has the same contents whoever is there."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.errors import ClosedError, SpecError, WaitTimeoutError
from overlord.service.elastic import MeshView, SeatWait
from tests.service.served import served, two_sources
from tests.small_sources import read_all, tokens_of

LEAVE_S = 0.6


def view(dp: int = 4, tp: int = 1, **changes) -> MeshView:
    fields = {"groups": tuple(range(dp)), "start": 5, "lost": frozenset(), "waiting": {}, "next_of_rank": {}}
    return MeshView(ClientPlaceTree(ol.Mesh(dp=dp, tp=tp)), **(fields | changes))


def asking(unfinished: int | None) -> SeatWait:
    return SeatWait("session", unfinished, 0.0)


def test_a_group_with_a_lost_rank_leaves_and_the_mesh_begins_at_the_first_unfinished_step():
    found = view(lost={2}, next_of_rank={0: 9, 1: 10, 2: 9, 3: 9}).decide()
    assert found is not None
    assert found.groups == (0, 1, 3)
    assert found.at == 8, "ranks 0 and 3 took step 8 last, and nobody knows whether they finished it"
    found = view(lost={2}, next_of_rank={0: 9, 1: 9, 2: 9}, waiting={0: asking(9), 1: asking(9), 3: asking(9)}).decide()
    assert found is not None
    assert found.at == 9, "those who ask say what they have finished"
    found = view(tp=2, lost={3}).decide()
    assert found is not None
    assert found.groups == (0, 2, 3), "a rank takes its whole group along"


def test_a_group_joins_when_all_of_its_ranks_are_there_and_nobody_is_in_trouble():
    away = {"groups": (0, 1, 3), "next_of_rank": {0: 9, 1: 9, 3: 9}}
    found = view(**away, waiting={2: asking(None)}).decide()
    assert found is not None
    assert (found.groups, found.at) == ((0, 1, 2, 3), None)
    assert view(**away).decide() is None
    assert view(**away, waiting={2: asking(None), 0: asking(9)}).decide() is None, "rank 0 has seen a peer fail"
    assert view(tp=2, groups=(0, 1, 3), waiting={4: asking(None)}).decide() is None, "rank 5 is of the same group"
    found = view(tp=2, groups=(0, 1, 3), waiting={4: asking(None), 5: asking(None)}).decide()
    assert found is not None
    assert found.groups == (0, 1, 2, 3)


def test_the_same_mesh_begins_again_when_all_ask_or_one_needs_an_earlier_step():
    found = view(2, waiting={0: asking(8), 1: asking(7)}).decide()
    assert found is not None
    assert (found.groups, found.at) == ((0, 1), 7)
    found = view(2, waiting={0: asking(4)}, next_of_rank={1: 6}).decide()
    assert found is not None
    assert (found.groups, found.at) == ((0, 1), 4)
    assert view(2, waiting={0: asking(7)}).decide() is None
    assert view(2, lost={0, 1}).decide() is None, "nobody is left: the run stays where it was"


@given(
    st.integers(1, 6),
    st.sets(st.integers(0, 5)),
    st.dictionaries(st.integers(0, 5), st.none() | st.integers(3, 12)),
    st.dictionaries(st.integers(0, 5), st.integers(5, 12)),
)
def test_no_step_that_a_surviving_rank_may_not_have_finished_is_passed_over(dp, lost, waiting, next_of_rank):
    waiting = {rank: asking(step) for rank, step in waiting.items() if rank < dp and rank not in lost}
    seen = view(dp, lost=frozenset(lost), waiting=waiting, next_of_rank=next_of_rank)
    found = seen.decide()
    if found is None:
        return
    assert set(found.groups) == set(range(dp)) - lost
    for rank in found.groups:
        if rank in waiting:
            unfinished = waiting[rank].unfinished
            assert unfinished is None or found.at is None or found.at <= unfinished
        else:
            assert found.at is None or found.at <= max(next_of_rank.get(rank, 5) - 1, 5)


class Trainer(threading.Thread):
    """Reads the steps of a member, in step with the others of its mesh; notes what it got by step and mesh."""

    def __init__(self, address: str, rank: int, meshes: "Meshes", until: int) -> None:
        super().__init__(daemon=True)
        self.address, self.declared, self.meshes, self.until = address, rank, meshes, until
        self.killed = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error

    def _train(self) -> None:
        with ol.join(self.address, rank=self.declared, timeout_s=60) as member:
            while True:
                seat = member.seat
                assert member.client.step == seat.step
                try:
                    for step in member:
                        if self.killed.is_set():
                            member._leave_seat()  # as a process that is gone: nobody is told
                            return
                        self.meshes.exchange(seat, step)
                        if step.number == self.until:
                            return
                except (ClosedError, threading.BrokenBarrierError):
                    self.meshes.breaks(seat)
                    member.regroup()


class Meshes:
    """The process groups of the trainers: each step ends when all ranks of the mesh have it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._barriers: dict[str, threading.Barrier] = {}
        self.parts: dict[tuple[int, int, str], dict[int, np.ndarray]] = {}
        self.finished: dict[int, list[int]] = {}
        self.progress = threading.Condition()

    def exchange(self, seat: ol.Seat, step: ol.Step) -> None:
        with self._lock:
            barrier = self._barriers.setdefault(seat.number, threading.Barrier(seat.world_size))
            parts = self.parts.setdefault((step.number, seat.world_size, seat.number), {})
        parts[seat.rank] = tokens_of(step)
        if barrier.wait(30) == 0:
            with self.progress:
                self.finished[step.number] = np.sort(
                    np.concatenate([parts[rank] for rank in range(seat.world_size)])
                ).tolist()
                self.progress.notify_all()

    def breaks(self, seat: ol.Seat) -> None:
        with self._lock:
            barrier = self._barriers.setdefault(seat.number, threading.Barrier(seat.world_size))
        barrier.abort()

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        with self.progress:
            assert self.progress.wait_for(holds, 60), what

    def sizes(self) -> list[int]:
        return list(dict.fromkeys(size for _, size, _ in self.parts))


@pytest.mark.parametrize("engine", [None, "processes"])
def test_four_trainers_three_and_four_again_get_every_token_of_every_step(engine):
    job, until = two_sources(mesh=ol.Mesh(dp=4)), 40
    expected = [step.tolist() for step in read_all(job, until + 1)[0]]
    meshes = Meshes()
    with ol.start(job, engine=ol.Processes(2) if engine else None) as loader:
        address = loader.serve(leave_after_s=LEAVE_S, resize_on_leave=True)
        trainers = [Trainer(address, rank, meshes, until) for rank in range(4)]
        for trainer in trainers:
            trainer.start()
        meshes.wait_for(lambda: len(meshes.finished) > 5, "four trainers")
        trainers[1].killed.set()
        trainers[1].join(30)
        for barrier in list(meshes._barriers.values()):
            barrier.abort()  # the collective of the others fails
        meshes.wait_for(lambda: any(size == 3 for _, size, _ in list(meshes.parts)), "three trainers")
        meshes.wait_for(lambda: max(meshes.finished) > 12, "three trainers go on")
        trainers[1] = Trainer(address, 1, meshes, until)
        trainers[1].start()
        for trainer in trainers:
            trainer.join(60)
            assert trainer.error is None
            assert not trainer.is_alive()
        kinds = [event.kind for event in loader.metrics().events]
    assert [meshes.finished[step] for step in range(until + 1)] == expected
    assert meshes.sizes() == [4, 3] or meshes.sizes() == [4, 3, 4]
    assert kinds.count("resize") >= 2


def test_a_run_that_does_not_follow_its_trainers_says_so():
    with served(two_sources()) as (_, address), pytest.raises(SpecError, match="serve it with resize_on_leave=True"):
        ol.join(address, rank=0, timeout_s=5)
    with (
        ol.start(two_sources()) as loader,
        pytest.raises(SpecError, match="ranks that are silent for leave_after_s: give it in seconds"),
    ):
        loader.serve(resize_on_leave=True, leave_after_s=None)


def test_a_rank_that_the_run_was_never_served_with_is_refused_and_a_seat_that_is_taken_is_waited_for():
    with served(two_sources(mesh=ol.Mesh(dp=2)), resize_on_leave=True) as (_, address):
        with pytest.raises(SpecError, match="rank must be from 0 to 1, got 2"):
            ol.join(address, rank=2, timeout_s=5)
        with ol.join(address, rank=0, timeout_s=5) as first:
            assert (first.seat.rank, first.seat.world_size, first.seat.step) == (0, 2, 0)
            next(first)
            with pytest.raises(WaitTimeoutError, match=r"rank 0 waits for a seat in the mesh .* its peers still train"):
                ol.join(address, rank=0, timeout_s=0.3)
            assert next(first).number == 1


def test_a_member_whose_mesh_has_changed_is_told_to_regroup():
    with (
        served(two_sources(mesh=ol.Mesh(dp=2)), resize_on_leave=True) as (loader, address),
        ol.join(address, rank=0, timeout_s=30) as first,
        ol.join(address, rank=1, timeout_s=30) as second,
    ):
        for member in (first, second):
            next(member)
        loader.resize(ol.Mesh(dp=1))
        with pytest.raises(ClosedError, match=r"mesh of 2 ranks that began at step 0: the mesh has changed.*; call regroup"):
            next(first)
        assert (first.regroup().world_size, next(first).number) == (1, 1)


def test_without_the_token_there_is_no_seat():
    with served(two_sources(), resize_on_leave=True, token="hard-to-guess") as (_, address):
        for token in (None, "wrong"):
            with pytest.raises(ol.OverlordError, match="requires its token"):
                ol.join(address, rank=0, token=token, timeout_s=5)
        ol.join(address, rank=0, token="hard-to-guess", timeout_s=5).close()


def test_a_trainer_that_is_replaced_at_once_and_all_who_ask_begin_the_same_mesh_again():
    with served(two_sources(mesh=ol.Mesh(dp=2)), resize_on_leave=True) as (loader, address):
        members = [ol.join(address, rank=rank, timeout_s=30) for rank in range(2)]
        taken = [next(member) for member in members]
        assert [step.number for step in taken] == [0, 0]
        taken = [next(member) for member in members]
        members[1]._leave_seat()  # killed in step 1, and started again at once
        found: list = []
        threads = [
            threading.Thread(target=lambda: found.append(members[0].regroup())),
            threading.Thread(target=lambda: found.append(ol.join(address, rank=1, timeout_s=30))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(found) == 2
        assert loader.generation == 1
        assert members[0].seat.step == 1, "step 1 was not finished"
        other = next(member for member in found if isinstance(member, ol.ElasticClient))
        assert other.seat.step == 1
        again = [next(members[0]), next(other)]
        assert [tokens_of(step).tolist() for step in again] == [tokens_of(step).tolist() for step in taken]
        for member in (members[0], other):
            member.close()


def test_a_step_from_before_the_present_mesh_is_handed_out_again_to_a_rank_that_needs_it():
    """A rank is lost just after another has joined: the mesh began at a step that the others had not reached."""
    job = two_sources(mesh=ol.Mesh(dp=2))
    expected = [step.tolist() for step in read_all(job, 4)[0]]
    with served(job, resize_on_leave=True, leave_after_s=LEAVE_S) as (_, address):
        first = ol.join(address, rank=0, timeout_s=30)
        second = ol.join(address, rank=1, timeout_s=30)
        for member in (first, second):
            next(member)
        second._leave_seat()
        seat = first.regroup()
        assert (seat.world_size, seat.step) == (1, 0)
        assert tokens_of(next(first)).size
        next(first)
        joined: list[ol.ElasticClient] = []
        thread = threading.Thread(target=lambda: joined.append(ol.join(address, rank=1, timeout_s=30)))
        thread.start()
        thread.join(30)
        assert joined[0].seat.step == 2, "rank 0 had taken step 1"
        joined[0]._leave_seat()
        # Rank 0 fails in step 1, which it has not finished, while the run is at step 2 already.
        seat = first.regroup()
        while seat.world_size == 2:  # until the other is known to be lost
            seat = first.regroup()
        assert (seat.world_size, seat.step) == (1, 1)
        assert [np.sort(tokens_of(next(first))).tolist() for _ in range(3)] == expected[1:4]
        first.close()
