"""How a client in another process reaches its run: a `Channel` over Arrow Flight.

It survives its server. When a server cannot be reached, the channel asks the address that it was made with where the
rank is served now, again and again. `fetch` meanwhile answers Later, so that the client's own timeout ends the wait; other
questions wait for at most `timeout_s` and then raise ServiceError.

A run that was restarted has forgotten which state its clients had loaded; the channel loads it again. Its clients see no
other generation for that: generations are counted here, and what the server calls each of them is kept beside.
"""

from __future__ import annotations

import logging
import secrets
import threading
import weakref
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from overlord.batches.buffers import Arenas
from overlord.declare.arguments import seconds_or_none, switch, whole
from overlord.errors import OverlordError, ServiceError
from overlord.messages import Delivery, Later, StepReport
from overlord.roles.client import Client
from overlord.runtime.exclusive import OneProcess
from overlord.runtime.liveness import SERVER_ANSWER, SERVER_PAUSE_S
from overlord.runtime.long_waits import FIRST_S, waiting
from overlord.runtime.retry import FailedAttempt, retry
from overlord.service import wire
from overlord.service.auth import Address, check_token, read_pem
from overlord.service.link import Link, Unreachable
from overlord.service.steps import DamagedStepError, unpacked_step
from overlord.service.wire import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import pyarrow as pa

    from overlord.messages import State

T = TypeVar("T")

_PAUSE_S = SERVER_PAUSE_S  # between attempts to reach a server
_WAIT_S = 2.0  # how long a fetch waits at the server: a thousand clients that ask anew all the time would be its main work
_ASK_S = _GRACE_S = SERVER_ANSWER.after_s  # to answer a question, and for a step beyond the wait that was asked for
_ARENAS = 8
_log = logging.getLogger(__name__)


