"""The service: hands the steps of a run to trainers in other processes, and answers their calls on the run.

Trainers on this host reach it through a unix socket and map their batches from shared memory (`local_server.py`); others
over Arrow Flight (`flight_server.py`). Both ways lead to the methods below.

How it behaves:
- Every call may be repeated. A call that is malformed, is for another job or lacks the token is refused with an error that
  says why, is logged, and changes nothing.
- Errors of the run travel inside answers, so that the client raises what would have been raised here.
- A rank without a sign of life for `leave_after_s` no longer holds others back. When it comes back it continues where it
  was. A rank that has not come since the service started is late, and counts as gone after the same time, counted from its
  first peer.
- A step that a client has fetched ahead is not taken yet: the ranks' steps below are those that trainers have taken.
- A connection that ends says nothing about its rank: a rank that was replaced or lost its network comes back. Only what the
  client says counts, and its silence.
- Draining: a step that some rank has taken is still handed to the others; no later step is.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from overlord.declare.arguments import seconds_or_none
from overlord.errors import OverlordError, ServiceError
from overlord.messages import Delivery, Later
from overlord.runtime.liveness import RANK_SILENT
from overlord.runtime.recorder import current_recorder
from overlord.runtime.serving_threads import let_others_serve
from overlord.runtime.shared_memory import why_unavailable
from overlord.service import wire
from overlord.service.local_server import LocalServer
from overlord.service.ranks import RankRegistry
from overlord.service.run_api import ACTIONS, CALLS
from overlord.service.taking import TakeBoard
from overlord.service.wire import Refused, parse, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from overlord.batches.buffers import Arenas
    from overlord.runtime.serving_threads import ServingThreads
    from overlord.service.auth import Address, Listen
    from overlord.service.flight_server import FlightServer
    from overlord.service.run_api import Channel, StepSource
    from overlord.service.taking import TakenStep

T = TypeVar("T")

LEAVE_AFTER_S = RANK_SILENT.after_s

_MOST_WAIT_S = 10.0  # a call holds one of the server's threads
_SLICE_S = 0.5  # how often a waiting call checks that the run was not moved and the service is not closing
_PAUSES_S = (0.002, 0.25)  # the first and the longest pause between two fetches for one call
_log = logging.getLogger(__name__)


class Addresses(NamedTuple):
    """Where the steps of a rank are served."""

    flight: str | None
    local: str | None
    """For processes of the same host; None where there is no shared memory."""


class RankCalls(NamedTuple):
    """The ranks of a server since the run began or was moved: those that went silent, those that have called, and the next
    step of each that has read."""

    lost: frozenset[int]
    called: frozenset[int]
    last: dict[int, int]


class Service:
    """A server over a run, over the steps of some of its ranks, or over both; it serves until it is closed.

    `locate` returns the addresses of the server that has the steps of a client that greets, or None when it is this one, and
    raises SpecError for a rank that the run does not have. With `arenas`, whose memory is shared
    from then on, trainers on this host map their batches; `threads` serve them, and those of other servers of this process.
    Without `on_network` Flight starts when `open_network` is called.
    `serves` says whether a rank's steps are here; a rank may be moved elsewhere. `ranks`
    returns those that are expected to come. Servers of one run share an `instance`; another one tells clients that the
    service was restarted.
    """

    def __init__(  # noqa: PLR0913 - all but two by name
        self,
        job: str,
        listen: Listen,
        *,
        instance: str | None = None,
        steps: StepSource | None = None,
        run: Channel | None = None,
        locate: Callable[[wire.Hello], Addresses | None] = lambda _: None,
        serves: Callable[[int], bool] = lambda _: True,
        ranks: Callable[[], Collection[int]] = tuple,
        leave_after_s: float | None = LEAVE_AFTER_S,
        arenas: Arenas | None = None,
        threads: ServingThreads | None = None,
        on_network: bool = True,
        wait_for_all: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        leave_after_s = seconds_or_none(leave_after_s, "leave_after_s")
        self.job = job
        self.instance = instance or secrets.token_hex(8)
        self.ranks = RankRegistry(clock)
        self.takes = TakeBoard(self._note_taken)
        self._steps = steps
        self._run = run
        self._locate = locate
        self._serves = serves
        self._expected_ranks = ranks
        self.ranks.expect(ranks())
        self._leave_after_s = leave_after_s
        self._wait_for_all = wait_for_all
        self._clock = clock
        self._generation = 0 if steps is None else steps.generation()
        self._last_step: int | None = None  # the last to hand out, once draining
        self._taking = threading.Lock()
        self._closing = threading.Event()
        self._events = current_recorder().events
        self._listen = listen
        self._opening = threading.Lock()
        self._flight: FlightServer | None = None
        self._local: LocalServer | None = None
        self._door: LocalServer | None = None
        # Before the network: a trainer may greet at once, and is told of it.
        if steps is not None and arenas is not None and arenas.share():
            self._local = LocalServer(self, arenas, listen.token, threads=threads)
        if on_network:
            self.open_network()
        if leave_after_s is not None and steps is not None:
            threading.Thread(target=self._watch, args=(leave_after_s,), name="overlord-ranks", daemon=True).start()

    @property
    def address(self) -> str:
        """The address of the Flight server, which is started where it does not run."""
        return self.open_network()

    @property
    def addresses(self) -> Addresses:
        """Where this server can be reached by now."""
        flight = self._flight
        return Addresses(None if flight is None else flight.address, None if self._local is None else self._local.address)

    def open_network(self) -> str:
        """Start the Flight server, unless it runs; returns its address. It costs memory and time: it is not started where
        all trainers are on this host."""
        from overlord.service.flight_server import FlightServer

        with self._opening:
            if self._flight is None:
                # First, where the port is known: a client that finds the port open and no socket would use Flight.
                if self._listen.bound.port:
                    self._open_door(self._listen.bound)
                try:
                    self._flight = FlightServer.start(self._listen, self)
                except BaseException:
                    if self._door is not None:
                        self._door.close()
                    raise
                self._open_door(replace(self._listen.bound, port=self._flight.port))
            return self._flight.address

    def _open_door(self, address: Address) -> None:
        """Let processes of this host greet the service, and call the run, without Flight."""
        name = address.unix_name
        if self._run is None or name is None or self._door is not None or why_unavailable() is not None:
            return
        try:
            self._door = LocalServer(self, None, self._listen.token, name)
        except OSError as error:
            _log.info("processes of this host greet this service over Flight: %s", error)

    def pause_takes(self) -> list[int]:
        """Let trainers take no step without a message until `takes.resume`; returns the ranks of which it is not known
        whether they take one now."""
        return [page.rank for page in self.takes.pause()]

    def halt(self) -> int:
        """Hand out no step beyond those that some rank has taken; returns the last of them."""
        undecided = self.takes.pause()  # for good
        with self._taking:
            taken = [*self.ranks.last().values(), *(self.ranks.last().get(page.rank, 0) + 1 for page in undecided)]
            last = self._last_step = max(taken, default=0) - 1
        return last

    def drain(self, last: int, timeout_s: float) -> bool:
        """Hand out steps up to `last` and wait until every reading rank has it. False after `timeout_s`."""
        self._last_step = last
        return self.ranks.wait_until(lambda steps: min(steps.values(), default=last + 1) > last, timeout_s)

    def reading(self) -> dict[int, int]:
        """The ranks that are reading, with the next step of each."""
        self.takes.follow_all()
        return self.ranks.reading()

    def last(self) -> dict[int, int]:
        """Every rank that ever read, with its next step."""
        self.takes.follow_all()
        return self.ranks.last()

    def rank_calls(self) -> RankCalls:
        """What is known of the ranks of the run's present generation."""
        if self._steps is not None:
            self._follow_generation(self._steps)
        return RankCalls(frozenset(self.ranks.lost()), frozenset(self.ranks.called()), self.last())

    def close(self) -> None:
        """Stop serving, once calls in progress are answered. Safe to call twice."""
        self._closing.set()
        self.takes.pause()
        for local in (self._local, self._door):
            if local is not None:
                local.close()
        if self._flight is not None:
            self._flight.shutdown()

    def answer(self, ticket: wire.Ticket, pack: Callable[[Delivery], T], most_unbuilt: int = 0) -> T | wire.Answer:
        """Returns the answer to a ticket; a step as `pack` packs it. With `most_unbuilt` it may be unbuilt, with so many in
        all if it is fetched ahead."""
        self._check_job(ticket.job)
        steps = self._require_steps()
        try:
            answer = self._fetch_patiently(steps, ticket, most_unbuilt)
            return pack(answer) if isinstance(answer, Delivery) else answer
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            return self.failure(error, f"rank {ticket.rank} asked for step {ticket.step}")

    def failure(self, error: Exception, doing: str) -> wire.Failure:
        """The answer for an error. Those that are not Overlord's own are logged here."""
        if not isinstance(error, OverlordError):
            _log.error("%s", doing, exc_info=error)
        return wire.Failure.of(error)

    def _fetch_patiently(self, steps: StepSource, ticket: wire.Ticket, most_unbuilt: int) -> Delivery | wire.Answer:
        """Fetch for a client until there is an answer or its wait is over, so that thousands of clients need not poll."""
        deadline = self._clock() + min(ticket.wait_s, _MOST_WAIT_S)
        pause_s = _PAUSES_S[0]
        self.takes.follow(ticket.rank, ticket.session)
        while True:
            epoch = self.takes.epoch
            if (moved := self._find_move(steps, ticket)) is not None:
                return moved
            if not self._serves(ticket.rank):
                return wire.Elsewhere()
            self._claim(ticket.rank, ticket.session)
            if ticket.ahead:
                self.ranks.note_heartbeat(ticket.rank, ticket.session)
            else:
                self.ranks.note_request(ticket.rank, ticket.session, ticket.step)
            left_s = max(deadline - self._clock(), 0.0)
            answer = self._fetch(steps, ticket, min(left_s, _SLICE_S), most_unbuilt)
            if isinstance(answer, Delivery) and not ticket.ahead:
                answer = self._hand_out(answer, ticket, epoch)
            if isinstance(answer, Delivery):  # it counts as taken: the trainer gets it, even if the run was moved meanwhile
                return answer
            if (moved := self._find_move(steps, ticket)) is not None:
                return moved
            if answer is None:
                return wire.End()
            self.takes.follow_all()  # it may wait for another rank, which has gone on by now
            # No patience for a fetch ahead: by now the trainer may wait for the step, and it may not come before the rank is
            # moved, which only the trainer's own request does. And no fetch without time to wait for it: its reason would
            # only be that nothing has begun.
            if ticket.ahead or deadline - self._clock() <= 2 * pause_s:
                return wire.NotReady(answer.reason)
            let_others_serve()  # what it waits for may be another rank that this thread would serve next
            if self._closing.wait(pause_s):
                return wire.NotReady(answer.reason)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _hand_out(self, delivery: Delivery, ticket: wire.Ticket, epoch: int) -> Delivery | Later:
        """Let a rank take a step that it has fetched, unless `halt` came before it."""
        with self._taking:
            later = None if self._last_step is None else self._find_stop(delivery.step)
            if later is None and ticket.generation == self._generation:
                self.ranks.note_delivery(ticket.rank, ticket.session, delivery.step)
        if later is None:
            self.takes.open(ticket.rank, ticket.session, ticket.generation, epoch)
        return later or delivery

    def _fetch(self, steps: StepSource, ticket: wire.Ticket, wait_s: float, most_unbuilt: int) -> Delivery | Later | None:
        number, rank, ahead, generation = ticket.step, ticket.rank, ticket.ahead, ticket.generation
        stop = self._find_stop(number)
        return stop or steps.fetch(number, rank, wait_s, ahead, generation, most_unbuilt=most_unbuilt)

    def take(self, request: wire.Take) -> wire.Refusal | None:
        """Take a step for a rank that has fetched it ahead; returns why it cannot be taken now."""
        steps, epoch = self._require_steps(), self.takes.epoch
        self.takes.follow(request.rank, request.session)
        if (moved := self._find_move(steps, request)) is not None:
            return moved
        if not self._serves(request.rank):
            return wire.Elsewhere()
        self._claim(request.rank, request.session)
        with self._taking:  # `halt` finds the step taken, or it is not taken
            self.ranks.note_request(request.rank, request.session, request.step)
            later = self._find_stop(request.step)
            later = later or steps.take(request.step, request.rank, request.waited_s, request.generation)
            if later is None and request.generation == self._generation:
                self.ranks.note_delivery(request.rank, request.session, request.step)
        if later is not None:
            return self._find_move(steps, request) or wire.NotReady(later.reason)
        self.takes.open(request.rank, request.session, request.generation, epoch)
        return None

    def _note_taken(self, taken: TakenStep) -> None:
        """Note a step that was taken without a message."""
        steps = self._require_steps()
        if steps.generation() != taken.generation or not self.ranks.is_of(taken.rank, taken.session):
            return
        self.ranks.note_request(taken.rank, taken.session, taken.step)
        later = steps.take(taken.step, taken.rank, taken.waited_s, taken.generation)
        self.ranks.note_delivery(taken.rank, taken.session, taken.step)
        if later is not None:
            _log.debug("rank %d took step %d, and the constructor says: %s", taken.rank, taken.step, later.reason)

    def _claim(self, rank: int, session: str) -> None:
        """Before a client takes a rank's place: the one before it takes no more steps by itself."""
        if self.takes.has_other(rank, session) and not self.ranks.is_displaced(rank, session):
            self.takes.shut(rank, except_session=session)

    def _find_stop(self, step: int) -> Later | None:
        """Returns why a step is not handed out when the service is stopping."""
        last = self._last_step
        if last is not None and step > last:
            return Later(f"the service is stopping and hands out no step after {last}; it goes on when it is started again")
        return Later("the service is stopping") if self._closing.is_set() else None

    def _find_move(self, steps: StepSource, ticket: wire.Ticket | wire.Take) -> wire.Moved | None:
        """Note the run's generation; returns the answer for a client that knows the run as of another one."""
        generation = self._follow_generation(steps)
        if (ticket.instance, ticket.generation) == (self.instance, generation):
            return None
        return wire.Moved(self.instance, generation)

    def _follow_generation(self, steps: StepSource) -> int:
        """Forget where ranks were if the run was moved; returns its generation."""
        generation = steps.generation()
        if generation != self._generation:
            self._generation = generation
            self.ranks.forget(self._expected_ranks())
        return generation

    def act(self, name: str, body: bytes | memoryview) -> wire.Value[Any] | wire.Failure:
        """Returns the reply of an action. Raises Refused for a call that is refused."""
        if name not in ACTIONS:
            raise refusal(f"there is no action {name[:64]!r}; there are {', '.join(ACTIONS)}")
        request = parse(body, ACTIONS[name].request)
        try:
            return wire.Value(self._act(name, request))
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - the caller gets it, whatever it is
            return self.failure(error, f"action {name}")

    def _act(self, name: str, request: Any) -> Any:
        if isinstance(request, wire.Hello):
            return self._welcome(request)
        self._check_job(request.job)
        match name:
            case wire.HERE.name:
                self._claim(request.rank, request.session)
                self.ranks.note_heartbeat(request.rank, request.session)
            case wire.LEAVE.name:
                self.takes.follow(request.rank, request.session)
                if self.ranks.note_leave(request.rank, request.session) and self._steps is not None:
                    self._steps.leave(request.rank)
            case wire.TAKE.name:
                return self.take(request)
            case _:
                return CALLS[name].invoke(self._require_run().run, request)

    def _check_job(self, job: str) -> None:
        if job != self.job:
            _log.warning("refused a call for job %r: this service runs %r", job, self.job)
            raise Refused(
                f"this service runs job {self.job}, and the call is for job {job}: the declaration or its data changed, or "
                "the address belongs to another run; call overlord.connect again",
                is_unauthorized=True,
            )

    def _welcome(self, hello: wire.Hello) -> wire.Welcome:
        if hello.version != wire.VERSION:
            raise refusal(
                f"the client speaks version {hello.version} of the wire, this service version {wire.VERSION}: install the "
                "same release of overlord on both sides"
            )
        run = self._require_run()
        every_s = None if self._leave_after_s is None else self._leave_after_s / RANK_SILENT.checks
        found = self._locate(hello)
        flight, local = (None, self.addresses.local) if found is None else found
        generation = run.generation()  # before the start: a client that got an older one is told of the move
        return wire.Welcome(self.job, self.instance, flight, run.start(), generation, every_s, local)

    def _require_steps(self) -> StepSource:
        if self._steps is None:
            raise Refused("this server hands out no steps; ask it for the address of the rank's")
        return self._steps

    def _require_run(self) -> Channel:
        if self._run is None:
            raise ServiceError("this server only hands out steps; ask the one that `overlord.connect` was given")
        return self._run

    def _watch(self, leave_after_s: float) -> None:
        steps = self._steps
        assert steps is not None  # only then is this thread started
        while not self._closing.wait(leave_after_s / RANK_SILENT.checks):
            # Where all ranks are waited for, one that has not come yet is not gone, however long it takes.
            for rank in self.ranks.silent(leave_after_s, with_late=not self._wait_for_all):
                self.takes.shut(rank)  # if it comes back, it says so
                if self.ranks.note_silence(rank):
                    _log.warning("rank %d was silent for %.0f s: others no longer wait for it", rank, leave_after_s)
                    self._events.note(
                        "rank_lost", f"rank {rank} was silent for {leave_after_s:g} s: others no longer wait for it"
                    )
                    steps.leave(rank)
