"""Packed rows hold every token of every document once, within the length; a prepared corpus is read from an object store."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

import overlord as ol
from overlord.cli import main
from overlord.preparing.packing import LENGTHS, pack_rows
from tests.buckets import s3_bucket


@given(st.lists(st.integers(0, 50), max_size=60), st.integers(1, 40), st.booleans())
def test_packing_loses_no_token_and_keeps_documents_apart(lengths, capacity, in_two):
    documents = [np.arange(length) + 1000 * number for number, length in enumerate(lengths)]
    column = pa.array(documents, pa.list_(pa.int64()))
    mask = pa.array([document % 2 for document in documents], pa.list_(pa.int64()))
    table = pa.table({"tokens": column, "mask": mask, "other": pa.array(range(len(lengths)))})
    half = len(lengths) // 2
    tables = [table.slice(0, half), table.slice(half)] if in_two else [table]
    packed = pack_rows(tables, ("tokens", "mask"), capacity, "here")
    if packed is None:
        assert not sum(lengths)
        return
    found: list[list[int]] = []
    for row in packed.to_pylist():
        assert 0 < len(row["tokens"]) <= capacity
        assert sum(row[LENGTHS]) == len(row["tokens"])
        assert row["mask"] == [token % 1000 % 2 if token < 1000 else token % 2 for token in row["tokens"]]
        ends = np.cumsum([0, *row[LENGTHS]])
        found += [row["tokens"][a:b] for a, b in pairwise(ends)]
    pieces = [document[i : i + capacity].tolist() for document in documents for i in range(0, len(document), capacity)]
    assert Counter(map(tuple, found)) == Counter(map(tuple, pieces))


def write_texts(folder: Path) -> ol.Jsonl:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": "x" * (i % 90 + 1)}) for i in range(300)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return ol.Jsonl(str(folder / "a.jsonl"), transform=ol.Tokenize(encoding=ol.ByteTokenizer()), unit_bytes=3000)


def job_of(source: ol.Source) -> ol.Job:
    return ol.Job(sources={"web": source}, batch=ol.Batch(sequence_length=128, tokens=1024), num_workers=0)


def test_a_corpus_is_packed_by_the_command_line(tmp_path, capsys):
    write_texts(tmp_path / "texts")
    (tmp_path / "job.yaml").write_text(
        f"sources: {{web: {{paths: {tmp_path}/texts/a.jsonl, transform: {{Tokenize: {{encoding: ByteTokenizer}}}}}}}}\n"
        "batch: {sequence_length: 128, tokens: 1024}\n"
    )
    command = ["prepare", str(tmp_path / "job.yaml"), "--to", str(tmp_path / "out"), "--pack", "128", "--processes", "1"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sources"]["web"]
    assert found["packed"] == 128
    assert found["tokens"] == sum(i % 90 + 1 for i in range(300))
    packed = ol.Parquet(f"{tmp_path}/out/web/part-*.parquet")
    lengths = [len(row or ()) for unit in packed.units() for row in packed.read(unit).column("tokens").to_pylist()]
    assert max(lengths) <= 128
    assert np.mean(lengths) > 120
    assert main(command) == 0
    assert "read packed rows with ol.Parquet" in capsys.readouterr().out
    with pytest.raises(ol.errors.SpecError, match=r"holds packed rows of 128 tokens, which are not the stream"):
        ol.Prepared(tmp_path / "out" / "web").units()
    assert main(["prepare", str(tmp_path / "job.yaml"), "--to", str(tmp_path / "out"), "--processes", "1"]) == 1
    assert "--overwrite" in capsys.readouterr().err


@ol.per_row
def jittered(row, rng):
    return row


@pytest.mark.parametrize(
    ("options", "pack", "said"),
    [
        ({}, 0, "pack is a number of tokens, at least 1, got 0"),
        ({"tokens": None}, 8, "source 'web' cannot be packed: it is not plain text"),
        ({"transform": [jittered]}, 8, r"cannot be packed: per_row\(jittered\) depends on the epoch"),
        ({"tokens": "ids"}, 8, "packing needs the column 'ids' as lists of numbers"),
    ],
)
def test_what_cannot_be_packed_is_told(tmp_path, options, pack, said):
    texts = write_texts(tmp_path)
    source = ol.Jsonl(texts.paths, **{"transform": texts.transform, **options})
    batch = ol.Batch(sequence_length=16, samples=4)
    with pytest.raises(ol.OverlordError, match=said):
        ol.prepare(ol.Job(sources={"web": source}, batch=batch), tmp_path / "out", num_processes=1, pack=pack)


def test_a_copy_in_an_object_store_gives_the_same_stream(tmp_path):
    job = job_of(write_texts(tmp_path / "texts"))
    ol.prepare(job, tmp_path / "out", num_processes=1)
    with s3_bucket("corpus") as options:
        keys: dict[str, Any] = dict(options)
        store = S3Store("corpus", client_options={"allow_http": True}, **keys)
        for path in (tmp_path / "out" / "web").iterdir():
            obstore.put(store, f"pre[1]/web/{path.name}", path.read_bytes())
        there = ol.Prepared("s3://corpus/pre[1]/web", storage_options=keys)
        assert _tokens(job_of(there)) == _tokens(job)


def _tokens(job: ol.Job) -> list[Any]:
    with ol.start(job) as loader:
        client = loader.client(0, timeout_s=60)
        return [[micro["tokens"].tolist() for micro in next(client)] for _ in range(3)]