class FlightChannel:
    """The channel of one rank. Safe to call from several threads."""

    tell_after_s = FIRST_S
    """When a wait for the service is first told of."""

    def __init__(self, address: str, rank: int, token: str | None, root: str | None, timeout_s: float | None) -> None:
        self._rank = rank
        self._token = token
        self._root = root
        self._timeout_s = timeout_s
        self._wait_s = _WAIT_S if timeout_s is None else min(_WAIT_S, timeout_s)
        self._home = OneProcess(f"the connection of rank {rank}", "Call overlord.connect in the process that reads")
        self._session = secrets.token_hex(8)
        self._arenas = Arenas(_ARENAS)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._loaded: State | None = None
        self._is_lost = False
        self._front = self._linked(str(Address.parsed(address, "grpc" if root is None else "grpc+tls")))
        self._steps = self._front
        self._welcome = self._patiently(self._greeted)
        self._generations = [self._welcome.generation]
        self._follow(self._welcome)
        if self._welcome.heartbeat_s is not None:
            _start_heartbeat(self, self._welcome.heartbeat_s)

    def start(self) -> int:
        return self._renewed().start

    def generation(self) -> int:
        return len(self._generations) - 1

    def fetch(self, step: int, rank: int, wait_s: float) -> Delivery | Later | None:
        self._home.check()
        wait_s = max(wait_s, self._wait_s)
        known = self._welcome
        ticket = wire.Ticket(known.job, rank, step, wait_s, self._session, known.instance, self._generations[-1])
        try:
            answer, batches = self._steps.fetched(wire.packed(ticket), wait_s + _GRACE_S)
        except Unreachable as error:
            return self._lost(str(error))
        match answer:
            case wire.Contents():
                return self._unpacked(answer, batches, step)
            case wire.End():
                return None
            case wire.NotReady():
                return Later(answer.reason)
            case wire.Moved() if answer.instance != known.instance:
                return self._lost("it was restarted")
            case wire.Moved():
                self._note(answer.generation)
                return Later("the run was moved to another state")
            case wire.Elsewhere():
                return self._lost(f"rank {rank} is no longer served there")
            case wire.Failure():
                raise answer.error()

    def _unpacked(self, contents: wire.Contents, batches: Sequence[pa.RecordBatch], step: int) -> Delivery:
        try:
            delivery = unpacked_step(contents, batches, self._arenas)
        except DamagedStepError as error:
            raise ServiceError(
                f"step {step} came damaged from {self._steps.address}: {error}; ask for it again, and if that does not "
                "help, install the same release on both sides"
            ) from error
        if delivery.step != step:
            raise ServiceError(
                f"{self._steps.address} sent step {delivery.step} where step {step} was asked for: check the address, and "
                "install the same release on both sides"
            )
        return delivery

    def leave(self, rank: int, generation: int | None = None) -> None:
        # Whatever the generation: the service knows by the session whether another client has become this rank.
        try:
            self._say(Action.LEAVE)
        except (Unreachable, OverlordError) as error:  # then the server will find out by itself, if there still is one
            _log.info("rank %d left without saying so: %s", rank, error)

    def state_before(self, step: int) -> State:
        return self._ask(lambda job: (Action.STATE_BEFORE, wire.StateBefore(job, step)))

    def load_state(self, state: Mapping[str, Any], generation: int) -> int:
        state = dict(state)
        known = self._generations[generation] if generation >= 0 else self._generations[0] - 1
        moved = self._ask(lambda job: (Action.LOAD_STATE, wire.LoadState(job, state, known)))
        self._loaded = state
        self._note(moved)
        return self.generation()

    def status_lines(self) -> list[str]:
        try:
            return self._asked_once(Action.DOING, wire.Doing(self._welcome.job))
        except (Unreachable, OverlordError):  # it is asked to explain a wait, which must not fail for it
            return []

    def feedback(self, report: StepReport, generation: int) -> list[str]:
        known = self._generations[generation]
        losses, tokens = dict(report.losses), dict(report.tokens)
        told = wire.FeedbackRequest(self._welcome.job, known, report.rank, report.step, losses, tokens, list(report.seconds))
        try:
            return self._asked_once(Action.FEEDBACK, told)
        except (Unreachable, OverlordError) as error:  # training goes on without its report
            return [f"the service did not take it: {error}"]

    def close(self) -> None:
        """Wait for nothing any more, and fall silent. A question that needs no waiting is still answered."""
        self._closed.set()

    def beat(self) -> None:
        """Say that this rank is still there."""
        try:
            self._say(Action.HERE)
        except (Unreachable, OverlordError) as error:  # the next fetch will meet the same, and tell the trainer
            _log.debug("rank %d could not say that it is there: %s", self._rank, error)

    def _say(self, action: Action) -> None:
        present = wire.Presence(self._welcome.job, self._rank, self._session)
        self._steps.asked(action, wire.packed(present), _ASK_S)

    def _ask(self, question: Callable[[str], tuple[Action, msgspec.Struct]]) -> Any:
        def attempt() -> Any:
            try:
                return self._asked_once(*question(self._welcome.job))
            except Unreachable:
                self._renew()
                raise

        return self._patiently(attempt)

    def _asked_once(self, action: Action, body: msgspec.Struct) -> Any:
        return self._front.asked(action, wire.packed(body), _ASK_S)

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """The outcome of the first attempt that reaches the server."""
        self._home.check()
        self._trouble = "it has not answered yet"
        told = f"rank {self._rank} waits for the service at {self._front.address}"
        with waiting(lambda: f"{told}: {self._trouble}", self.tell_after_s):
            return self._tried(attempt)

    def _tried(self, attempt: Callable[[], T]) -> T:
        def note(failed: FailedAttempt[Unreachable]) -> None:
            self._trouble = str(failed.error)
            if self._timeout_s is not None and failed.waited_s >= self._timeout_s:
                raise ServiceError(
                    f"rank {self._rank} could not reach the service for {failed.waited_s:.1f} s: {failed.error}; is it "
                    "running, and is the address right?"
                ) from failed.error

        def pause(seconds: float) -> None:
            if self._closed.wait(seconds):
                raise ServiceError(f"the client of rank {self._rank} was closed while it waited for the service")

        return retry(attempt, on=Unreachable, pauses=repeat(_PAUSE_S), on_failure=note, sleep=pause)

    def _lost(self, reason: str) -> Later:
        """One attempt to find the server again; a client that gets Later asks again."""
        if not self._is_lost:  # once, not for every attempt
            _log.warning("rank %d lost its server and looks for it: %s", self._rank, reason)
            self._is_lost = True
        try:
            self._renew()
        except Unreachable as error:
            reason = str(error)
            self._closed.wait(_PAUSE_S)
        return Later(f"the service went away: {reason}")

    def _renewed(self) -> wire.Welcome:
        return self._patiently(self._renew)

    def _renew(self) -> wire.Welcome:
        """Greet the service again, and follow where it sends this rank."""
        with self._lock:
            welcome = self._greeted()
            if welcome.job != self._welcome.job:
                raise ServiceError(
                    f"the service at {self._front.address} now runs job {welcome.job}; this client began with "
                    f"{self._welcome.job}: the declaration or its data changed; connect anew"
                )
            if welcome.instance != self._welcome.instance:
                welcome = self._reloaded(welcome)
            elif welcome.generation != self._generations[-1]:
                self._note(welcome.generation)
            self._follow(welcome)
            self._welcome = welcome
            if self._is_lost:
                _log.warning("rank %d found its server again", self._rank)
                self._is_lost = False
            return welcome

    def _reloaded(self, welcome: wire.Welcome) -> wire.Welcome:
        """A new service, brought to where this client's run was, unless it was resumed from a later step by itself."""
        if self._loaded is not None and welcome.start <= self._loaded["step"]:
            load = wire.LoadState(welcome.job, self._loaded, -1)
            generation = self._asked_once(Action.LOAD_STATE, load)
            welcome = msgspec.structs.replace(self._greeted(), generation=generation)
        self._generations[-1] = welcome.generation
        return welcome

    def _greeted(self) -> wire.Welcome:
        greeting = wire.packed(wire.Hello(wire.VERSION, self._rank))
        return self._front.asked(Action.HELLO, greeting, _ASK_S)

    def _follow(self, welcome: wire.Welcome) -> None:
        address = welcome.address or self._front.address
        if address != self._steps.address:
            if self._steps is not self._front:
                self._steps.close()
            self._steps = self._front if address == self._front.address else self._linked(address)

    def _note(self, generation: int) -> None:
        if generation != self._generations[-1]:
            self._generations.append(generation)

    def _linked(self, address: str) -> Link:
        return Link(address, self._token, self._root)


