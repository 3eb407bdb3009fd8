"""Steering a served run from another process that is none of its ranks."""

from __future__ import annotations

import logging
from itertools import repeat
from typing import TYPE_CHECKING, TypeVar

from overlord.declare.arguments import positive_seconds
from overlord.errors import ServiceError
from overlord.runtime.liveness import SERVER_CONTROL, SERVER_PAUSE_S
from overlord.runtime.retry import FailedAttempt, retry
from overlord.service import wire
from overlord.service.auth import check_token, read_pem, service_address
from overlord.service.handle import RunHandle
from overlord.service.link import Link
from overlord.service.run_api import remote_run
from overlord.service.wire import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from overlord.service.run_api import Call, RunRequest

R = TypeVar("R")

_CALL_S = SERVER_CONTROL.after_s
_TELL_AFTER_S = 2.0  # whoever waits at a terminal learns of it before the timeout
_log = logging.getLogger(__name__)


class Control(RunHandle):
    """The run that is served at an address. While the service cannot be reached, a call is retried for up to
    `timeout_s`; after two seconds of that a warning says so."""

    def __init__(
        self, address: str, *, token: str | None = None, tls_root: str | Path | None = None, timeout_s: float = 30.0
    ) -> None:
        self._timeout_s = positive_seconds(timeout_s, "timeout_s")
        check_token(token)
        root = None if tls_root is None else read_pem(tls_root, "the TLS root certificate")
        self._link = Link(service_address(address, root), token, root)
        super().__init__(lambda: remote_run(self._send))

    def close(self) -> None:
        self._link.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, call: Call[..., R], request_for: Callable[[str], RunRequest]) -> R:
        has_told = False

        def attempt() -> R:
            # A service greets without asking its roles, so even a busy one does it soon.
            welcome = self._link.call(wire.HELLO, wire.Hello(wire.VERSION, 0), min(_CALL_S, self._timeout_s))
            request = request_for(welcome.job)
            return call.result_of(self._link.call(call.action, request, _CALL_S + request.patience_s))

        def check_timeout(failed: FailedAttempt[Unreachable]) -> None:
            nonlocal has_told
            if failed.waited_s >= self._timeout_s:
                raise ServiceError(
                    f"the service could not be reached for {failed.waited_s:.1f} s: {failed.error}; is it running, and is "
                    "the address right?"
                ) from failed.error
            if failed.waited_s >= _TELL_AFTER_S and not has_told:
                has_told = True
                _log.warning("%s; tried again for up to %g s", failed.error, self._timeout_s)

        return retry(attempt, on=Unreachable, pauses=repeat(SERVER_PAUSE_S), on_failure=check_timeout)
