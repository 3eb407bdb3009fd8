"""Hadoop's file system by fsspec: `webhdfs://` against a server on loopback that speaks its protocol, as name node and as
data node; and `hdfs://` by fsspec's class for it, over files in place of libhdfs, which needs Java."""

import http.server
import json
import os
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

import overlord as ol
from bench.slow_store import LoopbackServer
from overlord.errors import SourceError, StorageError
from overlord.sources import object_store
from overlord.sources.object_store import Retry
from overlord.sources.storage import Storage, storage_use

pytest.importorskip("requests")

QUICK = Retry(deadline_s=5, first_wait_s=0.001, max_wait_s=0.002)


class Cluster:
    """Serves the files of a folder as WebHDFS does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults: list[int] = []
        self.requests: list[str] = []
        self.num_bytes = 0
        self.port = 0

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(request.path)
        asked = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        path = self.folder / urllib.parse.unquote(url.path).removeprefix("/webhdfs/v1").removeprefix("/data").lstrip("/")
        self.requests.append(f"{asked.get('op', 'DATA')} {path.relative_to(self.folder)}")
        if not path.exists():
            return self._refuse(request, 404, "FileNotFoundException", f"File does not exist: /{path.name}")
        if url.path.startswith("/data/"):
            if self.faults:
                return self._send(request, self.faults.pop(0), b"<html>the data node is busy</html>")
            start = int(asked["offset"])
            data = path.read_bytes()[start : start + int(asked["length"])]
            self.num_bytes += len(data)
            return self._send(request, 200, data)
        if not os.access(path, os.R_OK) or path.name == "secret.txt":
            return self._refuse(request, 403, "AccessControlException", "Permission denied: user=dr.who")
        if asked["op"] == "OPEN":
            range_of = url.query.replace("op=OPEN", "op=DATA")
            where = f"http://127.0.0.1:{self.port}/data/{path.relative_to(self.folder)}?{range_of}"
            return self._send(request, 307, b"", {"Location": where})
        if asked["op"] == "GETFILESTATUS":
            return self._send(request, 200, json.dumps({"FileStatus": _status(path, "")}).encode())
        listed = [path] if path.is_file() else sorted(path.iterdir())
        statuses = [_status(each, "" if path.is_file() else each.name) for each in listed]
        return self._send(request, 200, json.dumps({"FileStatuses": {"FileStatus": statuses}}).encode())

    def _refuse(self, request: Any, status: int, kind: str, message: str) -> None:
        self._send(request, status, json.dumps({"RemoteException": {"exception": kind, "message": message}}).encode())

    def _send(self, request: Any, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(body)


def _status(path: Path, suffix: str) -> dict[str, Any]:
    found = path.stat()
    return {
        "type": "DIRECTORY" if path.is_dir() else "FILE",
        "length": 0 if path.is_dir() else found.st_size,
        "modificationTime": found.st_mtime_ns // 10**6,
        "pathSuffix": suffix,
        "permission": "644",
    }


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    object_store._stores.clear()
    (tmp_path / "corpus" / "deep").mkdir(parents=True)
    for i in range(3):
        table = pa.table({"tokens": [[row] * (row % 5 + 1) for row in range(20 * i, 20 * i + 20)]})
        pq.write_table(table, tmp_path / "corpus" / f"{i}.parquet", row_group_size=5)
        (tmp_path / "corpus" / "deep" / f"{i}.jsonl").write_text('{"tokens": [1]}\n')
    (tmp_path / "large.bin").write_bytes(bytes(range(256)) * 4000)
    made = Cluster(tmp_path)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # an answer in one packet

        def do_GET(self) -> None:
            made.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = LoopbackServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    made.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_source_on_webhdfs_keeps_its_promises(cluster):
    source = ol.Parquet(f"webhdfs://127.0.0.1:{cluster.port}/corpus/*.parquet")
    units = source.units()
    assert len(units) == 12
    assert all(unit.version for unit in units)
    assert [row["tokens"][0] for row in source.read(units[5]).to_pylist()] == [25, 26, 27, 28, 29]
    ol.testing.assert_source_keeps_its_promises(ol.Parquet(f"webhdfs://127.0.0.1:{cluster.port}/corpus/0.parquet"))
    assert len(ol.Jsonl(f"webhdfs://127.0.0.1:{cluster.port}/**/*.jsonl").units()) == 3
    assert storage_use()[f"webhdfs://127.0.0.1:{cluster.port}"].num_bytes > 0


def test_a_range_is_read_without_the_megabytes_behind_it(cluster):
    storage = Storage(retry=QUICK)
    (file,) = storage.list_files([f"webhdfs://127.0.0.1:{cluster.port}/large.bin"])
    assert storage.read(file, 100, 200).to_pybytes() == bytes(range(100, 200))
    assert cluster.num_bytes < 1 << 17
    cluster.num_bytes = 0
    assert storage.read(file, 256, 513_000).to_pybytes() == (bytes(range(256)) * 4000)[256:513_000]
    assert cluster.num_bytes < 513_000 + (1 << 17)


def test_a_file_that_was_replaced_by_one_of_the_same_size_is_noticed(cluster):
    storage, path = Storage(retry=QUICK), cluster.folder / "corpus" / "deep" / "0.jsonl"
    (file,) = storage.list_files([f"webhdfs://127.0.0.1:{cluster.port}/corpus/deep/0.jsonl"])
    path.write_bytes(b"x" * file.num_bytes)
    os.utime(path, ns=(0, 10**9))
    with pytest.raises(SourceError, match=r"/corpus/deep/0\.jsonl has changed since it was listed"):
        storage.read(file, 0, 5)


def test_the_page_of_an_error_is_never_taken_for_data(cluster):
    """fsspec returns what a data node says, whatever its status."""
    storage = Storage(retry=QUICK)
    (file,) = storage.list_files([f"webhdfs://127.0.0.1:{cluster.port}/corpus/deep/0.jsonl"])
    cluster.faults = [503, 500]
    assert storage.read(file, 0, 5).to_pybytes() == b'{"tok'
    assert storage_use()[f"webhdfs://127.0.0.1:{cluster.port}"].num_retries == 2
    cluster.faults = [503]
    with pytest.raises(StorageError, match=r"0\.jsonl: storage did not answer in 1 attempts .*503 Server Error"):
        Storage(retry=Retry(deadline_s=0)).read(file, 0, 5)


def test_what_is_missing_or_forbidden_on_webhdfs_is_told_at_once(cluster):
    storage, root = Storage(retry=QUICK), f"webhdfs://127.0.0.1:{cluster.port}"
    with pytest.raises(SourceError, match=r"/corpus/none\.txt does not exist: check the name"):
        storage.list_files([f"{root}/corpus/none.txt"])
    with pytest.raises(SourceError, match=r"nothing matches webhdfs://.*/corpus/\*\.txt"):
        storage.list_files([f"{root}/corpus/*.txt"])
    (cluster.folder / "secret.txt").write_text("x")
    with pytest.raises(SourceError, match=r"/secret\.txt may not be read with these credentials"):
        storage.list_files([f"{root}/secret.txt"])


@pytest.mark.parametrize("root", ["hdfs://", "hdfs://node:8020"])
def test_hdfs_is_read_by_the_class_that_fsspec_has_for_it(cluster, monkeypatch, root):
    reached: list[tuple[str, int]] = []

    def connect(host: str, port: int, **_: Any) -> pyarrow.fs.FileSystem:
        reached.append((host, port))
        return pyarrow.fs.SubTreeFileSystem(str(cluster.folder), pyarrow.fs.LocalFileSystem())

    monkeypatch.setattr(pyarrow.fs, "HadoopFileSystem", connect, raising=False)
    source = ol.Parquet(f"{root}/corpus/*.parquet", retry=QUICK)
    units = source.units()
    assert reached == [("node", 8020) if "node" in root else ("default", 0)]
    assert sorted({unit.path for unit in units}) == [f"{root}/corpus/{i}.parquet" for i in range(3)]
    assert source.read(units[0])["tokens"].to_pylist()[:2] == [[0], [1, 1]]
    lines = ol.Jsonl(f"{root}/corpus/deep/0.jsonl", retry=QUICK)
    assert lines.read(lines.units()[0])["tokens"].to_pylist() == [[1]]  # from its first byte on
    os.utime(cluster.folder / "corpus" / "2.parquet", ns=(0, 10**9))
    with pytest.raises(SourceError, match=rf"{root}/corpus/2\.parquet has changed since it was listed"):
        source.read(units[-1])
