"""What a client may call on its run, and how each call travels over Flight.

`RunApi` is the protocol. `Loader` implements it in the process of the run, and `remote_run` elsewhere. `CALLS` is the table
by which clients send calls and servers answer them. CONTRIBUTING.md says how to add a call.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
)

import msgspec
from msgspec import Meta

from overlord.declare.mesh import Axis, Mesh
from overlord.messages import (
    Decision,
    Delivery,
    DocumentOrigin,
    EvalTerms,
    Later,
    MeshChange,
    Seat,
    SeatRequest,
    SkipChange,
    SourceChange,
    StepReport,
    WeightChange,
    document_ids,
)
from overlord.service.wire import HELLO, HERE, LEAVE, TAKE, Action, BySource, Count, JobId, Seconds, Session
from overlord.status import PlannerStatus, Report, RunMetrics, StepCount, StepSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.messages import DocumentIds, State

MOVED = "the run was moved to another state or mesh"
"""Why a client that does not know of it gets no step."""

_MOST_TEXT = 4096  # of a name, as long as a path may be
_MOST_ROWS = 1 << 16  # that one request leaves out
ADD_SOURCE_S = 30.0
"""How long ranks that are behind are waited for when a source is added."""

P = ParamSpec("P")
R = TypeVar("R")


class RunApi(Protocol):
    """Calls on a whole run, for its trainers and for who steers it. Every call may be repeated."""

    def state_before(self, step: int) -> State:
        """Returns the state from which a run continues with `step`."""
        ...

    def load_state(self, state: Mapping[str, Any], generation: int) -> int:
        """Move the run to a state, for a client of a generation; returns the run's generation."""
        ...

    def status_lines(self) -> list[str]:
        """Returns what the run is busy with, to explain a wait."""
        ...

    def feedback(self, report: StepReport, generation: int) -> list[str]:
        """Report a step, for a client of a generation; returns what was not counted, and why."""
        ...

    def change_weights(self, change: WeightChange) -> int:
        """Draw by other weights; returns the first step they hold for. Repeating a change has no further effect."""
        ...

    def decisions(self) -> Sequence[Decision]:
        """Returns what was decided while the run ran."""
        ...

    def metrics(self) -> RunMetrics:
        """Returns the run at this moment as plain values."""
        ...

    def status(self) -> PlannerStatus:
        """Returns how far the planner is, and the state of its log."""
        ...

    def report(self, step: int | None = None) -> Report:
        """Returns how the run stood before a step, by default that of the slowest rank."""
        ...

    def plan_summary(self, step: int) -> StepSummary | None:
        """Returns the plan of a step in numbers; None when the run ends before it."""
        ...

    def locate(self, documents: DocumentIds) -> list[DocumentOrigin]:
        """Returns where documents were read."""
        ...

    def evaluations(self) -> list[EvalTerms]:
        """Returns the evaluations that the job declares."""
        ...

    def open_eval(self, name: str) -> str:
        """Start the run of an evaluation, if it does not run yet; returns the address at which it is served."""
        ...

    def change_mesh(self, change: MeshChange) -> int:
        """Continue for another mesh; returns the first step of it. Repeating a change has no further effect."""
        ...

    def state_dict(self) -> State:
        """Returns the state before the first step that not every reading rank has taken."""
        ...

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Hand out no new step. False when some rank did not come for the last one within `timeout_s`."""
        ...

    def leave_out(self, change: SkipChange) -> int:
        """Leave rows, a file or a source out; returns the first step without them. Repeating a change has no further
        effect."""
        ...

    def count_steps(self, wait_s: float = 0.0, most_bytes: int | None = None) -> StepCount:
        """Count the steps of a run that ends, beside it; returns what is known after `wait_s`. Nothing is counted where more
        than `most_bytes` would have to be read."""
        ...

    def may_follow(self, generation: int) -> bool:
        """True if a client of a generation goes on with its next step: the run was only moved to add sources."""
        ...

    def add_declared_source(self, change: SourceChange) -> int:
        """Add a source that the run's job file declares by now; returns its first step. Repeating a change has no further
        effect."""
        ...

    def seat_of(self, request: SeatRequest) -> Seat | None:
        """Returns which rank a trainer of an elastic run is now; None while there is no place for it."""
        ...


class StepSource(Protocol):
    """Where the steps of ranks come from."""

    def generation(self) -> int:
        """How often the run was moved to another state or mesh."""
        ...

    def fetch(
        self,
        step: int,
        rank: int,
        wait_s: float,
        ahead: bool = False,
        generation: int | None = None,
        *,
        most_unbuilt: int = 0,
    ) -> Delivery | Later | None:
        """Returns a rank's part of a step; None past the end; Later when it is not ready within `wait_s`. The rank takes
        the step with it. Fetched `ahead`, it is not taken until `take`, and the rank stays where it was. With
        `most_unbuilt` it may come unbuilt, and fetched ahead with the next ones, so many in all.

        Only steps of the run as of `generation` are returned, by default the present one. Such a step counts as taken even
        if the run is moved before the trainer has it: the trainer must get it.
        """
        ...

    def take(self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None) -> Later | None:
        """Take a step that was fetched ahead, after the trainer waited for it for `waited_s`. Returns why it cannot be taken
        now; it has to be fetched again then. The generation is as for `fetch`."""
        ...

    def leave(self, rank: int) -> None:
        """Say that a rank reads no more. Never fails: with nobody to tell, nobody waits."""
        ...


class StepAhead(Protocol):
    """A step that was received ahead."""

    @property
    def step(self) -> int: ...
    def build(self) -> Delivery: ...


class StepRequests(Protocol):
    """Steps of one rank and origin that are requested ahead. Answers come in the order of requests."""

    def request(self, step: int | None) -> None:
        """Requests a step, or what comes after the last answer, whether it was a step or not (None)."""
        ...

    def receive(self, timeout_s: float | None) -> Sequence[StepAhead]:
        """Waits for the next answer, of one step or of several that follow one another; none where it is no step. After an
        error the pipeline is of no use."""
        ...

    def stop_receiving(self) -> None:
        """Let a `receive` in another thread fail."""
        ...

    def close(self) -> None: ...


class Channel(StepSource, Protocol):
    """How a client reaches its run: in this process, or over the network. Every call may be repeated."""

    @property
    def run(self) -> RunApi: ...

    @property
    def is_ahead_useful(self) -> bool:
        """True if fetching a step takes longer than taking one that was fetched ahead."""
        ...

    def start(self) -> int:
        """Returns the step that clients begin at."""
        ...

    def eval_channel(self, name: str, known: Channel | None) -> Channel:
        """A channel to the run of an evaluation: the known one, if it still leads there."""
        ...

    def close(self) -> None: ...

    def origin(self) -> str:
        """Names what steps come from now: another name after the run was moved, or its service restarted."""
        ...

    @property
    def has_pipeline(self) -> bool:
        """True if steps can be requested before they are needed, without a thread."""
        ...

    def open_pipeline(self, rank: int) -> StepRequests | None:
        """A way to do so; None where it cannot be opened now."""
        ...

    def take(
        self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None, origin: str | None = None
    ) -> Later | None:
        """As in `StepSource`, for a step that was fetched ahead from an origin. A step from another origin is not taken."""
        ...

    def leave(self, rank: int, generation: int | None = None) -> None:
        """As in `StepSource`, for a client of a generation."""
        ...


# The requests, one type for each call. Field names and their order are the wire format.


class RunRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a call, after the job that it is for. A field `generation` is the caller's; a channel that counts
    generations by itself translates it."""

    job: JobId

    @property
    def patience_s(self) -> float:
        """How long the run may take for the call by itself; the caller waits so much longer for the reply."""
        return 0.0

    @classmethod
    def of(cls, job: str, *args: Any, **kwargs: Any) -> Self:
        """The request for a call with these arguments."""
        return cls(job, *args, **kwargs)

    def arguments(self) -> tuple[Any, ...]:
        """The arguments of the call again."""
        return msgspec.structs.astuple(self)[1:]


