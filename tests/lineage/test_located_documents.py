"""The numbers of documents in a batch lead to their file and row, on every engine and over every way to a trainer."""

import io
import json
import tarfile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import SpecError, StateError
from overlord.lineage.obtaining import open_log
from overlord.service.channel import FlightChannel
from tests.cli.test_watching import command
from tests.contract.test_stream import BATCHES
from tests.lineage.test_finding import job_file
from tests.pictures import picture
from tests.small_sources import Numbered, job_of

FIRST = {"a": (1, 5), "b": (100, 4)}
SOURCES = {"a": Numbered(rows=40, first=1, window=2), "b": Numbered(rows=23, unit_rows=4, first=100, longest=16)}
MESH = ol.Mesh(dp=2, cp=2)


def assert_located(micro: Any, found: list[ol.DocumentOrigin]) -> None:
    """Every document is the row that its first token tells of."""
    assert len(found) == micro["num_documents"] > 0
    names = list(SOURCES)
    assert [origin.source for origin in found] == [names[number] for number in micro["document_sources"].tolist()]
    tokens = np.asarray(micro["tokens"]).ravel()
    for i, origin in enumerate(found):
        first, unit_rows = FIRST[origin.source]
        unit = int(origin.file.partition("#")[2] or 0)
        length = int(micro["document_lengths"][i])
        if length and len(tokens) == micro["cu_seqlens"][-1]:  # no slice of a longer one
            assert tokens[micro["document_starts"][i]] // 1000 == first + unit * unit_rows + origin.row


@settings(max_examples=20)
@given(BATCHES, st.booleans())
def test_every_document_of_a_batch_is_located_with_its_run_and_without_it(batch, shuffle):
    sources = {name: Numbered(**{**vars(source), "shuffle": shuffle}) for name, source in SOURCES.items()}
    job = job_of(sources, batch)
    with ol.start(job) as loader:
        client = loader.client(0)
        micros = [micro for _ in range(3) for micro in next(client) if micro["num_documents"]]
        located = [loader.locate(micro) for micro in micros]
        assert loader.locate(micros) == [one for found in located for one in found]
    for micro, found in zip(micros, located, strict=True):
        assert micro["document_chunks"].dtype == np.int64
        assert micro["document_rows"].dtype == np.int32
        if "cu_seqlens" in micro:
            assert_located(micro, found)
        assert ol.locate(job, micro) == found


@pytest.mark.parametrize("engine", ["embedded", "processes", "ray"])
def test_batches_and_origins_are_the_same_on_every_engine_and_over_the_wire(engine, request, tmp_path, monkeypatch):
    job = job_of(SOURCES, mesh=MESH)
    with ol.start(job) as loader:
        clients = [loader.client(rank) for rank in range(4)]
        expected = [[numbers_of(next(client)) for client in clients] for _ in range(4)]
        origins = loader.locate(expected[0][0][0])
    options: dict[str, Any] = {"log": tmp_path}
    if engine == "processes":
        options["engine"] = ol.Processes(2)
    elif engine == "ray":
        request.getfixturevalue("ray_cluster")
        options["engine"] = ol.Ray("auto", loader_hosts=1, loaders=ol.scaling.ActorOptions())
    with ol.start(job, **options) as loader:
        address = loader.serve()
        clients = [loader.client(0), ol.connect(address, rank=1, timeout_s=60)]  # in shared memory
        with monkeypatch.context() as patch:
            patch.setattr(FlightChannel, "_find_local", lambda *_: None)
            clients += [ol.connect(address, rank=rank, timeout_s=60) for rank in (2, 3)]  # over Flight
        assert [[numbers_of(next(client)) for client in clients] for _ in range(4)] == expected
        assert loader.locate(expected[0][0][0]) == clients[3].run.locate(expected[0][0][0]) == origins
        with ol.Control(address) as control:
            assert control.locate(expected[0][0][0][:1]) == origins[:1]
        for client in clients:
            client.close()
    found = open_log(job, tmp_path)  # the lineage of such a run names the same documents
    for step, of_ranks in enumerate(expected):
        for rank, micros in enumerate(of_ranks):
            told = [(list(SOURCES).index(d.source), d.chunk, d.chunk_row) for d in found.documents(step, rank)]
            assert told == [document for micro in micros for document in micro]


def numbers_of(step: ol.Step) -> list[list[tuple[int, int, int]]]:
    columns = "document_sources", "document_chunks", "document_rows"
    return [list(zip(*(micro[name].tolist() for name in columns), strict=True)) for micro in step]


