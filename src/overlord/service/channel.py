"""The `Channel` to a service, through which a client in another process reaches its run.

Steps and calls on the run go over Arrow Flight, except where the service is on this host: there both go through unix
sockets, and steps are mapped from shared memory (`local_link.py`). Flight and Arrow are imported only where they are needed.

A channel survives a restart of its server. When the server cannot be reached, the channel reconnects to the address that it
was made with, until that address says which server has the rank now. `fetch` meanwhile returns Later, so that the client's
own timeout ends the wait; a call on the run waits for at most `timeout_s` and then raises ServiceError.

A restarted run does not know which state its clients had loaded, so the channel loads it again. For the client this is not a
new generation: the channel counts generations itself, and maps each to the server's number.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import weakref
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from overlord.batches.buffers import Arenas
from overlord.batches.tensors import Destination
from overlord.declare.arguments import seconds_or_none, whole
from overlord.errors import OverlordError, ServiceError
from overlord.messages import Delivery, Later
from overlord.runtime.exclusive import OneProcess
from overlord.runtime.liveness import SERVER_ANSWER, SERVER_PAUSE_S
from overlord.runtime.long_waits import FIRST_S, warn_if_long
from overlord.runtime.retry import FailedAttempt, retry
from overlord.runtime.whereabouts import node_names
from overlord.service import wire
from overlord.service.auth import Address, check_token, read_pem, service_address
from overlord.service.client import Client
from overlord.service.local_link import LocalLink, NotOnThisHostError, StepPipeline
from overlord.service.run_api import CALLS, MOVED, LoadStateRequest, remote_run
from overlord.service.steps import BuildError, DamagedStepError
from overlord.service.wire import Unreachable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from overlord.messages import State
    from overlord.service.link import Link
    from overlord.service.run_api import Call, Channel, RunApi, RunRequest, StepAhead
    from overlord.service.wire import Action

T = TypeVar("T")

_PAUSE_S = SERVER_PAUSE_S  # between attempts to reach a server
_WAIT_S = 2.0  # how long a fetch waits at the server, so that a thousand clients do not keep it busy with polling
_CALL_S = _GRACE_S = SERVER_ANSWER.after_s  # timeout of a call, and of the transfer of a step after the wait
_PROBE_S = 5.0  # to find out whether anything listens at an address
_MOST_WAITED_S = 3600.0  # more is not reported
_ARENAS = 8
_log = logging.getLogger(__name__)


class FlightChannel:
    """The channel of one rank to a service. Safe to call from several threads."""

    warn_after_s = FIRST_S
    """After how long a wait for the service is first logged."""

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        token: str | None = None,
        root: str | None = None,
        timeout_s: float | None,
        local: bool = True,
        reads: bool = True,
    ) -> None:
        """`local`: use shared memory where the service is on this host. `reads`: False for one that only calls the run, and
        is none of its ranks."""
        self._rank = rank
        self._token = token
        self._root = root
        self._timeout_s = timeout_s
        self._wait_s = _WAIT_S if timeout_s is None else min(_WAIT_S, timeout_s)
        self._home = OneProcess(f"the connection of rank {rank}", "Call overlord.connect in the process that reads")
        self._session = secrets.token_hex(8)
        self._arenas = Arenas(_ARENAS)
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        self._closed = threading.Event()
        self._loaded: State | None = None
        self._is_lost = False
        self._trouble = ""
        self._address = service_address(address, root)
        self._reads = reads
        self._nodes = node_names(Address.parse(self._address).host) if reads else ()
        self._not_here: str | None = None if local else ""  # the unix socket that cannot be used; "" for any
        self._door: Link | LocalLink | None = None  # the way to the run; opened by the first call
        self._welcome = self._retry(self._greet)
        self._generations = [self._welcome.generation]
        self._steps = self._retry(lambda: self._find_server(self._welcome, None) if reads else self._open_door())
        if self._welcome.heartbeat_s is not None and reads:
            _start_heartbeat(self, self._closed, self._welcome.heartbeat_s)

    @property
    def run(self) -> RunApi:
        return remote_run(self._send)  # not cached: a reference cycle would keep the heartbeat of a dropped channel alive

    @property
    def is_ahead_useful(self) -> bool:
        link = self._steps
        return not isinstance(link, LocalLink) or link.share_takes(self._rank, self._session)

    def start(self) -> int:
        return self._retry(self._renew).start

    def eval_channel(self, name: str, known: Channel | None) -> Channel:
        address = self.run.open_eval(name)
        if isinstance(known, FlightChannel) and known.address == address:
            return known
        return FlightChannel(address, self._rank, token=self._token, root=self._root, timeout_s=self._timeout_s)

    @property
    def address(self) -> str:
        """The address of the service."""
        return self._address

    def generation(self) -> int:
        return len(self._generations) - 1

    def origin(self) -> str:
        return _origin(self._welcome, self._generations[-1])

    def fetch(
        self,
        step: int,
        rank: int,
        wait_s: float,
        ahead: bool = False,
        generation: int | None = None,
        *,
        most_unbuilt: int = 0,  # noqa: ARG002 - the link knows
    ) -> Delivery | Later | None:
        self._home.check()
        if generation not in (None, self.generation()):
            return Later(MOVED)
        wait_s = max(wait_s, self._wait_s)
        known, of_server = self._welcome, self._generations[-1 if generation is None else generation]
        ticket = wire.Ticket(known.job, rank, step, wait_s, self._session, known.instance, of_server, ahead)
        link = self._steps
        try:
            answer = link.fetch(ticket, wait_s + _GRACE_S, self._arenas)
        except NotOnThisHostError as error:
            return self._give_up_local(link, str(error))
        except Unreachable as error:
            return self._reconnect(str(error))
        except BuildError as error:
            _log.info("rank %d: %s", self._rank, error)
            return Later(str(error))
        except DamagedStepError as error:
            raise ServiceError(
                f"step {step} came damaged from {link.address}: {error}; request it again, and if that does not help, "
                "install the same release on both sides"
            ) from error
        match answer:
            case Delivery():
                return self._check(answer, step, link.address)
            case wire.End():
                return None
            case wire.Failure():
                raise answer.error()
            case _:
                return self._follow_refusal(answer, ticket)

    @property
    def has_pipeline(self) -> bool:
        return isinstance(self._steps, LocalLink)

    def open_pipeline(self, rank: int) -> RequestsAhead | None:
        link = self._steps
        if not isinstance(link, LocalLink):
            return None
        try:
            pipeline = link.open_pipeline(self._arenas)
        except Unreachable as error:
            _log.debug("rank %d requests its steps one by one: %s", rank, error)
            return None
        known, generation = self._welcome, self._generations[-1]
        ticket = wire.Ticket(known.job, rank, 0, self._wait_s, self._session, known.instance, generation, True)
        return RequestsAhead(pipeline, ticket)

    def take(
        self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None, origin: str | None = None
    ) -> Later | None:
        self._home.check()
        if generation not in (None, self.generation()):
            return Later(MOVED)
        known, of_server = self._welcome, self._generations[-1 if generation is None else generation]
        if origin not in (None, _origin(known, of_server)):
            return Later("the run was moved, or its service restarted, since the step was fetched")
        link = self._steps
        if isinstance(link, LocalLink) and link.share_takes(rank, self._session) and link.take(step, waited_s):
            return None
        waited_s = min(waited_s, _MOST_WAITED_S)
        request = wire.Take(known.job, rank, step, self._session, known.instance, of_server, waited_s)
        try:
            refusal = link.call(wire.TAKE, request, _CALL_S)
        except NotOnThisHostError as error:
            return self._give_up_local(link, str(error))
        except Unreachable as error:
            return self._reconnect(str(error))
        return None if refusal is None else self._follow_refusal(refusal, request)

    def _follow_refusal(self, refusal: wire.Refusal, request: wire.Ticket | wire.Take) -> Later:
        """Do what the answer to a refused request says."""
        match refusal:
            case wire.NotReady():
                return Later(refusal.reason)
            case wire.Moved() if refusal.instance != request.instance:
                return self._reconnect("it was restarted")
            case wire.Moved():
                self._add_generation(refusal.generation, after=request.generation)
                return Later(MOVED)
            case wire.Elsewhere():
                return self._reconnect(f"rank {self._rank} is no longer served there")

    def _check(self, delivery: Delivery, step: int, address: str) -> Delivery:
        if delivery.step != step:
            raise ServiceError(
                f"{address} sent step {delivery.step} where step {step} was requested: check the address, and install the "
                "same release on both sides"
            )
        self._arenas.most = max(self._arenas.most, 2 * len(delivery.microbatches))
        return delivery

    def leave(self, rank: int, generation: int | None = None) -> None:  # noqa: ARG002 - part of the protocol
        # The generation is not needed: the service knows by the session whether another client has become this rank.
        try:
            self._send_presence(wire.LEAVE)
        except (Unreachable, OverlordError) as error:  # the server, if it still runs, will notice the missing heartbeats
            _log.info("rank %d left and could not notify the service: %s", rank, error)

    def close(self) -> None:
        """End every wait, and stop the heartbeat. Calls that do not have to wait still work."""
        self._closed.set()
        door, self._door = self._door, None  # a later call opens it again
        for link in (self._steps, door):
            if isinstance(link, LocalLink):
                link.close()

    def beat(self) -> None:
        """Send a heartbeat."""
        try:
            self._send_presence(wire.HERE)
        except (Unreachable, OverlordError) as error:  # the next fetch will fail too, and report it
            _log.debug("rank %d could not send a heartbeat: %s", self._rank, error)

    def _send_presence(self, action: Action[wire.Presence, None]) -> None:
        self._steps.call(action, wire.Presence(self._welcome.job, self._rank, self._session), _CALL_S)

    def _send(self, call: Call[..., T], request_for: Callable[[str], RunRequest]) -> T:
        """Send a call on the run to the service; see `remote_run`."""
        request = self._with_server_generation(request_for(self._welcome.job))
        if call.on_failure is None:
            reply = self._retry(lambda: self._call_or_renew(call.action, request))
        else:
            try:
                reply = self._ask(call.action, request)
            except (Unreachable, OverlordError) as error:
                return call.on_failure(error)
        if isinstance(request, LoadStateRequest):
            self._loaded = request.state
            self._add_generation(reply)
            reply = self.generation()
        return call.result_of(reply)

    def _with_server_generation(self, request: RunRequest) -> RunRequest:
        generation: int | None = getattr(request, "generation", None)
        if generation is None:
            return request
        known = self._generations[generation] if generation >= 0 else self._generations[0] - 1
        return msgspec.structs.replace(request, generation=known)

    def _call_or_renew(self, action: Action[RunRequest, Any], request: RunRequest) -> Any:
        try:
            return self._ask(action, request)
        except Unreachable:
            self._renew()
            raise

    def _ask(self, action: Action[Any, T], request: Any) -> T:
        """Call the service itself."""
        door = self._door
        if door is None:
            door = self._door = self._open_door()
        try:
            return door.call(action, request, _CALL_S + getattr(request, "patience_s", 0.0))
        except Unreachable:
            if isinstance(door, LocalLink):  # it may come back in another way
                self._door = None
                door.close()
            raise

    def _open_door(self) -> Link | LocalLink:
        """The way to the service: through its unix socket where it is on this host, which takes neither Flight nor Arrow;
        else over Flight. Raises Unreachable where there is no service yet."""
        address = Address.parse(self._address)
        name = None if self._not_here == "" else address.unix_name
        if name is None:
            return self._link_to(self._address)
        try:
            return LocalLink(name, self._token, for_steps=False)
        except NotOnThisHostError as error:
            if isinstance(error.__cause__, OverlordError):  # it is there, and refuses this client
                raise error.__cause__ from None
            try:
                socket.create_connection((address.host, address.port), _PROBE_S).close()
            except OSError as nobody:
                raise Unreachable(f"{self._address}: {nobody}") from None
            _log.info("rank %d calls its service over Flight: %s", self._rank, error)
            return self._link_to(self._address)

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Returns the outcome of the first attempt that reaches the server."""
        self._home.check()

        def check_timeout(failed: FailedAttempt[Unreachable]) -> None:
            self._trouble = str(failed.error)
            if self._timeout_s is not None and failed.waited_s >= self._timeout_s:
                raise ServiceError(
                    f"rank {self._rank} could not reach the service for {failed.waited_s:.1f} s: {failed.error}; is it "
                    "running, and is the address right?"
                ) from failed.error

        def pause(seconds: float) -> None:
            if self._closed.wait(seconds):
                raise ServiceError(f"the client of rank {self._rank} was closed while it waited for the service")

        self._trouble = "it has not answered yet"
        wait = f"rank {self._rank} waits for the service at {self._address}"
        with warn_if_long(lambda: f"{wait}: {self._trouble}", self.warn_after_s):
            return retry(attempt, on=Unreachable, pauses=repeat(_PAUSE_S), on_failure=check_timeout, sleep=pause)

    def _reconnect(self, reason: str) -> Later:
        """Try once to find the server of this rank. The client calls again when it gets Later."""
        if self._closed.is_set():  # a fetch ahead that was under way
            return Later("the client is closed")
        if not self._is_lost:  # log once, not for every attempt
            _log.warning("rank %d lost its server and reconnects: %s", self._rank, reason)
            self._is_lost = True
        try:
            self._renew()
        except Unreachable as error:
            reason = str(error)
            self._closed.wait(_PAUSE_S)
        return Later(f"the service went away: {reason}")

    def _renew(self) -> wire.Welcome:
        """Greet the service again, and connect to the server that it names for this rank."""
        with self._lock:
            welcome = self._greet()
            if welcome.job != self._welcome.job:
                raise ServiceError(
                    f"the service at {self._address} now runs job {welcome.job}; this client began with "
                    f"{self._welcome.job}: the declaration or its data changed; call overlord.connect again"
                )
            if welcome.instance != self._welcome.instance:
                welcome = self._reload(welcome)
            elif welcome.generation > self._generations[-1]:  # an older one was sent before another thread heard of a move
                self._add_generation(welcome.generation)
            self._follow(welcome)
            self._welcome = welcome
            if self._is_lost:
                _log.warning("rank %d found its server again", self._rank)
                self._is_lost = False
            return welcome

    def _reload(self, welcome: wire.Welcome) -> wire.Welcome:
        """Move a restarted run to the state that this client had loaded, unless it was resumed from a later step."""
        if self._loaded is not None and welcome.start <= self._loaded["step"]:
            load = LoadStateRequest(welcome.job, self._loaded, -1)
            generation = self._ask(CALLS["load_state"].action, load)
            welcome = msgspec.structs.replace(self._greet(), generation=generation)
        self._generations[-1] = welcome.generation
        return welcome

    def _greet(self, needs_flight: bool = False) -> wire.Welcome:
        return self._ask(wire.HELLO, wire.Hello(wire.VERSION, self._rank, needs_flight, self._nodes))

    def _follow(self, welcome: wire.Welcome) -> None:
        """Connect to the server that has this rank's steps."""
        if not self._reads:
            return
        old, self._steps = self._steps, self._find_server(welcome, self._steps)
        if old not in (self._steps, self._door):
            old.close()

    def _find_server(self, welcome: wire.Welcome, known: Link | LocalLink | None) -> Link | LocalLink:
        """The server that has this rank's steps: through its unix socket, or else over Flight. Whether it is on this host is
        not guessed from names: only a process of the same host can connect to the socket."""
        link = self._find_local(welcome.local, known)
        if link is not None:
            return link
        if welcome.local is not None:
            welcome = self._greet(needs_flight=True)  # the server listens on the network only where a client needs it
        address = welcome.address or self._address
        for same in (known, self._door):
            if same is not None and same.address == address:
                return same
        return self._link_to(address)

    def _find_local(self, address: str | None, known: Link | LocalLink | None) -> LocalLink | None:
        if address is None or self._not_here in ("", address):
            return None
        if isinstance(known, LocalLink) and known.address == address and known.is_open:
            return known
        try:
            return LocalLink(address, self._token)
        except NotOnThisHostError as error:
            self._not_here = address
            _log.info("rank %d does not share memory with its service, and uses Flight: %s", self._rank, error)
            return None

    def _give_up_local(self, link: Link | LocalLink, reason: str) -> Later:
        """Use Flight from now on: the service has no shared memory for this rank's steps."""
        _log.warning("rank %d uses Flight from now on: %s", self._rank, reason)
        self._not_here = link.address
        return self._reconnect(reason)

    def _add_generation(self, generation: int, after: int | None = None) -> None:
        """Note that the run was moved. The answer to an old request, sent `after` an older move, is no news."""
        with self._moving:
            if generation != self._generations[-1] and after in (None, self._generations[-1]):
                self._generations.append(generation)

    def _link_to(self, address: str) -> Link:
        from overlord.service.link import Link

        return Link(address, self._token, self._root)


