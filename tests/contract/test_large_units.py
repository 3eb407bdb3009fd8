"""Sources of large row groups with a transform: the first step waits for a part of each, and every promise holds."""

import gc
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.checkpoint.fingerprint import SavedChunks
from overlord.checkpoint.form import contents_of, seal, with_checksum
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.errors import StateError
from overlord.lineage.finding import find_document
from overlord.lineage.obtaining import open_log
from overlord.loaders.routing import RoutingTable
from overlord.planlog.lineage_run import locate_row
from overlord.roles.assembly import cut_units, list_units, make_partition, turns_of, with_windows
from overlord.sources.parquet import ParquetReader

ROWS, FILES = 300, 3
"""Rows of a row group, of 5 MiB; each file has two, of which the second is small."""
SMALL = 40
BUFFER = 32 << 20
PARTS = 5
MADE: list[str] = []
"""What `numbered` was called with."""


def numbered(row: dict[str, Any]) -> dict[str, Any]:
    """Tokens that say which row it is, instead of its text."""
    MADE.append(row["text"][:8])
    file, number = int(row["text"][:2]), int(row["text"][2:8])
    return {"tokens": [1000 * file + number] * 5}


PER_ROW = ol.per_row(numbered, types={"tokens": pa.list_(pa.int32())})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large")
    words = random.Random(0).randbytes(20_000).hex()
    for file in range(FILES):
        texts = [f"{file:02d}{row:06d}{words[row * 7 : row * 7 + 17_000]}" for row in range(ROWS + SMALL)]
        schema = pa.schema([("text", pa.string())])
        with pq.ParquetWriter(path / f"f{file}.parquet", schema, use_dictionary=False) as writer:
            writer.write_table(pa.table({"text": texts[:ROWS]}), row_group_size=ROWS)
            writer.write_table(pa.table({"text": texts[ROWS:]}), row_group_size=SMALL)
    return path


def source_of(folder: Path, name: str = "f*.parquet", **options: Any) -> ol.Source:
    return ol.Parquet(str(folder / name), **{"transform": PER_ROW, "buffer_bytes": BUFFER, **options})


def job_of(*sources: ol.Source, **options: Any) -> ol.Job:
    named = {f"s{i}": source for i, source in enumerate(sources)}
    return ol.Job(sources=named, **{"batch": ol.Batch(samples=24, sequence_length=8), "num_workers": 0, **options})


def steps(loader: ol.Loader, num_steps: int) -> list[list[int]]:
    """The rows of each step, as their tokens number them."""
    client = loader.client(0)
    found = [next(client, []) for _ in range(num_steps)]
    return [[int(n) for micro in step for n in np.asarray(micro["tokens"]).ravel()[::5]] for step in found]


def all_steps(job: ol.Job, num_steps: int, **options: Any) -> list[list[int]]:
    with ol.start(job, **options) as loader:
        return steps(loader, num_steps)


def row_numbers() -> list[int]:
    return [1000 * file + row for file in range(FILES) for row in range(ROWS + SMALL)]


PER_EPOCH = len(row_numbers()) // 20
"""Steps of 20 samples."""
TWENTY = ol.Batch(samples=20, sequence_length=5)


def test_step_0_waits_for_a_part_of_each_source(folder):
    MADE.clear()
    job = job_of(*(source_of(folder, f"f{i}.parquet") for i in range(FILES)))
    with ol.start(job) as loader:
        client = loader.client(0)
        next(client)
        made = Counter(text[:2] for text in MADE)
        assert {source.window for source in loader.job.sources.values()} == {1}
    assert len(made) == FILES
    assert max(made.values()) <= ROWS // PARTS  # a part, or the small row group
    MADE.clear()
    whole = job_of(*(source_of(folder, f"f{i}.parquet", window=1) for i in range(FILES)))
    all_steps(whole, 1)
    assert max(Counter(text[:2] for text in MADE).values()) == ROWS


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_workers", [0, 3])
def test_every_row_comes_once_in_an_epoch_and_unshuffled_rows_in_the_order_of_files(folder, shuffle, num_workers):
    job = job_of(source_of(folder, shuffle=shuffle), batch=TWENTY, num_workers=num_workers)
    epochs = all_steps(job, 2 * PER_EPOCH)
    first, second = ([n for step in epochs[i : i + PER_EPOCH] for n in step] for i in (0, PER_EPOCH))
    assert sorted(first) == sorted(second) == row_numbers()
    if not shuffle:
        assert first == second == row_numbers()


