"""Whatever happens to the loaders of a run: its stream stays what it was, byte for byte, its buffers within their bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import ClosedError, WaitTimeoutError
from overlord.fleet.hosts import Fleet
from overlord.loaders.model import Partition, Share
from overlord.roles import assembly
from overlord.roles.loader_host import LoaderHost
from overlord.roles.planner import Cursor, Planner
from overlord.runtime.embedded import Immediate
from overlord.runtime.engine import Handle
from tests.roles.mortal import Mortal, bytes_of
from tests.small_sources import Numbered, job_of

SOURCES = ("a", "b", "c")
STEPS = 14


def job(**fields) -> ol.Job:
    sources = {
        "a": Numbered(rows=60, first=1, buffer_bytes=30_000, with_mask=True, loss_mask="mask"),
        "b": Numbered(rows=45, first=100, buffer_bytes=20_000, with_mask=True, loss_mask="mask"),
        "c": Numbered(rows=30, first=200, with_mask=True, loss_mask="mask", repeat=2),
    }
    mixture = ol.Mixture({0: {"a": 2, "b": 1}, 6: {"a": 1, "c": 3}})
    return job_of(sources, ol.Batch(tokens=96, sequence_length=16, cut_documents=True), mixture=mixture, **fields)


def steps_of(loader: ol.Loader, clients: list[ol.Client], count: int) -> list:
    return [[s and (s.number, s.loss_tokens, bytes_of(s)) for s in (next(c, None) for c in clients)] for _ in range(count)]


@pytest.fixture(scope="module")
def expected() -> list:
    with ol.start(job(mesh=ol.Mesh(dp=2))) as loader:
        return steps_of(loader, [loader.client(rank, timeout_s=60) for rank in range(2)], STEPS)


def cursors_of(loader: ol.Loader) -> dict[str, Cursor]:
    return loader._roles.planner.call(Planner.cursors).result()


@dataclass(frozen=True)
class Deal:
    """The host of each share of each source."""

    hosts: tuple[tuple[int, ...], ...]

    def to(self, fleet: Fleet) -> Partition:
        num_hosts = max(len(fleet.partition.hosts), 1 + max(host for hosts in self.hosts for host in hosts))
        held: list[list[Share]] = [[] for _ in range(num_hosts)]
        for source, hosts in zip(SOURCES, self.hosts, strict=True):
            for index, host in enumerate(hosts):
                held[host].append(Share(source, index, len(hosts)))
        return Partition(tuple(tuple(sorted(shares)) for shares in held))


@dataclass(frozen=True)
class To:
    """Something that happens to one of the hosts."""

    what: str
    host: int


DEALS = st.builds(Deal, st.tuples(*[st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple)] * 3))
HAPPENINGS = ["lose", "shadow", "mirror", "promote", "exchange", "unshadow", "close"]
EVENTS = DEALS | st.builds(To, st.sampled_from(HAPPENINGS), st.integers(0, 5)) | st.sampled_from(["tidy", "read", "read"])


def happen(event: Deal | To | str, loader: ol.Loader, engine: Mortal) -> None:
    fleet = loader._roles.fleet
    if isinstance(event, Deal):
        fleet.repartition(event.to(fleet), cursors_of(loader))
    elif isinstance(event, To):
        names = [name for name in fleet.names if name]
        host = names[event.host % len(names)]
        if event.what == "lose":
            engine.lose(host)
        elif event.what == "close":  # the way memory is taken back, here from a host that is still asked
            Handle[LoaderHost](engine, host).call(LoaderHost.keep, ())
        elif event.what == "shadow" and host not in fleet.table.shadows:
            fleet.add_shadow(host)
        elif event.what == "mirror" and host in fleet.table.shadows:
            status = Handle[LoaderHost](engine, host).call(LoaderHost.status).result()
            Handle[LoaderHost](engine, fleet.table.shadows[host]).call(LoaderHost.mirror, host, status)
        elif event.what == "promote":
            fleet.promote(host)
        elif event.what == "exchange":
            fleet.exchange(host)
        elif event.what == "unshadow":
            fleet.remove_shadow(host)
    elif event == "tidy":
        fleet.tidy(cursors_of(loader))


@settings(max_examples=40)
@given(st.lists(EVENTS, max_size=24))
def test_the_stream_is_the_same_under_any_history_of_its_loaders(expected, events):
    engine = Mortal()
    with ol.start(job(mesh=ol.Mesh(dp=2)), engine=engine) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = []
        for event in events:
            happen(event, loader, engine)
            if event == "read" and len(found) < STEPS:
                found += steps_of(loader, clients, 1)
            for host in loader._roles.fleet.hosts:
                sources = tuple(host.call(LoaderHost.status).result().holding)
                for use in host.call(LoaderHost.buffer_use, sources).result().values():
                    assert use.peak_bytes <= use.limit_bytes
        found += steps_of(loader, clients, STEPS - len(found))
        assert found == expected


def test_hosts_that_nobody_needs_any_more_are_stopped_and_their_buffers_are_empty(expected):
    engine = Mortal()
    with ol.start(job(mesh=ol.Mesh(dp=2)), engine=engine) as loader:
        fleet = loader._roles.fleet
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = steps_of(loader, clients, 2)
        one = fleet.partition
        fleet.repartition(Deal(((0, 1, 2), (0,), (0, 3))).to(fleet), cursors_of(loader))
        assert len(fleet.hosts) == 4
        found += steps_of(loader, clients, 3)
        added = [engine._roles[name] for name in fleet.names[1:]]
        back = Partition((*one.hosts, *[()] * 3))
        fleet.repartition(back, cursors_of(loader))
        assert loader.report().loaders == {"a": 1, "b": 1, "c": 1}
        fleet.tidy(cursors_of(loader))
        found += steps_of(loader, clients, STEPS - 5)
        fleet.tidy(cursors_of(loader))
        assert [host.name for host in fleet.hosts] == [fleet.names[0]], "all steps that named their chunks were read"
        assert all(not role._sources for role in added)
        assert found == expected


def test_more_loaders_make_more_chunks_side_by_side(monkeypatch):
    """Chunks that are prepared ahead are made at the same time: each waits here until all the others have begun."""
    monkeypatch.setattr(assembly, "_INLINE_S", 0.0)  # ahead, although they are quick at first
    barrier = threading.Barrier(4)

    @dataclass(frozen=True)
    class Together(Numbered):
        def read(self, unit: ol.Unit):
            if unit.index >= 2:
                barrier.wait(30)
            return Numbered.read(self, unit)

    source = Together(rows=30, first=1, shuffle=False, repeat=False)
    engine = Mortal()
    with ol.start(job_of({"a": source}, num_workers=1), engine=engine) as loader:
        fleet = loader._roles.fleet
        fleet._num_added_threads = 1
        shares = tuple((Share("a", index, 4),) for index in range(4))
        fleet.repartition(Partition(shares), {"a": Cursor(0, 0, None)})
        loader._roles.routes._look()
        assert sum(1 for _ in loader.client(0, timeout_s=60)) > 0, "a single loader would wait here for ever"


class Silent(Mortal):
    """Its `silent` roles take asks and never answer, the way a stopped process does."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: set[str] = set()

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate:
        if name in self.silent:
            return _Never()
        return super().call(name, method, *args, **kwargs)


