"""Chunks that loaders save: a run that starts again gets the same from them, and makes what is missing or damaged."""

import os
import signal
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.chunks.bad_rows import BadRowKey
from overlord.chunks.chunk import Chunk
from overlord.chunks.chunk_files import decode_chunk, encode_chunk
from overlord.errors import SpecError, StateError
from overlord.roles import loader_host
from overlord.roles.loader_host import LoaderHost
from overlord.runtime.embedded import Embedded
from tests.contract.streams import part, picture_file, stream
from tests.contract.test_loss import WEIGHTED
from tests.faults.trainers import wait_until
from tests.roles.test_borrowed_chunks import Piped
from tests.roles.test_chunk_copies import contents
from tests.small_sources import Numbered, job_of


@dataclass(frozen=True)
class Counted(Numbered):
    """Counts the units that were read."""

    reads: ClassVar[list[int]] = []

    def read(self, unit: ol.Unit) -> pa.Table:
        self.reads.append(unit.index)
        return Numbered.read(self, unit)


@pytest.fixture(autouse=True)
def all_worth_saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_host, "is_copied", lambda *_: True)
    Counted.reads.clear()


def log_in(folder: Path) -> ol.Log:
    return ol.Log(str(folder), chunks_every_s=3600)


def host_of(loader: ol.Loader) -> LoaderHost:
    engine = loader._roles.engine
    assert isinstance(engine, Embedded)
    return engine._roles[loader._roles.fleet.names[0]]


def opened(data: bytes, source: str, number: int, chunk: Chunk) -> tuple[Chunk, frozenset[BadRowKey]]:
    """The content of a file, as that of this chunk."""
    return decode_chunk(data, source, number, units=chunk.lineage.units, unit_numbers=chunk.lineage.unit_numbers)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("chunks/*/*/*.chunk"))


@pytest.mark.parametrize("engine", [Embedded, Piped], ids=["private", "shared"])
def test_a_run_that_resumes_reads_the_chunks_that_were_saved(tmp_path: Path, engine: type[Embedded]):
    job = job_of({"a": Counted(rows=400, with_mask=True, loss_mask="mask", shuffle=False)})
    with ol.start(job) as loader:
        expected = stream(loader, 20)
    with ol.start(job, engine=engine(), log=log_in(tmp_path)) as loader:
        found = stream(loader, 6)
        state = loader.state_before(6)
        host_of(loader)._save_chunks()
    assert files_in(tmp_path)
    Counted.reads.clear()
    with ol.start(job, engine=engine(), log=log_in(tmp_path), resume=state) as loader:
        first = stream(loader, 1)
        assert first == expected[6:7]
        assert not set(Counted.reads) & {int(path.stem) for path in files_in(tmp_path)}, "read again, although it was saved"
        rest = [step for step in stream(loader, 13) if step[0][0] > 6]
        assert found + first + rest == expected[: len(found + first + rest)]