class StateBeforeRequest(RunRequest, frozen=True):
    step: Count


class LoadStateRequest(RunRequest, frozen=True):
    state: dict[str, Any]
    generation: Annotated[int, Meta(ge=-1)]
    """-1: of a client that has read nothing, where the run was never moved."""

    @classmethod
    def of(cls, job: str, state: Mapping[str, Any], generation: int) -> Self:
        return cls(job, dict(state), generation)


class StatusRequest(RunRequest, frozen=True):
    pass


class FeedbackRequest(RunRequest, frozen=True):
    """A `StepReport`, field by field."""

    generation: Count
    rank: Count
    step: Count
    losses: BySource
    tokens: BySource
    seconds: Annotated[list[float], Meta(max_length=65_536)]

    @classmethod
    def of(cls, job: str, report: StepReport, generation: int) -> Self:
        losses, tokens = dict(report.losses), dict(report.tokens)
        return cls(job, generation, report.rank, report.step, losses, tokens, list(report.seconds))

    def arguments(self) -> tuple[Any, ...]:
        report = StepReport(self.step, self.rank, self.losses, self.tokens, tuple(self.seconds))
        return report, self.generation


class ChangeWeightsRequest(RunRequest, frozen=True):
    """A `WeightChange`, field by field."""

    weights: BySource | None
    from_step: Count | None
    id: Session

    @classmethod
    def of(cls, job: str, change: WeightChange) -> Self:
        return cls(job, None if change.weights is None else dict(change.weights), change.from_step, change.id)

    def arguments(self) -> tuple[Any, ...]:
        return (WeightChange(self.weights, self.from_step, self.id),)


