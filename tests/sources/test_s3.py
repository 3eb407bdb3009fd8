"""Object stores, against an S3 server on loopback behind a proxy that fails on demand and notes every request."""

from __future__ import annotations

import http.client
import http.server
import io
import logging
import sys
import tarfile
import threading
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import S3Store

from bench.slow_store import LoopbackServer
from overlord.errors import SourceError, SpecError, StorageError
from overlord.sources import object_store
from overlord.sources.arrow_ipc import ArrowIpc
from overlord.sources.jsonl import Jsonl
from overlord.sources.object_store import (
    ListedObject,
    ObjectStore,
    Retry,
)
from overlord.sources.parquet import Parquet
from overlord.sources.storage import Storage, storage_use
from overlord.sources.webdataset import WebDataset

CREDENTIALS: dict[str, Any] = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}
BIG = ListedObject("t/big", 256 * 1024, "")
QUICK = Retry(deadline_s=20, first_wait_s=0.01, max_wait_s=0.05, request_timeout_s=10)


@dataclass
class Proxy:
    """Forwards to `upstream`. Each of `faults` is for one request: a status, 'drop', 'cut', a word that lets it pass, or a
    function to call before the request is refused with 503."""

    upstream: str
    faults: deque[int | str | Callable[[], object]] = field(default_factory=deque)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    port: int = 0

    def start(self) -> None:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = LoopbackServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        self.requests.append((request.command, request.path, request.headers.get("Range", "")))
        fault = self.faults.popleft() if self.faults else None
        if fault == "drop":
            return
        if callable(fault):
            fault()
            fault = 503
        if isinstance(fault, int):
            request.send_response(fault)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        upstream = http.client.HTTPConnection(self.upstream)
        upstream.request(request.command, request.path, headers=dict(request.headers))
        reply = upstream.getresponse()
        body = reply.read()
        request.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "server", "date"):
                request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        upstream.close()

    @property
    def options(self) -> dict[str, str]:
        return {**CREDENTIALS, "endpoint": f"http://127.0.0.1:{self.port}"}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/corpus", method="PUT")).close()
    store = S3Store("corpus", endpoint=endpoint, client_options={"allow_http": True}, **CREDENTIALS)
    for name, data in objects().items():
        obstore.put(store, name, data)
    yield f"{host}:{port}"
    moto.stop()


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    made = Proxy(server)
    made.start()
    yield made
    made.stop()


TABLE = pa.table({"id": range(300), "tokens": [list(range(i % 9)) for i in range(300)], "text": ["x" * 50] * 300})
ROWS = [{"n": i, "text": f"text {i}"} for i in range(400)]
SHARD = {f"{i}.{end}": bytes([i]) * size for i in range(9) for end, size in (("jpg", 20_000), ("txt", 9))}


def objects() -> dict[str, bytes]:
    parquet, arrow, stream, shard = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(TABLE, parquet, row_group_size=100)
    with pa.ipc.new_file(arrow, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=50)
    with pa.ipc.new_stream(stream, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=50)
    with tarfile.open(fileobj=shard, mode="w") as archive:
        for name, data in SHARD.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    lines = b"".join(orjson.dumps(row) + b"\n" for row in ROWS)
    return {
        **{f"web/{part}/p-{i}.parquet": parquet.getvalue() for part in ("a", "b") for i in range(2)},
        "web/a/deep/er/x.parquet": parquet.getvalue(),
        "web/a/.hidden.parquet": b"",
        "t/a.arrow": arrow.getvalue(),
        "t/a.stream": stream.getvalue(),
        "t/a b é.jsonl": lines,
        "t/a.jsonl.zst": pa.compress(lines, codec="zstd", asbytes=True),
        "t/a.tar": shard.getvalue(),
        "t/big": bytes(range(256)) * 1024,
    }


def names(proxy: Proxy, *patterns: str) -> list[str]:
    files = Storage(tuple(proxy.options.items()), QUICK).list_files([f"s3://corpus/{pattern}" for pattern in patterns])
    return [file.path.removeprefix("s3://corpus/") for file in files]


def test_globs_and_ranges_list_keys_in_order(proxy: Proxy) -> None:
    assert names(proxy, "web/*/p-*.parquet") == [f"web/{part}/p-{i}.parquet" for part in "ab" for i in range(2)]
    assert names(proxy, "web/b/p-{0..1}.parquet", "web/a/p-[1].parquet")[-1] == "web/a/p-1.parquet"
    assert names(proxy, "web/a/**/*.parquet") == ["web/a/deep/er/x.parquet", "web/a/p-0.parquet", "web/a/p-1.parquet"]


