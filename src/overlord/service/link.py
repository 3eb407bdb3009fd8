"""A connection to one server: calls go out with the token and a deadline, and come back as Overlord's own errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from overlord.errors import ServiceError
from overlord.service import wire
from overlord.service.auth import token_header
from overlord.service.forking import check_not_forked, hold

# Each client has a connection of its own, lets go of one that it does not use (the front door's, once it knows who serves
# its rank), and after a loss tries again at once rather than after gRPC's two minutes.
_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # the time that one attempt may take, in spite of its name
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.client_idle_timeout_ms", 60_000),
]
_INTRODUCED_BYTES = 4 << 10
_UNREACHABLE = (
    flight.FlightUnavailableError,
    flight.FlightTimedOutError,
    flight.FlightCancelledError,
    flight.FlightInternalError,  # a stream that breaks off in the middle
)


class Unreachable(Exception):
    """The server did not answer: it is gone, hangs, or is on its way down. Asking again may help."""


class Link:
    """Made without a connection; the first call makes it."""

    def __init__(self, address: str, token: str | None, root: str | None) -> None:
        self.address = address
        self._headers = token_header(token)
        check_not_forked()
        self._client = flight.connect(address, tls_root_certs=root, generic_options=_OPTIONS)
        hold(self._client)

    def asked(self, action: str, body: bytes, timeout_s: float) -> Any:
        """What an action answers, of the type that it answers with; raises what went wrong in the service."""
        try:
            if len(body) > _INTRODUCED_BYTES:  # on a new connection the service takes no more before it has seen the token
                list(self._client.list_actions(self._options(timeout_s)))
            results = list(self._client.do_action(flight.Action(action, body), self._options(timeout_s)))
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._told(error) from None
        try:
            return wire.unpacked_value(action, memoryview(results[0].body) if results else b"")
        except msgspec.DecodeError as error:
            raise self._foreign(error) from None

    def fetched(self, ticket: bytes, timeout_s: float) -> tuple[wire.Answer, list[pa.RecordBatch]]:
        try:
            reader = self._client.do_get(flight.Ticket(ticket), self._options(timeout_s))
            chunks = list(reader)
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._told(error) from None
        try:
            answer = wire.unpacked_answer(memoryview((chunks[0].app_metadata if chunks else None) or b""))
        except msgspec.DecodeError as error:
            raise self._foreign(error) from None
        return answer, [chunk.data for chunk in chunks if chunk.data is not None]

    def close(self) -> None:
        self._client.close()

    def _options(self, timeout_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=timeout_s, headers=self._headers)

    def _foreign(self, error: Exception) -> ServiceError:
        return ServiceError(
            f"{self.address} does not answer as an overlord service of this release does ({error}): check the address, and "
            "install the same release on both sides"
        )

    def _told(self, error: Exception) -> Exception:
        if isinstance(error, _UNREACHABLE):
            return Unreachable(f"{self.address}: {wire.plain(error)}")
        return ServiceError(f"{self.address} refused: {wire.plain(error)}")
