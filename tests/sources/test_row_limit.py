"""`max_rows`: exactly so many rows, the same ones in every epoch and run, wherever a run is cut, and with files added."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.cli import main
from overlord.lineage.obtaining import open_log
from overlord.sources.files import open_reader, units_of
from overlord.sources.row_limit import limit_units
from tests.small_sources import Numbered, job_of, read_all, same


@st.composite
def listings(draw: st.DrawFn) -> list[ol.Unit]:
    sizes = draw(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=6))
    return [
        ol.Unit(f"data/{file}.parquet", index, rows, rows * 10)
        for file, units in enumerate(sizes)
        for index, rows in enumerate(units)
    ]


def never(unit: ol.Unit) -> int:
    raise AssertionError(f"{unit} says how many rows it has")


def rows_of(units: list[ol.Unit]) -> set[tuple[str, int, int]]:
    return {(unit.path, unit.index, row) for unit in units for row in range(unit.num_rows or 0)}


@given(listings(), st.integers(1, 40), st.booleans())
def test_a_limit_takes_as_many_rows_as_there_are_from_the_beginnings_of_files(units, limit, is_counted):
    listed = [replace(unit, num_rows=None) for unit in units] if is_counted else units
    sizes = {(unit.path, unit.index): unit.num_rows or 0 for unit in units}
    found = limit_units(listed, limit, lambda unit: sizes[unit.path, unit.index])
    known = [replace(unit, num_rows=sizes[unit.path, unit.index]) if unit.num_rows is None else unit for unit in found]
    assert len(rows_of(known)) == min(limit, sum(sizes.values()))
    for path in {unit.path for unit in known}:
        assert [unit.index for unit in known if unit.path == path] == list(range(sum(u.path == path for u in known)))
    assert sum(unit.whole is not None for unit in found) <= 1
    assert found == sorted(found, key=lambda unit: (unit.path, unit.index))
    assert limit_units(known, limit, never) == known  # as `overlord prepare` has it


@given(listings(), st.integers(1, 30), st.integers(1, 6))
def test_a_smaller_limit_and_an_added_file_only_take_rows_away(units, limit, new):
    before = rows_of(limit_units(units, limit, never))
    assert rows_of(limit_units(units, max(1, limit - 3), never)) <= before
    after = rows_of(limit_units([*units, ol.Unit("data/new.parquet", 0, new, 1)], limit, never))
    assert {row for row in after if row[0] != "data/new.parquet"} <= before
    moved = limit_units([replace(unit, path=f"s3://elsewhere/{unit.path}") for unit in units], limit, never)
    assert {(path.removeprefix("s3://elsewhere/"), *rest) for path, *rest in rows_of(moved)} == before


def tokens(number: int) -> list[int]:
    return [1000 * number + place for place in range(1 + number % 7)]


@pytest.fixture
def parquet(tmp_path: Path) -> str:
    for file in range(4):
        rows = range(1 + 20 * file, 21 + 20 * file)
        table = pa.table({"tokens": pa.array([tokens(row) for row in rows], pa.list_(pa.int32())), "n": list(rows)})
        pq.write_table(table, tmp_path / f"{file}.parquet", row_group_size=6)
    return str(tmp_path / "*.parquet")


@pytest.fixture
def jsonl(tmp_path: Path) -> str:
    for file in range(3):
        lines = [json.dumps({"tokens": tokens(1 + 20 * file + row)}) for row in range(20)]
        lines[2] = "{broken"
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "*.jsonl")


def documents_in(found: list[np.ndarray]) -> Counter[int]:
    return Counter((np.unique(step // 1000)).tolist()[0] for step in found)


ONE_A_STEP = ol.Batch(samples=1, sequence_length=16)


@pytest.mark.parametrize("limit", [1, 6, 13, 45, 1000])
def test_every_epoch_has_the_same_rows_and_a_run_goes_on_exactly_after_a_cut(parquet, limit):
    job = job_of({"a": ol.Parquet(parquet, max_rows=limit, repeat=3)}, ONE_A_STEP, seed=5)
    uncut, _ = read_all(job, 1000)
    size = min(limit, 80)
    assert len(uncut) == 3 * size
    epochs = [documents_in(uncut[e * size : (e + 1) * size]) for e in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert set(epochs[0].values()) == {1}
    cut = size + size // 2
    before, state = read_all(job, cut)
    after, _ = read_all(replace(job, mesh=ol.Mesh(dp=2)), 1000, resume=state)
    assert same(before + after, uncut)
    other_seed, _ = read_all(replace(job, seed=9), size)
    assert documents_in(other_seed) == epochs[0]
    with pytest.raises(ol.errors.StateError, match="source 'a' is declared differently"):
        ol.start(job_of({"a": ol.Parquet(parquet, max_rows=limit + 1, repeat=3)}, ONE_A_STEP, seed=5), resume=state)


def test_rows_that_are_counted_only_by_reading_are_limited_too_and_bad_ones_count(jsonl):
    source = ol.Jsonl(jsonl, max_rows=25, repeat=False, on_bad_row="skip", unit_bytes=200)
    assert any(unit.num_rows is None for unit in source.units())
    reader = open_reader(source, release_gil=False)
    results = [reader.read_rows(unit) for unit in units_of(source)]
    assert sum(result.table.num_rows + len(result.bad) for result in results) == 25
    found, _ = read_all(job_of({"a": source}, ONE_A_STEP), 1000)
    assert len(found) == 25 - sum(len(result.bad) for result in results) == 23
    with ol.start(job_of({"a": source}, ONE_A_STEP), engine=ol.Processes(1)) as loader:
        assert len(loader.client(0, timeout_s=60)) == 23


def test_a_cache_keeps_a_part_of_a_unit_apart_from_all_of_it(parquet, tmp_path):
    def read(limit: int | None, cache: ol.Cache | None) -> list[np.ndarray]:
        source = ol.Parquet(parquet, max_rows=limit, repeat=False, cache=cache, transform=ol.Pick("tokens"))
        return read_all(job_of({"a": source}, ONE_A_STEP), 1000)[0]

    cache = ol.Cache(tmp_path / "cache", 1 << 24)
    for limit in (9, 15, None, 9, 15):
        assert same(read(limit, cache), read(limit, None))


def test_a_prepared_source_has_the_same_subset(jsonl, tmp_path):
    source = ol.Jsonl(jsonl, max_rows=25, repeat=2, on_bad_row="skip", unit_bytes=200, transform=ol.Pick("tokens"))
    job = job_of({"a": source}, ONE_A_STEP)
    uncut, _ = read_all(job, 1000)
    prepared = ol.prepare(job, tmp_path / "prepared", num_processes=1)
    assert isinstance(prepared.sources["a"], ol.Prepared)
    assert same(read_all(prepared, 1000)[0], uncut)
    _, state = read_all(job, 10)
    assert same(read_all(prepared, 1000, resume=state)[0], uncut[10:])
    whole = ol.prepare(job_of({"a": replace(source, max_rows=None)}, ONE_A_STEP), tmp_path / "all", num_processes=1)
    limited = replace(whole, sources={"a": replace(whole.sources["a"], max_rows=25)})
    assert same(read_all(limited, 1000)[0], uncut)


def test_an_evaluation_takes_the_same_rows_every_time(parquet):
    held_out = ol.Parquet(parquet, max_rows=13)
    evals = {"val": ol.Eval(sources={"val": held_out}, batch=ol.Batch(samples=4, sequence_length=16))}
    seen: list[Any] = []
    for seed in (0, 7):
        with ol.start(job_of({"a": Numbered(first=1)}, evals=evals, seed=seed)) as loader:
            client = loader.client(0)
            for _ in range(2):
                read = [np.asarray(m["tokens"]) for step in client.evaluate("val") for m in step]
                seen.append(sorted(np.unique(np.concatenate(read) // 1000).tolist()))
                next(client)
    assert all(each == seen[0] for each in seen)
    assert len([document for document in seen[0] if document]) == 13


def test_lineage_tells_the_rows_of_files(parquet, tmp_path, capsys):
    job = job_of({"a": ol.Parquet(parquet, max_rows=29, repeat=False)}, ol.Batch(samples=29, sequence_length=16))
    with ol.start(job, log=tmp_path / "log") as loader:
        found = np.concatenate([np.asarray(micro["tokens"]) for micro in next(loader.client(0))])
    documents = open_log(job, tmp_path / "log").documents(0)
    told = sorted(int(Path(each.file).stem) * 20 + (each.file_row or 0) + 1 for each in documents)
    assert told == sorted(set((found[found > 0] // 1000).tolist()))
    file = tmp_path / "job.yaml"
    file.write_text(
        f"sources: {{a: {{paths: '{parquet}', max_rows: 29, repeat: false}}}}\nbatch: {{samples: 29, sequence_length: 16}}\n"
    )
    assert main(["check", str(file)]) == 0
    assert "29" in next(line for line in capsys.readouterr().out.splitlines() if " a " in line).split()
    name, row = Path(documents[0].file).name, documents[0].file_row
    assert main(["find", str(file), "--source", "a", "--file", name, "--row", str(row), "--log", str(tmp_path / "log")]) == 0
    assert "in 1 step before step 1" in capsys.readouterr().out


@pytest.mark.parametrize("value", [0, -1, 1.5, "10", True])
def test_a_limit_that_is_no_number_of_rows_is_refused(value):
    with pytest.raises(ol.errors.SpecError, match="max_rows"):
        Numbered(max_rows=value)
