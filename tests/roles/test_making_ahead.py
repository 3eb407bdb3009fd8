"""Chunks that are told of before they are needed: only where nobody has to wait, never beyond the buffer, and no failure
is told of before its time."""

import time
from collections.abc import Sequence

import pyarrow as pa
import pytest

import overlord as ol
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk import Chunk
from overlord.errors import BadRowError, DataError
from overlord.roles.loader_host import LoaderHost, OpenSource
from overlord.roles.source_loader import SourceLoader
from overlord.runtime.threads import make_executor
from tests.roles.test_source_loader import SIZE, chunk_of
from tests.small_sources import Numbered, job_of, tokens_of


def host_of(num_threads: int, make=chunk_of, room: int = 3, makes_inline: bool | None = None) -> LoaderHost:
    threads = make_executor(num_threads, "test")

    def open_source(name: str) -> OpenSource:
        loader = SourceLoader(
            name,
            make,
            lambda number: SIZE,
            buffer_bytes=room * SIZE,
            threads=threads,
            makes_inline=num_threads == 0 if makes_inline is None else makes_inline,
        )
        return OpenSource(loader, BadRowLog(name, ol.policies.BadRows("skip", budget=1)))

    return LoaderHost(open_source, ("s",), (), threads, owns_threads=True)


def test_with_threads_only_what_is_there_is_told():
    host = host_of(1)
    try:
        assert host.peek("s", 0) is None
        host.describe("s", 0)
        facts = host.peek("s", 0)
        assert facts is not None
        assert facts.num_rows == 1
    finally:
        host.close()


@pytest.fixture
def always_quick(monkeypatch: pytest.MonkeyPatch):
    """Chunks count as quickly made, also where the thread that makes one loses the processor meanwhile."""
    monkeypatch.setattr("overlord.roles.source_loader._QUICK_S", 60.0)


@pytest.mark.usefixtures("always_quick")
def test_without_threads_it_is_made_while_there_is_room():
    host = host_of(0, room=2)
    try:
        assert host.peek("s", 0) is not None
        assert host.peek("s", 1) is not None
        assert host.peek("s", 2) is None
        use = host.buffer_use(["s"])["s"]
        assert (use.num_chunks, use.chunks_made) == (2, 2)
        assert host.peek("s", 2, keep_from=1) is not None, "what is not needed any more makes room"
    finally:
        host.close()


def test_one_that_cannot_be_made_fails_when_it_is_needed_and_is_tried_once_before():
    tried = []

    def make(number):
        tried.append(number)
        raise DataError("broken file")

    host = host_of(0, make)
    try:
        assert host.peek("s", 5) is None
        assert host.peek("s", 5) is None
        assert tried == [5]
        with pytest.raises(DataError, match="broken file"):
            host.describe("s", 5)
    finally:
        host.close()


class BrokenLater(Numbered):
    """Its last unit cannot be read."""

    def read(self, unit: ol.Unit) -> pa.Table:
        if unit.index == len(self.units()) - 1:
            raise OSError("broken")
        return super().read(unit)


@pytest.mark.usefixtures("always_quick")
def test_every_step_before_a_broken_chunk_comes():
    def read_until_broken(num_workers: int) -> list[list[int]]:
        broken = BrokenLater(rows=400, unit_rows=10, first=1, repeat=False, shuffle=False)
        job = job_of({"a": broken, "b": Numbered(first=1000)}, num_workers=num_workers)
        found = []
        with ol.start(job) as loader, pytest.raises(OSError, match="broken"):
            found.extend(tokens_of(step).tolist() for step in loader.client(0, timeout_s=30))
        return found

    ahead, told_late = read_until_broken(0), read_until_broken(1)
    assert len(ahead) > 20
    assert ahead == told_late


def test_a_budget_that_was_overrun_ahead_of_time_is_told_of_when_the_chunk_is_needed():
    log = BadRowLog("s", ol.policies.BadRows("skip", budget=1))

    def make(number: int) -> Chunk:
        for row in range(2):
            log.add("file", row, "bad")
        return chunk_of(number)

    host = host_of(0, make)
    try:
        assert host.peek("s", 3) is None
        with pytest.raises(BadRowError, match="2 bad rows are more than its budget of 1"):
            host.describe("s", 3)
    finally:
        host.close()


def test_a_budget_that_was_overrun_does_not_fail_what_was_within_it():
    log = BadRowLog("s", ol.policies.BadRows("skip", budget=2))

    def make(number: int) -> Chunk:
        log.add("file", number, "bad")
        return chunk_of(number)

    host = host_of(0, make, room=1)
    try:
        for number in (0, 1):
            host.describe("s", number)
        for _ in range(2):
            with pytest.raises(BadRowError, match="3 bad rows are more than its budget of 2"):
                host.describe("s", 2)
        assert host._open("s").loader.get(0).chunk.facts.num_rows == 1, "of a reader that is behind"
    finally:
        host.close()


def test_where_a_read_may_keep_one_waiting_nothing_is_made_before_it_is_needed():
    host = host_of(0, makes_inline=False)
    try:
        assert host.peek("s", 0) is None
        host.describe("s", 0)
        assert host.peek("s", 0) is not None, "what is there is told all the same"
        assert host.peek("s", 1) is None
    finally:
        host.close()


@pytest.mark.usefixtures("always_quick")
def test_of_a_local_source_chunks_are_made_ahead_and_of_a_remote_one_not(monkeypatch):
    def num_ahead(is_there: bool) -> int:
        monkeypatch.setattr("overlord.roles.assembly.is_remote", lambda path: not is_there)
        sources = {name: Numbered(rows=40, first=first) for name, first in (("a", 1), ("b", 100))}
        asked = []
        make_if_quick = SourceLoader._make_if_quick

        def noted(loader: SourceLoader, number: int):
            facts = make_if_quick(loader, number)
            asked.append(facts is not None)
            return facts

        monkeypatch.setattr(SourceLoader, "_make_if_quick", noted)
        with ol.start(job_of(sources, num_workers=0)) as loader:
            client = loader.client(0, timeout_s=30)
            for _ in range(20):
                next(client)
        monkeypatch.undo()
        return sum(asked)

    assert num_ahead(is_there=True) > 0
    assert num_ahead(is_there=False) == 0


def test_chunks_that_take_long_to_make_are_left_until_they_are_needed():
    def make(number: int) -> Chunk:
        time.sleep(0.05)
        return chunk_of(number)

    host = host_of(0, make)
    try:
        host.describe("s", 0)
        assert host.peek("s", 1) is None
        assert host.describe("s", 1).num_rows == 1
    finally:
        host.close()


def test_chunks_of_the_first_step_are_announced_before_those_that_other_hosts_make_meanwhile(monkeypatch):
    told: list[tuple[str, list[int]]] = []
    announce = LoaderHost.prefetch

    def prefetch(host: LoaderHost, source: str, chunks: Sequence[int]) -> None:
        told.append((source, [*chunks]))
        announce(host, source, chunks)

    monkeypatch.setattr(LoaderHost, "prefetch", prefetch)
    with ol.start(job_of({name: Numbered(first=1, loaders=2) for name in ("a", "b")})):
        assert told[:2] == [("a", [0]), ("b", [0])]
        firsts = {(source, chunks[0]) for source, chunks in told}
        assert firsts == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
