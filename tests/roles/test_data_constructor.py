"""A data-parallel group's steps: kept as long as a rank may want them, and built again if one asks later. What was fetched
ahead is not taken, and moves nobody."""

import gc
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.messages import Delivery, Later
from overlord.roles.rank_pace import PaceMeter
from overlord.service.constructor import ServingConstructor
from overlord.service.local_channel import LocalChannel
from overlord.service.run_api import StepSource
from tests.small_sources import Numbered, job_of


def channel_of(loader: ol.Loader) -> LocalChannel:
    return LocalChannel(loader, loader._roles)


def fetched(loader: ol.Loader, step: int, rank: int, ahead: bool = False) -> Delivery:
    found = channel_of(loader).fetch(step, rank, 20.0, ahead)
    assert isinstance(found, Delivery)
    return found


def refused(answer: Delivery | Later | None) -> str:
    assert isinstance(answer, Later)
    return answer.reason


def thawed(loader: ol.Loader):
    """What the only constructor has handed out."""
    return loader._roles.constructors[0].call(ServingConstructor.thaw).result()


def test_a_step_is_kept_until_the_last_rank_has_it_and_can_be_had_again():
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2), num_workers=0)
    with ol.start(job) as loader:
        first = fetched(loader, 0, 0).microbatches[0]
        kept = weakref.ref(first["tokens"])
        tokens = first["tokens"].copy()
        del first
        gc.collect()
        assert kept() is not None, "the other rank has not come for it"
        fetched(loader, 0, 1)
        gc.collect()
        assert kept() is None
        np.testing.assert_array_equal(fetched(loader, 0, 0).microbatches[0]["tokens"], tokens)
        assert fetched(loader, 1, 0).step == 1


def test_a_rank_of_another_group_is_told_to_wait_and_holds_nobody_back():
    """As while the mesh changes: a client of the old mesh may reach a constructor of the new one."""
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(dp=2))) as loader:
        wrong = loader._roles.constructors[0].call(StepSource.fetch, 0, 1, 20.0, False, 0).result()
        assert isinstance(wrong, Later)
        assert "rank 1 is not in data-parallel group 0" in wrong.reason
        for step in range(8):  # more than a group may be ahead of a rank that was counted
            for rank in range(2):
                assert fetched(loader, step, rank).step == step


def test_a_step_that_was_fetched_ahead_counts_as_taken_only_when_it_is():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2))) as loader:
        for rank in range(2):
            fetched(loader, 0, rank)
            assert [fetched(loader, step, rank, ahead=True).step for step in (1, 2)] == [1, 2]
        assert (thawed(loader).next_of_rank, thawed(loader).untaken) == ({0: 1, 1: 1}, 1)
        assert channel_of(loader).take(1, 1) is None
        assert (thawed(loader).next_of_rank, thawed(loader).untaken) == ({0: 1, 1: 2}, 2)
        assert channel_of(loader).take(1, 1) is None, "it may be repeated"
        assert (thawed(loader).next_of_rank, thawed(loader).untaken) == ({0: 1, 1: 2}, 2)


def test_the_weights_of_a_step_that_was_fetched_ahead_do_not_change_any_more():
    with ol.start(job_of({"a": Numbered(first=1), "b": Numbered(first=100)})) as loader:
        fetched(loader, 0, 0)
        for step in (1, 2):
            fetched(loader, step, 0, ahead=True)
        reached = loader._roles.constructors[0].call(ServingConstructor.reached).result()
        assert reached == 3
        assert loader.set_weights({"a": 1.0}) >= 3


def test_a_rank_that_does_not_read_or_has_left_fetches_nothing_ahead_and_is_not_brought_back_by_it():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2))) as loader:
        channel = channel_of(loader)
        assert "reads nothing here now" in refused(channel.fetch(0, 1, 20.0, ahead=True))
        for rank in range(2):
            fetched(loader, 0, rank)
        channel.leave(1)
        assert "reads nothing here now" in refused(channel.fetch(1, 1, 20.0, ahead=True))
        for step in range(1, 9):
            assert fetched(loader, step, 0).step == step, "rank 1 holds nobody back"


def test_nothing_is_fetched_ahead_that_would_not_be_built_ahead():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2), prefetch=1)) as loader:
        channel = channel_of(loader)
        fetched(loader, 0, 0)
        fetched(loader, 0, 1)
        assert fetched(loader, 1, 0, ahead=True).step == 1
        assert "step 2 is more than 1 steps ahead of rank 0" in refused(channel.fetch(2, 0, 20.0, ahead=True))
        assert channel.take(1, 0) is None
        assert "ahead of rank 1" in refused(channel.fetch(2, 0, 20.0, ahead=True))
        assert fetched(loader, 1, 1).step == 1
        assert fetched(loader, 2, 0, ahead=True).step == 2


def test_a_rank_that_fetches_ahead_is_built_what_it_requests_and_no_more():
    with ol.start(job_of({"a": Numbered(first=1)}, prefetch=6)) as loader:
        constructor = loader._roles.constructors[0]
        assert fetched(loader, 0, 0).step == 0
        for step in range(1, 7):  # built ahead, because this rank was not known to fetch ahead
            assert fetched(loader, step, 0, ahead=True).step == step
            assert channel_of(loader).take(step, 0) is None
        assert constructor.call(ServingConstructor.reached).result() == 7
        assert fetched(loader, 7, 0, ahead=True).step == 7
        assert constructor.call(ServingConstructor.reached).result() == 8
        assert fetched(loader, 8, 0).step == 8, "and when it waits by itself, the next ones are built for it"
        assert constructor.call(ServingConstructor.reached).result() == 15