class DecisionsRequest(RunRequest, frozen=True):
    pass


class MetricsRequest(RunRequest, frozen=True):
    pass


class PlannerRequest(RunRequest, frozen=True):
    pass


class ReportRequest(RunRequest, frozen=True):
    step: Count | None = None


class StepPlanRequest(RunRequest, frozen=True):
    step: Count


class ChangeMeshRequest(RunRequest, frozen=True):
    """A `MeshChange`, field by field."""

    sizes: dict[Axis, Annotated[int, Meta(ge=1, le=1 << 24)]]
    order: tuple[Axis, ...]
    at: Count | None
    timeout_s: Seconds
    id: Session

    @property
    def patience_s(self) -> float:
        return self.timeout_s

    @classmethod
    def of(cls, job: str, change: MeshChange) -> Self:
        sizes: dict[Axis, int] = {axis: getattr(change.mesh, axis) for axis in change.mesh.order}
        return cls(job, sizes, change.mesh.order, change.at, change.timeout_s, change.id)

    def arguments(self) -> tuple[Any, ...]:
        return (MeshChange(Mesh(**self.sizes, order=self.order), self.at, self.timeout_s, self.id),)


class CheckpointRequest(RunRequest, frozen=True):
    pass


class DrainRequest(RunRequest, frozen=True):
    timeout_s: Seconds = 30.0

    @property
    def patience_s(self) -> float:
        return self.timeout_s


class SkipRequest(RunRequest, frozen=True):
    """A `SkipChange`, field by field."""

    source: Annotated[str, Meta(max_length=_MOST_TEXT)]
    file: Annotated[str, Meta(max_length=_MOST_TEXT)] | None
    rows: Annotated[tuple[Count, ...], Meta(max_length=_MOST_ROWS)] | None
    from_step: Count | None
    id: Session

    @classmethod
    def of(cls, job: str, change: SkipChange) -> Self:
        return cls(job, change.source, change.file, change.rows, change.from_step, change.id)

    def arguments(self) -> tuple[Any, ...]:
        return (SkipChange(self.source, self.file, self.rows, self.from_step, self.id),)


class LocateRequest(RunRequest, frozen=True):
    documents: Annotated[list[tuple[Count, Count, Count]], Meta(max_length=65_536)]

    @classmethod
    def of(cls, job: str, documents: DocumentIds) -> Self:
        return cls(job, document_ids(documents))


class CountStepsRequest(RunRequest, frozen=True):
    wait_s: Seconds = 0.0
    most_bytes: Count | None = None

    @property
    def patience_s(self) -> float:
        return self.wait_s


class MayFollowRequest(RunRequest, frozen=True):
    generation: Count


class AddSourceRequest(RunRequest, frozen=True):
    """A `SourceChange`, field by field."""

    source: Annotated[str, Meta(max_length=_MOST_TEXT)]
    share: float
    from_step: Count | None
    id: Session

    @property
    def patience_s(self) -> float:
        return ADD_SOURCE_S

    @classmethod
    def of(cls, job: str, change: SourceChange) -> Self:
        return cls(job, change.source, change.share, change.from_step, change.id)

    def arguments(self) -> tuple[Any, ...]:
        return (SourceChange(self.source, self.share, self.from_step, self.id),)


class RankSeatRequest(RunRequest, frozen=True):
    """A `SeatRequest`, field by field."""

    rank: Count
    session: Session
    unfinished: Count | None
    after: Annotated[str, Meta(max_length=64)] | None

    @classmethod
    def of(cls, job: str, request: SeatRequest) -> Self:
        return cls(job, request.rank, request.session, request.unfinished, request.after)

    def arguments(self) -> tuple[Any, ...]:
        return (SeatRequest(self.rank, self.session, self.unfinished, self.after),)