class RequestsAhead:
    """Requests for steps of one origin, sent before their answers are needed."""

    def __init__(self, pipeline: StepPipeline, ticket: wire.Ticket) -> None:
        self._pipeline = pipeline
        self._ticket = ticket
        self.stop_receiving = pipeline.stop_receiving
        self.close = pipeline.close

    def request(self, step: int | None) -> None:
        ticket = self._ticket if step is None else msgspec.structs.replace(self._ticket, step=step)
        self._pipeline.request(ticket, goes_on=step is None)

    def receive(self, timeout_s: float | None) -> Sequence[StepAhead]:
        """The answer to the first request that was not answered yet; nothing where it is no step. Raises what a connection
        raises, which is of no use then."""
        most_s = self._ticket.wait_s + _GRACE_S
        answer = self._pipeline.receive(most_s if timeout_s is None else min(timeout_s, most_s))
        if isinstance(answer, Delivery):
            return [BuiltStep(answer)]
        return answer if isinstance(answer, list) else ()


class BuiltStep(NamedTuple):
    """A step that came as it is used."""

    delivery: Delivery

    @property
    def step(self) -> int:
        return self.delivery.step

    def build(self) -> Delivery:
        return self.delivery


def _origin(welcome: wire.Welcome, generation: int) -> str:
    return f"{welcome.instance}/{generation}"


