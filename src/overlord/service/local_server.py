"""The unix socket of a service, for trainers on its host. Their batches are not copied: see `local_steps.py`.

Only processes of the same user can connect, and they must show the token where the service has one. When a connection ends,
whatever its trainer had borrowed is retired, because the trainer may be alive and hold arrays. For its rank a closed
connection means nothing: only what the client says counts, and its silence.
"""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from overlord.runtime.serving_threads import ServingThreads
from overlord.runtime.shared_memory import Listener
from overlord.service import wire
from overlord.service.auth import is_token
from overlord.service.forking import close_in_forks
from overlord.service.local_steps import (
    MOST_BYTES,
    Act,
    Fetch,
    Greeting,
    LocalMessage,
    NoSharedMemoryError,
    NotLocal,
    Returned,
    ShareTakes,
    StepLender,
    pack_answer,
    read_long,
    send_long,
    unpack_request,
)
from overlord.service.wire import Failure, Refused, refusal

if TYPE_CHECKING:
    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery
    from overlord.runtime.shared_memory import Connection
    from overlord.service.local_steps import LocalRequest
    from overlord.service.server import Service
    from overlord.service.taking import SharedPage

_GREETING_S = 10.0  # how long a connection may take to greet
_log = logging.getLogger(__name__)


def serving_threads() -> ServingThreads:
    """Threads for the servers of a process."""
    return ServingThreads("overlord-local-rank")


