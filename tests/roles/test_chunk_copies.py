"""Chunks that a shadow copies from its loader: they are what it would have made, and it makes them where it must."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import ClosedError, WaitTimeoutError
from overlord.roles import loader_host
from overlord.roles.loader_host import HostStatus, LoaderHost
from overlord.runtime.embedded import Immediate
from tests.contract.streams import part, picture_file, stream
from tests.contract.test_loss import WEIGHTED
from tests.fleet.test_fleet import EVENTS, STEPS, Deal, happen, job, steps_of
from tests.roles.mortal import Mortal
from tests.roles.test_borrowed_chunks import Piped, damaged_file
from tests.small_sources import Numbered, job_of


def wait_until(holds: Callable[[], bool]) -> None:
    deadline, pause = time.monotonic() + 30, threading.Event()
    while not holds():
        assert time.monotonic() < deadline
        pause.wait(0.002)


@pytest.fixture(autouse=True)
def always_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks are not worth copying."""
    monkeypatch.setattr(loader_host, "is_copied", lambda *_: True)


class Nodes(Piped):
    """Roles that are on nodes of a cluster, one each. In `trouble`, a call for a finished chunk ends like this."""

    def __init__(self, *, are_near: bool = True) -> None:
        super().__init__()
        self.are_near = are_near
        self.trouble: Exception | None = None

    def shares_memory_with(self, name: str) -> bool:
        return self.are_near

    def call(self, name: str, method: Any, /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        if method.__name__ in ("finished", "lend") and self.trouble is not None:
            raise self.trouble
        return super().call(name, method, *args, **kwargs)


@dataclass
class Pair:
    """The only host of a run, and its shadow."""

    loader: ol.Loader
    engine: Nodes
    host: str = field(init=False)
    shadow: str = field(init=False)

    def __post_init__(self) -> None:
        self.host = self.loader._roles.fleet.names[0]
        self.shadow = self.loader._roles.fleet.add_shadow(self.host)

    def of(self, name: str) -> LoaderHost:
        return self.engine._roles[name]

    def status(self, name: str) -> HostStatus:
        return self.of(name).status()

    def mirror(self) -> HostStatus:
        """Mirror the host, and wait until its shadow has what it can have."""
        status = self.status(self.host)
        self.of(self.shadow).mirror(self.host, status)
        loaders = [held.loader for held in self.of(self.shadow)._sources.values()]
        wait_until(lambda: not any(loader._copying or loader._pending for loader in loaders))
        return status


def contents(host: LoaderHost, source: str, number: int) -> Any:
    """A chunk, as all who use it see it."""
    hot = host.obtain(source, number)
    rows = range(hot.chunk.facts.num_rows)
    facts = hot.chunk.facts
    arrays = [facts.tokens, facts.loss_tokens, hot.values, hot.mask, hot.table_row, *facts.sizes.values()]
    whole_rows = np.array([rows, np.zeros(len(rows), np.int64), facts.tokens])
    return (
        [None if array is None else (array.dtype.str, array.tobytes()) for array in arrays],
        hot.begin.tobytes(),
        hot.document_end.tobytes(),
        hot.table.to_pydict(),
        [losses.tolist() for losses in host.count_losses([(source, number, whole_rows)])[0]],
        host.origins(source, number, rows),
        dict(facts.counts),
    )


@settings(max_examples=20, deadline=None)
@given(are_near=st.booleans(), masked=st.booleans(), columns=st.sampled_from([(), ("document",)]), window=st.integers(1, 3))
def test_a_copied_chunk_is_the_chunk_that_the_shadow_would_make(are_near, masked, columns, window):
    sources = {
        "a": Numbered(rows=23, first=1, longest=30, with_mask=True, loss_mask="mask" if masked else None, window=window),
        "weighted": replace(WEIGHTED, with_images=True),
    }
    batch = ol.Batch(tokens=64, sequence_length=16, special_ids=(-200,), columns=columns)
    job = job_of({name: sources[name] for name in (("a",) if columns else sources)}, batch=batch)
    engine = Nodes(are_near=are_near)
    with ol.start(job, engine=engine) as loader, ol.start(job, engine=Nodes()) as other:
        pair = Pair(loader, engine)
        far_ahead = range(1000, 1003)  # nobody else makes these, or drops them
        for source in job.sources:
            for number in far_ahead:
                pair.of(pair.host).obtain(source, number)
        status = pair.mirror()
        fresh = other._roles.engine._roles[other._roles.fleet.names[0]]  # type: ignore[union-attr]
        shadow, work = pair.of(pair.shadow), pair.status(pair.shadow).work
        for source in job.sources:
            assert set(far_ahead) <= set(status.copyable[source])
            assert set(far_ahead) <= set(pair.status(pair.shadow).holding[source])
            assert work[source].num_copied >= len(far_ahead)
            assert work[source].num_chunks == 0, "it made none"
            for number in far_ahead:
                assert contents(shadow, source, number) == contents(fresh, source, number)


@pytest.mark.parametrize("are_near", [True, False], ids=["near", "far"])
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_a_shadow_goes_on_with_pictures_that_it_has_copied_and_knows_the_bad_ones(tmp_path, are_near, damaged):
    path = (damaged_file if damaged else picture_file)(tmp_path / "pictures.tar", 12)
    skip = ol.policies.BadRows("skip", budget=100)
    pictures = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("jpg", (16, 16)), on_bad_row=skip)
    job = job_of({"pictures": pictures}, ol.Batch(samples=5, sequence_length=64, columns=("txt",)))
    with ol.start(job) as loader:
        expected, bad = stream(loader, 12), loader.report().bad_rows
    engine = Nodes(are_near=are_near)
    with ol.start(job, engine=engine) as loader:
        pair = Pair(loader, engine)
        client = loader.client(0, timeout_s=60)
        found = [[part(next(client))] for _ in range(2)]
        pair.mirror()
        if damaged:
            assert pair.of(pair.shadow).bad_rows() == pair.of(pair.host).bad_rows()
        loader._roles.fleet.promote(pair.host)
        found += [[part(next(client))] for _ in range(10)]
        assert found == expected
        assert loader.report().bad_rows == bad


