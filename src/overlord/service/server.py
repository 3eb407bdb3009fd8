"""The service: hands the steps of a run to trainers in other processes, and answers their questions about the run.

How it behaves:
- Every call may be repeated. What it cannot understand, what belongs to another job and what lacks the token is refused
  with a Flight error that says why, is logged, and changes nothing.
- Errors of the run travel inside answers, so that the client raises what would have been raised here.
- A rank that is not heard from for `leave_after_s` no longer holds others back. When it comes back it goes on where it was.
  One that has not come since the service started is late, and counts as gone after the same time, from its first peer on.
- Draining: a step that some rank has taken is still handed to the others; no later one is.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from overlord.declare.arguments import seconds_or_none
from overlord.errors import OverlordError, ServiceError, SpecError
from overlord.messages import Delivery, Later, StepReport, WeightChange
from overlord.runtime.liveness import RANK_SILENT
from overlord.service import wire
from overlord.service.auth import Listen, TokenCheck
from overlord.service.forking import check_not_forked, hold
from overlord.service.gate import Gate, has_gate
from overlord.service.ranks import RankRegistry
from overlord.service.steps import SCHEMA, packed_step
from overlord.service.wire import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from overlord.messages import State
    from overlord.steering.decisions import Decision

T = TypeVar("T")

LEAVE_AFTER_S = RANK_SILENT.after_s

_MOST_WAIT_S = 10.0  # a call holds one of the server's threads
_SLICE_S = 0.5  # how often a waiting call looks whether it still should
_PAUSES_S = (0.002, 0.25)  # the first and the longest, between two looks at a rank that is behind
_NO_REGIONS = pa.RecordBatch.from_arrays([pa.array([], pa.binary_view())], schema=SCHEMA)
_log = logging.getLogger(__name__)


class Steps(Protocol):
    """What a server hands out. A `Channel` is one."""

    def generation(self) -> int: ...
    def fetch(self, step: int, rank: int, wait_s: float) -> Delivery | Later | None: ...
    def leave(self, rank: int) -> None: ...


class ServedRun(Protocol):
    """What a server is asked about the whole run. A `Channel` is one."""

    def start(self) -> int: ...
    def generation(self) -> int: ...
    def state_before(self, step: int) -> State: ...
    def load_state(self, state: Mapping[str, Any], generation: int) -> int: ...
    def status_lines(self) -> list[str]: ...
    def feedback(self, report: StepReport, generation: int) -> list[str]: ...
    def change_weights(self, change: WeightChange) -> int: ...
    def decisions(self) -> Sequence[Decision]: ...


class Service:
    """A Flight server over a run, over the steps of some of its ranks, or over both; it serves until it is closed.

    `locate` gives the address of the server that has a rank's steps, or None when it is this one, and raises SpecError for
    a rank that the run does not have. `serves` says whether a rank's steps are here; a rank may be moved elsewhere. `ranks`
    gives those that are expected to come. Servers of one run share an `instance`, and are no longer known when it changes.
    """

    def __init__(
        self,
        job: str,
        listen: Listen,
        *,
        instance: str | None = None,
        steps: Steps | None = None,
        run: ServedRun | None = None,
        locate: Callable[[int], str | None] = lambda _: None,
        serves: Callable[[int], bool] = lambda _: True,
        ranks: Callable[[], Collection[int]] = tuple,
        leave_after_s: float | None = LEAVE_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        leave_after_s = seconds_or_none(leave_after_s, "leave_after_s")
        self.job = job
        self.instance = instance or secrets.token_hex(8)
        self.ranks = RankRegistry(clock)
        self._steps = steps
        self._run = run
        self._locate = locate
        self._serves = serves
        self._expected_ranks = ranks
        self.ranks.expect(ranks())
        self._leave_after_s = leave_after_s
        self._clock = clock
        self._generation = 0 if steps is None else steps.generation()
        self._last_step: int | None = None  # the last to be handed out, once draining
        self._closing = threading.Event()
        self._server = _server(listen, self)
        self.address = listen.told(self._server.port)
        if leave_after_s is not None and steps is not None:
            threading.Thread(target=self._watch, args=(leave_after_s,), name="overlord-ranks", daemon=True).start()

    def halt(self) -> int:
        """Hand out no step beyond those that some rank has taken; gives the last of them."""
        last = self._last_step = max(self.ranks.last().values(), default=0) - 1
        return last

    def drain(self, last: int, timeout_s: float) -> bool:
        """Hand out steps up to `last` and wait until every reading rank has it. False when some did not come in time."""
        self._last_step = last
        return self.ranks.wait_until(lambda steps: min(steps.values(), default=last + 1) > last, timeout_s)

    def close(self) -> None:
        """Stop serving, after the answers that are on their way. Safe to call twice."""
        self._closing.set()
        self._server.shutdown()

    def answer(self, ticket: wire.Ticket) -> tuple[wire.Answer, Iterator[pa.RecordBatch]]:
        """What a ticket gets, and the data that comes with it: always a batch, if an empty one."""
        self._check_job(ticket.job)
        steps = self._steps
        if steps is None:
            raise flight.FlightServerError("this server hands out no steps; ask it for the address of the rank's")
        try:
            answer = self._awaited(steps, ticket)
            return packed_step(answer) if isinstance(answer, Delivery) else (answer, iter([_NO_REGIONS]))
        except Exception as error:  # noqa: BLE001 - whoever asked gets it, whatever it is
            if not isinstance(error, OverlordError):
                _log.exception("rank %d asked for step %d", ticket.rank, ticket.step)
            return wire.Failure.of(error), iter([_NO_REGIONS])

    def _awaited(self, steps: Steps, ticket: wire.Ticket) -> Delivery | wire.Answer:
        """Asks on behalf of a client until there is an answer or its patience ends: clients that polled would be many."""
        deadline = self._clock() + min(ticket.wait_s, _MOST_WAIT_S)
        pause_s = _PAUSES_S[0]
        while True:
            if self._is_behind(steps, ticket):
                return wire.Moved(self.instance, self._generation)
            if not self._serves(ticket.rank):
                return wire.Elsewhere()
            self.ranks.asked(ticket.rank, ticket.session, ticket.step)
            left_s = max(deadline - self._clock(), 0.0)
            answer = self._fetched(steps, ticket, min(left_s, _SLICE_S))
            if self._is_behind(steps, ticket):
                return wire.Moved(self.instance, self._generation)
            if answer is None:
                return wire.End()
            if isinstance(answer, Delivery):
                self.ranks.took(ticket.rank, ticket.session, answer.step)
                return answer
            # No ask without time to wait for its answer: its reason would only be that nothing has begun.
            if deadline - self._clock() <= 2 * pause_s or self._closing.wait(pause_s):
                return wire.NotReady(answer.reason)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _fetched(self, steps: Steps, ticket: wire.Ticket, wait_s: float) -> Delivery | Later | None:
        last = self._last_step
        if last is not None and ticket.step > last:
            return Later(f"the service is stopping and hands out no step after {last}; it goes on when it is started again")
        if self._closing.is_set():
            return Later("the service is stopping")
        return steps.fetch(ticket.step, ticket.rank, wait_s)

    def _is_behind(self, steps: Steps, ticket: wire.Ticket) -> bool:
        generation = steps.generation()
        if generation != self._generation:
            self._generation = generation
            self.ranks.forget(self._expected_ranks())
        return (ticket.instance, ticket.generation) != (self.instance, generation)

    def act(self, kind: str, body: memoryview) -> Any:
        """What an action answers; raises Flight errors for what is refused and others for what went wrong."""
        match kind:
            case Action.HELLO:
                return self._welcome(_parsed(body, wire.Hello))
            case Action.HERE:
                present = self._ours(_parsed(body, wire.Presence))
                return self.ranks.heard(present.rank, present.session)
            case Action.LEAVE:
                present = self._ours(_parsed(body, wire.Presence))
                if self.ranks.left(present.rank, present.session) and self._steps is not None:
                    self._steps.leave(present.rank)
                return None
            case Action.STATE_BEFORE:
                return self._of_run().state_before(self._ours(_parsed(body, wire.StateBefore)).step)
            case Action.LOAD_STATE:
                wanted = self._ours(_parsed(body, wire.LoadState))
                return self._of_run().load_state(wanted.state, wanted.generation)
            case Action.DOING:
                self._ours(_parsed(body, wire.Doing))
                return self._of_run().status_lines()
            case Action.FEEDBACK:
                told = self._ours(_parsed(body, wire.FeedbackRequest))
                report = StepReport(told.step, told.rank, told.losses, told.tokens, tuple(told.seconds))
                return self._of_run().feedback(report, told.generation)
            case Action.CHANGE_WEIGHTS:
                change = self._ours(_parsed(body, wire.ChangeWeights))
                return self._of_run().change_weights(WeightChange(change.weights, change.from_step, change.id))
            case Action.DECISIONS:
                self._ours(_parsed(body, wire.Decisions))
                return [(d.step, d.name, d.value) for d in self._of_run().decisions()]
        raise _refusal(f"there is no action {kind[:64]!r}; there are {', '.join(Action)}")

    def _check_job(self, job: str) -> None:
        if job != self.job:
            _log.warning("refused a call for job %r: this service runs %r", job, self.job)
            raise flight.FlightUnauthorizedError(
                f"this service runs job {self.job}, and the call is for job {job}: the declaration or its data changed, or "
                "the address belongs to another run; connect anew"
            )

    def _welcome(self, hello: wire.Hello) -> wire.Welcome:
        if hello.version != wire.VERSION:
            raise _refusal(
                f"the client speaks version {hello.version} of the wire, this service version {wire.VERSION}: install the "
                "same release of overlord on both sides"
            )
        run = self._of_run()
        every_s = None if self._leave_after_s is None else self._leave_after_s / RANK_SILENT.checks
        where = self._locate(hello.rank)
        return wire.Welcome(self.job, self.instance, where, run.start(), run.generation(), every_s)

    def _of_run(self) -> ServedRun:
        if self._run is None:
            raise ServiceError("this server only hands out steps; ask the one that `overlord.connect` was given")
        return self._run

    def _ours(self, asked: T) -> T:
        self._check_job(asked.job)  # type: ignore[attr-defined] - every struct that is passed here has one
        return asked

    def _watch(self, leave_after_s: float) -> None:
        steps = self._steps
        assert steps is not None  # only then is this thread started
        while not self._closing.wait(leave_after_s / RANK_SILENT.checks):
            for rank in self.ranks.silent(leave_after_s):
                if self.ranks.left(rank):
                    _log.warning("rank %d was not heard from for %.0f s: others no longer wait for it", rank, leave_after_s)
                    steps.leave(rank)


def _server(listen: Listen, service: Service) -> _Server:
    try:
        return _Server(listen, service)
    except (OSError, pa.ArrowException) as error:
        raise SpecError(f"cannot listen on {listen.bound}: {wire.plain(error)}; is the port taken?") from error


class _Server(flight.FlightServerBase):
    """From Flight calls to the service."""

    def __init__(self, listen: Listen, service: Service) -> None:
        check_not_forked()
        self._service = service
        bound = listen.bound
        super().__init__(
            str(bound),
            tls_certificates=[] if listen.tls is None else [listen.tls.read()],
            middleware={} if listen.token is None else {"token": TokenCheck(listen.token)},
        )
        hold(self)
        self._gate = Gate(self.port) if listen.token is not None and has_gate() else None

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.close()

    def _admit(self, context: Any) -> None:
        """Calls come so far only with the token."""
        if self._gate is not None:
            self._gate.admit(context.peer())

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        self._admit(context)
        answer, batches = self._service.answer(_parsed(ticket.ticket, wire.Ticket))
        # The first message says what all of them hold.
        messages: Any = zip(batches, chain([wire.packed(answer)], repeat(b"")), strict=False)
        return flight.GeneratorStream(SCHEMA, messages)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[bytes]:
        self._admit(context)
        try:
            answer = wire.Value(self._service.act(action.type, memoryview(action.body)))
        except flight.FlightError:
            raise
        except Exception as error:  # noqa: BLE001 - whoever asked gets it, whatever it is
            if not isinstance(error, OverlordError):
                _log.exception("action %s", action.type[:64])
            answer = wire.Failure.of(error)
        return iter([wire.packed(answer)])

    def list_actions(self, context: Any) -> Any:
        self._admit(context)
        return [(action.value, "") for action in Action]

    def list_flights(self, context: Any, criteria: Any) -> Any:
        raise _not_offered()

    def get_flight_info(self, context: Any, descriptor: Any) -> Any:
        raise _not_offered()

    def get_schema(self, context: Any, descriptor: Any) -> Any:
        raise _not_offered()

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise _not_offered()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        raise _not_offered()


def _parsed(data: bytes | memoryview, kind: type[T]) -> T:
    try:
        return wire.unpacked(data, kind)
    except msgspec.DecodeError as error:
        raise _refusal(f"not a {kind.__name__.lower()} of overlord's wire: {error}") from None


def _refusal(text: str) -> flight.FlightError:
    _log.warning("refused a call: %s", text)
    return flight.FlightServerError(text)


def _not_offered() -> flight.FlightError:
    return _refusal("an overlord service answers do_get and actions, nothing else of Flight")
