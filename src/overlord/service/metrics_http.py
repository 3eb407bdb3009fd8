"""`/metrics` over HTTP, for Prometheus: the table of `metric_table.py` in its text format.

The rules are those of the Flight server: loopback needs no token unless the user gives one, any other address does, and the
comparison takes constant time. A scrape that comes within a second of another gets the same figures, so that scrapers cannot
keep the run busy. It answers GET /metrics and nothing else.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from overlord.errors import OverlordError, SpecError
from overlord.service.auth import HEADER, SCHEME, Address, is_token
from overlord.service.metric_table import FAMILIES, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from overlord.service.auth import Listen
    from overlord.status import RunMetrics

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FRESH_S = 1.0
_REQUEST_S = 10.0  # for a request to arrive and its answer to be taken
_log = logging.getLogger(__name__)


def render(metrics: RunMetrics) -> bytes:
    """The metrics of a run in Prometheus' text format."""
    library = _import_library()
    registry = library.CollectorRegistry(auto_describe=False)
    registry.register(PrometheusCollector(lambda: metrics))
    return library.generate_latest(registry)


class PrometheusCollector:
    """The metrics of a run for a registry of `prometheus_client`, as in
    `REGISTRY.register(PrometheusCollector(loader.metrics))`."""

    def __init__(self, metrics: Callable[[], RunMetrics]) -> None:
        _import_library()
        self._metrics = metrics

    def describe(self) -> list[Any]:
        """Nothing: the registry need not ask the run for its names."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        metrics = self._metrics()
        for family in FAMILIES:
            if family.kind == "histogram":
                made = HistogramMetricFamily(family.name, family.help, labels=family.labels)
                for labels, found in family.values(metrics):
                    assert isinstance(found, Histogram)  # as its kind says
                    made.add_metric(labels, found.cumulative(), found.total)
            else:
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                made = kind(family.name, family.help, labels=family.labels)
                for labels, value in family.values(metrics):
                    assert not isinstance(value, Histogram)  # as its kind says
                    made.add_metric(labels, value)
            yield made


class MetricsServer:
    """Serves the metrics of a run until it is closed."""

    def __init__(
        self, listen: Listen, metrics: Callable[[], RunMetrics], clock: Callable[[], float] = time.monotonic
    ) -> None:
        _import_library()
        self._metrics = metrics
        self._clock = clock
        self._token = listen.token
        self._lock = threading.Lock()
        self._fresh: tuple[float, bytes] | None = None
        bound = listen.bound
        try:
            self._server = _Server((bound.host, bound.port), self)
        except OSError as error:
            raise SpecError(
                f"cannot serve metrics on {bound.host}:{bound.port}: {error.strerror}; choose a free port (port 0: any)"
            ) from error
        if listen.tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(listen.tls.certificate, listen.tls.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        public = Address.parse(listen.public_address(self._server.server_address[1]))
        scheme = "http" if listen.tls is None else "https"
        self.url = f"{scheme}://{str(public).partition('://')[2]}/metrics"
        threading.Thread(target=self._server.serve_forever, name="overlord-metrics", daemon=True).start()

    def answer(self, path: str, given: str) -> tuple[int, bytes]:
        """The status and the body for a request with this value of the header `Authorization`."""
        if self._token is not None and not is_token(given, f"{SCHEME}{self._token}"):
            what = "a wrong token" if given else "no token"
            _log.warning("refused a request for %s: it carried %s", path[:64], what)
            return (
                401,
                f"this service requires its token, and the request carried {what}: Authorization: Bearer ...\n".encode(),
            )
        if path.partition("?")[0] != "/metrics":
            return 404, b"this service answers /metrics\n"
        with self._lock:
            if self._fresh is None or self._clock() - self._fresh[0] >= _FRESH_S:
                try:
                    self._fresh = self._clock(), render(self._metrics())
                except OverlordError as error:
                    return 503, f"{error}\n".encode()
            return 200, self._fresh[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], metrics: MetricsServer) -> None:
        import socket

        self.metrics = metrics
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002 - of the base class
        _log.debug("a request for metrics ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version, sys_version = "overlord", ""

    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)  # made there
        status, body = self.server.metrics.answer(self.path, self.headers.get(HEADER) or "")
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", _CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug(format, *args)


def _import_library() -> Any:
    try:
        import prometheus_client
    except ImportError as error:
        raise SpecError(
            "serving metrics needs the extra 'metrics': pip install 'overlord-dataloader[metrics]'; "
            "Loader.metrics() returns the same figures without it"
        ) from error
    return prometheus_client