class _Never(Immediate):
    def __init__(self) -> None:
        super().__init__(None)

    def result(self, timeout: float | None = None) -> None:
        if timeout is None:
            raise AssertionError("somebody would wait for ever")
        raise WaitTimeoutError("it does not answer")


def test_a_host_that_does_not_answer_is_stood_in_for_by_its_shadow(expected):
    engine = Silent()
    with ol.start(job(mesh=ol.Mesh(dp=2)), engine=engine) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = steps_of(loader, clients, 2)
        host = loader._roles.fleet.names[0]
        loader._roles.fleet.add_shadow(host)
        loader._roles.routes._look()
        found += steps_of(loader, clients, 3)  # those that were being built knew of no shadow
        engine.silent.add(host)
        found += steps_of(loader, clients, 4)
        loader._roles.fleet.promote(host)
        engine.silent.clear()
        found += steps_of(loader, clients, STEPS - 9)
        assert found == expected


class Lost(Mortal):
    """Hosts in `lost` have ended: a call that may not be repeated says so, one that may waits for another process."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    def call_once(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate:
        if name in self.lost:
            raise ClosedError(f"{name} was lost")
        return super().call_once(name, method, *args, **kwargs)

    def call(self, name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Immediate:
        return _Waiting() if name in self.lost else super().call(name, method, *args, **kwargs)


class _Waiting(Immediate):
    def __init__(self) -> None:
        super().__init__(None)

    def result(self, timeout: float | None = None) -> None:
        raise AssertionError("somebody waits for a host that has ended")


def test_a_host_that_has_ended_is_stood_in_for_without_a_wait(expected):
    engine = Lost()
    with ol.start(job(mesh=ol.Mesh(dp=2)), engine=engine) as loader:
        clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
        found = steps_of(loader, clients, 2)
        host = loader._roles.fleet.names[0]
        loader._roles.fleet.add_shadow(host)
        loader._roles.routes._look()
        found += steps_of(loader, clients, 3)
        engine.lost.add(host)
        found += steps_of(loader, clients, 4)
        loader._roles.fleet.promote(host)
        engine.lost.clear()
        assert found + steps_of(loader, clients, STEPS - 9) == expected
