"""Writes who did what when to a file: `profile="out.json"`, for Perfetto (ui.perfetto.dev) or chrome://tracing. The word
`otel` sends it to OpenTelemetry instead (telemetry.py).

A thread collects the spans of all processes of a run once a second and appends them in the Trace Event format. Its form is a
list that needs no end, so the file can be opened while the run goes on, or after it was killed. A file that has grown to
`MOST_BYTES` becomes NAME.previous.json and a new one begins: there are never more than two, and they have the newest part.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from overlord.errors import ClosedError, SpecError, WaitTimeoutError, WorkerDiedError
from overlord.roles.loader_host import LoaderHost
from overlord.roles.planner import Planner
from overlord.runtime.liveness import ROLE_BUSY
from overlord.service.constructor import ServingConstructor
from overlord.service.telemetry import OTEL, TelemetryWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import BinaryIO

    from overlord.runtime.engine import Handle, Reply
    from overlord.runtime.events import Event, EventRing
    from overlord.runtime.recorder import SpanBatch

EVERY_S = 1.0
MOST_BYTES = 64 << 20
_log = logging.getLogger(__name__)
_GONE = (ClosedError, WaitTimeoutError, WorkerDiedError)


class SpanWriter(Protocol):
    """Where spans and events go. One thread at a time calls it; OSError ends the profile."""

    @property
    def place(self) -> str: ...

    def add(self, role: str, batch: SpanBatch) -> None: ...

    def add_events(self, events: Iterable[Event]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def writer_to(place: str | os.PathLike[str]) -> SpanWriter:
    """The writer that `profile=` names: a file, or the word `otel`."""
    return TelemetryWriter() if os.fspath(place) == OTEL else ProfileWriter(place)


class ProfileWriter:
    """A file of spans and events. One thread at a time may call it."""

    def __init__(self, path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> None:
        self.path = Path(path)
        self.place = str(self.path)
        self._most_bytes = most_bytes
        self._file = self._open()
        self._num_bytes = 0
        self._processes: dict[tuple[str, int], int] = {}
        self._tracks: dict[tuple[int, str], int] = {}
        self._roles: dict[int, list[str]] = {}

    def _open(self) -> BinaryIO:
        try:
            file = self.path.open("wb")
        except OSError as error:
            raise SpecError(f"the profile cannot be written to {self.path}: {error.strerror}; name another file") from error
        file.write(b"[\n")
        return file

    def add(self, role: str, batch: SpanBatch) -> None:
        """Add the spans of a process, as a role in it has told them."""
        process = self._number_of(batch.node, batch.process, role)
        for name, track, began_s, seconds, more in batch.spans:
            span = {"name": name, "ph": "X", "pid": process, "tid": self._track(process, track)}
            span |= {"ts": round(began_s * 1e6, 1), "dur": round(seconds * 1e6, 1)}
            self._write(span | ({"args": more} if more else {}))
        if self._num_bytes > self._most_bytes:
            self._turn_over()

    def add_events(self, events: Iterable[Event]) -> None:
        """Add what happened, as marks across all tracks."""
        for event in events:
            mark = {"name": f"{event.kind}: {event.text}", "ph": "i", "s": "g", "pid": 0, "tid": 0}
            self._write(mark | {"ts": round(event.at_s * 1e6, 1)})

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        # The last entry has no comma after it, so that strict parsers take the file too.
        self._file.write(orjson.dumps({"name": "end", "ph": "M", "pid": 0, "args": {}}) + b"\n]\n")
        self._file.close()

    def _number_of(self, node: str, process: int, role: str) -> int:
        """The number of a process in the file. Those of several machines may have the same id."""
        number = self._processes.setdefault((node, process), len(self._processes) + 1)
        roles = self._roles.setdefault(number, [])
        if role not in roles:
            roles.append(role)
            self._write_name("process_name", number, 0, f"{', '.join(roles[:4])} (process {process} on {node})")
        return number

    def _track(self, process: int, name: str) -> int:
        found = self._tracks.get((process, name))
        if found is None:
            found = self._tracks[process, name] = len(self._tracks) + 1
            self._write_name("thread_name", process, found, name)
        return found

    def _write_name(self, kind: str, process: int, track: int, name: str) -> None:
        self._write({"name": kind, "ph": "M", "pid": process, "tid": track, "args": {"name": name}})

    def _write(self, entry: dict[str, Any]) -> None:
        line = orjson.dumps(entry)
        self._file.write(line + b",\n")
        self._num_bytes += len(line) + 2

    def _turn_over(self) -> None:
        """Begin another file; names are written again, so that each file can be read alone."""
        self.close()
        self.path.replace(self.path.with_name(f"{self.path.stem}.previous{self.path.suffix}"))
        self._file, self._num_bytes = self._open(), 0
        for (node, process), number in self._processes.items():
            roles = ", ".join(self._roles[number][:4])
            self._write_name("process_name", number, 0, f"{roles} (process {process} on {node})")
        for (process, name), track in self._tracks.items():
            self._write_name("thread_name", process, track, name)


class Profiler:
    """Collects the spans of a run until it is closed."""

    def __init__(
        self,
        writer: SpanWriter,
        planner: Handle[Planner],
        constructors: Sequence[Handle[ServingConstructor]],
        hosts: Callable[[], Sequence[Handle[LoaderHost]]],
        events: EventRing,
    ) -> None:
        """`constructors` is read each time, and may change."""
        self._writer = writer
        self._planner = planner
        self._constructors = constructors
        self._hosts = hosts
        self._events = events
        self._num_events = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="overlord-profile", daemon=True)
        self._collect()
        self._thread.start()

    def close(self) -> None:
        """Collect once more, and end the file. Before the roles are stopped."""
        self._closing.set()
        self._thread.join(ROLE_BUSY.after_s + EVERY_S)
        if not self._thread.is_alive():
            try:
                self._collect()
                self._writer.close()
            except OSError as error:
                _log.warning("the profile at %s has no end: %s", self._writer.place, error)

    def _run(self) -> None:
        while not self._closing.wait(EVERY_S):
            try:
                self._collect()
                self._writer.flush()
            except OSError as error:
                _log.warning("the profile at %s is not written any more: %s", self._writer.place, error)
                return

    def _collect(self) -> None:
        replies: list[tuple[str, Reply[SpanBatch]]] = []
        with suppress(*_GONE):
            replies.append((self._planner.name, self._planner.call(Planner.take_spans)))
        for host in self._hosts():
            with suppress(*_GONE):
                replies.append((host.name, host.call(LoaderHost.take_spans)))
        for constructor in list(self._constructors):
            with suppress(*_GONE):
                replies.append((constructor.name, constructor.call(ServingConstructor.take_spans)))
        for role, reply in replies:
            with suppress(*_GONE):
                batch = reply.result(ROLE_BUSY.after_s)
                if batch.num_lost:
                    _log.warning("the profile lacks %d spans of %s: more came than were collected", batch.num_lost, role)
                self._writer.add(role, batch)
        events = self._events.recent()
        self._writer.add_events(event for event in events if event.number >= self._num_events)
        self._num_events = events[-1].number + 1 if events else self._num_events