class EvalRequest(RunRequest, frozen=True):
    name: Annotated[str, Meta(max_length=_MOST_TEXT)]


class Call(Generic[P, R]):
    """A row of the table: a method of `RunApi`, its Flight action, its request, and the type of its reply.

    `on_failure` is for calls that must not stop a trainer: they are tried once, and it makes the result when the service
    cannot be reached or refuses. Other calls are retried while the service cannot be reached. `to_plain` and `from_plain`
    convert a result that MessagePack does not have.
    """

    def __init__(
        self,
        method: Callable[Concatenate[RunApi, P], R],
        action: str,
        request: type[RunRequest],
        reply: Any,
        *,
        on_failure: Callable[[Exception], R] | None = None,
        to_plain: Callable[[R], Any] | None = None,
        from_plain: Callable[[Any], R] | None = None,
    ) -> None:
        self.method = method.__name__
        self.action: Action[RunRequest, Any] = Action(action, request, reply)
        self.on_failure = on_failure
        self._to_plain = to_plain
        self._from_plain = from_plain

    def invoke(self, run: RunApi, request: RunRequest) -> Any:
        """Call the run on the server's side; returns what goes into the reply."""
        result = getattr(run, self.method)(*request.arguments())
        return result if self._to_plain is None else self._to_plain(result)

    def result_of(self, reply: Any) -> R:
        """The result of the call on the client's side."""
        return reply if self._from_plain is None else self._from_plain(reply)


CALLS: dict[str, Call[..., Any]] = {
    call.action.name: call
    for call in (
        Call(RunApi.state_before, "state_before", StateBeforeRequest, dict[str, Any]),
        Call(RunApi.load_state, "load_state", LoadStateRequest, Count),
        Call(RunApi.status_lines, "doing", StatusRequest, list[str], on_failure=lambda _: []),
        Call(
            RunApi.feedback,
            "feedback",
            FeedbackRequest,
            list[str],
            on_failure=lambda error: [f"the service did not take it: {error}"],
        ),
        Call(RunApi.change_weights, "change_weights", ChangeWeightsRequest, Count),
        Call(
            RunApi.decisions,
            "decisions",
            DecisionsRequest,
            list[tuple[Count, str, Any]],
            to_plain=lambda decisions: [decision.to_plain() for decision in decisions],
            from_plain=lambda entries: [Decision(*entry) for entry in entries],
        ),
        Call(RunApi.metrics, "metrics", MetricsRequest, RunMetrics),
        Call(RunApi.status, "status", PlannerRequest, PlannerStatus),
        Call(RunApi.report, "report", ReportRequest, Report),
        Call(RunApi.plan_summary, "plan", StepPlanRequest, StepSummary | None),
        Call(RunApi.change_mesh, "resize", ChangeMeshRequest, Count),
        Call(RunApi.state_dict, "checkpoint", CheckpointRequest, dict[str, Any]),
        Call(RunApi.drain, "drain", DrainRequest, bool),
        Call(RunApi.leave_out, "skip", SkipRequest, Count),
        Call(RunApi.locate, "locate", LocateRequest, list[DocumentOrigin]),
        Call(RunApi.count_steps, "count_steps", CountStepsRequest, StepCount),
        Call(RunApi.seat_of, "seat", RankSeatRequest, Seat | None),
        Call(RunApi.may_follow, "may_follow", MayFollowRequest, bool),
        Call(RunApi.add_declared_source, "add_source", AddSourceRequest, Count),
        Call(RunApi.evaluations, "evaluations", StatusRequest, list[EvalTerms]),
        Call(RunApi.open_eval, "open_eval", EvalRequest, str),
    )
}
"""The table of calls, by the names of their actions."""

ACTIONS: dict[str, Action[Any, Any]] = {
    action.name: action for action in (HELLO, HERE, LEAVE, TAKE, *(call.action for call in CALLS.values()))
}
"""Every action of a service."""


class Send(Protocol):
    """How a call gets to the service: sends the request for a job, and returns the result of the call."""

    def __call__(self, call: Call[..., R], request_for: Callable[[str], RunRequest], /) -> R: ...


def remote_run(send: Send) -> RunApi:
    """Returns a run in another process: an object with a method for each row of the table."""

    def method_of(call: Call[..., R]) -> Callable[..., R]:
        return lambda *args, **kwargs: send(call, lambda job: call.action.request.of(job, *args, **kwargs))

    return cast("RunApi", SimpleNamespace(**{call.method: method_of(call) for call in CALLS.values()}))