def test_a_pattern_in_one_folder_does_not_list_the_bucket(proxy: Proxy) -> None:
    names(proxy, "web/a/*.parquet")
    assert len(proxy.requests) == 1
    assert "prefix=web%2Fa%2F" in proxy.requests[0][1]
    assert "delimiter" in proxy.requests[0][1]


def test_all_formats_read_the_same_from_a_bucket(proxy: Proxy) -> None:
    def rows(source: Parquet | ArrowIpc | Jsonl | WebDataset) -> list[dict]:
        return [row for unit in source.units() for row in source.read(unit).to_pylist()]

    options = proxy.options
    assert rows(Parquet("s3://corpus/web/a/p-0.parquet", storage_options=options)) == TABLE.to_pylist()
    for name in ("a.arrow", "a.stream"):
        source = ArrowIpc(f"s3://corpus/t/{name}", ["text", "id"], unit_bytes=5000, storage_options=options)
        assert rows(source) == TABLE.select(["text", "id"]).to_pylist()
    assert rows(Jsonl("s3://corpus/t/a b é.jsonl", unit_bytes=777, storage_options=options)) == ROWS
    assert rows(Jsonl("s3://corpus/t/*.zst", storage_options=options)) == ROWS
    shard = rows(WebDataset("s3://corpus/t/a.tar", storage_options=options))
    assert {f"{row['__key__']}.{end}": row[end] for row in shard for end in ("jpg", "txt")} == SHARD


def test_reading_a_row_group_fetches_its_columns_and_never_the_footer(proxy: Proxy) -> None:
    source = Parquet("s3://corpus/web/a/p-0.parquet", ["tokens"], storage_options=proxy.options, retry=QUICK)
    units = source.units()
    proxy.requests.clear()
    for unit in units:
        assert source.read(unit)["tokens"].to_pylist() == TABLE["tokens"][unit.index * 100 :][:100].to_pylist()
    with source.storage.stream(units[0].detail.file) as file:
        footer = pq.read_metadata(file)
    requests = proxy.requests[:3]
    chunks = [footer.row_group(i).column(1) for i in range(3)]
    assert [place for _, _, place in requests] == [
        f"bytes={start}-{start + chunk.total_compressed_size - 1}"
        for chunk in chunks
        for start in [chunk.dictionary_page_offset or chunk.data_page_offset]
    ]


def test_footers_cost_one_request_a_listed_file(proxy: Proxy) -> None:
    Parquet("s3://corpus/web/b/*.parquet", storage_options=proxy.options).units()
    assert sorted(path.partition("?")[0] for _, path, _ in proxy.requests) == [
        "/corpus", "/corpus/web/b/p-0.parquet", "/corpus/web/b/p-1.parquet",
    ]  # fmt: skip


def test_passing_faults_are_retried_and_counted(proxy: Proxy) -> None:
    store = ObjectStore("s3://corpus", proxy.options, QUICK)
    want = (bytes(range(256)) * 1024)[5:200_000]
    for fault in (500, 503, 429, 408, "drop", "cut"):
        proxy.faults.extend([fault, fault])
        before = store.num_retries
        assert store.read(BIG, 5, 200_000).to_pybytes() == want
        assert store.num_retries == before + 2
    proxy.faults.append(503)
    assert len(store.list_all("t")) >= 6  # tests of other formats keep theirs there too


def test_retries_of_sources_are_counted_by_bucket(proxy: Proxy) -> None:
    source = Jsonl("s3://corpus/t/a b é.jsonl", storage_options=proxy.options, retry=QUICK)
    units = source.units()
    before = storage_use()["s3://corpus"].num_retries
    proxy.faults.extend([503, "drop", 500])
    assert source.read(units[0]).num_rows == len(ROWS)
    assert storage_use()["s3://corpus"].num_retries == before + 3


