"""The unix socket of a service, for trainers on its host. Their batches are not copied: see `local_steps.py`.

Only processes of the same user can connect, and they must show the token where the service has one. A thread serves each
connection; it ends with the connection. Then whatever the trainer had borrowed is retired, because the trainer may be alive
and hold arrays. For its rank a closed connection means nothing: only what the client says counts, and its silence.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import msgspec

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


class LocalServer:
    """Listens at `address`, an abstract unix socket, until it is closed."""

    def __init__(self, service: Service, arenas: Arenas | None, token: str | None, address: str | None = None) -> None:
        """Without `arenas` it answers calls and hands out no steps. OSError where another process has that address."""
        self._service = service
        self._arenas = arenas
        self._token = token
        self._listener = Listener(address=address)
        close_in_forks(self._listener)
        self.address = self._listener.address
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name="overlord-local", daemon=True).start()

    def close(self) -> None:
        """Accept and receive no more. Requests in progress are answered."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        self._listener.close()
        for connection in connections:
            connection.stop_receiving()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError as error:
                if not self._is_closed:
                    _log.warning("no more trainers of this host are accepted; they use Flight: %s", error)
                return
            close_in_forks(connection)
            with self._lock:
                if self._is_closed:
                    connection.close()
                    return
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="overlord-local-rank", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        session = _TrainerSession(self._service, self._arenas)
        try:
            if self._admit(connection):
                session.answer_all(connection)
        except (EOFError, OSError, Refused) as error:
            _log.debug("the connection of %s ended: %s", session.name, error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
            session.close(was_expected=self._is_closed)

    def _admit(self, connection: Connection) -> bool:
        """Read the greeting; returns whether the peer may go on."""
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
        return True


class _TrainerSession:
    """What a connection has borrowed, and for whom."""

    def __init__(self, service: Service, arenas: Arenas | None) -> None:
        self._service = service
        self._lender = None if arenas is None else StepLender(arenas)
        self._last: wire.Ticket | None = None
        self._has_warned = False
        self._page: SharedPage | None = None

    @property
    def name(self) -> str:
        return "a client" if self._last is None else f"rank {self._last.rank}"

    def answer_all(self, connection: Connection) -> None:
        """Answer until the connection ends."""
        while True:
            request = _receive(connection)
            if isinstance(request, Act):
                send_long(connection, wire.pack(self._act(request)))
            elif isinstance(request, Greeting):
                raise refusal("a connection has greeted already")
            elif self._lender is None:
                raise refusal("this server hands out no steps; ask it for the address of the rank's")
            elif isinstance(request, Fetch):
                self._lender.take_back(request.returned)
                for message in self._fetch(self._lender, request.ticket):
                    connection.send_raw(message.data, segments=message.segments)
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

    def _fetch(self, lender: StepLender, ticket: wire.Ticket) -> list[LocalMessage]:
        self._last = ticket
        try:
            answer = self._service.answer(ticket, lambda delivery: self._pack(lender, delivery))
        except Refused as error:
            answer = Failure("ServiceError", str(error), [])
        if isinstance(answer, list):
            return answer
        return [pack_answer(_short(answer) if isinstance(answer, Failure) else answer)]

    def _pack(self, lender: StepLender, delivery: Delivery) -> list[LocalMessage] | NotLocal:
        try:
            messages = lender.pack(delivery)
        except NoSharedMemoryError as error:
            return NotLocal(str(error))
        if lender.num_copied and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s holds %d steps and returned none of them: further steps are copied for it, which costs time and its own "
                "memory. Batches are returned when their last array is collected; copy what has to be kept",
                self.name,
                lender.num_lent,
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
