"""The profile of a run as spans of OpenTelemetry: in the program's own provider, and over OTLP to a collector."""

import json
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import overlord as ol
from overlord.errors import SpecError
from overlord.runtime.events import Event
from overlord.runtime.recorder import SpanBatch, TimedSpan
from tests.commands import overlord, python
from tests.service.served import two_sources

PROGRAM = """
import json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import overlord as ol
from tests.service.served import two_sources

kept = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
if __name__ == "__main__":
    with ol.start(two_sources(mesh=ol.Mesh(dp=2)), engine=ENGINE, profile="otel") as loader:
        with trace.get_tracer("trainer").start_as_current_span("epoch"):
            clients = [loader.client(rank, timeout_s=60) for rank in range(2)]
            for _ in range(12):
                for client in clients:
                    next(client)
            loader.set_weights({"a": 1, "b": 0})
    print("[" + ",".join(span.to_json() for span in kept.get_finished_spans()) + "]")
"""


@pytest.mark.parametrize("engine", ["None", "ol.Processes(2)"])
def test_everything_that_was_done_for_a_step_is_one_trace(engine, tmp_path):
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    program = tmp_path / "traced_program.py"
    program.write_text(PROGRAM.replace("ENGINE", engine))
    spans = json.loads(python(program).stdout)
    ours = [span for span in spans if span["name"] != "epoch"]
    by_id = {span["context"]["span_id"]: span for span in spans}
    names = {span["name"] for span in ours}
    assert {"plan step", "build step", "wait for step", "train on step", "make chunk", "read", "event weights"} <= names
    assert not any(any(letter.isdigit() for letter in name) for name in names), "backends group by name"
    traces: dict[int, set[str]] = defaultdict(set)
    of_step: dict[int, set[str]] = defaultdict(set)
    for span in ours:
        step = span["attributes"].get("overlord.step")
        if step is not None:
            traces[step].add(span["context"]["trace_id"])
            of_step[step].add(span["name"])
    assert all(len(found) == 1 for found in traces.values())
    assert len(set.union(*traces.values())) == len(traces)
    assert all({"plan step", "build step"} <= of_step[step] for step in range(12))
    for span in ours:
        assert span["start_time"] <= span["end_time"]
        assert {"process.pid"} <= span["attributes"].keys()
        if span["name"] == "read":
            assert by_id[span["parent_id"]]["name"] == "make chunk"
            assert "numbered" in span["attributes"]["overlord.what"]
    (epoch,) = (span for span in spans if span["name"] == "epoch")
    assert epoch["context"]["trace_id"] not in {span["context"]["trace_id"] for span in ours}
    assert len({span["attributes"]["process.pid"] for span in ours}) == (1 if engine == "None" else 3)


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that takes what is posted to it, and the bodies."""
    bodies: list[bytes] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", bodies
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("service", [None, "pretraining"])
def test_run_sends_its_spans_to_a_collector(tmp_path, monkeypatch, service):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    path = tmp_path / "traced_job.py"
    path.write_text("from tests.service.served import two_sources\njob = two_sources()\n")
    monkeypatch.chdir(tmp_path)
    with collector() as (url, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        if service is not None:
            monkeypatch.setenv("OTEL_SERVICE_NAME", service)
        overlord("run", path, "--steps", 20, "--profile", "otel")
    assert sorted(file.name for file in tmp_path.glob("otel*")) == [], "the word is no file"
    found: list[Any] = []
    for body in bodies:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            names = {each.key: each.value.string_value for each in resource.resource.attributes}
            assert names["service.name"] == (service or "overlord")
            found += [span for scope in resource.scope_spans for span in scope.spans]
    built = {
        attribute.value.int_value
        for span in found
        if span.name == "build step"
        for attribute in span.attributes
        if attribute.key == "overlord.step"
    }
    assert set(range(20)) <= built


def test_memory_for_the_traces_of_steps_is_bounded_and_names_without_a_number_stay():
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from overlord.service.telemetry import _MOST_STEPS, TelemetryWriter

    kept, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    writer = TelemetryWriter(provider)
    spans: list[TimedSpan] = [(f"plan step {n}", "planner", 1e9 + n, 0.5, None) for n in range(_MOST_STEPS + 5)]
    writer.add("planner", SpanBatch(1, "node", [*spans, ("something else", "x", 1e9, 1.0, {"rows": 3})], 0))
    assert len(writer._first_of_step) == _MOST_STEPS
    writer.add_events([Event(1e9, "restart", "loaders/0 was lost", 7, 0)])
    writer.close()
    *_, other, event = kept.get_finished_spans()
    assert (other.name, (other.attributes or {})["overlord.rows"]) == ("something else", 3)
    assert (event.name, (event.attributes or {})["overlord.event"]) == ("event restart", "loaders/0 was lost")
    assert event.start_time == event.end_time == 10**18


def test_without_the_extra_the_error_names_it_before_anything_is_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(SpecError, match=r"needs the extra 'otel': pip install 'overlord-dataloader\[otel\]'; a profile for"):
        ol.start(two_sources(), profile="otel")
