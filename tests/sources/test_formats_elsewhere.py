"""Formats of other loaders in an object store, and what lineage tells of them."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

import overlord as ol
from overlord.errors import SourceError, StorageError
from overlord.formats import Csv, HuggingFaceFiles, LitData, Mds, MegatronBin, TextLines, energon
from overlord.lineage.obtaining import open_log
from tests.sources.recording import RECORDED
from tests.sources.test_energon import write_dataset
from tests.sources.test_megatron import write_pair

KEYS: dict[str, Any] = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A blend of two datasets of Energon."""
    folder = tmp_path_factory.mktemp("energon")
    for name in ("coco", "laion"):
        write_dataset(folder / name, 4)
    parts = "      - {weight: 1, path: coco}\n      - {weight: 3, path: ./laion, split_part: val}\n"
    kind = "__module__: megatron.energon\n__class__: MetadatasetV2\n"
    (folder / "blend.yaml").write_text(f"{kind}splits:\n  train:\n    blend:\n{parts}")
    return folder


@pytest.fixture(scope="module")
def options(shards: Path) -> Iterator[dict[str, str]]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/corpus", method="PUT")).close()
    store = S3Store("corpus", endpoint=endpoint, client_options={"allow_http": True}, **KEYS)
    for folder, prefix in ((RECORDED, ""), (shards, "energon/")):
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(store, prefix + str(path.relative_to(folder)), path.read_bytes())
    lines = "".join(f"{i},row {i}\n" for i in range(300))
    obstore.put(store, "t/a.csv", f"id,text\n{lines}".encode())
    obstore.put(store, "t/a.txt", lines.encode())
    index = (RECORDED / "megatron" / "int32.idx").read_bytes()
    obstore.put(store, "bad/short.idx", index)
    obstore.put(store, "bad/short.bin", (RECORDED / "megatron" / "int32.bin").read_bytes()[:-1])
    obstore.put(store, "bad/alone.idx", index)
    for name in ("index.json", "shard.00001.mds"):
        obstore.put(store, f"bad/mds/{name}", (RECORDED / "mds" / "plain" / name).read_bytes())
    shard = bytearray((RECORDED / "mds" / "plain" / "shard.00000.mds").read_bytes())
    shard[-1] ^= 1
    obstore.put(store, "bad/mds/shard.00000.mds", bytes(shard))
    plain = RECORDED / "litdata" / "plain"
    for name in ("index.json", "chunk-0-1.bin", "chunk-0-2.bin"):
        obstore.put(store, f"bad/litdata/{name}", (plain / name).read_bytes())
    obstore.put(store, "bad/litdata/chunk-0-0.bin", (plain / "chunk-0-0.bin").read_bytes()[:-1])
    yield {**KEYS, "endpoint": endpoint}
    moto.stop()


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def test_all_formats_read_the_same_from_a_bucket(options: dict[str, str]) -> None:
    here, there = str(RECORDED), "s3://corpus"
    pairs: list[tuple[Any, str, dict[str, Any]]] = [
        (MegatronBin, "/megatron/uint16", {"unit_bytes": 20}),
        (MegatronBin, "/megatron/int32_modes.idx", {"columns": ("tokens", "modes"), "rows": "sequences"}),
        (Mds, "/mds/plain", {}),
        (Mds, "/mds/zstd/index.json", {"columns": ["tokens", "text"]}),
        *((LitData, f"/litdata/{kind}", {}) for kind in ("plain", "chunk", "batch", "tokens", "table_zstd")),
        (HuggingFaceFiles, "/huggingface/splits", {"split": "train", "columns": ["tokens"]}),
        (ol.Prepared, "/prepared", {}),
    ]
    for reader, path, fields in pairs:
        source = reader(there + path, storage_options=options, **fields)
        ol.testing.assert_source_keeps_its_promises(source)
        assert read_all(source).equals(read_all(reader(here + path, **fields)))
    table = read_all(Csv("s3://corpus/t/*.csv", unit_bytes=500, storage_options=options))
    assert table.to_pydict() == {"id": list(range(300)), "text": [f"row {i}" for i in range(300)]}
    text = read_all(TextLines("s3://corpus/t/a.txt", unit_bytes=500, storage_options=options))
    assert text["text"].to_pylist() == [f"{i},row {i}" for i in range(300)]


