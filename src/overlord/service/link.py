"""A connection to one server: adds the token and a deadline to calls, and translates errors into Overlord's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from overlord.errors import ServiceError
from overlord.service import wire
from overlord.service.auth import token_header
from overlord.service.flight_steps import regions_of
from overlord.service.forking import check_not_forked, protect_in_forks
from overlord.service.steps import unpack_step
from overlord.service.wire import Unreachable, pack

if TYPE_CHECKING:
    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery
    from overlord.service.wire import Action

Q = TypeVar("Q", bound=msgspec.Struct)
T = TypeVar("T")

# Each client has its own connection, closes one that is idle (the front door's, once the client knows who serves its rank),
# and reconnects at once after a loss rather than after gRPC's two minutes.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # in spite of its name, the time that one attempt may take
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.client_idle_timeout_ms", 60_000),
]
_INTRODUCED_BYTES = 4 << 10
_UNREACHABLE = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,  # a stream that ends in the middle
)


class Link:
    """A connection to one server. The first call opens it."""

    def __init__(self, address: str, token: str | None, root: str | None) -> None:
        self.address = address
        self._headers = token_header(token)
        check_not_forked()
        self._client = flight.connect(address, tls_root_certs=root, generic_options=_OPTIONS)
        protect_in_forks(self._client)

    def call(self, action: Action[Q, T], request: Q, timeout_s: float) -> T:
        """Returns the reply of an action; raises what went wrong in the service."""
        reply = self.send(action.name, pack(request), timeout_s)
        try:
            return action.unpack_reply(reply)
        except msgspec.DecodeError as error:
            raise self._foreign(error) from None

    def send(self, name: str, body: bytes, timeout_s: float) -> memoryview:
        """Send an action as bytes; returns the bytes of its reply."""
        try:
            if len(body) > _INTRODUCED_BYTES:  # on a new connection the service takes no more before it has seen the token
                list(self._client.list_actions(self._options(timeout_s)))
            results = list(self._client.do_action(flight.Action(name, body), self._options(timeout_s)))
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._translate(error) from None
        return memoryview(results[0].body if results else b"")

    def fetch(self, ticket: wire.Ticket, timeout_s: float, arenas: Arenas) -> Delivery | wire.NoStep:
        """Returns the answer to a ticket. Raises DamagedStepError for a step that cannot be read."""
        try:
            reader = self._client.do_get(flight.Ticket(pack(ticket)), self._options(timeout_s))
            chunks = list(reader)
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._translate(error) from None
        try:
            answer = wire.unpack_answer(memoryview((chunks[0].app_metadata if chunks else None) or b""))
        except msgspec.DecodeError as error:
            raise self._foreign(error) from None
        if not isinstance(answer, wire.Contents):
            return answer
        return unpack_step(answer, regions_of([chunk.data for chunk in chunks if chunk.data is not None]), arenas)

    def close(self) -> None:
        self._client.close()

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)

    def _foreign(self, error: Exception) -> ServiceError:
        return ServiceError(
            f"{self.address} does not answer as an overlord service of this release does ({error}): check the address, and "
            "install the same release on both sides"
        )

    def _translate(self, error: Exception) -> Exception:
        if isinstance(error, _UNREACHABLE):
            return Unreachable(f"{self.address}: {wire.words_of(error)}")
        return ServiceError(f"{self.address} refused: {wire.words_of(error)}")
