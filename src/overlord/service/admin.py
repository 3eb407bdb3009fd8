"""Steering a served run from another process that is none of its ranks."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, TypeVar
from uuid import uuid4

from overlord.declare.arguments import positive_seconds, whole
from overlord.errors import ServiceError
from overlord.messages import Decision, WeightChange
from overlord.runtime.liveness import SERVER_CONTROL, SERVER_PAUSE_S
from overlord.runtime.retry import FailedAttempt, retry
from overlord.service import wire
from overlord.service.auth import check_token, read_pem, service_address
from overlord.service.link import Link
from overlord.service.run_api import remote_run
from overlord.service.wire import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from overlord.service.run_api import Call, RunRequest

R = TypeVar("R")

_CALL_S = SERVER_CONTROL.after_s


class Control:
    """Calls on the run that is served at an address. While the service cannot be reached, a call is retried for up to
    `timeout_s`."""

    def __init__(
        self, address: str, *, token: str | None = None, tls_root: str | Path | None = None, timeout_s: float = 30.0
    ) -> None:
        self._timeout_s = positive_seconds(timeout_s, "timeout_s")
        check_token(token)
        root = None if tls_root is None else read_pem(tls_root, "the TLS root certificate")
        self._link = Link(service_address(address, root), token, root)
        self._run = remote_run(self._send)

    def set_weights(self, weights: Mapping[str, float] | None, from_step: int | None = None) -> int:
        """See `Loader.set_weights`."""
        from_step = None if from_step is None else whole(from_step, "from_step")
        # One id for all attempts: a reply that was lost must not make it two changes.
        return self._run.change_weights(WeightChange(weights, from_step, uuid4().hex))

    def decisions(self) -> list[Decision]:
        """See `Loader.decisions`."""
        return list(self._run.decisions())

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[..., R], request_for: Callable[[str], RunRequest]) -> R:
        def attempt() -> R:
            welcome = self._link.call(wire.HELLO, wire.Hello(wire.VERSION, 0), _CALL_S)
            return call.result_of(self._link.call(call.action, request_for(welcome.job), _CALL_S))

        def check_timeout(failed: FailedAttempt[Unreachable]) -> None:
            if failed.waited_s >= self._timeout_s:
                raise ServiceError(
                    f"the service could not be reached for {failed.waited_s:.1f} s: {failed.error}; is it running, and is "
                    "the address right?"
                ) from failed.error

        return retry(attempt, on=Unreachable, pauses=repeat(SERVER_PAUSE_S), on_failure=check_timeout)
