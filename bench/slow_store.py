"""An object store on loopback that takes its time: so long for each request, so many bytes a second for all together.

    python -m bench.slow_store FOLDER [--latency S] [--bytes-per-s N]

Serves the files of a folder as the objects of the bucket `data`, by as much of S3's protocol as readers use: HEAD, GET with
a range, and lists of objects. Prints its port. Ends with its standard input.
"""

from __future__ import annotations

import argparse
import bisect
import hashlib
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PAGE = 1000
PIECE = 1 << 16
OPTIONS = {"access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}


class Limiter:
    """Lets so many bytes pass in a second, over all threads."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._bytes_per_s
            wait = self._free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


class LoopbackServer(ThreadingHTTPServer):
    """Takes many connections at once: socketserver's queue holds five, and the clients that find no place in it wait for a
    second or more."""

    request_queue_size = 128


class SlowStore:
    """Serves objects by name to content. `requests` has a line for each request; `names` lists more without any content."""

    def __init__(
        self, objects: Mapping[str, bytes], *, latency_s: float = 0.0, bytes_per_s: float = 1e12, names: int = 0
    ) -> None:
        self.objects = dict(objects)
        self.requests: list[str] = []
        self.latency_s = latency_s
        self._limiter = Limiter(bytes_per_s)
        self._listed = sorted(self.objects) or [f"many/{i:06d}.parquet" for i in range(names)]
        store = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                store.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = LoopbackServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def options(self) -> dict[str, str]:
        return {**OPTIONS, "endpoint": f"http://127.0.0.1:{self.port}"}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(request.path)
        key = urllib.parse.unquote(url.path).removeprefix("/data").strip("/")
        self.requests.append(f"{request.command} {key or url.query} {request.headers.get('Range', '')}".strip())
        time.sleep(self.latency_s)
        if not key:
            self._send(
                request, 200, self._list(dict(urllib.parse.parse_qsl(url.query))), {"Content-Type": "application/xml"}
            )
            return
        content = self.objects.get(key)
        if content is None:
            self._send(request, 404, b"", {})
            return
        headers = {
            "ETag": f'"{tag_of(content)}"',
            "Last-Modified": "Mon, 01 Jun 2026 00:00:00 GMT",
            "Accept-Ranges": "bytes",
        }
        asked = request.headers.get("Range", "")
        if request.command == "GET" and asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(content)}"
            self._send(request, 206, content[int(first) : stop], headers)
            return
        self._send(request, 200, content, headers)

    def _send(self, request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command == "HEAD":
            return
        view = memoryview(body)
        while len(view):
            self._limiter.take(min(PIECE, len(view)))
            request.wfile.write(view[:PIECE])
            view = view[PIECE:]

    def _list(self, query: Mapping[str, str]) -> bytes:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        begin = bisect.bisect_right(self._listed, after) if after else bisect.bisect_left(self._listed, prefix)
        page = [name for name in self._listed[begin : begin + PAGE] if name.startswith(prefix)]
        entries = "".join(
            f"<Contents><Key>{name}</Key><LastModified>2026-06-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{tag_of(self.objects.get(name, name.encode()))}&quot;</ETag>"
            f"<Size>{len(self.objects.get(name, b''))}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            for name in page
        )
        more = len(page) == PAGE and self._listed[begin + PAGE : begin + PAGE + 1] > [prefix]
        token = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>data</Name><Prefix>{prefix}</Prefix><KeyCount>{len(page)}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{entries}</ListBucketResult>"
        ).encode()


_tags: dict[int, tuple[bytes, str]] = {}


def tag_of(content: bytes) -> str:
    known = _tags.get(id(content))
    if known is None or known[0] is not content:
        known = content, hashlib.md5(content, usedforsecurity=False).hexdigest()
        if len(content) > PIECE:
            _tags[id(content)] = known
    return known[1]


def files_of(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield os.path.relpath(path, folder), path.read_bytes()


def main(argv: list[str] | None = None, wait: Callable[[], Any] = sys.stdin.read) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=0.05)
    parser.add_argument("--bytes-per-s", type=float, default=50e6)
    given = parser.parse_args(argv)
    store = SlowStore(dict(files_of(given.folder)), latency_s=given.latency, bytes_per_s=given.bytes_per_s)
    print(store.port, flush=True)
    wait()
    store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
