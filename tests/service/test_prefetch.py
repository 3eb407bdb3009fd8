"""Steps that a client fetches ahead: the trainer sees what it would see without, and states go by what it has taken."""

from __future__ import annotations

import gc
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.batches.buffers import Arenas
from overlord.messages import Delivery
from overlord.runtime.shared_memory import Connection
from overlord.service import client as client_module
from overlord.service import wire
from overlord.service.channel import BuiltStep, FlightChannel, RequestsAhead
from overlord.service.client import Client
from overlord.service.local_link import StepPipeline
from overlord.service.local_server import _TrainerSession
from overlord.service.local_steps import StepBorrower
from overlord.service.prefetch import RequestedSteps, StepsAhead
from tests.service.served import content, served, two_sources, undisturbed
from tests.service.test_client import Gated
from tests.service.test_reconnect import free_port
from tests.small_sources import Numbered, job_of

REQUESTED = "requested"
"""A way to read: over the wire, with default settings, which need no thread."""


MOST_UNPACKED = client_module._MOST_UNPACKED


@pytest.fixture(autouse=True, scope="module")
def _no_thread_for_small_steps() -> Iterator[None]:
    """Steps here have up to four microbatches, and take no time to unpack."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client_module, "_MOST_UNPACKED", 4)
        yield


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    pause = threading.Event()
    while not holds():
        assert time.monotonic() < deadline, "it did not come to pass"
        pause.wait(0.005)


def fetch_ahead(client: ol.Client, num_steps: int) -> None:
    """Wait until a client has fetched that many steps ahead, or requested them."""
    if isinstance(client._ahead, RequestedSteps):
        assert len(client._ahead._received) + client._ahead._num_requested == num_steps
        return
    wait_until(lambda: isinstance(client._ahead, StepsAhead) and len(client._ahead._ready) == num_steps)


def thread_of(client: ol.Client) -> threading.Thread:
    assert isinstance(client._ahead, StepsAhead)
    assert client._ahead._thread is not None
    assert client._ahead._thread.is_alive()
    return client._ahead._thread


@contextmanager
def readers(job: ol.Job, over_the_wire: bool | str, **options: Any) -> Iterator[tuple[ol.Loader, list[ol.Client]]]:
    """A client for each rank, that fetches ahead."""
    with ol.start(job) as loader:
        options = {"fetch_ahead": None if over_the_wire == REQUESTED else 2, **options}
        if over_the_wire:
            address = loader.serve()
            yield loader, [ol.connect(address, rank=r, timeout_s=30, **options) for r in range(job.mesh.world_size)]
        else:
            yield loader, [loader.client(r, timeout_s=30, **options) for r in range(job.mesh.world_size)]


BOTH = pytest.mark.parametrize("over_the_wire", [False, True], ids=["in process", "connected"])
ALL = pytest.mark.parametrize("over_the_wire", [False, True, REQUESTED], ids=["in process", "connected", "no thread"])
MESHES = [ol.Mesh(dp=2), ol.Mesh(tp=2), ol.Mesh(dp=1), ol.Mesh(dp=2, cp=2)]
LAST = 60


@cache
def expected(mesh: int) -> list[list[tuple]]:
    """What each rank of a mesh gets, step by step, when nothing is fetched ahead and nothing happens."""
    return undisturbed(two_sources(mesh=MESHES[mesh]), LAST)


@dataclass(frozen=True)
class Delayed(Numbered):
    """A source whose units take some time to read, each another."""

    delays: tuple[float, ...] = (0.0,)

    def read(self, unit: ol.Unit) -> pa.Table:
        threading.Event().wait(self.delays[unit.index % len(self.delays)])
        return super().read(unit)


EVENTS = st.one_of(
    st.tuples(st.just("read"), st.integers(1, 4)),
    st.tuples(st.just("lead"), st.integers(0, 3)),  # one rank takes a step that the others have not taken yet
    st.tuples(st.just("resize"), st.integers(0, len(MESHES) - 1)),
    st.tuples(st.just("load"), st.integers(0, 8)),
    st.tuples(st.just("rewind"), st.just(0)),
    st.tuples(st.just("replace"), st.integers(0, 3)),  # a trainer dies, and another comes in its place
    st.tuples(st.just("restart"), st.just(0)),
)


class Training:
    """The trainers of a run, and what happens to them. Everything they see is compared with a run without prefetch."""

    def __init__(self, job: dict[str, Any], mesh: int, depths: list[int | None], address: str | None) -> None:
        self._fields = job
        self._depths = depths
        self._address = address
        self._stack = ExitStack()
        self.mesh = mesh
        self.at: list[int] = []
        self.start = self.taken_to = 0
        self._loader = self._begin(None)
        self._states = [self._loader.state_before(step) for step in range(9)]
        self.clients = [self._client(rank) for rank in range(self.world_size)]
        self.at = [0] * self.world_size

    @property
    def world_size(self) -> int:
        return MESHES[self.mesh].world_size

    def _begin(self, resume: dict[str, Any] | None) -> ol.Loader:
        loader = self._stack.enter_context(ol.start(job_of(**self._fields, mesh=MESHES[self.mesh]), resume=resume))
        if self._address is not None:
            loader.serve(self._address)
        return loader

    def _client(self, rank: int) -> ol.Client:
        depth = self._depths[rank % len(self._depths)]
        if self._address is None:
            return self._loader.client(rank, timeout_s=30, fetch_ahead=depth)
        return ol.connect(self._address, rank=rank, timeout_s=30, fetch_ahead=depth)

    def next(self, rank: int) -> None:
        step = next(self.clients[rank])
        assert content(step) == expected(self.mesh)[rank][self.at[rank]]
        self.at[rank] += 1
        self.taken_to = max(self.taken_to, self.at[rank])

    def catch_up(self) -> None:
        """Read up to the last step that was taken before a rewind: a mesh changes behind it."""
        self.read(self.taken_to - min(self.at))

    def read(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for rank in range(self.world_size):
                self.next(rank)
            self.check()

    def check(self) -> None:
        """States are those before the next step of each trainer, or of the slowest."""
        for client, at in zip(self.clients, self.at, strict=True):
            assert client.step == at
        assert self.clients[0].state_dict()["step"] == self.at[0]
        assert self._loader.state_dict()["step"] == min(self.at)

    def lead(self, rank: int) -> None:
        """One rank takes a step; the mesh cannot change before the others have."""
        self.catch_up()
        self.read(1)  # a run does not know of trainers that only connected
        rank %= self.world_size
        self.next(rank)
        if self.world_size > 1:
            self.check()
            with pytest.raises(ol.errors.WaitTimeoutError, match=f"cannot change at step {self.at[rank]} yet"):
                self._loader.resize(MESHES[0])
        for other in range(self.world_size):
            if other != rank:
                self.next(other)

    def resize(self, mesh: int) -> None:
        self.catch_up()
        old, self.mesh = self.clients, mesh
        assert self._loader.resize(MESHES[mesh]) == self.at[0]
        self.start = self.at[0]
        self.at = [self.start] * self.world_size
        for client in old:
            with pytest.raises(ol.errors.ClosedError, match="the run was moved to another state"):
                next(client)
        for client in old[self.world_size :]:
            client.close()
        self.clients = old[: self.world_size]
        for client in self.clients:
            client.rejoin()
        self.clients += [self._client(rank) for rank in range(len(self.clients), self.world_size)]

    def load(self, step: int) -> None:
        for client in self.clients:
            client.load_state_dict(self._states[step])
        self.start, self.taken_to, self.at = step, step, [step] * self.world_size

    def rewind(self, _: int) -> None:
        for client in self.clients:
            client.rewind()
        self.at = [self.start] * self.world_size

    def replace(self, rank: int) -> None:
        rank %= self.world_size
        at = self.at[rank]
        if self._address is None:
            self.clients[rank].close()
        self.clients[rank] = self._client(rank)
        self.clients[rank].rejoin(at=at)
        self.next(rank)
        for other in range(self.world_size):
            if other != rank:
                self.next(other)

    def restart(self, _: int) -> None:
        """The service dies, and another one goes on from the last state. Trainers in its process would die with it."""
        if self._address is None:
            return
        state = self.clients[0].state_dict()
        self._stack.close()
        self._loader = self._begin(state)
        self.start = self.taken_to = self.at[0]
        self.read(1)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._stack.close()


@BOTH
@given(
    st.lists(EVENTS, min_size=1, max_size=8),
    st.integers(0, len(MESHES) - 1),
    st.lists(st.none() | st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.lists(st.sampled_from([0.0, 0.001, 0.02]), min_size=1, max_size=3),
)
@settings(max_examples=50)
def test_trainers_see_the_same_steps_whatever_is_fetched_ahead_and_whatever_happens(
    over_the_wire, events, mesh, depths, prefetch, num_workers, delays
):
    slow = Delayed(rows=40, first=1, delays=tuple(delays))
    other = Numbered(rows=23, unit_rows=4, first=100, longest=16)
    job = {"sources": {"a": slow, "b": other}, "prefetch": prefetch, "num_workers": num_workers}
    training = Training(job, mesh, depths, f"127.0.0.1:{free_port()}" if over_the_wire else None)
    try:
        for name, argument in events:
            if max(training.at) > LAST - 8:
                break
            getattr(training, name)(argument)
        training.read(2)
    finally:
        training.close()


# What was fetched ahead is not taken


@ALL
def test_a_mesh_changes_at_the_first_step_that_no_trainer_has_taken_whatever_was_fetched(over_the_wire):
    job = two_sources(mesh=ol.Mesh(dp=2))
    with readers(job, over_the_wire) as (loader, clients):
        found = [[content(next(client)) for _ in range(3)] for client in clients]
        for client in clients:
            fetch_ahead(client, 2)
        assert loader.resize(ol.Mesh(dp=1)) == 3
        for client in clients:
            with pytest.raises(ol.errors.ClosedError, match="the run was moved to another state"):
                next(client)
        clients[1].close()
        clients[0].rejoin()
        after = [content(next(clients[0])) for _ in range(3)]
        assert found == [steps[:3] for steps in expected(0)]
        assert after == expected(2)[0][3:6]


def test_a_rank_may_finish_the_step_that_another_has_while_the_mesh_waits_for_it_and_takes_no_other():
    with readers(two_sources(mesh=ol.Mesh(dp=2)), over_the_wire=False) as (loader, clients):
        for client in clients:
            next(client)
            fetch_ahead(client, 2)
        next(clients[0])
        done: list[int] = []
        resizing = threading.Thread(target=lambda: done.append(loader.resize(ol.Mesh(dp=1), timeout_s=30)))
        resizing.start()
        wait_until(lambda: loader._moves.lock.locked())
        assert next(clients[1]).number == 1
        resizing.join(30)
        assert done == [2]
        for client in clients:
            with pytest.raises(ol.errors.ClosedError, match="the run was moved"):
                next(client)


@ALL
def test_a_state_is_that_before_the_next_step_of_the_trainer(over_the_wire):
    with readers(two_sources(), over_the_wire) as (loader, (client,)):
        assert [next(client).number for _ in range(2)] == [0, 1]
        fetch_ahead(client, 2)
        assert client.state_dict()["step"] == loader.state_dict()["step"] == client.step == 2
        state = client.state_dict()
        after = [content(next(client)) for _ in range(3)]
    with ol.start(two_sources(), resume=state) as loader:
        assert [content(step) for step in islice(loader.client(0), 3)] == after


def test_draining_hands_out_no_step_that_a_client_has_fetched_and_not_taken():
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        clients = [ol.connect(address, rank=rank, timeout_s=1.0, fetch_ahead=2) for rank in range(2)]
        for client in clients:
            next(client)
        next(clients[0])
        for client in clients:
            fetch_ahead(client, 2)
        drained: list[bool] = []
        thread = threading.Thread(target=lambda: drained.append(loader.drain(timeout_s=20)))
        thread.start()
        assert next(clients[1]).number == 1, "another rank has taken it"
        thread.join(20)
        assert drained == [True]
        for client in clients:
            with pytest.raises(ol.errors.WaitTimeoutError, match="the service is stopping and hands out no step after 1"):
                next(client)
        assert loader.state_dict()["step"] == 2


def test_the_log_of_a_run_goes_by_what_was_taken(tmp_path):
    with ol.start(two_sources(), log=tmp_path) as loader:
        client = loader.client(0, timeout_s=30, fetch_ahead=2)
        for _ in range(3):
            next(client)
        fetch_ahead(client, 2)
        assert loader.status().taken_to <= 3
        client.abandon()  # as if the process were killed: it does not leave
    with ol.start(two_sources(), log=tmp_path, resume="log") as loader:
        assert loader.start_step <= 3
        client = loader.client(0, timeout_s=30, fetch_ahead=2)
        client.rejoin(at=3)
        assert content(next(client)) == undisturbed(two_sources(), 4)[0][3]


# Errors and waits


@dataclass(frozen=True)
class Failing(Numbered):
    """A source with a unit that cannot be read until it is mended."""

    bad: int = 7
    mended: threading.Event = field(default_factory=threading.Event)

    def read(self, unit: ol.Unit) -> pa.Table:
        if unit.index == self.bad and not self.mended.is_set():
            raise ol.errors.DataError(f"unit {unit.index} is broken")
        return super().read(unit)


@BOTH
def test_an_error_is_raised_by_the_next_of_its_step_and_that_step_can_be_had_later(over_the_wire):
    def read(depth: int | None) -> list[Any]:
        source = Failing(rows=40, first=1, shuffle=False)
        found: list[Any] = []
        with readers(job_of({"a": source}), over_the_wire, fetch_ahead=depth) as (_, (client,)):
            while not source.mended.is_set():
                try:
                    found.append(content(next(client)))
                except ol.errors.DataError as error:
                    found.append((client.step, str(error)))
                    with pytest.raises(ol.errors.DataError, match="unit 7 is broken"):
                        next(client)
                    source.mended.set()
            while len(found) < 8:
                with suppress(ol.errors.DataError):  # of steps that were built before
                    found.append(content(next(client)))
            return found

    without = read(0)
    assert "unit 7 is broken" in str(without)
    assert read(2) == without
    assert read(3) == without
    assert read(None) == without


@ALL
def test_a_wait_ends_after_its_timeout_and_says_what_it_waited_for(over_the_wire):
    source = Gated(rows=40, first=1)
    job = job_of({"a": Numbered(first=100), "slow": source}, mixture=ol.Mixture({0: {"a": 1}, 3: {"a": 1, "slow": 1}}))
    with ol.start(job) as loader:
        if over_the_wire:
            depth = None if over_the_wire == REQUESTED else 2
            client = ol.connect(loader.serve(), rank=0, timeout_s=1.0, fetch_ahead=depth)
        else:
            client = loader.client(0, timeout_s=1.0, fetch_ahead=2)
        with pytest.raises(ol.errors.WaitTimeoutError, match=r"(?s)rank 0 waited .* s for step \d+: .*'slow'"):
            list(client)
        source.gate.set()
        client._timeout_s = 30.0
        at = client.step
        assert next(client).number == at


def test_a_long_wait_is_told_of(caplog):
    source = Gated(rows=40, first=1)
    with ol.start(job_of({"slow": source})) as loader:
        client = Client(0, loader.client(0)._channel, fetch_ahead=2, warn_after_s=0.05)
        taken: list[int] = []
        reader = threading.Thread(target=lambda: taken.extend(next(client).number for _ in range(2)))
        with caplog.at_level(logging.WARNING, "overlord"):
            reader.start()
            wait_until(lambda: any("rank 0 waits for step 0" in record.getMessage() for record in caplog.records))
            source.gate.set()
            reader.join(30)
        assert taken == [0, 1]


@ALL
def test_a_finite_run_ends_at_its_end_and_can_be_read_again(over_the_wire):
    job = job_of({"a": Numbered(rows=12, first=1, repeat=False)}, mesh=ol.Mesh(dp=2))
    with readers(job, over_the_wire) as (loader, clients):
        rounds = []
        for _ in range(2):
            for client in clients:
                iter(client)
            found = []
            while any(steps := [next(client, None) for client in clients]):
                found.append([content(step) for step in steps if step is not None])
            rounds.append(found)
            assert [client.step for client in clients] == [len(found)] * 2
            assert loader.state_dict()["step"] == len(found)
        assert rounds[0]
        assert rounds[0] == rounds[1]


# The thread


def test_a_client_has_a_thread_only_if_that_saves_the_trainer_time_or_it_was_asked_for():
    pytest.importorskip("torch")
    with served(two_sources()) as (loader, address):

        def has_thread(client: ol.Client) -> bool:
            assert [next(client).number for _ in range(3)] == [0, 1, 2]
            is_there = isinstance(client._ahead, StepsAhead) and client._ahead._thread is not None
            client.close()
            return is_there

        assert not has_thread(loader.client(0))
        assert not has_thread(loader.client(0, torch=True, device="cpu"))
        assert has_thread(loader.client(0, torch=True, device="meta"))
        assert not has_thread(loader.client(0, torch=True, device="meta", fetch_ahead=0))
        assert has_thread(loader.client(0, fetch_ahead=1))
        assert not has_thread(ol.connect(address, rank=0, timeout_s=30)), "it is enough to request steps early"
        assert has_thread(ol.connect(address, rank=0, timeout_s=30, fetch_ahead=1))
        assert not has_thread(ol.connect(address, rank=0, timeout_s=30, fetch_ahead=0))
        assert has_thread(ol.connect(address, rank=0, timeout_s=30, torch=True, device="meta"))
        assert has_thread(Client(0, FlightChannel(address, 0, timeout_s=30, local=False)))
        assert not has_thread(Client(0, FlightChannel(address, 0, timeout_s=30, local=False), fetch_ahead=0))
        for make in (lambda: loader.client(0, fetch_ahead=-1), lambda: ol.connect(address, rank=0, fetch_ahead=-1)):
            with pytest.raises(ol.errors.SpecError, match="fetch_ahead"):
                make()


def test_steps_of_many_microbatches_are_unpacked_by_a_thread(monkeypatch):
    monkeypatch.setattr(client_module, "_MOST_UNPACKED", MOST_UNPACKED)
    with served(two_sources()) as (_, address), ol.connect(address, rank=0, timeout_s=30) as client:
        assert len(next(client)) > MOST_UNPACKED
        assert isinstance(client._ahead, StepsAhead)


def test_a_trainer_that_works_long_on_its_steps_gets_a_thread():
    now = [0.0]
    with served(two_sources()) as (_, address):
        client = Client(0, FlightChannel(address, 0, timeout_s=30), timeout_s=30, clock=lambda: now[0])
        found = [content(next(client)) for _ in range(6)]
        assert isinstance(client._ahead, RequestedSteps)
        for _ in range(4):
            now[0] += 0.1
            found.append(content(next(client)))
        assert isinstance(client._ahead, StepsAhead)
        found += [content(next(client)) for _ in range(4)]
        assert found == expected(2)[0][:14]
        client.close()


# Without a thread


class Scripted:
    """A channel, its pipeline, and what places steps on a device. Steps that are not ready are answered with nothing."""

    def __init__(self, missing: set[int]) -> None:
        self._missing = missing
        self._num_received = 0
        self.requested: list[int] = []
        self.pipelines = 0

    def origin(self) -> str:
        return "here"

    def open_pipeline(self, rank: int) -> Scripted:
        self.pipelines += 1
        return self

    def request(self, step: int | None) -> None:
        self.requested.append(self.requested[-1] + 1 if step is None else step)

    def receive(self, timeout_s: float | None) -> list[BuiltStep]:
        step = self.requested[self._num_received]
        self._num_received += 1
        return [] if step in self._missing else [BuiltStep(Delivery(step, 0, ()))]

    def place(self, microbatches: Any) -> Any:
        return microbatches


def test_after_a_step_that_was_not_ready_the_next_ones_come_and_none_is_requested_twice():
    channel = Scripted(missing={3, 6, 7})
    ahead = RequestedSteps(cast("Any", channel), rank=0, depth=2)
    found = list[int]()
    for number in range(1, 12):
        if ahead.is_paused:
            ahead.follow(number, cast("Any", channel))
        else:
            ahead.advance(number)
        if ahead.pop(number, 1.0) is not None:
            found.append(number)
    assert found == [1, 2, 4, 5, 8, 9, 10, 11]
    assert channel.requested == list(range(1, 13))
    assert channel.pipelines == 1


def test_a_request_that_goes_on_after_a_step_that_was_not_ready_is_for_the_next_one():
    asked: list[int] = []

    class NeverReady:
        def answer(self, ticket: wire.Ticket, pack: Any, most_unbuilt: int) -> wire.NotReady:
            asked.append(ticket.step)
            return wire.NotReady("it never is")

    ours, theirs = (Connection(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    session = _TrainerSession(cast("Any", NeverReady()), Arenas())
    pipeline = StepPipeline(cast("Any", SimpleNamespace(connection=theirs, borrower=StepBorrower())), Arenas(), True)
    requests = RequestsAhead(pipeline, wire.Ticket("0" * 32, 0, 0, 1.0, "session-", "instance", 0, ahead=True))
    for step in (5, None, None):
        requests.request(step)
        session.answer_next(ours)
    assert asked == [5, 6, 7]
    assert [list(requests.receive(5.0)) for _ in asked] == [[], [], []]


def test_an_interrupted_wait_loses_no_step(monkeypatch):
    with served(two_sources()) as (_, address), ol.connect(address, rank=0, timeout_s=30) as client:
        found = [content(next(client)) for _ in range(3)]
        receive = StepPipeline.receive

        def interrupted(pipeline: StepPipeline, timeout_s: float) -> Any:
            receive(pipeline, timeout_s)  # the answer is lost
            raise KeyboardInterrupt

        monkeypatch.setattr(StepPipeline, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(client)
        monkeypatch.undo()
        found += [content(next(client)) for _ in range(4)]
    assert found == expected(2)[0][:7]


@pytest.mark.parametrize("how", ["close", "drop", "forget"])
def test_the_connection_of_early_requests_ends_with_its_client(how):
    with served(two_sources()) as (_, address):
        client: ol.Client | None = ol.connect(address, rank=0, timeout_s=30)
        assert [next(client).number for _ in range(2)] == [0, 1]
        ahead = client._ahead
        assert isinstance(ahead, RequestedSteps)
        assert ahead._pipeline is not None
        if how == "close":
            client.close()
        elif how == "drop":
            client = None
            gc.collect()
        else:
            client.rewind()
            assert ahead._pipeline is None
            assert [next(client).number for _ in range(3)] == [0, 1, 2]
            client.close()
        assert ahead._pipeline is None


@BOTH
def test_the_thread_ends_when_its_client_is_closed(over_the_wire):
    with readers(two_sources(mesh=ol.Mesh(dp=2)), over_the_wire) as (_, clients):
        for client in clients:
            next(client)
            thread = thread_of(client)
            client.close()
            thread.join(30)
            assert not thread.is_alive()
        for client in clients:
            with pytest.raises(ol.errors.ClosedError, match="is closed"):
                next(client)


def test_the_thread_ends_when_its_client_is_dropped_or_its_loader_closed():
    with served(two_sources(mesh=ol.Mesh(dp=2))) as (loader, address):
        dropped = ol.connect(address, rank=0, timeout_s=30, fetch_ahead=2)
        other = loader.client(1, timeout_s=30, fetch_ahead=2)
        next(dropped)
        next(other)
        threads = [thread_of(dropped), thread_of(other)]
        gone = weakref.ref(dropped)
        del dropped
        gc.collect()
        assert gone() is None
        threads[0].join(30)
        assert [thread.is_alive() for thread in threads] == [False, True]
    threads[1].join(30)
    assert not threads[1].is_alive()


@ALL
def test_closing_a_client_ends_its_wait_in_another_thread(over_the_wire):
    source = Gated(rows=40, first=1)
    job = job_of({"a": Numbered(first=100), "slow": source}, mixture=ol.Mixture({0: {"a": 1}, 3: {"a": 1, "slow": 1}}))
    with readers(job, over_the_wire) as (_, (client,)):
        ends: list[BaseException] = []

        def read() -> None:
            try:
                while True:
                    next(client)
            except (ol.errors.ClosedError, ol.errors.ServiceError) as error:
                ends.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        wait_until(lambda: client.step > 0 and client._turn.lock.locked())
        client.abandon()
        reader.join(30)
        assert not reader.is_alive()
        assert len(ends) == 1
        source.gate.set()


def test_a_step_that_is_there_is_handed_over_without_another_fetch():
    """The service counts as asked only for what was fetched ahead, each step once."""
    with ol.start(two_sources()) as loader:
        channel = loader.client(0)._channel
        fetched: list[tuple[int, bool]] = []

        class Counted:
            def __getattr__(self, name: str) -> Any:
                return getattr(channel, name)

            def fetch(self, step: int, rank: int, wait_s: float, ahead: bool = False, generation: int | None = None) -> Any:
                found = channel.fetch(step, rank, wait_s, ahead, generation)
                if isinstance(found, Delivery):
                    fetched.append((step, ahead))
                return found

        client = Client(0, Counted(), fetch_ahead=2, timeout_s=30)  # type: ignore[arg-type]
        next(client)
        for _ in range(6):
            fetch_ahead(client, 2)
            next(client)
        fetch_ahead(client, 2)
        client.close()
        assert fetched == [(0, False), *((step, True) for step in range(1, 9))]


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
@BOTH
def test_tensors_come_from_the_device_that_was_asked_for(over_the_wire, device):
    torch = pytest.importorskip("torch")
    with readers(two_sources(), over_the_wire, torch=True, device=device, fetch_ahead=2) as (_, (client,)):
        steps = [next(client) for _ in range(3)]
    with ol.start(two_sources()) as loader:
        plain = list(islice(loader.client(0), 3))
    for step, arrays in zip(steps, plain, strict=True):
        for micro, fields in zip(step, arrays, strict=True):
            assert micro["tokens"].device.type == (device or "cpu")
            assert micro["tokens"].shape == fields["tokens"].shape
            assert micro["tokens"].dtype == torch.int32
            assert micro["num_tokens"] == fields["num_tokens"]
            if device != "meta":
                assert micro["tokens"].tolist() == fields["tokens"].tolist()


def test_devices_that_cannot_be_are_refused_before_anything_is_fetched():
    torch = pytest.importorskip("torch")
    with ol.start(two_sources()) as loader:
        for fields, message in [
            ({"device": "cpu"}, "device='cpu' needs torch=True"),
            ({"torch": True, "device": "gpu"}, "device is a torch device or its name, as 'cuda' or 'cuda:1', got 'gpu'"),
            ({"torch": True, "device": 1.5}, "device is a torch device or its name"),
        ]:
            with pytest.raises(ol.errors.SpecError, match=message):
                loader.client(0, **fields)
            with pytest.raises(ol.errors.SpecError, match=message):
                ol.connect("127.0.0.1:9", rank=0, timeout_s=1.0, **fields)
        if not torch.cuda.is_available():
            with pytest.raises(ol.errors.SpecError, match="device='cuda' needs a CUDA device, and torch sees none"):
                loader.client(0, torch=True, device="cuda")


@pytest.mark.parametrize("depth", [0, 2])
@BOTH
def test_cuda_gets_the_same_numbers_while_it_computes(over_the_wire, depth):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    busy = torch.randn(4096, 4096, device="cuda")
    with readers(two_sources(), over_the_wire, torch=True, device="cuda", fetch_ahead=depth) as (_, (client,)):
        sums = []
        for _ in range(20):
            step = next(client)
            for _ in range(4):
                busy = busy @ busy / 4096  # the stream is behind the host, so that a copy that is not waited for shows
            assert all(micro["tokens"].is_cuda for micro in step)
            sums.append(torch.stack([micro["tokens"].long().sum() for micro in step]))
            del step  # its memory must not be reused before the sum is computed
    with ol.start(two_sources()) as loader:
        plain = [[int(micro["tokens"].sum()) for micro in step] for step in islice(loader.client(0), 20)]
    assert [found.tolist() for found in sums] == plain