def test_a_damaged_or_foreign_file_costs_nothing_but_time(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = job_of({"a": Counted(rows=400)})
    with ol.start(job, log=log_in(tmp_path)) as loader:
        expected = stream(loader, 3)
        host_of(loader)._save_chunks()
    files = files_in(tmp_path)
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with ol.start(job, log=log_in(tmp_path)) as loader:
        assert stream(loader, 30)[:3] == expected  # as far as whatever was in the buffer is needed
    assert "is made again: its snapshot cannot be read: the file of a chunk is damaged" in caplog.text
    with ol.start(replace(job, seed=job.seed + 1), log=log_in(tmp_path), accept_changes=True):
        assert files_in(tmp_path) == [], "another job deletes what it cannot use"


def test_a_folder_that_cannot_be_written_is_told_once_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    job = job_of({"a": Counted(rows=400)})
    with ol.start(job, log=log_in(tmp_path)) as loader:
        (tmp_path / "chunks").write_text("in the way")
        assert len(stream(loader, 3)) == 3
        for _ in range(2):
            host_of(loader)._save_chunks()
    assert caplog.text.count("the chunks of source 'a' cannot be saved in") == 1


def test_chunks_that_no_step_needs_any_more_are_deleted(tmp_path: Path):
    job = job_of({"a": Counted(rows=400)})
    with ol.start(job, log=log_in(tmp_path)) as loader:
        client = loader.client(0, timeout_s=60)
        next(client)
        host_of(loader)._save_chunks()
        first = files_in(tmp_path)
        for _ in range(12):
            next(client)
        host_of(loader)._save_chunks()
        assert first
        assert not set(first) & set(files_in(tmp_path))


@settings(max_examples=15, deadline=None)
@given(masked=st.booleans(), columns=st.sampled_from([(), ("document",)]), window=st.integers(1, 3))
def test_a_saved_chunk_is_the_chunk(masked, columns, window):
    source = Numbered(rows=23, first=1, longest=30, with_mask=True, loss_mask="mask" if masked else None, window=window)
    sources = {"a": source} if columns else {"a": source, "weighted": replace(WEIGHTED, with_images=True)}
    batch = ol.Batch(tokens=64, sequence_length=16, special_ids=(-200,), columns=columns)
    with ol.start(job_of(sources, batch=batch), engine=Embedded()) as loader:
        _assert_same_when_saved(host_of(loader), columns)


def test_pictures_that_lie_in_a_mapped_file_are_not_saved_and_others_are(tmp_path: Path):
    path = picture_file(tmp_path / "pictures.tar", 12)
    mapped = ol.WebDataset(path, tokens=None, decode=ol.vision.DecodeImage("jpg", (16, 16)))
    with ol.start(job_of({"a": mapped}, ol.Batch(samples=5, sequence_length=64)), engine=Embedded()) as loader:
        chunk = host_of(loader).obtain("a", 0).chunk
        assert encode_chunk(chunk, "a", 0, columns=("jpg",), bad_rows=()) is None


def _assert_same_when_saved(host: LoaderHost, columns: tuple[str, ...]) -> None:
    for source, held in host._sources.items():
        chunk = host.obtain(source, 0).chunk
        parts = encode_chunk(chunk, source, 0, columns=columns, bad_rows=[("file", 3), ("other", "why")])
        assert parts is not None
        data = b"".join(parts)
        found, bad_rows = opened(data, source, 0, chunk)
        assert bad_rows == {("file", 3), ("other", "why")}
        before = contents(host, source, 0)
        held.loader._chunks[0] = loader_host.HotChunk.of(found)
        after = contents(host, source, 0)
        made, saved = chunk.facts.origins, found.facts.origins
        assert made is not None
        assert saved is not None
        assert saved.units == made.units
        for one, other in ((saved.row, made.row), (saved.place, made.place), (saved.token, made.token)):
            assert (None if one is None else one.tolist()) == (None if other is None else other.tolist())
        # The table of a saved chunk has only the columns that delivery needs, and its tokens begin where the rows do.
        assert (after[0][0], after[0][1], after[4:]) == (before[0][0], before[0][1], before[4:])
        assert found.num_bytes >= sum(array.nbytes for array in (found.begin, found.document_end, found.origin))
        for number, name in ((1, source), (0, source + "x")):
            with pytest.raises(StateError, match="the file has chunk 0 of source"):
                opened(data, name, number, chunk)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_no_damaged_file_is_taken_for_a_chunk(data):
    with ol.start(job_of({"a": Numbered(rows=9)}), engine=Embedded()) as loader:
        chunk = host_of(loader).obtain("a", 0).chunk
    parts = encode_chunk(chunk, "a", 0, columns=("document",), bad_rows=())
    assert parts is not None
    whole = b"".join(parts)
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(StateError):
        opened(bytes(flipped), "a", 0, chunk)
    with pytest.raises(StateError):
        opened(whole[:at], "a", 0, chunk)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "x", "chunks_every_s": 0}, "chunks_every_s is a positive number of seconds or None, got 0"),
        ({"location": "s3://b/x", "chunks_every_s": 5}, "chunks_every_s saves chunks in a folder, and location='s3://b/x'"),
    ],
)
def test_a_wrong_setting_says_why(fields, message):
    with pytest.raises(SpecError, match=message):
        ol.Log(**fields)


@dataclass(frozen=True)
class Noted(Numbered):
    """Takes long to read, and notes in a file each unit that was read, whichever process does so."""

    note: str = ""

    def read(self, unit: ol.Unit) -> pa.Table:
        threading.Event().wait(0.1)  # as storage far away
        with Path(self.note).open("a") as file:
            file.write(f"{unit.index}\n")
        return Numbered.read(self, unit)


@pytest.mark.second_try(reason="Ray must replace a killed loader within a client's 60 s")
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "not saved"])
def test_a_loader_of_a_cluster_that_is_killed_reads_the_chunks_that_it_had_saved(
    ray_cluster: None, tmp_path: Path, is_saved: bool
):
    from tests.faults.on_ray import health_reports

    note = tmp_path / "read"
    job = job_of({"a": Noted(rows=4000, note=str(note), shuffle=False)}, num_workers=1)
    with ol.start(job_of({"a": Numbered(rows=4000, shuffle=False)}, num_workers=1)) as loader:
        expected = stream(loader, 30)
    engine = ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions())
    with ol.start(job, engine=engine, log=log_in(tmp_path / "log")) as loader:
        client = loader.client(0, timeout_s=60)
        found = [[part(next(client))] for _ in range(10)]
        if is_saved:
            loader._roles.fleet.save_chunks()
            assert wait_until(lambda: bool(files_in(tmp_path / "log")), 60)
        saved = {int(path.stem) for path in files_in(tmp_path / "log")}
        killed = ("loaders/0", "constructor/0")  # which has borrowed some chunks
        assert wait_until(lambda: health_reports(engine).keys() >= {*killed}, 60)
        before, reports = note.read_text().split(), health_reports(engine)
        for role in killed:
            os.kill(reports[role].process, signal.SIGKILL)
        found += [[part(next(client))] for _ in range(20)]
        again = {int(unit) for unit in note.read_text().split()[len(before) :]} & {int(unit) for unit in before}
    assert found == expected[: len(found)]
    assert not again & saved, "read again, although they were saved"
    assert is_saved or again, "what was ready is gone with the process"
