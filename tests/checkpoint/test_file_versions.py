"""Files that change between a stop and a resume: told, named, and accepted on request."""

import os
import pickle
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.checkpoint.form import with_checksum
from overlord.sources.storage import StoredFile
from overlord.sources.webdataset import Shard
from tests.small_sources import Numbered
from tests.sources.damage import replace


def written_tokens(folder: Path, count: int) -> ol.Job:
    for number in range(count):
        table = pa.table({"tokens": [[number, row] for row in range(4)]})
        pq.write_table(table, folder / f"{number:02}.parquet")
    return ol.Job(
        sources={"files": ol.Parquet(f"{folder}/*.parquet"), "own": Numbered(rows=8)},
        batch=ol.Batch(samples=2, sequence_length=8),
    )


def saved(job: ol.Job) -> dict[str, Any]:
    with ol.start(job) as loader:
        client = loader.client(0)
        next(client)
        return orjson.loads(client.state_dict()["state"])


@pytest.mark.strangers
@pytest.mark.parametrize("count", [3, 60])
def test_a_file_that_was_replaced_between_stop_and_resume_is_named_and_may_be_accepted(tmp_path: Path, count: int) -> None:
    job = written_tokens(tmp_path, count)
    state = saved(job)
    replace(tmp_path / "01.parquet")
    with pytest.raises(ol.errors.StateError, match=r"source 'files' has files that were written anew") as caught:
        ol.start(job, resume=state)
    assert "01.parquet; if they were only copied" in str(caught.value)
    assert "02.parquet" not in str(caught.value)
    assert "accept_changes=['files']" in str(caught.value)
    ol.start(job, resume=state, accept_changes=["files"]).close()
    assert len(orjson.dumps(state["fingerprint"]["files"])) < 80


@pytest.mark.strangers
def test_a_file_that_went_back_in_time_is_told_among_those_that_it_may_be(tmp_path: Path) -> None:
    job = written_tokens(tmp_path, 60)
    state = saved(job)
    os.utime(tmp_path / "01.parquet", ns=(10**18, 10**18))
    with pytest.raises(ol.errors.StateError, match=r"ETags\): one or more of .*01\.parquet"):
        ol.start(job, resume=state)


@pytest.mark.strangers
def test_a_state_that_knows_no_versions_of_files_can_be_resumed(tmp_path: Path) -> None:
    job = written_tokens(tmp_path, 3)
    state = saved(job)
    del state["fingerprint"]["files"]
    replace(tmp_path / "01.parquet")
    ol.start(job, resume=with_checksum(state)).close()


@pytest.mark.strangers
def test_files_that_did_not_change_are_resumed_without_a_word(tmp_path: Path) -> None:
    job = written_tokens(tmp_path, 3)
    ol.start(job, resume=saved(job)).close()


@pytest.mark.strangers
def test_a_hundred_thousand_units_hardly_grow_by_the_versions_of_their_files() -> None:
    def pickled(version: str) -> int:
        units = []
        for number in range(1000):
            file = StoredFile(f"/data/corpus/web/part-{number:05}.tar", 10**9, version and f"{version}{number:09}")
            units.append(ol.Unit(file.path, 0, None, 10**9, Shard(file, pa.schema([]), False), file.version))
        return len(pickle.dumps(units)) // len(units)

    assert pickled("1763289515") - pickled("") < 0.4 * pickled("")