def test_a_step_is_not_taken_while_the_mesh_changes_unless_another_rank_has_it():
    with ol.start(job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2))) as loader:
        channel, constructor = channel_of(loader), loader._roles.constructors[0]
        for rank in range(2):
            fetched(loader, 0, rank)
            for step in (1, 2):
                fetched(loader, step, rank, ahead=True)
        assert channel.take(1, 0) is None
        assert constructor.call(ServingConstructor.freeze).result().untaken == 2
        later = channel.take(2, 0)
        assert later is not None
        assert "waits for the mesh to change" in later.reason
        assert channel.take(1, 1) is None
        assert thawed(loader).next_of_rank == {0: 2, 1: 2}
        assert channel.take(2, 0) is None


def test_a_step_from_before_the_run_was_moved_is_not_taken():
    with ol.start(job_of({"a": Numbered(first=1)})) as loader:
        channel, state = channel_of(loader), loader.state_dict()
        fetched(loader, 0, 0)
        fetched(loader, 1, 0, ahead=True)
        origin = channel.origin()
        loader.load_state_dict(state)
        assert channel.take(1, 0, origin=origin) is not None
        assert loader.state_dict()["step"] == 0


def test_a_step_that_all_ranks_have_fetched_is_dropped_and_can_be_had_again():
    job = job_of({"a": Numbered(first=1)}, mesh=ol.Mesh(tp=2), num_workers=0)
    with ol.start(job) as loader:
        for rank in range(2):
            fetched(loader, 0, rank)
        ahead = fetched(loader, 1, 0, ahead=True).microbatches[0]
        kept, tokens = weakref.ref(ahead["tokens"]), ahead["tokens"].copy()
        del ahead
        gc.collect()
        assert kept() is not None, "the other rank has not come for it"
        fetched(loader, 1, 1, ahead=True)
        gc.collect()
        assert kept() is None
        np.testing.assert_array_equal(fetched(loader, 1, 0).microbatches[0]["tokens"], tokens)


CALLS = st.lists(
    st.tuples(st.sampled_from(["fetch", "ahead", "take", "take", "leave", "back", "freeze", "thaw"]), st.integers(0, 1)),
    max_size=40,
)


@settings(max_examples=60)
@given(CALLS, st.integers(0, 3), st.integers(0, 2))
def test_whatever_is_fetched_ahead_the_constructor_knows_exactly_what_was_taken(calls, prefetch, num_workers):
    sources = {"a": Numbered(first=1), "b": Numbered(first=90)}
    with ol.start(job_of(sources, num_workers=0)) as alone:
        steps = [fetched(alone, step, 0).microbatches[0]["tokens"].tobytes() for step in range(45)]
    with ol.start(job_of(sources, mesh=ol.Mesh(tp=2), prefetch=prefetch, num_workers=num_workers)) as loader:
        channel, constructor = channel_of(loader), loader._roles.constructors[0]
        next_of: dict[int, int] = {}
        ahead: dict[int, int] = {0: 0, 1: 0}
        untaken, frozen_from = 0, None
        for name, rank in calls:
            at = next_of.get(rank, 0)
            if name == "ahead":
                step = max(ahead[rank], at)
                answer = channel.fetch(step, rank, 20.0, ahead=True)
                if isinstance(answer, Delivery):
                    assert answer.microbatches[0]["tokens"].tobytes() == steps[step]
                    assert rank in next_of
                    assert step <= min(next_of.values()) + prefetch
                    ahead[rank] = step + 1
            elif name == "take" and rank in next_of and ahead[rank] > at:
                if channel.take(at, rank) is None:
                    assert frozen_from is None or at < frozen_from
                    next_of[rank] = at + 1
                    untaken = max(untaken, at + 1)
                else:
                    assert frozen_from is not None
                    assert at >= frozen_from
            elif name in ("fetch", "back"):
                step = at if name == "fetch" else max(at - 1, 0)
                if name == "back":
                    ahead[rank] = 0
                answer = channel.fetch(step, rank, 20.0)
                next_of[rank] = step
                if isinstance(answer, Delivery):
                    assert answer.microbatches[0]["tokens"].tobytes() == steps[step]
                    assert frozen_from is None or step < frozen_from
                    next_of[rank], untaken = step + 1, max(untaken, step + 1)
            elif name == "leave":
                channel.leave(rank)
                next_of.pop(rank, None)
            elif name in ("freeze", "thaw"):
                handed = constructor.call(getattr(ServingConstructor, name)).result()
                frozen_from = untaken if name == "freeze" else None
                assert (handed.next_of_rank, handed.untaken) == (next_of, untaken)
        assert (thawed(loader).next_of_rank, thawed(loader).untaken) == (next_of, untaken)


def test_the_pace_of_a_rank_that_fetches_ahead_is_measured_by_what_its_trainer_waits():
    now = [0.0]
    paces = PaceMeter(lambda: now[0])
    paces.note_request(0, 0)
    now[0] = 1.0
    paces.note_delivery(0, 0)
    now[0] = 5.0
    paces.note_take(0, 1, 0.5)  # trained from 1.0 to 4.5
    paces.note_take(0, 1, 0.5)
    assert (paces.pace.num_steps, paces.pace.busy_s) == (1, 3.5)
    assert (paces.pace.num_waits, paces.pace.waited_s) == (2, 1.5)
    now[0] = 6.0
    paces.note_take(0, 2, 100.0)  # no longer than since it got the last one
    assert (paces.pace.busy_s, paces.pace.waited_s) == (3.5, 2.5)
