"""A cache of transformed rows: the same stream with it and without, no older rows, and fewer rows made."""

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.caches.folder import CacheFolder, _folders
from overlord.chunks import row_cache
from overlord.chunks.row_cache import KeepingBudget
from overlord.cli import main
from overlord.errors import BadRowError, SchemaError
from overlord.status import CacheUse

ROWS, FILES = 60, 3
SHARE = row_cache._KEEPING_SHARE


@pytest.fixture(autouse=True)
def _forget_folders():
    """Each run counts from zero, as in a process of its own."""
    _folders.clear()


@pytest.fixture(autouse=True)
def _keep_everything(monkeypatch):
    """The few rows of these tests cost less to make than to keep."""
    monkeypatch.setattr(row_cache, "_KEEPING_SHARE", 1e6)


def write_files(place: Path, shift: int = 0) -> str:
    for i in range(FILES):
        texts = [f"text {i} {row} " + "x" * ((row * 7 + shift) % 23) for row in range(ROWS)]
        table = pa.table({"text": texts, "n": range(i * ROWS, (i + 1) * ROWS), "unused": [b"z" * 50] * ROWS})
        pq.write_table(table, place / f"{i}.parquet", row_group_size=7)
    return str(place / "*.parquet")


def upper(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("text"), "text", pc.utf8_upper(table["text"]))


def sorted_rows(table: pa.Table) -> pa.Table:
    return table.sort_by([("text", "descending")])


def some_rows(row: dict[str, Any]) -> dict[str, Any] | None:
    return None if row["n"] % 5 == 0 else {"text": row["text"], "n": row["n"] if row["n"] % 2 else row["n"] / 2}


def noisy(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"text": row["text"] + str(rng.integers(1000)), "n": row["n"]}


def twice(row: dict[str, Any]) -> Sequence[dict[str, Any]]:
    return [{"text": row["text"], "n": row["n"]}, {"text": "again", "n": row["n"]}]


def lost(table: pa.Table) -> pa.Table:
    """A function that loses the lineage of its rows."""
    return table.drop_columns(["__origin__"]).filter(pc.field("n") != 3)


def without_threes(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] % 10 == 3:
        raise ValueError(f"{row['n']} is bad")
    return row


BYTES = ol.Tokenize("text", encoding=ol.ByteTokenizer(), keep=("n",))
TRANSFORMS: dict[str, Any] = {
    "tokens": (BYTES,),
    "function": (upper, BYTES),
    "per_row": (ol.per_row(some_rows), BYTES),
    "random": (ol.per_row(noisy), BYTES),
    "one_to_many": (ol.per_row(twice), BYTES),
    "lost": (lost, BYTES),
    "dependent": (sorted_rows, BYTES),
    "in_processes": (ol.InProcesses(upper), BYTES),
}


def job_of(paths: str, transform: Any = (BYTES,), cache: ol.Cache | None = None, **options: Any) -> ol.Job:
    source = ol.Parquet(paths, transform=transform, window=options.pop("window", 4), **options)
    batch = ol.Batch(samples=20, sequence_length=64, columns=("n",))
    return ol.Job(sources={"a": source}, batch=batch, cache=cache, num_workers=0, num_processes=1, seed=3)