def test_blends_of_energon_are_read_from_a_bucket(shards: Path, options: dict[str, str]) -> None:
    here = energon(shards / "blend.yaml", tokens=None)
    there = energon("s3://corpus/energon/blend.yaml", tokens=None, storage_options=options)
    assert there.weights == here.weights == {"coco": 0.25, "laion": 0.75}
    for name, source in there.sources.items():
        ol.testing.assert_source_keeps_its_promises(source)
        assert read_all(source).equals(read_all(here.sources[name]))
    with pytest.raises(SourceError, match=r"s3://corpus/energon/nowhere"):
        energon("s3://corpus/energon/nowhere", tokens=None, storage_options=options)


def test_bad_files_in_a_bucket_are_the_same_errors(options: dict[str, str]) -> None:
    with pytest.raises(SourceError, match=r"s3://corpus/bad/short\.bin has 187 bytes and its index.* up to byte 188"):
        MegatronBin("s3://corpus/bad/short", storage_options=options).units()
    with pytest.raises(SourceError, match=r"s3://corpus/bad/alone\.bin does not exist"):
        MegatronBin("s3://corpus/bad/alone", storage_options=options).units()
    mds = Mds("s3://corpus/bad/mds", storage_options=options)
    with pytest.raises(SourceError, match=r"s3://corpus/bad/mds/shard\.00000\.mds has the sha1 .* its index\.json says"):
        read_all(mds)
    with pytest.raises(SourceError, match=r"s3://corpus/nowhere/index\.json does not exist"):
        Mds("s3://corpus/nowhere", storage_options=options).units()
    with pytest.raises(
        SourceError, match=r"s3://corpus/bad/litdata/chunk-0-0\.bin has 2,385 bytes, and its index\.json says"
    ):
        LitData("s3://corpus/bad/litdata", storage_options=options).units()
    with pytest.raises(SourceError, match=r"s3://corpus/nowhere/index\.json does not exist"):
        LitData("s3://corpus/nowhere", storage_options=options).units()
    with pytest.raises(SourceError, match=r"s3://corpus/nowhere/state\.json does not exist"):
        HuggingFaceFiles("s3://corpus/nowhere", storage_options=options).units()


@pytest.mark.parametrize(
    ("reader", "path"),
    [
        (MegatronBin, "megatron/int32"),
        (Mds, "mds/plain"),
        (LitData, "litdata/plain"),
        (HuggingFaceFiles, "huggingface/one"),
        (Csv, "t/a.csv"),
    ],
)
def test_storage_that_stays_silent_is_a_storage_error(reader: Any, path: str) -> None:
    retry = ol.policies.Retry(deadline_s=0)
    nobody = {**KEYS, "endpoint": "http://127.0.0.1:9"}
    with pytest.raises(StorageError, match=r"s3://corpus/.* storage did not answer"):
        reader(f"s3://corpus/{path}", storage_options=nobody, retry=retry).units()


def test_lineage_of_other_formats_names_the_file_and_the_row(tmp_path: Path) -> None:
    documents = [[[1000 * d + t for t in range(1 + d % 5)]] for d in range(60)]
    write_pair(tmp_path / "web", documents)
    source = MegatronBin(tmp_path / "web", unit_bytes=64)
    job = ol.Job(sources={"web": source}, batch=ol.Batch(tokens=32, sequence_length=16))
    ol.testing.assert_resumes_exactly(job, 6, 2)
    log = tmp_path / "log"
    with ol.start(job, log=log) as loader:
        client = loader.client(0, timeout_s=60)
        steps = [[list(map(int, micro["tokens"].ravel())) for micro in next(client)] for _ in range(4)]
    found = open_log(job, log)
    for number, micros in enumerate(steps):
        traced = found.documents(number, 0)
        assert traced
        for document in traced:
            assert document.file == str(tmp_path / "web.bin")
            assert document.file_row is not None
            tokens = micros[document.microbatch][document.place : document.place + document.tokens]
            assert tokens == documents[document.file_row][0][document.start : document.stop]


def test_a_state_knows_the_versions_of_both_files_of_a_pair(tmp_path: Path) -> None:
    write_pair(tmp_path / "web", [[[1, 2, 3]] for _ in range(40)])
    job = ol.Job(
        sources={"web": MegatronBin(tmp_path / "web", unit_bytes=64)}, batch=ol.Batch(tokens=32, sequence_length=16)
    )
    with ol.start(job) as loader:
        state = json.loads(json.dumps(loader.state_dict()))
    index = tmp_path / "web.idx"
    index.write_bytes(index.read_bytes())
    with pytest.raises(ol.errors.StateError, match=r"web\.bin"), ol.start(job, resume=state):
        pass
