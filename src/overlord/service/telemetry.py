"""Sends who did what when to OpenTelemetry: `profile="otel"`, with the extra `otel`.

The spans are those of the profile for Perfetto (profile.py), collected in the same way. They go to the tracer provider of
this process if the program has set one; otherwise to one of our own, which exports over OTLP and HTTP as the environment
says (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME, ...).

Everything that was done for a step is one trace: the first span of a step that is collected, as a rule its plan, is the
parent of those that come later. Spans that lie inside another on one thread, as reading a unit lies inside making a chunk,
are its children.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError
from overlord.runtime.recorder import MOST_SPANS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

    from overlord.runtime.events import Event
    from overlord.runtime.recorder import SpanBatch, TimedSpan

OTEL = "otel"
"""The word that stands for OpenTelemetry where a profile is named."""
_MOST_STEPS = 4096  # whose first span is remembered
_NUMBERED = re.compile(r"(.*?\b(step|chunk)) (\d+)\b")
_READ = "read "


class TelemetryWriter:
    """Spans and events for OpenTelemetry. One thread at a time may call it."""

    place = "OpenTelemetry"

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """`provider` gets the spans; by default that of the process, or one of our own where the process has none."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError:
            raise SpecError(
                "profile='otel' needs the extra 'otel': pip install 'overlord-dataloader[otel]'; a profile for Perfetto "
                "needs none: name a file, such as out.json"
            ) from None
        current = trace.get_tracer_provider()
        self._is_own = provider is None and not isinstance(current, TracerProvider)
        self._provider = provider or (current if isinstance(current, TracerProvider) else _exporting_provider())
        self._trace = trace
        self._tracer = self._provider.get_tracer("overlord")
        self._first_of_step: OrderedDict[int, Context] = OrderedDict()

    def add(self, role: str, batch: SpanBatch) -> None:
        """Add the spans of a process, as a role in it has told them."""
        process = {"overlord.role": role, "process.pid": batch.process, "host.name": batch.node}
        by_track: defaultdict[str, list[TimedSpan]] = defaultdict(list)
        for span in batch.spans:
            by_track[span[1]].append(span)
        for spans in by_track.values():
            self._add_track(process, spans)

    def add_events(self, events: Iterable[Event]) -> None:
        """Add what happened, as spans that take no time."""
        for event in events:
            attributes: dict[str, Any] = {"overlord.event": event.text, "process.pid": event.process}
            self._send(f"event {event.kind}", event.at_s, event.at_s, None, attributes)

    def flush(self) -> None:
        """Nothing: the provider has a thread of its own that sends."""

    def close(self) -> None:
        """Send what is left. A provider of the program's own stays open."""
        if self._is_own:
            self._provider.shutdown()
        else:
            self._provider.force_flush()

    def _add_track(self, process: dict[str, Any], spans: list[TimedSpan]) -> None:
        enclosing: list[tuple[float, Context]] = []  # ends of the spans that the next one may lie in, the innermost last
        for what, track, began_s, seconds, more in sorted(spans, key=lambda span: (span[2], -span[3])):
            ended_s = began_s + seconds
            while enclosing and enclosing[-1][0] < ended_s:
                enclosing.pop()
            name, attributes = _describe(what)
            attributes |= {**process, "thread.name": track}
            attributes |= {f"overlord.{key}": value for key, value in (more or {}).items()}
            step = attributes.get("overlord.step")
            parent = enclosing[-1][1] if enclosing else self._first_of_step.get(step) if step is not None else None
            context = self._send(name, began_s, ended_s, parent, attributes)
            enclosing.append((ended_s, context))
            if step is not None and step not in self._first_of_step:
                self._first_of_step[step] = context
                if len(self._first_of_step) > _MOST_STEPS:
                    self._first_of_step.popitem(last=False)

    def _send(
        self, name: str, began_s: float, ended_s: float, parent: Context | None, attributes: dict[str, Any]
    ) -> Context:
        from opentelemetry.context import Context

        # Without a parent an empty context, so that no span of the program that happens to be current becomes one.
        span = self._tracer.start_span(name, parent or Context(), attributes=attributes, start_time=round(began_s * 1e9))
        span.end(round(ended_s * 1e9))
        return self._trace.set_span_in_context(span, Context())


def _describe(what: str) -> tuple[str, dict[str, Any]]:
    """The name of a span and its attributes. Backends group spans by name, so it has no number in it."""
    attributes: dict[str, Any] = {"overlord.what": what}
    if what.startswith(_READ):
        return _READ.strip(), attributes
    found = _NUMBERED.match(what)
    if found is None:
        return what, attributes
    return found[1], attributes | {f"overlord.{found[2]}": int(found[3])}


def _exporting_provider() -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise SpecError(
            "profile='otel' sends spans with opentelemetry-exporter-otlp-proto-http, which is not installed: "
            "pip install 'overlord-dataloader[otel]', or set a tracer provider before the run starts"
        ) from None
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()  # from the environment
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "overlord"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=MOST_SPANS))
    return provider