def test_waits_follow_the_policy_and_end_at_the_deadline(proxy: Proxy) -> None:
    proxy.faults.extend([503] * 100)
    now = 0.0
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)

    retry = Retry(deadline_s=20, first_wait_s=1, factor=2, max_wait_s=6, jitter=0)
    store = ObjectStore("s3://corpus", proxy.options, retry, clock=lambda: now, sleep=sleep)
    with pytest.raises(
        StorageError, match=r"t/big: storage did not answer in 6 attempts over 19\.0 s \(deadline_s=20\).*503"
    ):
        store.read(BIG, 0, 10)
    assert waits == [1, 2, 4, 6, 6]
    with pytest.raises(StorageError, match="in 1 attempts"):
        ObjectStore("s3://corpus", proxy.options, Retry(deadline_s=0)).read(BIG, 0, 10)


@pytest.mark.parametrize("source", [Parquet, ArrowIpc, Jsonl, WebDataset])
def test_storage_that_stays_silent_is_a_storage_error_for_every_format(proxy: Proxy, source: type) -> None:
    listed = source("s3://corpus/t/b*", storage_options=proxy.options, retry=Retry(deadline_s=0))
    proxy.faults.append(503)
    with pytest.raises(StorageError, match="s3://corpus/t: storage did not answer"):
        listed.units()
    (file,) = listed.list_files()
    proxy.faults.append("list passes")
    proxy.faults.extend([503] * 10)
    with pytest.raises(StorageError, match="s3://corpus/t/big: storage did not answer"):
        listed.units()
    assert file.num_bytes == 256 * 1024


@pytest.mark.parametrize("status", [403, 401, 400])
def test_a_refusal_is_not_retried(proxy: Proxy, status: int) -> None:
    proxy.faults.append(status)
    message = "may not be read with these credentials: give others in storage_options" if status > 400 else "cannot be read"
    with pytest.raises(SourceError, match=rf"s3://corpus/t/big {message}.*{status}"):
        ObjectStore("s3://corpus", proxy.options, QUICK).read(BIG, 0, 10)
    assert len(proxy.requests) == 1


def test_a_missing_object_or_bucket_is_not_retried(proxy: Proxy) -> None:
    with pytest.raises(SourceError, match=r"s3://corpus/t/none\.parquet does not exist: check the name, and the bucket"):
        Parquet("s3://corpus/t/none.parquet", storage_options=proxy.options).units()
    with pytest.raises(SourceError, match=r"s3://nowhere/t does not exist: check the name, and the bucket"):
        Parquet("s3://nowhere/t/*.parquet", storage_options=proxy.options).units()
    assert len(proxy.requests) == 2


def test_a_pattern_without_matches_is_an_error(proxy: Proxy) -> None:
    with pytest.raises(SourceError, match=r"nothing matches s3://corpus/t/\*\.parquet"):
        Parquet("s3://corpus/t/*.parquet", storage_options=proxy.options).units()


def test_a_server_that_goes_away_and_comes_back_is_waited_for(proxy: Proxy) -> None:
    """Between two reads the server stops; the reader's first retry makes it come back."""
    options = proxy.options
    source = Parquet("s3://corpus/web/*/p-*.parquet", storage_options=options, retry=QUICK)
    units = source.units()
    back = threading.Event()

    class ComeBack(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if not back.is_set():
                proxy.start()
                back.set()

    handler = ComeBack()
    log = logging.getLogger("overlord.storage")
    log.addHandler(handler)
    try:
        tables = []
        for i, unit in enumerate(units):
            if i == len(units) // 2:
                proxy.stop()
            tables.append(source.read(unit))
    finally:
        log.removeHandler(handler)
    assert back.is_set()
    assert pa.concat_tables(tables).equals(pa.concat_tables([TABLE] * 4))


def test_large_objects_come_in_parts_and_a_fault_repeats_only_its_parts(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 10_000)
    store = ObjectStore("s3://corpus", proxy.options, QUICK)
    want = bytes(range(256)) * 1024
    assert store.read(BIG, 0, len(want)).to_pybytes() == want
    undisturbed = len(proxy.requests)
    proxy.requests.clear()
    proxy.faults.extend([503])
    assert store.read(BIG, 0, len(want)).to_pybytes() == want
    assert len(proxy.requests) <= undisturbed + object_store.PARTS_AT_ONCE


def test_an_object_that_shrank_since_it_was_listed_is_an_error(proxy: Proxy) -> None:
    longer = ListedObject("t/big", 999_999, "")
    store = ObjectStore("s3://corpus", proxy.options, QUICK)
    with pytest.raises(
        SourceError, match=r"t/big has changed since it was listed: it has 262,144 bytes .* had 999,999 bytes"
    ):
        store.read(longer, 100, 999_999)
    with pytest.raises(SourceError, match=r"t/big has changed since it was listed: it has become shorter"):
        store.read(longer, 300_000, 999_999)


def put(server: str, name: str, data: bytes) -> None:
    store = S3Store("corpus", endpoint=f"http://{server}", client_options={"allow_http": True}, **CREDENTIALS)
    obstore.put(store, name, data)


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("source", "name"), [(Parquet, "web/a/p-0.parquet"), (ArrowIpc, "t/a.arrow"), (Jsonl, "t/a b é.jsonl")]
)
def test_an_object_that_is_replaced_by_one_of_the_same_size_is_an_error(
    proxy: Proxy, server: str, source: type, name: str
) -> None:
    content = objects()[name]
    put(server, f"new/{name}", content)
    listed = source(f"s3://corpus/new/{name}", storage_options=proxy.options, retry=QUICK)
    units = listed.units()
    listed.read(units[0])
    put(server, f"new/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        SourceError, match=r"s3://corpus/new/.* has changed since it was listed: .* the version [0-9a-f]{32}, and had"
    ):
        listed.read(units[0])


