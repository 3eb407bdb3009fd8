"""Steering a served run from another process, without being one of its ranks."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from overlord.declare.arguments import positive_seconds, whole
from overlord.errors import ServiceError
from overlord.runtime.liveness import SERVER_CONTROL, SERVER_PAUSE_S
from overlord.runtime.retry import FailedAttempt, retry
from overlord.service import wire
from overlord.service.auth import Address, check_token, read_pem
from overlord.service.link import Link, Unreachable
from overlord.service.wire import Action
from overlord.steering.decisions import Decision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import msgspec

T = TypeVar("T")

_ASK_S = SERVER_CONTROL.after_s


class Control:
    """Asks the service at an address; a service that cannot be reached is asked again for up to `timeout_s` seconds."""

    def __init__(
        self, address: str, *, token: str | None = None, tls_root: str | Path | None = None, timeout_s: float = 30.0
    ) -> None:
        timeout_s = positive_seconds(timeout_s, "timeout_s")
        check_token(token)
        root = None if tls_root is None else read_pem(tls_root, "the TLS root certificate")
        self._timeout_s = timeout_s
        self._link = Link(str(Address.parsed(address, "grpc" if root is None else "grpc+tls")), token, root)

    def set_weights(self, weights: Mapping[str, float] | None, from_step: int | None = None) -> int:
        """See `Loader.set_weights`."""
        # One id for all attempts: an answer that was lost on its way must not make it two changes.
        from_step = None if from_step is None else whole(from_step, "from_step")
        number, given = uuid4().hex, None if weights is None else dict(weights)
        return self._asked(Action.CHANGE_WEIGHTS, lambda job: wire.ChangeWeights(job, given, from_step, number))

    def decisions(self) -> list[Decision]:
        """See `Loader.decisions`."""
        return [Decision(*entry) for entry in self._asked(Action.DECISIONS, wire.Decisions)]

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _asked(self, action: Action, question: Callable[[str], msgspec.Struct]) -> Any:
        def attempt() -> Any:
            hello = wire.packed(wire.Hello(wire.VERSION, 0))
            welcome: wire.Welcome = self._link.asked(Action.HELLO, hello, _ASK_S)
            return self._link.asked(action, wire.packed(question(welcome.job)), _ASK_S)

        def note(failed: FailedAttempt[Unreachable]) -> None:
            if failed.waited_s >= self._timeout_s:
                raise ServiceError(
                    f"the service could not be reached for {failed.waited_s:.1f} s: {failed.error}; is it running, and is "
                    "the address right?"
                ) from failed.error

        return retry(attempt, on=Unreachable, pauses=repeat(SERVER_PAUSE_S), on_failure=note)
