"""Storage on loopback that fails when it is told to: files over HTTP, with ranges, errors, lost answers, stalls, and a door
that is shut."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

from bench.slow_store import LoopbackServer

ERRORS = "errors"
DROPS = "drops"
CUTS = "cuts"
STALL = "stall"


class Store:
    """Serves the files of a folder. While `fault` is set, every request meets it."""

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        self._port = 0
        self._healed = threading.Event()
        self._healed.set()
        self.fault: str | None = None
        self.num_faults = 0
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Listen, at the same address as before."""
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                store._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = LoopbackServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def shut(self) -> None:
        """Refuse connections."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def begin(self, fault: str) -> None:
        self._healed.clear()
        self.fault = fault

    def end(self) -> None:
        self.fault = None
        self._healed.set()

    def close(self) -> None:
        self.end()
        self.shut()

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        fault = self.fault
        if fault is not None:
            self.num_faults += 1
        if fault == STALL:
            self._healed.wait(60)
        if fault == DROPS:
            return
        if fault == ERRORS:
            request.send_error(503)
            return
        content = self._files.get(request.path.lstrip("/"))
        if content is None:
            request.send_error(404)
            return
        self._send(request, content, is_cut=fault == CUTS)

    def _send(self, request: http.server.BaseHTTPRequestHandler, content: bytes, is_cut: bool) -> None:
        asked = request.headers.get("Range")
        if asked is None:
            request.send_response(200)
            part = content
        else:
            first, last = asked.removeprefix("bytes=").split("-")
            begin, end = int(first), min(int(last or len(content)), len(content) - 1) + 1
            part = content[begin:end]
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        request.send_header("Content-Length", str(len(part)))
        request.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        request.end_headers()
        if request.command == "GET":
            try:
                request.wfile.write(part[: len(part) // 2] if is_cut else part)
            except ConnectionError:  # who asked has given up
                request.close_connection = True