@pytest.mark.strangers
@pytest.mark.parametrize("is_listed", [True, False])
def test_parts_of_two_versions_of_an_object_are_never_mixed(
    proxy: Proxy, server: str, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 10_000)
    put(server, "new/big", b"a" * 55_000)
    store = ObjectStore("s3://corpus", proxy.options, QUICK)
    listed = store.head("new/big") if is_listed else ListedObject("new/big", 55_000, "")
    proxy.faults.extend(["pass", "pass", lambda: put(server, "new/big", b"b" * 55_000)])
    with pytest.raises(SourceError, match=r"s3://corpus/new/big has changed since it was listed"):
        store.read(listed, 0, 55_000)


@pytest.mark.strangers
def test_names_with_special_characters_can_be_named(proxy: Proxy, server: str) -> None:
    lines = b'{"n": 1}\n'
    for name in ("a%20b", "a#b", "a b", "é", "f[1]", "g{x}", "h?"):
        put(server, f"odd/{name}.jsonl", lines)
    for named in ("a%20b", "a#b", "a b", "é", "f[[]1]", "g[{]x[}]", "g[{]x}", "h[?]"):
        source = Jsonl(f"s3://corpus/odd/{named}.jsonl", storage_options=proxy.options, retry=QUICK)
        assert [source.read(unit).to_pylist() for unit in source.units()] == [[{"n": 1}]], named
    with pytest.raises(SourceError, match=r"nothing matches .*f\[1\]\.jsonl.*written with that character in brackets"):
        names(proxy, "odd/f[1].jsonl")
    with pytest.raises(SpecError, match=r"is not a valid name: .*no line breaks"):
        names(proxy, "odd/a\nb")
    with pytest.raises(SpecError, match=r"is not a valid name"):
        names(proxy, "odd//b")


@pytest.mark.strangers
def test_an_object_named_by_two_patterns_is_refused(proxy: Proxy) -> None:
    with pytest.raises(SpecError, match=r"web/a/p-0\.parquet is named twice, by '.*\*\.parquet' and by '.*p-0\.parquet'"):
        names(proxy, "web/a/*.parquet", "web/a/p-0.parquet")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(
        SpecError, match=r"s3://other needs the extra 'object-stores': pip install 'overlord-dataloader\[object-stores\]'"
    ):
        Storage().list_files(["s3://other/x"])


def test_options_that_are_not_understood_are_refused() -> None:
    with pytest.raises(SpecError, match=r"storage_options for s3://corpus are not understood: .*nonsense"):
        Storage((("nonsense", "1"),)).list_files(["s3://corpus/x"])


def test_plain_http_servers_can_be_read() -> None:
    data = b"".join(orjson.dumps(row) + b"\n" for row in ROWS)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            begin, _, end = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            part = data[int(begin) : int(end or len(data)) + 1]
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Last-Modified", "Mon, 12 Oct 2009 17:50:00 GMT")
            if "Range" in self.headers:
                self.send_header("Content-Range", f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(part)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = LoopbackServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        source = Jsonl(f"http://127.0.0.1:{server.server_port}/x/a.jsonl", unit_bytes=1000, retry=QUICK)
        assert [row for unit in source.units() for row in source.read(unit).to_pylist()] == ROWS
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
