"""The page over HTTP: one document, one stream of server-sent events, and the steps that somebody asks for.

The rules are those of the Flight server: loopback needs no token unless the user gives one, any other address does, and the
comparison takes constant time. The document is the same for every run and has nothing of the job, so it is sent to anybody;
what it shows is fetched with the token. Requests can change nothing. Where no token is needed, the host that a request names
must be this machine: a foreign web site that lets its name point here could otherwise read the run through its visitor's
browser.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import socket
import threading
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import orjson

from overlord.errors import OverlordError, SpecError
from overlord.service.auth import HEADER, SCHEME, Address, is_token
from overlord.service.page.watching import RunWatcher, Viewer
from overlord.service.step_summary import summarise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from overlord.service.auth import Listen
    from overlord.service.page.watching import PagedRun, TimeRange
    from overlord.service.step_documents import StepHistory

_log = logging.getLogger(__name__)
_SCRIPTS = ("core.js", "charts.js", "overview.js", "steps.js", "main.js")
_HEARTBEAT_S = 5.0
_MOST_VIEWERS = 64
_MOST_UNSENT = 8  # messages; a viewer that takes none for longer is sent away, and comes back for a snapshot
_CLOSE_S = 3.0
_NAMED_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:]*)(:\d*)?")


class PageServer:
    """Serves the page of a run until it is closed."""

    def __init__(self, listen: Listen, run: PagedRun, steps: StepHistory) -> None:
        uvicorn = _import_library()
        bound = listen.bound
        listening = _open_socket(bound)
        public = str(Address.parse(listen.public_address(listening.getsockname()[1]))).partition("://")[2]
        self.url = f"{'http' if listen.tls is None else 'https'}://{public}/"
        self._watcher = RunWatcher(run)
        app = _Guard(_make_app(self._watcher, _StepAnswers(run, steps)), listen)
        tls = {} if listen.tls is None else {"ssl_certfile": listen.tls.certificate, "ssl_keyfile": listen.tls.key}
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=4 * _MOST_VIEWERS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
            **tls,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listening]}, name="overlord-page", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._watcher.close()
        self._server.should_exit = True
        self._thread.join(_CLOSE_S)


def _open_socket(bound: Address) -> socket.socket:
    try:
        family, _, _, _, target = socket.getaddrinfo(bound.host, bound.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family, backlog=128)
    except OSError as error:
        raise SpecError(
            f"cannot serve the page on {bound.host}:{bound.port}: {error.strerror}; choose a free port (port 0: any)"
        ) from error


class _Guard:
    """Lets in who may come, and adds the headers that keep the page to itself. Every answer passes through it."""

    def __init__(self, app: ASGIApp, listen: Listen) -> None:
        self._app = app
        self._token = listen.token
        self._policy = _content_policy()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.responses import PlainTextResponse

        if scope["type"] != "http":
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        problem = self._find_problem(scope["path"], headers)
        answer: ASGIApp = self._app if problem is None else PlainTextResponse(problem[1] + "\n", problem[0])
        more = [
            (b"content-security-policy", self._policy),
            (b"x-content-type-options", b"nosniff"),
            (b"x-frame-options", b"DENY"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
            (b"cache-control", b"no-store"),
        ]
        if problem is not None and problem[0] == 401:
            more.append((b"www-authenticate", b"Bearer"))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _find_problem(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        if self._token is None:
            named = _NAMED_HOST.fullmatch(headers.get(b"host", b"").decode("latin-1"))
            host = "" if named is None else named[1].strip("[]")
            if not Address(host or "?", 0).is_loopback:
                return 403, (
                    "this service answers to localhost and 127.0.0.1 only; to reach it under another name, give it a token"
                )
        elif path != "/":
            given = headers.get(HEADER.encode(), b"")
            if not is_token(given, f"{SCHEME}{self._token}"):
                what = "a wrong token" if given else "no token"
                _log.warning("refused a request for the page: it carried %s", what)
                return 401, f"this service requires its token, and the request carried {what}"
        return None


def _make_app(watcher: RunWatcher, steps: _StepAnswers) -> Starlette:
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, StreamingResponse
    from starlette.routing import Route

    page = _read_page()

    async def send_page(_: Request) -> Response:
        return HTMLResponse(page)

    async def stream(request: Request) -> Response:
        if watcher.num_viewers >= _MOST_VIEWERS:
            return _problem(503, f"{_MOST_VIEWERS} viewers watch already; close a page")
        wanted = request.query_params.get("range", "recent")
        if wanted not in ("recent", "long"):
            return _problem(400, f"range is recent or long, got {wanted[:32]!r}")
        return StreamingResponse(_messages(watcher, wanted), media_type="text/event-stream")

    async def step(request: Request) -> Response:
        return await asyncio.to_thread(steps.plan, request.path_params["step"])

    async def newest(_: Request) -> Response:
        return await asyncio.to_thread(steps.newest)

    async def documents(request: Request) -> Response:
        return await asyncio.to_thread(steps.documents, request.path_params["step"], request.path_params["microbatch"])

    return Starlette(
        routes=[
            Route("/", send_page),
            Route("/api/stream", stream),
            Route("/api/step/now", newest),
            Route("/api/step/{step:int}", step),
            Route("/api/step/{step:int}/microbatch/{microbatch:int}", documents),
        ]
    )


async def _messages(watcher: RunWatcher, wanted: TimeRange) -> AsyncIterator[bytes]:
    """What one viewer gets, until it leaves or the run ends."""
    loop = asyncio.get_running_loop()
    unsent: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(message: bytes | None) -> None:
        unsent.put_nowait(None if unsent.qsize() >= _MOST_UNSENT else message)

    viewer = Viewer(wanted, lambda message: _call_in(loop, put, message))
    await asyncio.to_thread(watcher.join, viewer)
    try:
        while True:
            try:
                message = await asyncio.wait_for(unsent.get(), _HEARTBEAT_S)
            except TimeoutError:
                message = b": nothing new\n\n"
            if message is None:
                return
            yield message
    finally:
        watcher.leave(viewer)


def _call_in(loop: asyncio.AbstractEventLoop, put: Any, message: bytes | None) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(put, message)


class _StepAnswers:
    """Answers for the step explorer, one at a time: reading rows again must not keep a run's loaders busy."""

    def __init__(self, run: PagedRun, steps: StepHistory) -> None:
        self._run = run
        self._steps = steps
        self._lock = threading.Lock()

    def plan(self, step: int) -> Response:
        with self._lock:
            try:
                looked = self._steps.look_at(step)
                if looked is None:
                    return _problem(404, self._describe_missing(step))
                found, ranks = summarise(step, looked.plan), looked.ranks()
            except OverlordError as error:
                return _problem(503, str(error))
        return _json(
            {
                "step": step,
                "recorded": looked.is_recorded,
                "any": self._steps.is_recorded,
                "axis": found.axis,
                "loss_tokens": found.loss_tokens,
                "counts": found.num_microbatches,
                "samples": found.micro_samples,
                "tokens": found.micro_tokens,
                "costs": found.micro_costs,
                "group_costs": found.group_costs,
                "ranks": ranks,
                "sources": {name: [count, found.tokens[name]] for name, count in found.samples.items() if count},
                "stages": found.stages,
            }
        )

    def newest(self) -> Response:
        """The step that ranks take now; where they are quicker than the question, the newest planned one."""
        with self._lock:
            try:
                return _json({"step": self._steps.newest(self._run.metrics().step)})
            except OverlordError as error:
                return _problem(503, str(error))

    def documents(self, step: int, microbatch: int) -> Response:
        with self._lock:
            try:
                found = self._steps.documents(step, microbatch)
                if found is None:
                    return _problem(404, self._describe_missing(step))
            except SpecError as error:
                return _problem(404, str(error))
            except OverlordError as error:
                return _problem(503, str(error))
        return _json([[each.source, each.file, each.row, each.tokens] for each in found])

    def _describe_missing(self, step: int) -> str:
        status = self._run.status()
        if status.end is not None and step >= status.end:
            return f"the run ends before step {step:,}: it has {status.end:,} steps"
        if step >= status.reached:
            return f"step {step:,} is not planned yet: the planner has reached step {status.reached:,}"
        if self._steps.is_recorded:
            return (
                f"step {step:,} is not in the log: the run begins at step {status.start:,}"
                if step < status.start
                else f"step {step:,} is not in the log yet: it is written within 16 steps, unless a planner was lost before"
            )
        return (
            f"the plan of step {step:,} is no longer kept: the run keeps those from about step {status.oldest_needed:,} on. "
            f"A run with a log (log=..., `overlord serve --log`) shows any step; `overlord trace job.py --step {step}` "
            "draws this one again"
        )


def _json(value: object) -> Response:
    from starlette.responses import Response

    return Response(orjson.dumps(value), media_type="application/json")


def _problem(status: int, text: str) -> Response:
    from starlette.responses import Response

    return Response(orjson.dumps({"error": text}), status, media_type="application/json")


def _read_page() -> str:
    """The document with its style and its script inside: one request, and nothing from elsewhere."""
    style, script = _read_parts()
    return _read("page.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)


def _read_parts() -> tuple[str, str]:
    return _read("page.css"), "\n".join(_read(name) for name in _SCRIPTS)


def _content_policy() -> bytes:
    """Only our own script and style may run, and only this service may be asked."""
    style, script = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in _read_parts())
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ).encode()


def _read(name: str) -> str:
    return files("overlord.service.page").joinpath(name).read_text("utf-8")


def _import_library() -> Any:
    try:
        import_module("starlette.applications")
        return import_module("uvicorn")
    except ImportError as error:
        raise SpecError(
            "the page needs the extra 'page': pip install 'overlord-dataloader[page]'; `overlord top` shows a run in the "
            "terminal without it"
        ) from error