class LocalServer:
    """Listens at `address`, an abstract unix socket, until it is closed."""

    def __init__(
        self,
        service: Service,
        arenas: Arenas | None,
        token: str | None,
        address: str | None = None,
        threads: ServingThreads | None = None,
    ) -> None:
        """Without `arenas` it answers calls and hands out no steps. OSError where another process has that address. With
        `threads`, servers of one process share them: they would take the interpreter from each other."""
        self._service = service
        self._arenas = arenas
        self._token = token
        self._listener = Listener(address=address)
        close_in_forks(self._listener)
        self.address = self._listener.address
        self._threads = threads or serving_threads()
        self._are_threads_own = threads is None
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="overlord-local", daemon=True).start()

    def close(self) -> None:
        """Accept and receive no more. Requests in progress are answered."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = self._connections, set()
        self._listener.close()
        for connection in connections:
            self._threads.end(connection)
        if self._are_threads_own:
            self._threads.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("no more trainers of this host are accepted; they use Flight: %s", error)
                return
            close_in_forks(connection)
            threading.Thread(target=self._greet, args=(connection,), name="overlord-greeting", daemon=True).start()

    def _greet(self, connection: Connection) -> None:
        """Have a connection served once it has greeted: a stranger may take its time."""
        try:
            self._admit(connection)
        except (EOFError, OSError, Refused) as error:
            _log.debug("a connection ended before it was served: %s", error)
            connection.close()
            return
        session = _TrainerSession(self._service, self._arenas)

        def serve_next() -> bool:
            try:
                session.answer_next(connection)
            except (EOFError, OSError, Refused) as error:
                _log.debug("the connection of %s ended: %s", session.name, error)
                return False
            return True

        def end() -> None:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            session.close(was_expected=self._is_closed)

        with self._lock:
            self._connections.add(connection)
        self._threads.add(connection, serve_next, end)
        if self._is_closed:
            self._threads.end(connection)

    def _admit(self, connection: Connection) -> None:
        """Read the greeting, and answer it. Raises Refused for a peer that may not go on."""
        request = _receive(connection, _GREETING_S)
        if not isinstance(request, Greeting):
            raise refusal("a connection begins with a greeting")
        reason = None
        if request.version != wire.VERSION:
            reason = f"the client speaks version {request.version} of the wire, this service version {wire.VERSION}"
        elif self._token is not None and not is_token(request.token or "", self._token):
            carried = "a wrong token" if request.token else "no token"
            reason = f"the service requires its token, and the call carried {carried}; pass token=..."
        reply = wire.Value(None) if reason is None else Failure("ServiceError", reason, [])
        connection.send_raw(wire.pack(reply))
        if reason is not None:
            raise refusal(reason)


class _TrainerSession:
    """What a connection has borrowed, and for whom."""

    def __init__(self, service: Service, arenas: Arenas | None) -> None:
        self._service = service
        self._lender = None if arenas is None else StepLender(arenas)
        self._last: wire.Ticket | None = None
        self._next_step: int | None = None  # the one after the last that was sent, or that was not ready
        self._has_warned = False
        self._page: SharedPage | None = None

    @property
    def name(self) -> str:
        return "a client" if self._last is None else f"rank {self._last.rank}"

    def answer_next(self, connection: Connection) -> None:
        """Answer the next request."""
        request = _receive(connection)
        if isinstance(request, Act):
            send_long(connection, wire.pack(self._act(request)))
        elif isinstance(request, Greeting):
            raise refusal("a connection has greeted already")
        elif self._lender is None:
            raise refusal("this server hands out no steps; ask it for the address of the rank's")
        elif isinstance(request, Fetch):
            self._lender.take_back(request.returned)
            messages = self._fetch(self._lender, self._ticket_of(request), request.most_unbuilt)
            try:
                for message in messages:
                    connection.send_raw(message.data, segments=message.segments)
            except ConnectionError:
                self._read_last(connection)
                raise
        elif isinstance(request, ShareTakes):
            self._share_takes(connection, request)
        else:
            self._lender.take_back(request)
            if request.is_last:
                self._last = None

    def close(self, was_expected: bool) -> None:
        if self._lender is not None:
            self._lender.close()
        if self._page is not None:  # once more: a trainer that was killed may have taken a step
            self._service.takes.drop(self._page)
        last = self._last
        if last is not None and not was_expected and self._service.ranks.is_reading(last.rank, last.session):
            _log.warning(
                "the connection of rank %d ended without a leave: its process may have died; others wait for it as long as "
                "for a silent one",
                last.rank,
            )

    def _read_last(self, connection: Connection) -> None:
        """Look whether a client that is gone had requested steps ahead and then said that it closes the connection."""
        with suppress(EOFError, OSError, Refused):
            while True:
                request = _receive(connection, 0.0)
                if isinstance(request, Returned) and request.is_last:
                    self._last = None

    def _share_takes(self, connection: Connection, request: ShareTakes) -> None:
        if self._page is not None:
            raise refusal("a connection has one page of takes")
        try:
            self._page = page = self._service.takes.add(request.rank, request.session)
        except OSError as error:
            reason = f"the system refuses shared memory: {error}"
            connection.send_raw(wire.pack(Failure("ServiceError", reason, [])))
            return
        connection.send_raw(wire.pack(wire.Value(None)), segments=[page.segment])

    def _ticket_of(self, request: Fetch) -> wire.Ticket:
        if not request.goes_on:
            return request.ticket
        if self._next_step is None:
            raise refusal("no step went over this connection that others could follow")
        return structs.replace(request.ticket, step=self._next_step)

    def _fetch(self, lender: StepLender, ticket: wire.Ticket, most_unbuilt: int) -> list[LocalMessage]:
        self._last, self._next_step = ticket, ticket.step + 1  # a step that is not ready is requested by itself next
        try:
            answer = self._service.answer(ticket, lambda delivery: self._pack(lender, delivery), most_unbuilt)
        except Refused as error:
            answer = Failure("ServiceError", str(error), [])
        if isinstance(answer, list):
            return answer
        return [pack_answer(_short(answer) if isinstance(answer, Failure) else answer)]

    def _pack(self, lender: StepLender, delivery: Delivery) -> list[LocalMessage] | NotLocal:
        self._next_step = delivery.step + 1 + len(delivery.following)
        try:
            messages = lender.pack(delivery)
        except NoSharedMemoryError as error:
            return NotLocal(str(error))
        if lender.num_copied and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s holds %d steps (%s bytes) and returned none of them: further steps are copied for it, which costs time "
                "and its own memory. Batches are returned when their last array is collected; copy what has to be kept",
                self.name,
                lender.num_lent,
                f"{lender.lent_bytes:,}",
            )
        return messages

    def _act(self, request: Act) -> wire.Value[object] | Failure:
        try:
            return self._service.act(request.name, request.body)
        except Refused as error:
            return Failure("ServiceError", str(error), [])


def _receive(connection: Connection, timeout_s: float | None = None) -> LocalRequest:
    data, descriptors = connection.receive_raw(timeout_s)
    try:
        body = read_long(descriptors) if descriptors else None
        request = unpack_request(data)
    except (msgspec.DecodeError, OSError, ValueError) as error:
        raise refusal(f"not a request of overlord's local wire: {error}") from None
    return Act(request.name, bytes(body)) if body is not None and isinstance(request, Act) else request


def _short(failure: Failure) -> Failure:
    """A failure that fits into a message."""
    notes, room = list[str](), MOST_BYTES // 16
    for note in failure.notes:
        notes.append(note[:room])
        room -= len(notes[-1])
    return Failure(failure.kind, failure.message[: MOST_BYTES // 16], notes)
