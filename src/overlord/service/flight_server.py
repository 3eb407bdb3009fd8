"""The Flight server of a service: for trainers on other hosts, and for the first greeting of all."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as flight

from overlord.batches.buffers import Arenas
from overlord.errors import SpecError
from overlord.service import wire
from overlord.service.auth import HEADER, SCHEME, is_token
from overlord.service.flight_steps import SCHEMA, pack_step
from overlord.service.forking import check_not_forked, protect_in_forks
from overlord.service.gate import Gate, has_gate
from overlord.service.run_api import ACTIONS
from overlord.service.wire import Refused, parse, refusal

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from overlord.service.auth import Listen
    from overlord.service.server import Service

_arrow: Any = pa  # its stubs leave types open
_NO_REGIONS: pa.RecordBatch = _arrow.RecordBatch.from_arrays([pa.array([], pa.binary_view())], schema=SCHEMA)
_log = logging.getLogger(__name__)
_SCRATCH = 8  # buffers to compute fields in that need not be sent


class FlightServer(flight.FlightServerBase):
    """Hands Flight calls to the service."""

    @staticmethod
    def start(listen: Listen, service: Service) -> FlightServer:
        """Raises SpecError where it cannot listen."""
        try:
            return FlightServer(listen, service)
        except (OSError, pa.ArrowException) as error:
            raise SpecError(f"cannot listen on {listen.bound}: {wire.words_of(error)}; is the port taken?") from error

    def __init__(self, listen: Listen, service: Service) -> None:
        check_not_forked()
        self._service = service
        bound = listen.bound
        super().__init__(
            str(bound),
            tls_certificates=[] if listen.tls is None else [listen.tls.read()],
            middleware={} if listen.token is None else {"token": _TokenCheck(listen.token)},
        )
        protect_in_forks(self)
        self.address = listen.public_address(self.port)
        self._scratch = Arenas(_SCRATCH)
        self._gate = Gate(self.port) if listen.token is not None and has_gate() else None

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.close()

    def _admit(self, context: Any) -> None:
        """Flight calls reach this point only with the token."""
        if self._gate is not None:
            self._gate.admit(context.peer())

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        self._admit(context)
        with _translated():
            found = self._service.answer(parse(ticket.ticket, wire.Ticket), lambda step: pack_step(step, self._scratch))
        answer, batches = found if isinstance(found, tuple) else (found, iter([_NO_REGIONS]))
        # The metadata of the first message describes all of them.
        messages: Any = zip(batches, chain([wire.pack(answer)], repeat(b"")), strict=False)
        return flight.GeneratorStream(SCHEMA, messages)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        self._admit(context)
        with _translated():
            return iter([wire.pack(self._service.act(action.type, memoryview(action.body)))])

    def list_actions(self, context: Any) -> Any:
        self._admit(context)
        return [(name, "") for name in ACTIONS]

    def list_flights(self, context: Any, criteria: Any) -> Any:  # noqa: ARG002 - refused
        raise _not_offered()

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:  # noqa: ARG002 - refused
        raise _not_offered()

    def get_schema(self, context: Any, descriptor: Any) -> Any:  # noqa: ARG002 - refused
        raise _not_offered()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002 - refused
        raise _not_offered()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002 - refused
        raise _not_offered()


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Flight middleware that refuses every call without the token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._expected = f"{SCHEME}{token}"

    def start_call(self, info: Any, headers: Mapping[str, Sequence[str | bytes]]) -> None:
        given = headers.get(HEADER) or [""]
        text = given[0]
        if len(given) == 1 and is_token(text, self._expected):
            return
        what = "a wrong token" if text else "no token"
        _log.warning("refused a call (%s): it carried %s", info.method, what)
        raise flight.FlightUnauthenticatedError(
            f"the service requires its token, and the call carried {what}; pass token=..."
        )


@contextmanager
def _translated() -> Generator[None]:
    """Raise Flight's error for a call that the service refuses."""
    try:
        yield
    except Refused as error:
        kind = flight.FlightUnauthorizedError if error.is_unauthorized else flight.FlightServerError
        raise kind(str(error)) from None


def _not_offered() -> flight.FlightError:
    return flight.FlightServerError(str(refusal("an overlord service answers do_get and actions, nothing else of Flight")))
