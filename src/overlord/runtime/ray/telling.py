"""Sends calls that nobody waits for to actors on other nodes. Those that come while one is under way are sent together, so
that they cost one actor call however many they are."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import ray

from overlord.runtime import liveness
from overlord.runtime.threads import Threads

if TYPE_CHECKING:
    from overlord.runtime.peers import RoleCall

_MOST_WAITING = 256
"""Calls to one actor that wait for those before them. What comes when there are as many is dropped: it is advice."""
_MOST_ACTORS = 4  # with a call under way at a time
_log = logging.getLogger(__name__)
_ANSWER_S = liveness.RAY_REBOUND.after_s


class RemoteTells:
    """The one-way calls of this process to actors on other nodes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Any, deque[tuple[int, RoleCall]]] = {}
        self._threads: Threads | None = None

    def send(self, actor: Any, number: int, call: RoleCall) -> None:
        """Send a call to a role of an actor. BlockingIOError if the actor does not keep up."""
        with self._lock:
            waiting = self._waiting.get(actor)
            if waiting is None:  # nothing is under way
                self._waiting[actor] = deque([(number, call)])
                if self._threads is None:
                    self._threads = Threads(_MOST_ACTORS, "overlord-tell")
                self._threads.submit(self._send_all, actor)
            elif len(waiting) >= _MOST_WAITING:
                raise BlockingIOError("an actor does not keep up with what it is told")
            else:
                waiting.append((number, call))

    def close(self) -> None:
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False)

    def _send_all(self, actor: Any) -> None:
        while True:
            with self._lock:
                calls = list(self._waiting[actor])
                self._waiting[actor].clear()
                if not calls:
                    del self._waiting[actor]
                    return
            try:
                ray.wait([actor.run_told.remote(calls)], timeout=_ANSWER_S)  # an actor that is gone answers too
            except Exception as error:  # noqa: BLE001 - nobody waits for it: whoever needs a result calls, and gets the error
                _log.debug("%d calls could not be sent: %s", len(calls), error)