def read(job: ol.Job, steps: int = 13, resume: Any = None) -> tuple[list[Any], dict[str, Any]]:
    """What a run returns: every array of every step, with its types, and where its rows came from."""
    found: list[Any] = []
    with ol.start(job, resume=resume) as loader:
        client = loader.client(0)
        for _ in range(steps):
            step = next(client)
            plain = [{name: _plain(value) for name, value in micro.items()} for micro in step.microbatches]
            found.append((step.loss_tokens, plain))
        return found, {"use": loader.metrics().caches, "report": loader.report(), "state": client.state_dict()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return str(value.type), value.to_pylist()
    return repr(value) if isinstance(value, dict) else value


def use_of(told: dict[str, Any]) -> CacheUse:
    return told["use"].get("chunks", CacheUse())


@pytest.mark.parametrize(("name", "window"), [*((name, 4) for name in TRANSFORMS), ("per_row", 1), ("lost", 1)])
def test_the_stream_is_the_same_with_a_cache_in_its_first_run_and_in_the_next(tmp_path, name, window):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    options: dict[str, Any] = {"window": window}
    bare, _ = read(job_of(paths, TRANSFORMS[name], **options))
    first, _ = read(job_of(paths, TRANSFORMS[name], cache, **options))
    _folders.clear()
    second, told = read(job_of(paths, TRANSFORMS[name], cache, **options))
    assert first == bare
    assert second == bare
    if name == "random" or (name == "dependent" and window > 1):
        assert use_of(told).hits > 3  # by chunk: one may have been read ahead that the first run did not make
    else:
        assert use_of(told).hits > 15
        assert use_of(told).misses <= window  # one chunk more may have been read ahead


def test_the_second_epoch_makes_nothing_though_its_chunks_are_others(tmp_path):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    num_units = FILES * -(-ROWS // 7)
    _, told = read(job_of(paths, cache=cache), steps=FILES * ROWS // 20 * 3)
    assert use_of(told).misses == num_units
    assert use_of(told).hits >= 2 * num_units


def test_a_resumed_run_and_a_job_with_more_files_take_what_is_there(tmp_path):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    whole, _ = read(job_of(paths, cache=cache), steps=20)
    _folders.clear()
    before, told = read(job_of(paths, cache=cache), steps=7)
    after, told = read(job_of(paths, cache=cache), steps=13, resume=told["state"])
    assert before + after == whole
    assert use_of(told).misses == 0
    shutil.copy(tmp_path / "0.parquet", tmp_path / "9.parquet")
    _folders.clear()
    _, told = read(job_of(paths, cache=cache), steps=12)
    assert use_of(told).misses == -(-ROWS // 7)  # the units of the new file


@pytest.mark.parametrize("change", ["file", "option", "code", "columns", "version"])
def test_nothing_that_is_found_is_stale(tmp_path, change, monkeypatch):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    read(job_of(paths, (upper, BYTES), cache))
    _folders.clear()
    transform: Any = (upper, BYTES)
    if change == "file":
        at = os.stat(tmp_path / "0.parquet").st_mtime_ns
        write_files(tmp_path, shift=5)
        for i in range(FILES):
            os.utime(tmp_path / f"{i}.parquet", ns=(at, at + 10**9))
    elif change == "option":
        transform = (upper, ol.Tokenize("text", encoding=ol.ByteTokenizer(), keep=("n",), eos=7))
    elif change == "code":
        transform = (lower, BYTES)
    elif change == "version":
        monkeypatch.setattr("importlib.metadata.version", lambda package: "99")
    options: dict[str, Any] = {"columns": ("text", "n")} if change == "columns" else {}
    found, told = read(job_of(paths, transform, cache, **options))
    bare, _ = read(job_of(paths, transform, **options))
    assert found == bare
    assert use_of(told).misses > 0


def lower(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("text"), "text", pc.utf8_lower(table["text"]))


def test_damaged_entries_are_made_again(tmp_path):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    bare, _ = read(job_of(paths, cache=cache))
    for i, path in enumerate(sorted((tmp_path / "kept").rglob("chunks-*"))):
        data = bytearray(path.read_bytes())
        data[i * 37 % len(data)] ^= 255
        path.write_bytes(data if i % 2 else data[: len(data) // 2])
    _folders.clear()
    found, told = read(job_of(paths, cache=cache))
    assert found == bare
    assert use_of(told).damaged > 15


def test_bad_rows_are_counted_and_listed_when_their_rows_come_from_the_cache(tmp_path):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    transform = (ol.per_row(without_threes), BYTES)

    def listed(kept: ol.Cache | None, name: str) -> tuple[Any, int, list[str]]:
        policy = ol.policies.BadRows("quarantine", path=tmp_path / name)
        found, told = read(job_of(paths, transform, kept, on_bad_row=policy))
        return found, told["report"].bad_rows["a"], sorted((tmp_path / name).read_text().splitlines())

    bare = listed(None, "one")
    assert bare[1] == 18
    assert listed(cache, "two") == bare
    _folders.clear()
    assert listed(cache, "three") == bare
    for kept in (None, cache):
        with pytest.raises(ValueError, match=r"^\d*3 is bad") as caught:
            read(job_of(paths, transform, kept))
        assert "in transform per_row(without_threes) of source 'a'" in "".join(caught.value.__notes__)
        with pytest.raises(BadRowError, match="5 bad rows are more than its budget of 4"):
            read(job_of(paths, transform, kept, on_bad_row=ol.policies.BadRows("skip", budget=4)))


def test_a_transform_that_does_not_treat_rows_alone_is_told(tmp_path, caplog):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    read(job_of(paths, TRANSFORMS["dependent"], cache))
    assert (
        "a transform of source 'a' does not treat rows independently of each other: its chunks are kept in the cache as a "
        "whole, so that later epochs make them again"
    ) in caplog.messages


def test_a_missing_column_is_told_with_all_columns_that_there_are(tmp_path):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    for _ in range(2):
        with pytest.raises(SchemaError, match=r"has no column 'tokens' .*it has \['text', 'n', 'unused'\]"):
            read(job_of(paths, (upper,), cache))


@dataclass(frozen=True)
class Unversioned(ol.Source):
    version: str = ""
    window: int | None = field(default=2, kw_only=True)

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("somewhere", i, 5, 400, None, self.version) for i in range(6)]

    def read(self, unit: ol.Unit) -> pa.Table:
        return pa.table({"text": [f"{unit.index} {row}" for row in range(5)], "n": range(5)})

    def identity(self) -> str:
        return "Unversioned"


def test_units_without_a_version_are_not_kept(tmp_path, caplog):
    cache = ol.Cache(tmp_path, 1 << 26)
    batch = ol.Batch(samples=10, sequence_length=64)
    for version in ("", "7"):
        caplog.clear()
        source = Unversioned(version=version, transform=BYTES)
        _, told = read(ol.Job(sources={"a": source}, batch=batch, cache=cache, num_workers=0), steps=9)
        assert (use_of(told).hits > 0) == bool(version)
        told_of = [text for text in caplog.messages if " has no version, so that a change of it would go" in text]
        assert len(told_of) == (0 if version else 1)


def test_a_transform_that_cannot_be_inspected_is_not_kept(tmp_path, caplog):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    lines: Any = open(tmp_path / "x", "w")  # noqa: SIM115 - no contents that could be compared

    def depends(table: pa.Table) -> pa.Table:
        return table if lines.closed else upper(table)

    with lines:
        _, told = read(job_of(paths, (depends, BYTES), cache), steps=3)
    assert use_of(told) == CacheUse()
    assert "the rows of source 'a' are not kept in its cache: " in caplog.text
    assert "give it an identity() method that names all that it depends on" in caplog.text


def test_sources_that_are_quick_to_read_are_not_kept(tmp_path):
    table = pa.table({"tokens": [list(range(i % 30)) for i in range(ROWS)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    cache = ol.Cache(tmp_path / "kept", 1 << 26)
    source = ol.Parquet(str(tmp_path / "a.parquet"))
    read(ol.Job(sources={"a": source}, batch=ol.Batch(samples=10, sequence_length=64), cache=cache, num_workers=0), steps=5)
    assert not list((tmp_path / "kept").rglob("chunks-*"))


def test_a_source_has_a_cache_of_its_own(tmp_path):
    paths = write_files(tmp_path)
    of_job, own = ol.Cache(tmp_path / "job", 1 << 26), ol.Cache(tmp_path / "own", 1 << 26)
    job = ol.Job(
        sources={"a": ol.Parquet(paths, transform=BYTES), "b": ol.Parquet(paths, transform=(upper, BYTES), cache=own)},
        batch=ol.Batch(samples=20, sequence_length=64),
        cache=of_job,
        num_workers=0,
    )
    read(job, steps=3)
    assert list((tmp_path / "job").rglob("chunks-*"))
    assert list((tmp_path / "own").rglob("chunks-*"))


@pytest.mark.parametrize("break_it", ["full", "lost"])
def test_a_cache_that_fails_in_the_middle_of_a_run_changes_nothing(tmp_path, monkeypatch, break_it):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    bare, _ = read(job_of(paths))
    write: Callable[..., Any] = os.writev
    num_writes = 0

    def fail_later(descriptor: int, data: Any) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes > 3:
            if break_it == "lost":
                shutil.rmtree(tmp_path / "kept", ignore_errors=True)
            raise OSError(28, os.strerror(28))
        return write(descriptor, data)

    monkeypatch.setattr(os, "writev", fail_later)
    found, told = read(job_of(paths, cache=cache))
    assert found == bare
    assert use_of(told).failures >= 1


def test_run_says_in_a_line_what_the_cache_found(tmp_path, capsys):
    write_files(tmp_path)
    job = tmp_path / "job.yaml"
    job.write_text(
        f"sources: {{a: {{paths: '{tmp_path}/*.parquet', transform: {{Tokenize: {{encoding: ByteTokenizer}}}}}}}}\n"
        "batch: {sequence_length: 64, samples: 30}\nnum_workers: 0\n"
    )
    command = ["run", str(job), "--steps", "6"]
    with_cache = [*command, f"cache={{location: {tmp_path}/kept, max_bytes: 50MB}}"]
    assert main(with_cache) == 0
    first = capsys.readouterr().out
    assert re.search(r"^cache: \d+ of [1-9]\d* entries of transformed rows found \(.*B\), .*B written$", first, re.MULTILINE)
    _folders.clear()
    assert main([*with_cache, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["caches"]["chunks"]["hits"] > 0
    assert main(command) == 0
    assert "cache:" not in capsys.readouterr().out


def test_a_state_does_not_depend_on_the_cache(tmp_path):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    _, with_one = read(job_of(paths, cache=cache), steps=5)
    _, without = read(job_of(paths), steps=5)
    assert json.dumps(with_one["state"]) == json.dumps(without["state"])


def test_the_folder_is_checked_before_anything_starts(tmp_path):
    paths = write_files(tmp_path)
    with pytest.raises(ol.errors.SpecError, match="is not a folder"):
        ol.start(job_of(paths, cache=ol.Cache(tmp_path / "0.parquet", 1 << 26)))
    assert isinstance(CacheFolder(str(tmp_path / "new"), 1 << 26), CacheFolder)
    assert not (tmp_path / "new").exists()


def test_looking_up_and_keeping_rows_takes_a_twentieth_of_making_them_and_what_finding_them_saved(monkeypatch):
    monkeypatch.setattr(row_cache, "_KEEPING_SHARE", SHARE)
    budget = KeepingBudget()
    assert budget.allows_lookup  # a run that resumes looks before it makes anything
    assert not budget.allows_keeping(0)
    budget.take(1.0)
    assert budget.allows_lookup
    budget.add_made(10.0, 1000, 10**6)
    assert not budget.allows_lookup
    budget.add_made(12.0, 1000, 10**6)
    assert budget.allows_lookup
    assert budget.allows_keeping(10**6)
    budget.add_kept(1.1, 10**6)
    assert not budget.allows_keeping(10**6)
    budget.add_found(0.5, 300)  # they would have taken 3.6 s to make
    assert budget.allows_keeping(10**6)
    budget.take(4.0)
    budget.add_found(50.0, 300)  # slower than making them: nothing was saved, and nothing is lost by it
    assert not budget.allows_keeping(0)


def test_the_budget_learns_what_an_entry_costs(monkeypatch):
    monkeypatch.setattr(row_cache, "_KEEPING_SHARE", SHARE)
    budget = KeepingBudget()
    assert budget.may_keep(4)  # nothing is known yet
    budget.add_made(1.0, 1000, 10**7, num_units=4)
    assert budget.may_keep(4)
    for _ in range(20):
        budget.add_kept(0.5, 10**7)
        budget.add_made(10.0, 10_000, 10**8)
    assert not budget.allows_keeping(10**8)
    assert not budget.may_keep(1)


def test_a_transform_that_costs_next_to_nothing_is_hardly_slowed_down_by_a_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(row_cache, "_KEEPING_SHARE", SHARE)
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    bare, _ = read(job_of(paths))
    found, _ = read(job_of(paths, cache=cache))
    assert found == bare
    assert len(list((tmp_path / "kept").rglob("chunks-*"))) < FILES * -(-ROWS // 7) // 4


@pytest.mark.parametrize("num_kept", [1, 2])
def test_units_that_are_found_stand_beside_units_that_are_made_at_once(tmp_path, num_kept):
    paths, cache = write_files(tmp_path), ol.Cache(tmp_path / "kept", 1 << 26)
    policy = ol.policies.BadRows("skip", budget=1000)
    transform = (ol.Pick("text", "n"), BYTES)
    texts = [None if row % 9 == 4 else f"text {row}" for row in range(ROWS)]
    table = pa.table({"text": texts, "n": range(ROWS), "unused": [b""] * ROWS})
    pq.write_table(table, tmp_path / "1.parquet", row_group_size=7)
    bare, told = read(job_of(paths, transform, on_bad_row=policy))
    first, told_first = read(job_of(paths, transform, cache, on_bad_row=policy))
    for i, path in enumerate(sorted((tmp_path / "kept").rglob("chunks-*"))):
        if i % 3 >= num_kept:
            path.unlink()
    _folders.clear()
    found, told_again = read(job_of(paths, transform, cache, on_bad_row=policy))
    assert first == found == bare
    assert told["report"].bad_rows == told_first["report"].bad_rows == told_again["report"].bad_rows
    assert use_of(told_again).hits > 0
    assert use_of(told_again).misses > 0
