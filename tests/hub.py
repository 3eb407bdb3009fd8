"""What of the Hugging Face Hub reading needs, on loopback: repositories with revisions, listings in pages, files that are
stored in git and files that another server has, as those of Git LFS, versions in headers, rights, and faults on demand."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.slow_store import LoopbackServer

LFS_BYTES = 400
"""Files from this size on lie with the other server."""


@dataclass
class Hub:
    """Files by repository (`datasets/org/name`), revision and path."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict[str, dict[str, dict[str, bytes]]])
    page_size: int = 1000
    faults: list[int] = field(default_factory=list[int])
    """Statuses that the next answers with bytes of a file have instead."""
    token: str = ""
    requests: list[str] = field(default_factory=list[str])
    num_bytes: int = 0
    endpoint: str = ""
    elsewhere: str = ""

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        length = int(request.headers.get("Content-Length") or 0)
        form = urllib.parse.parse_qs(request.rfile.read(length).decode())
        url = urllib.parse.urlsplit(request.path)
        self.requests.append(f"{request.command} {url.path}")
        path = url.path
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}" and not path.startswith("/lfs/"):
            return _reply(request, 401, b"", {"X-Error-Code": "RepoNotFound"})  # as the Hub says it
        if path.startswith("/lfs/"):
            return self._send_bytes(request, self._by_digest(path.removeprefix("/lfs/")), {"ETag": '"of-the-other-server"'})
        if found := re.fullmatch(r"/api/(\w+)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path):
            kind, name, verb, revision, below = found.groups()
            files = self._files(f"{kind}/{name}", revision or "main")
            if files is None:
                code = "RevisionNotFound" if f"{kind}/{name}" in self.repos else "RepoNotFound"
                return _reply(request, 404, b"", {"X-Error-Code": code})
            if verb == "tree":
                return self._list(request, files, urllib.parse.unquote(below or ""))
            if verb == "paths-info":
                known = {entry["path"]: entry for entry in _tree(files, "", is_deep=True)}
                return _reply_json(request, [known[path] for path in form["paths"] if path in known])
            return _reply_json(request, {"id": name, "sha": "0" * 40, "siblings": []})
        found = re.fullmatch(r"/(?:(datasets|spaces)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.*)", path)
        if found is None:
            return _reply(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        kind, name, revision, below = found.groups()
        files = self._files(f"{kind or 'models'}/{name}", revision)
        if files is None:
            return _reply(request, 404, b"", {"X-Error-Code": "RepoNotFound"})
        data = files.get(urllib.parse.unquote(below))
        if data is None:
            return _reply(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        if len(data) < LFS_BYTES:
            return self._send_bytes(request, data, {"ETag": f'"{_git_digest(data)}"'})
        digest = hashlib.sha256(data).hexdigest()
        where = {"Location": f"{self.elsewhere}/lfs/{digest}", "X-Linked-Etag": f'"{digest}"', "ETag": '"of-the-answer"'}
        return _reply(request, 302, b"", where)

    def _files(self, repo: str, revision: str) -> dict[str, bytes] | None:
        return self.repos.get(repo, {}).get(urllib.parse.unquote(revision))

    def _by_digest(self, digest: str) -> bytes:
        contents = (data for revisions in self.repos.values() for files in revisions.values() for data in files.values())
        return next(data for data in contents if hashlib.sha256(data).hexdigest() == digest)

    def _list(self, request: Any, files: dict[str, bytes], below: str) -> None:
        url = urllib.parse.urlsplit(request.path)
        asked = urllib.parse.parse_qs(url.query)
        is_deep = asked.get("recursive", ["false"])[0].lower() == "true"
        entries = list(_tree(files, below, is_deep=is_deep))
        if not entries:
            return _reply(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        start = int(asked.get("cursor", ["0"])[0])
        headers = {}
        if start + self.page_size < len(entries):
            left = urllib.parse.urlencode({"recursive": str(is_deep).lower(), "cursor": start + self.page_size})
            headers["Link"] = f'<{self.endpoint}{url.path}?{left}>; rel="next"'
        return _reply_json(request, entries[start : start + self.page_size], headers)

    def _send_bytes(self, request: Any, data: bytes, headers: dict[str, str]) -> None:
        if self.faults:
            return _reply(request, self.faults.pop(0), b"", {})
        status = 200
        if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", "")):
            start, stop = int(asked[1]), int(asked[2]) + 1
            if start >= len(data):
                return _reply(request, 416, b"", {})
            headers = {**headers, "Content-Range": f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"}
            status, data = 206, data[start:stop]
        self.num_bytes += len(data)
        return _reply(request, status, data, headers)


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A Hub, and the other server that large files are kept on."""
    hub = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # an answer in one packet

        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    servers = [LoopbackServer(("127.0.0.1", 0), Handler) for _ in range(2)]
    hub.endpoint, hub.elsewhere = (f"http://127.0.0.1:{server.server_port}" for server in servers)
    with _serving(servers):
        yield hub


@contextmanager
def _serving(servers: list[LoopbackServer]) -> Iterator[None]:
    targets: list[Callable[[], None]] = [lambda server=server: server.serve_forever(0.01) for server in servers]
    threads = [threading.Thread(target=target) for target in targets]
    for server, thread in zip(servers, threads, strict=True):
        server.daemon_threads = True
        thread.start()
    try:
        yield
    finally:
        for server, thread in zip(servers, threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()


def _tree(files: dict[str, bytes], below: str, *, is_deep: bool) -> Iterator[dict[str, Any]]:
    told: set[str] = set()
    prefix = f"{below}/" if below else ""
    for path in sorted(files):
        if not path.startswith(prefix):
            continue
        folders = path.removeprefix(prefix).split("/")[:-1]
        for depth in range(1, len(folders) + 1 if is_deep else min(len(folders), 1) + 1):
            folder = prefix + "/".join(folders[:depth])
            if folder not in told:
                told.add(folder)
                yield {"type": "directory", "oid": "f" * 40, "size": 0, "path": folder}
        if is_deep or not folders:
            yield _entry(path, files[path])


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": _git_digest(data), "size": len(data), "path": path}
    if len(data) >= LFS_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _reply_json(request: Any, content: Any, headers: dict[str, str] | None = None) -> None:
    _reply(request, 200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})


def _reply(request: Any, status: int, body: bytes, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.send_header("Content-Length", str(len(body)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(body)
