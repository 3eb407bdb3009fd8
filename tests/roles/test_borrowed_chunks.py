"""Chunks in shared memory: rows that a process reads from them are those that a loader host would send."""

import gc
import io
import itertools
import os
import signal
import socket
import tarfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.chunks.shared_rows import ChunkArenas, RowsInMemory
from overlord.errors import ClosedError
from overlord.roles import borrowed_chunks
from overlord.roles.assembly import make_loader_host
from overlord.roles.chunk_loans import ChunkLoans, LoanRequest
from overlord.roles.loader_host import LoaderHost
from overlord.runtime.embedded import Embedded, Immediate
from overlord.runtime.engine import Handle
from overlord.runtime.shared_memory import Connection
from tests.contract.streams import part, picture_file, stream, text_file, text_job
from tests.contract.test_loss import BATCHES, WEIGHTED
from tests.contract.test_stream import MESHES
from tests.small_sources import Numbered, job_of

STEPS = 12


def sent(value: Any) -> Any:
    """A value as another process would get it."""
    ends = [Connection(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    try:
        ends[0].send(value)
        return ends[1].receive(10)
    finally:
        for end in ends:
            end.close()


class Piped(Embedded):
    """One process whose roles call each other as if they were in several: every message goes through a socket."""

    shares_memory = True

    def call(self, name: str, method: Any, /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        if method.__name__ in ("plans", "lend", "fetch", "fetch_apart", "describe", "report_bad_decode", "finished"):
            args, kwargs = sent((args, kwargs))
            return Immediate(sent(super().call(name, method, *args, **kwargs).result()))
        return super().call(name, method, *args, **kwargs)

    @property
    def arenas(self) -> ChunkArenas:
        assert self._workplace is not None
        return self._workplace.share("chunks", ChunkArenas)


class Noting(Piped):
    """Keeps the requests for chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[LoanRequest] = []

    def call(self, name: str, method: Any, /, *args: Any, **kwargs: Any) -> Immediate[Any]:
        self.requests += [arg for arg in args if isinstance(arg, LoanRequest)]
        return super().call(name, method, *args, **kwargs)


def assert_equal_streams(job: ol.Job, steps: int = STEPS) -> Piped:
    with ol.start(job) as loader:
        expected = stream(loader, steps)
    engine = Piped()
    with ol.start(job, engine=engine) as loader:
        assert stream(loader, steps) == expected
    return engine


@settings(max_examples=30, deadline=None)
@given(
    batch=BATCHES, mesh=MESHES, masked=st.booleans(), columns=st.sampled_from([(), ("document",)]), window=st.integers(1, 3)
)
def test_rows_of_shared_chunks_are_those_of_their_host(batch, mesh, masked, columns, window):
    mask = "mask" if masked else None
    sources = {
        "a": Numbered(rows=23, first=1, longest=30, with_mask=True, loss_mask=mask, window=window),
        "b": Numbered(rows=9, first=100, unit_rows=4),
    }
    assert_equal_streams(job_of(sources, batch=replace(batch, columns=columns), mesh=mesh))


def test_loss_weights_and_ids_of_images_are_shared():
    source = replace(WEIGHTED, with_images=True)
    batch = ol.Batch(tokens=64, sequence_length=16, special_ids=(-200,), columns=("document",))
    assert_equal_streams(job_of({"weighted": source, "plain": Numbered(rows=9, first=100)}, batch=batch))


def damaged_file(path: Path, count: int) -> str:
    """Pictures, every third of which has a header and no more."""
    whole = picture_file(path.with_suffix(".whole"), count)
    with tarfile.open(whole) as source, tarfile.open(path, "w") as archive:
        for number, member in enumerate(source.getmembers()):
            content = source.extractfile(member).read()  # type: ignore[union-attr]
            if member.name.endswith("jpg") and number % 3 == 0:
                content = content[:-40]
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return str(path)


@pytest.mark.parametrize("size", [(16, 16), None], ids=["one size", "own sizes"])
@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
def test_images_are_decoded_by_the_reader_and_bad_ones_counted_by_their_host(tmp_path, size, damaged):
    path = (damaged_file if damaged else picture_file)(tmp_path / "pictures.tar", 12)
    skip = ol.policies.BadRows("skip", budget=100)
    pictures = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("jpg", size), on_bad_row=skip)
    text = ol.Parquet(text_file(tmp_path / "text.parquet", 50, 1), null_columns=("txt",))
    job = ol.Job(
        sources={"pictures": pictures, "text": text},
        mixture=ol.Mixture({"pictures": 2, "text": 1}),
        batch=ol.Batch(samples=5, sequence_length=64, columns=("txt",)),
    )
    with ol.start(job) as loader:
        expected = stream(loader, STEPS)
        bad = loader.report().bad_rows
    with ol.start(job, engine=Piped()) as loader:
        assert stream(loader, STEPS) == expected
        assert loader.report().bad_rows == bad
    assert bool(bad["pictures"]) == damaged


def test_a_policy_that_forbids_bad_images_reaches_the_trainer(tmp_path):
    path = damaged_file(tmp_path / "pictures.tar", 12)
    pictures = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("jpg", (16, 16)))
    job = job_of({"pictures": pictures}, ol.Batch(samples=5, sequence_length=64))
    with ol.start(job, engine=Piped()) as loader, pytest.raises(ol.errors.DataError, match=r"pictures\.tar"):
        stream(loader, STEPS)


def arrow_file(path: Path) -> str:
    """One record batch that is larger than a small buffer."""
    tokens = pa.array([np.arange(1, 400, dtype=np.int32)] * 50, pa.list_(pa.int32()))
    table = pa.table({"tokens": tokens, "title": [f"row {i}" for i in range(50)]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def test_chunks_in_mapped_files_are_not_copied_but_read_through_their_host(tmp_path):
    mapped = ol.ArrowIpc(arrow_file(tmp_path / "large.arrow"), buffer_bytes=20_000)
    text = ol.Parquet(text_file(tmp_path / "text.parquet", 50, 1))
    batch = ol.Batch(tokens=2048, sequence_length=512, columns=("title",))
    engine = assert_equal_streams(job_of({"mapped": mapped, "text": text}, batch))
    assert engine.arenas.shared_bytes < 1 << 20


def test_without_shared_memory_chunks_are_read_through_their_host(tmp_path, monkeypatch):
    monkeypatch.setattr(ChunkArenas, "share", lambda self: False)
    engine = assert_equal_streams(text_job(tmp_path, mesh=ol.Mesh(dp=2)))
    assert engine.arenas.shared_bytes == 0


def test_while_a_process_has_few_descriptors_left_chunks_are_read_through_their_host(tmp_path, monkeypatch):
    answers = itertools.cycle([True, False, False, True, False])
    monkeypatch.setattr(borrowed_chunks, "may_share_more", lambda part: next(answers))
    assert_equal_streams(text_job(tmp_path, mesh=ol.Mesh(dp=2)))


@dataclass(frozen=True)
class Large(Numbered):
    """Units of which a buffer of 40,000 bytes holds two."""

    rows: int = 200
    unit_rows: int = 4

    def read(self, unit: ol.Unit) -> pa.Table:
        first = unit.index * self.unit_rows
        tokens = [np.full(1000, 1 + first + row, np.int32) for row in range(self.unit_rows)]
        return pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))})


def test_memory_is_bounded_by_the_buffers_and_the_steps_in_flight():
    sources = {name: Large(first=first, buffer_bytes=40_000) for first, name in enumerate("abc")}
    job = job_of(sources, ol.Batch(tokens=8000, sequence_length=1000), mesh=ol.Mesh(dp=2))
    engine = Piped()
    with ol.start(job, engine=engine) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(2)]
        most = 0
        for _ in range(60):
            for client in clients:
                next(client)
            gc.collect()
            most = max(most, engine.arenas.shared_bytes - engine.arenas.idle_bytes)
        # Segments are of 64 KiB at least. A buffer holds two chunks; the steps in flight name 8,000 tokens each.
        num_flying = job.prefetch + 8 + 8
        assert most <= (1 << 16) * (3 * 2 + 2 * 3 + num_flying * 8000 // 4000)
    gc.collect()
    assert engine.arenas.shared_bytes == engine.arenas.idle_bytes


def test_a_host_learns_that_a_chunk_is_used_up_before_the_one_after_the_next_is_requested():
    """Otherwise it would keep two chunks of each source for most of the time, and many sources share its memory."""
    # A chunk lasts for more steps than are planned ahead, and chunks end at different steps.
    sources = {f"source {n}": Large(first=n, buffer_bytes=80_000) for n in range(24)}
    weights = {name: 1.0 + 0.02 * number for number, name in enumerate(sources)}
    job = job_of(sources, ol.Batch(tokens=2000, sequence_length=1000), mixture=ol.Mixture(weights))
    engine = Noting()
    with ol.start(job, engine=engine) as loader:
        client = loader.client(0, timeout_s=30)
        for _ in range(160):
            next(client)
    num_before = 0
    for name in sources:
        told = next(number for number, request in enumerate(engine.requests) if request.needed_from.get(name, 0) > 0)
        wanted = next(number for number, request in enumerate(engine.requests) if (name, 2) in request.wanted)
        assert told <= wanted
        num_before += told < wanted
        limits = [request.needed_from[name] for request in engine.requests if name in request.needed_from]
        assert limits == sorted(set(limits)), "nothing is told twice"
    # Where plans of many steps come at once, the request for a chunk is the first that can tell it.
    assert num_before >= len(sources) // 2


def test_a_host_that_is_made_again_lends_anew_and_the_stream_stays(tmp_path):
    job = text_job(tmp_path, mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        expected = stream(loader, 30)
    engine = Piped()
    with ol.start(job, engine=engine) as loader:
        clients = [loader.client(rank, timeout_s=30) for rank in range(2)]
        found = []
        for number in range(30):
            if number % 4 == 3:
                name = loader._roles.fleet.names[0]
                host = loader._roles.fleet._hosts[name]
                engine.spawn(f"{name}/new", partial(make_loader_host, job, engine, host.shares, None))
                engine.rebind(name, f"{name}/new")
            found.append([part(next(client)) for client in clients])
        assert found == expected


def test_a_closed_host_lends_nothing_more():
    """A request may have found its chunk before the host was closed. Its memory would be used again while it is read."""
    arenas, loans = ChunkArenas(), ChunkLoans()
    memory = arenas.lease(1000)
    request = LoanRequest("reader", os.getpid(), [("s", 0)])
    assert loans.lend(request, [RowsInMemory(memory, ())]).chunks[0] is not None
    loans.close()
    with pytest.raises(ClosedError, match="lends no more"):
        loans.lend(request, [RowsInMemory(memory, ())])


@pytest.mark.second_try(reason="processes are killed while others start")
def test_a_host_killed_while_its_chunks_are_borrowed_changes_nothing(tmp_path):
    job = text_job(tmp_path, loaders=3)
    with ol.start(job) as loader:
        expected = stream(loader, 40)
    with ol.start(job, engine=ol.Processes(3)) as loader:
        client = loader.client(0, timeout_s=60)
        found = [[part(next(client))]]
        builder = loader._roles.engine._roles["constructor/0"][1].pid  # pyright: ignore[reportAttributeAccessIssue]
        for number in range(1, 40):
            if number in (5, 20):
                hosts = [Handle[LoaderHost](loader._roles.engine, name) for name in loader._roles.fleet.names]
                processes = {host.call(LoaderHost.status).result().process for host in hosts}
                os.kill(min(processes - {builder}), signal.SIGKILL)
            found.append([part(next(client))])
        assert found == expected