@pytest.mark.parametrize("trouble", [ClosedError("gone"), WaitTimeoutError("silent")])
def test_a_shadow_makes_the_chunks_of_a_loader_that_is_lost_in_the_middle_of_a_copy(trouble):
    engine = Nodes()
    with ol.start(job_of({"a": Numbered(rows=200)}), engine=engine) as loader:
        pair = Pair(loader, engine)
        loader.client(0, timeout_s=60).__next__()
        engine.trouble = trouble
        status = pair.mirror()
        held = pair.status(pair.shadow)
        assert set(status.copyable["a"]) <= set(held.holding["a"])
        assert (held.work["a"].num_copied, held.work["a"].num_chunks > 0) == (0, True)
        number = status.copyable["a"][0]
        assert contents(pair.of(pair.shadow), "a", number) == contents(pair.of(pair.host), "a", number)


def test_a_chunk_that_its_loader_has_dropped_meanwhile_is_not_made():
    engine = Nodes()
    with ol.start(job_of({"a": Numbered(rows=200)}), engine=engine) as loader:
        host = engine._roles[loader._roles.fleet.names[0]]
        far = 1000  # nobody else makes it
        asked: list[int] = []
        host._sources["a"].loader.mirror({far}, asked.append)
        wait_until(lambda: not host._sources["a"].loader._copying)
        assert asked == [far]
        assert far not in host.status().holding["a"]


def test_a_shadow_that_copies_reads_ahead_only_once_it_is_asked():
    engine = Nodes()
    with ol.start(job_of({"a": Numbered(rows=200)}), engine=engine) as loader:
        pair = Pair(loader, engine)
        loader.client(0, timeout_s=60).__next__()
        last = max(pair.mirror().copyable["a"])
        shadow = pair.of(pair.shadow)
        shadow.prefetch("a", range(last + 1, last + 9))
        assert pair.status(pair.shadow).work["a"].num_chunks == 0
        assert last + 1 not in pair.status(pair.shadow).holding["a"]
        shadow.describe("a", last)
        wait_until(lambda: last + 1 in pair.status(pair.shadow).holding["a"])


class Fallible(Nodes, Mortal):
    """Roles that share memory and can be lost."""

    def __init__(self) -> None:
        Mortal.__init__(self)
        self.are_near, self.trouble = True, None


@settings(max_examples=25, deadline=None)
@given(st.lists(EVENTS, max_size=24), st.booleans())
def test_the_stream_is_the_same_under_any_history_of_loaders_and_shadows_that_copy(events: Sequence[Deal], are_near: bool):
    given_job = job(mesh=ol.Mesh(dp=2))
    with ol.start(given_job) as loader:
        expected = steps_of(loader, [loader.client(rank, timeout_s=60) for rank in range(2)], STEPS)
    engine = Fallible()
    engine.are_near = are_near
    with ol.start(given_job, engine=engine) as loader:
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