def test_a_shuffled_step_has_rows_from_all_over_a_row_group(folder):
    job = job_of(source_of(folder, "f0.parquet"), batch=TWENTY)
    for rows in all_steps(job, PER_EPOCH):
        large = [row for row in rows if row < ROWS]
        if len(large) == 20:
            assert len({row // (ROWS // 4) for row in large}) == 4
            assert sum(after == before + 1 for before, after in pairwise(large)) <= 4


def test_each_row_is_located_in_its_row_group_and_found_in_its_step(folder, tmp_path):
    job = job_of(source_of(folder), batch=TWENTY)
    with ol.start(job, log=tmp_path) as loader:
        client = loader.client(0)
        drawn = [(number, row) for number in range(PER_EPOCH) for row in _rows(loader, next(client))]
        assert {row for _, row in drawn} == {*row_numbers()}
    found = open_log(job, tmp_path)
    units = found.run.units(found.run.stretches[-1], "s0")
    for step, (file, row) in random.Random(1).sample([(step, divmod(row, 1000)) for step, row in drawn], 12):
        name = f"f{file}.parquet"
        place = locate_row(units, "s0", name, row)
        group = f"{name}#1" if row >= ROWS else f"{name}#0"
        assert locate_row(units, "s0", group, row % ROWS) == place
        occurrences = find_document(found, "s0", place)
        assert [document.step for document in occurrences.documents] == [step]
        assert [document.file_row for document in occurrences.documents] == [row]


def _rows(loader: ol.Loader, step: Any) -> list[int]:
    """The rows of a step, whose places are checked against their tokens."""
    found: list[int] = []
    for micro in step:
        numbers = [int(n) for n in np.asarray(micro["tokens"]).ravel()[::5]]
        located = loader.locate(micro)
        assert located == ol.locate(loader_job(loader), micro)
        for number, origin in zip(numbers, located, strict=True):
            path, _, group = origin.file.partition("#")
            assert Path(path).name == f"f{number // 1000}.parquet"
            assert origin.row == number % 1000 - (ROWS if group == "1" else 0)
        found += numbers
    return found


def loader_job(loader: ol.Loader) -> ol.Job:
    """The job as it was declared, without a window."""
    return replace(loader.job, sources={name: replace(source, window=None) for name, source in loader.job.sources.items()})


@pytest.mark.parametrize("skip", [{"rows": [5, 44, 310]}, {}], ids=str)
def test_rows_and_row_groups_are_left_out(folder, skip):
    file = "f1.parquet" if skip else "f1.parquet#0"
    left_out = {1005, 1044, 1310} if skip else {1000 + row for row in range(ROWS)}
    job = job_of(source_of(folder, repeat=2), batch=TWENTY, skip=[ol.Skip("s0", file, **skip)])
    found = [row for step in all_steps(job, 2 * PER_EPOCH) for row in step]
    assert Counter(found) == Counter(2 * [row for row in row_numbers() if row not in left_out])


def of_earlier_release(state: Any) -> Any:
    """The state as a release wrote it that cut no units."""
    contents = contents_of(state)
    assert "parts" not in contents["fingerprint"]
    return seal(with_checksum(contents))


def test_a_run_that_resumes_a_state_of_whole_units_goes_on_with_whole_units(folder):
    whole = all_steps(job_of(source_of(folder, window=1)), 40)
    assert whole != all_steps(job_of(source_of(folder)), 40)
    with ol.start(job_of(source_of(folder, window=1))) as loader:
        steps(loader, 7)
        state = of_earlier_release(loader.state_dict())
    with ol.start(job_of(source_of(folder)), resume=state) as loader:
        assert steps(loader, 13) == whole[7:20]
        later = of_earlier_release(loader.state_dict())
    assert all_steps(job_of(source_of(folder)), 20, resume=later) == whole[20:]


def test_a_run_that_resumes_keeps_its_parts_whatever_else_changes(folder, tmp_path):
    whole = all_steps(job_of(source_of(folder)), 40)
    with ol.start(job_of(source_of(folder)), log=tmp_path / "log") as loader:
        assert steps(loader, 7) == whole[:7]
        state = loader.state_dict()
    assert contents_of(state)["fingerprint"]["parts"] == {"s0": 1 << 20}
    changed = source_of(folder, buffer_bytes=8 << 20, loaders=2)
    with ol.start(job_of(changed, num_workers=2), resume=state) as loader:
        assert steps(loader, 13) == whole[7:20]
        later = loader.state_dict()
    assert all_steps(job_of(source_of(folder, buffer_bytes=1 << 30)), 20, resume=later) == whole[20:]
    with ol.start(job_of(changed), log=tmp_path / "log", resume="log") as loader:
        assert steps(loader, 2) == whole[loader.start_step : loader.start_step + 2]


def test_a_state_of_whole_units_is_refused_by_a_run_of_parts_with_the_way_out(folder):
    with ol.start(job_of(source_of(folder, window=1))) as loader:
        steps(loader, 2)
        state = loader.state_dict()
    said = r"large units were not cut, and are cut into parts of about 1,048,576 bytes: give the state to start\(resume="
    with ol.start(job_of(source_of(folder))) as loader, pytest.raises(StateError, match=said):
        loader.load_state_dict(state)


def test_a_prepared_source_has_the_stream_of_its_original_and_may_take_its_place(folder, tmp_path):
    job = job_of(source_of(folder))
    whole = all_steps(job, 40)
    prepared = ol.prepare(job, tmp_path, num_processes=1)
    with ol.start(prepared) as loader:
        assert steps(loader, 20) == whole[:20]
        state = loader.state_dict()
    assert all_steps(job, 20, resume=state) == whole[20:]


def test_what_is_in_a_cache_does_not_change_the_stream(folder, tmp_path):
    whole = all_steps(job_of(source_of(folder)), 2 * PER_EPOCH)
    cached = job_of(source_of(folder), cache=ol.Cache(tmp_path, 1 << 30))
    assert all_steps(cached, 2 * PER_EPOCH) == whole
    assert all_steps(cached, 2 * PER_EPOCH) == whole


def test_the_bytes_of_a_row_group_are_fetched_ahead_once(folder):
    job = job_of(source_of(folder, repeat=1))
    units = cut_units(job, list_units(job.sources))
    source = with_windows(job, units).sources["s0"]
    maker = ChunkMaker("s0", source, units["s0"], seed=0, batch=job.batch, bad_rows=_log(job))
    found = [maker._ranges_of(chunk) for chunk in range(len(units["s0"]) + 1)]
    assert found.pop() is None
    whole = [source.byte_ranges(unit) for unit in list_units(job.sources)["s0"]]  # type: ignore[attr-defined]
    assert sorted((ranges for ranges in found if ranges), key=str) == sorted(map(list, whole), key=str)
    maker.close()


def test_a_limit_of_rows_cuts_what_is_left_of_a_row_group(folder):
    job = job_of(source_of(folder, "f0.parquet", max_rows=200), batch=TWENTY)
    rows = [row for step in all_steps(job, 10) for row in step]
    assert sorted(rows) == list(range(200))


def test_functions_over_tables_and_declared_windows_keep_whole_units(folder):
    for source in (
        source_of(folder, window=2),
        source_of(folder, transform=lambda table: table),
        source_of(folder, transform=[PER_ROW, lambda table: table]),
        source_of(folder, transform=()),
        source_of(folder, buffer_bytes=8 << 20),
    ):
        job = job_of(source)
        units = list_units(job.sources)
        assert cut_units(job, units) == units
        assert len(cut_units(job_of(source_of(folder)), units)["s0"]) == FILES * (PARTS + 1)
    by_state = cut_units(job_of(source_of(folder)), units, {"s0": SavedChunks()})
    assert by_state == units


def test_units_that_are_mixed_with_others_in_a_chunk_stay_whole():
    """A few large ones among many small ones: cut, each of the small ones would be a chunk of its own."""
    source = ol.Parquet("x.parquet", transform=PER_ROW, buffer_bytes=256 << 20)
    sizes = [1 << 20] * 200 + [12 << 20]
    units = {"s0": [ol.Unit("x.parquet", i, 100, num_bytes, version="1") for i, num_bytes in enumerate(sizes)]}
    job = job_of(source)
    assert cut_units(job, units) == units
    assert with_windows(job, units).sources["s0"].units_per_chunk > 1
    alone = {"s0": units["s0"][-1:]}
    assert len(cut_units(job, alone)["s0"]) == 3


def test_each_row_group_is_read_by_one_host_and_once(folder, monkeypatch):
    read: list[str] = []
    decode = ParquetReader.read_rows
    monkeypatch.setattr(ParquetReader, "read_rows", lambda self, unit: read.append(str(unit)) or decode(self, unit))
    job = job_of(source_of(folder))
    units = cut_units(job, list_units(job.sources))
    job = with_windows(job, units)
    partition = make_partition(job, units, ol.Processes(4))
    names = [f"host {i}" for i in range(len(partition.hosts))]
    assert len(names) == 4
    turns = turns_of(job, "s0", units["s0"])
    assert turns is not None
    table = RoutingTable.of(partition, names, {"s0": turns})
    makers = {
        name: ChunkMaker("s0", job.sources["s0"], units["s0"], seed=0, batch=job.batch, bad_rows=_log(job)) for name in names
    }
    hosts = [table.host_of("s0", chunk) for chunk in range(2 * len(units["s0"]))]
    for chunk, host in enumerate(hosts):
        makers[host].make(chunk)
    assert {*hosts} == {*names}
    assert Counter(read) == Counter(2 * [str(unit) for unit in list_units(job.sources)["s0"]])
    assert all(maker.held_bytes == 0 for maker in makers.values())


def _log(job: ol.Job) -> BadRowLog:
    return BadRowLog("s0", job.sources["s0"].bad_rows)


@pytest.mark.parametrize("num_processes", [2])
def test_worker_processes_have_the_same_stream(folder, num_processes):
    options = {"batch": TWENTY, "num_workers": None}
    expected = all_steps(job_of(source_of(folder), **options), 2 * PER_EPOCH)
    assert all_steps(job_of(source_of(folder), **options), 2 * PER_EPOCH, engine=ol.Processes(num_processes)) == expected


def test_the_buffer_counts_rows_that_were_read_and_not_yet_transformed(folder):
    with ol.start(job_of(source_of(folder))) as loader:
        steps(loader, 2)
        use = loader.report().buffers["s0"]
        assert 4 << 20 < use.num_bytes <= BUFFER
        assert use.peak_bytes <= BUFFER
    gc.collect()