def _start_heartbeat(channel: FlightChannel, every_s: float) -> None:
    """Beats as long as somebody holds the channel: a client that was dropped without `close` must fall silent."""
    closed, held = channel._closed, weakref.ref(channel)

    def beat() -> None:
        while not closed.wait(every_s):
            alive = held()
            if alive is None:
                return
            alive.beat()
            del alive

    threading.Thread(target=beat, name="overlord-heartbeat", daemon=True).start()


def connect(
    address: str,
    *,
    rank: int,
    token: str | None = None,
    tls_root: str | Path | None = None,
    timeout_s: float | None = 300.0,
    torch: bool = False,
    pin_memory: bool = False,
) -> Client:
    """The iterator of one rank of a run that `Loader.serve` or `overlord serve` offers at an address.

    `timeout_s` is the longest wait for the service to be there and for each step; None waits for ever. `tls_root`
    is a PEM file with the certificate that the service's own must lead to; without one the system's are trusted.
    """
    rank = whole(rank, "rank")
    timeout_s = seconds_or_none(timeout_s, "timeout_s")
    torch, pin_memory = switch(torch, "torch"), switch(pin_memory, "pin_memory")  # before anything is waited for
    check_token(token)
    root = None if tls_root is None else read_pem(tls_root, "the TLS root certificate")
    channel = FlightChannel(address, rank, token, root, timeout_s)
    client = Client(rank, channel, torch, pin_memory, timeout_s)
    client.at_close(channel.close)
    return client
