"""Who reads a run: the clients of this process, and the trainers in other processes through the run's servers."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from overlord.errors import WaitTimeoutError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from overlord.service.client import Client
    from overlord.service.serving import OneServer, ServerPerGroup


class Readers:
    """The clients and servers of one run. Safe to call from several threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while the run changes its generation: meanwhile nobody begins to read, and nobody asks where readers are."""
        self.clients: list[Client] = []
        """Those of this process; read and replaced under the lock."""
        self.serving: OneServer | ServerPerGroup | None = None

    def add(self, client: Client) -> None:
        with self.lock:
            self.clients = [other for other in self.clients if other.is_reading or other.is_stale]
            self.clients.append(client)

    def forget_ended(self) -> None:
        """Keep the clients that may rejoin a run that is moved. The lock is held."""
        self.clients = [client for client in self.clients if client.is_reading]

    def here(self) -> dict[int, int]:
        """The ranks that read in this process, with the next step of each."""
        with self.lock:
            return {client.rank: client.step for client in self.clients if client.is_reading}

    def is_any(self) -> bool:
        return bool(self.here()) or (self.serving is not None and bool(self.serving.reading()))

    def slowest(self, taken_to: Callable[[], int], start: Callable[[], int]) -> int:
        """The first step that not every reader has taken; after the last reader, that of the readers there were.
        `taken_to` returns the first step that is not known to be taken by all, `start` the step that clients begin at."""
        reading, last = ({}, {}) if self.serving is None else (self.serving.reading(), self.serving.last())
        # A late rank may need any step that is not known to be taken by all.
        late = [] if self.serving is None or not self.serving.late() else [taken_to()]
        with self.lock:
            here = [client.step for client in self.clients if client.is_reading] + list(reading.values())
            here = [*here, *late] if here else []
            ended = [client.step for client in self.clients if not client.is_stale] + list(last.values())
            return min(here or ended or [start()])

    def note_taken(self) -> None:
        """Note the steps that trainers have taken without a message."""
        if self.serving is not None:
            with suppress(WaitTimeoutError, WorkerDiedError):
                self.serving.reading()

    @contextmanager
    def take_by_message(self) -> Generator[list[int]]:
        """Meanwhile no trainer takes a step that the run does not know of; yields the ranks of which that is not certain."""
        serving = self.serving
        if serving is None:
            yield []
            return
        try:
            yield serving.pause_takes()
        finally:
            serving.resume_takes()

    def expect(self) -> None:
        """Expect the trainers of other processes anew: the run was moved."""
        if self.serving is not None:
            self.serving.expect()
