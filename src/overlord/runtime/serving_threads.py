"""Threads that serve the requests of many connections: one while requests are quick, more while some take long.

A thread for each connection is the plain way, and a slow one for quick requests: threads hand the interpreter to each other,
which costs up to a third of the CPU time of requests that take half a millisecond. So one thread, which leads, polls all
connections and serves what it finds. Another takes the lead over when a request turns out to take long, because it may wait
for a request on another connection. A connection whose last request took long is left to a thread of its own at once.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.runtime.shared_memory import Connection

_LONG_S = 0.02
"""A request that took longer has the next one of its connection served apart."""
_WATCH_S = 0.02
"""How often a watching thread looks whether the leading one is still at the same request."""
_MOST_IDLE = 4
"""How many threads without work are kept."""
_NEXT_REQUEST = select.EPOLLIN | select.EPOLLONESHOT  # one thread at a time serves a connection
_log = logging.getLogger(__name__)
_this_thread = threading.local()


def let_others_serve() -> None:
    """Say that this thread is about to wait: if it leads, another takes the lead now, not only when it is seen to wait."""
    threads: ServingThreads | None = getattr(_this_thread, "threads", None)
    if threads is not None:
        threads.pass_lead_on()


@dataclass(slots=True)
class _Served:
    connection: Connection
    serve_next: Callable[[], bool]
    end: Callable[[], None]
    takes_long: bool = False
    is_busy: bool = False
    is_last: bool = False
    """The request in progress is the connection's last."""


class ServingThreads:
    """Serves connections until they end or it is closed. Thread-safe."""

    def __init__(self, name: str) -> None:
        """`name` is that of its threads."""
        self._name = name
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.EPOLLIN)  # stays readable once it is closed: every thread sees it
        self._served: dict[int, _Served] = {}
        self._lock = threading.Lock()
        self._lead: threading.Thread | None = None
        self._idle: dict[threading.Thread, threading.Event] = {}
        self._num_requests = 0  # that a leading thread began
        self._is_serving = False  # the leading thread does
        self._is_watched = threading.Event()
        self._is_closed = False

    def add(self, connection: Connection, serve_next: Callable[[], bool], end: Callable[[], None]) -> None:
        """Serve a connection: `serve_next` receives its next message, answers it, and returns whether the connection goes
        on. `end` is called once when it does not, and when `serve_next` raises."""
        descriptor = connection.fileno()
        with self._lock:
            if not self._is_closed:
                self._served[descriptor] = _Served(connection, serve_next, end)
                if self._lead is None:
                    self._start_thread()
                    threading.Thread(target=self._watch, name=f"{self._name}-watch", daemon=True).start()
                self._poll.register(descriptor, _NEXT_REQUEST)
                return
        end()

    def end(self, connection: Connection) -> None:
        """Serve no more requests of a connection; one in progress is answered first."""
        descriptor = connection.fileno()
        with self._lock:
            served = self._served.get(descriptor)
            if served is None or served.connection is not connection:
                return  # it has ended, and another has its descriptor by now
            served.is_last = True
            if served.is_busy:
                return
        self._end(descriptor)

    def pass_lead_on(self) -> None:
        """Let another thread take the lead, if this one has it."""
        with self._lock:
            if self._lead is threading.current_thread():
                self._choose_lead()

    def close(self) -> None:
        """Serve no more requests; those in progress are answered. Every connection ends."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._is_watched.set()
            for event in self._idle.values():
                event.set()
            idle = [descriptor for descriptor, served in self._served.items() if not served.is_busy]
        os.eventfd_write(self._wake, 1)
        for descriptor in idle:
            self._end(descriptor)

    def _start_thread(self) -> None:
        """Start a thread that leads. The lock is held."""
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._lead = thread
        self._is_serving = False
        thread.start()

    def _choose_lead(self) -> None:
        """Let a thread without work lead, or a new one. The lock is held."""
        self._is_serving = False
        if self._is_closed or not self._idle:
            return self._start_thread()
        self._lead, event = self._idle.popitem()
        event.set()

    def _serve(self) -> None:
        """Lead, or wait for the lead, until there are threads enough."""
        this, leads = threading.current_thread(), threading.Event()
        _this_thread.threads = self
        while not self._is_closed:
            ((descriptor, _),) = self._poll.poll(maxevents=1)
            if descriptor == self._wake:
                break
            self._serve_next(descriptor)
            if self._lead is not this:
                with self._lock:
                    if self._is_closed or len(self._idle) >= _MOST_IDLE:
                        break
                    leads.clear()
                    self._idle[this] = leads
                leads.wait()

    def _serve_next(self, descriptor: int) -> None:
        """Serve the next request of a connection."""
        with self._lock:
            served = self._served.get(descriptor)
            if served is None:
                return  # closed meanwhile
            served.is_busy = True
            if served.takes_long:
                self._choose_lead()
            else:
                self._num_requests += 1
                self._is_serving = True
                if not self._is_watched.is_set():
                    self._is_watched.set()
        goes_on, began = False, time.monotonic()
        try:
            goes_on = served.serve_next()
        except Exception:  # noqa: BLE001 - of this connection alone: the thread serves others too
            _log.exception("a connection is closed: its request could not be served")
        served.takes_long = time.monotonic() - began > _LONG_S
        with self._lock:
            served.is_busy = False
            if self._lead is threading.current_thread():
                self._is_serving = False
            if goes_on and not self._is_closed and not served.is_last:
                # Under the lock: without it `end` could close the connection first, and another could have its descriptor.
                self._poll.modify(descriptor, _NEXT_REQUEST)
                return
        self._end(descriptor)

    def _end(self, descriptor: int) -> None:
        with self._lock:
            served = self._served.pop(descriptor, None)
            if served is None:
                return
            self._poll.unregister(descriptor)
        served.end()

    def _watch(self) -> None:
        """Choose another thread to lead whenever the one that does is long at a request. Sleeps while there are none."""
        while not self._is_closed:
            self._is_watched.wait()
            seen = -1
            while self._is_watched.is_set() and not self._is_closed:
                time.sleep(_WATCH_S)
                with self._lock:
                    if self._num_requests == seen and self._is_serving:
                        self._choose_lead()
                    elif self._num_requests == seen:
                        self._is_watched.clear()
                    seen = self._num_requests