def _start_heartbeat(channel: FlightChannel, closed: threading.Event, every_s: float) -> None:
    """Start the heartbeat thread. It holds the channel weakly, so that the heartbeat of a dropped client stops."""
    held = weakref.ref(channel)

    def beat() -> None:
        while not closed.wait(every_s):
            alive = held()
            if alive is None:
                return
            alive.beat()
            del alive

    threading.Thread(target=beat, name="overlord-heartbeat", daemon=True).start()


def connect(  # noqa: PLR0913 - all but the address by name
    address: str,
    *,
    rank: int,
    token: str | None = None,
    tls_root: str | Path | None = None,
    timeout_s: float | None = 300.0,
    torch: bool = False,
    pin_memory: bool = False,
    device: Any = None,
    fetch_ahead: int | None = None,
) -> Client:
    """Return the iterator of one rank of a run that `Loader.serve` or `overlord serve` serves at an address.

    `timeout_s` is the longest wait for the service and for each step; None waits forever. `tls_root` is a PEM file with the
    root certificate to trust; without it the system's root certificates are trusted.

    With `torch`, arrays are tensors; with `pin_memory` in page-locked memory, with `device` on that device. A thread of the
    client fetches up to `fetch_ahead` steps and copies them before the trainer takes them. By default two steps are fetched
    ahead; by a thread only where that saves time, not where a step is mapped from shared memory.
    """
    rank = whole(rank, "rank")
    timeout_s = seconds_or_none(timeout_s, "timeout_s")
    Destination(torch, pin_memory, device)  # checked before any wait
    fetch_ahead = None if fetch_ahead is None else whole(fetch_ahead, "fetch_ahead")
    channel = connect_channel(address, rank, token=token, tls_root=tls_root, timeout_s=timeout_s)
    return open_client(
        channel, rank, torch=torch, pin_memory=pin_memory, device=device, fetch_ahead=fetch_ahead, timeout_s=timeout_s
    )


def connect_channel(
    address: str,
    rank: int,
    *,
    token: str | None,
    tls_root: str | Path | None,
    timeout_s: float | None,
    reads: bool = True,
) -> FlightChannel:
    """The channel of a rank to the service at an address, or one that only calls the run."""
    check_token(token)
    root = None if tls_root is None else read_pem(tls_root, "the TLS root certificate")
    return FlightChannel(address, rank, token=token, root=root, timeout_s=timeout_s, reads=reads)


def open_client(
    channel: FlightChannel,
    rank: int,
    *,
    torch: bool,
    pin_memory: bool,
    device: Any,
    fetch_ahead: int | None,
    timeout_s: float | None,
) -> Client:
    """The client of a rank over its channel, which it closes."""
    destination = Destination(torch, pin_memory, device)
    client = Client(rank, channel, destination=destination, fetch_ahead=fetch_ahead, timeout_s=timeout_s)
    client.at_close(channel.close)
    return client