def test_rows_that_a_transform_dropped_or_a_policy_left_out_do_not_shift_the_others(tmp_path):
    lines = [json.dumps({"tokens": [i] * (1 + i % 7), "i": i}) if i % 5 else "{broken" for i in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    source = ol.Jsonl(tmp_path / "a.jsonl", transform=_odd, on_bad_row="skip")
    job = ol.Job(sources={"a": source}, batch=ol.Batch(samples=12, sequence_length=16))
    with ol.start(job) as loader:
        micro = next(loader.client(0)).microbatches[0]
        found = loader.locate(micro)
    tokens = micro["tokens"][micro["document_starts"]].tolist()
    assert [origin.row for origin in found] == tokens
    assert ol.locate(job, micro) == found


def _odd(table: pa.Table) -> pa.Table:
    return table.filter(pa.array([(i or 0) % 2 == 1 for i in table["i"].to_pylist()]))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([(2, 0, 0)], "the job has sources 0 to 1; there is no source 2"),
        ([(0, 0, 4000)], "chunk 0 of source 'a' has 10 rows; there is no row 4,000"),
        ([(0, -1, 0)], "source, chunk and row of a document are 0 or more, got (0, -1, 0)"),
        ([(0, 0)], "a document is (source, chunk, row), three whole numbers, got (0, 0)"),
        ({"document_sources": np.zeros(1)}, "this one has no document_chunks"),
        ([(0, 0, 0)] * 65_537, "at most 65,536 documents are located at a time, got 65,537"),
    ],
)
def test_numbers_that_name_no_document_are_one_clear_line(documents, message):
    job = job_of(SOURCES)
    with ol.start(job) as loader:
        for locate in (loader.locate, loader.client(0).run.locate, lambda asked: ol.locate(job, asked)):
            with pytest.raises(SpecError) as error:
                locate(documents)
            assert message in str(error.value)


def test_a_log_that_is_not_there_is_told(tmp_path):
    with pytest.raises(StateError, match="there is no log at"):
        ol.locate(job_of(SOURCES), [(0, 0, 0)], log=tmp_path / "none")


def test_the_commands_take_the_numbers_of_a_batch(tmp_path, capsys):
    path, log = job_file(tmp_path), tmp_path / "log"
    declared: dict[str, ol.Job] = {}
    exec(path.read_text(), declared)
    with ol.start(declared["job"], log=log) as loader:
        clients = [loader.client(rank) for rank in range(2)]
        micros = [next(client).microbatches[0] for _ in range(20) for client in clients]
    micro = micros[-1]
    numbers = ("--source", "web", "--chunk", micro["document_chunks"][0], "--row", micro["document_rows"][0])
    row = int(micro["tokens"][micro["document_starts"][0]]) - 1
    assert f"sentence number {row}" in command(capsys, "show", path, *numbers, "--log", log)[0]
    found = json.loads(command(capsys, "find", path, *numbers, "--log", log, "--json")[0])["found"][0]
    assert 19 in [document["step"] for document in found["documents"]]


def test_trace_reads_keys_and_image_names_where_it_is_asked(tmp_path, capsys):
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for i in range(6):
            for ending, data in (("jpg", picture(i, 8, 8)), ("txt", b"a photo")):
                member = tarfile.TarInfo(f"dir/photo-{i}.{ending}")
                member.size = len(data)
                shard.addfile(member, io.BytesIO(data))
    named = [[{"bytes": picture(7, 8, 8), "path": f"img/{i}-{j}.jpg"} for j in range(i % 3)] for i in range(6)]
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 6, "images": named}), tmp_path / "web.parquet")
    path = tmp_path / "pictured_job.py"
    path.write_text(f"""
import overlord as ol
job = ol.Job(
    sources={{
        "photos": ol.WebDataset("{tmp_path}/shard.tar", columns=["jpg"], tokens=None, decode=ol.vision.DecodeImage("jpg")),
        "web": ol.Parquet("{tmp_path}/web.parquet", decode=ol.vision.DecodeImage("images")),
    }},
    batch=ol.Batch(samples=12, sequence_length=16),
)
""")
    assert "--names reads the names of the images" in command(capsys, "trace", path, "--step", 0)[1]
    found = json.loads(command(capsys, "trace", path, "--step", 0, "--names", "--json")[0])["documents"]
    photos = [document for document in found if document["source"] == "photos"]
    assert {document["key"] for document in photos} <= {f"dir/photo-{i}" for i in range(6)}
    assert all(document["image_names"] == [f"{document['key']}.jpg"] for document in photos)
    web = [document for document in found if document["source"] == "web"]
    assert web
    assert photos
    assert all(
        document["image_names"] == [f"img/{document['row']}-{j}.jpg" for j in range(document["row"] % 3)] for document in web
    )
    assert "img/2-1.jpg" in command(capsys, "trace", path, "--step", 0, "--names")[0]
