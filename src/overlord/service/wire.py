"""The messages of the wire beside Arrow data: small msgspec structs, packed as MessagePack.

A step is fetched with `do_get`, whose ticket is a `Ticket`; the metadata of the first message holds the `Answer`. Everything
else is an `Action`, with one struct in and one out. A malformed message is refused as a whole: structs forbid unknown
fields, and numbers have bounds.
"""

from __future__ import annotations

import hashlib
import logging
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

import msgspec
import orjson
from msgspec import Meta, Struct

from overlord.runtime.transport import ErrorEnvelope
from overlord.runtime.whereabouts import MOST_NAMES

if TYPE_CHECKING:
    from collections.abc import Mapping

VERSION = 5
"""Incremented whenever a struct of this file, a request of `run_api` or the layout of a step changes."""

_log = logging.getLogger(__name__)

Q = TypeVar("Q", bound=Struct)
T = TypeVar("T")

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]
Session = Annotated[str, Meta(min_length=8, max_length=64)]
JobId = Annotated[str, Meta(min_length=1, max_length=64)]
BySource = Annotated[dict[str, float], Meta(max_length=65_536)]
Heartbeat = Annotated[float, Meta(gt=0.0, le=1e9)]
NodeNames = Annotated[tuple[Annotated[str, Meta(max_length=255)], ...], Meta(max_length=MOST_NAMES)]
Shape = Annotated[tuple[Count, ...], Meta(max_length=32)]


class Ticket(Struct, frozen=True, forbid_unknown_fields=True):
    """Requests one rank's part of one step, for a client that knows the run as of a generation."""

    job: JobId
    rank: Count
    step: Count
    wait_s: Seconds
    session: Session
    instance: Session
    generation: Count
    ahead: bool = False
    """The rank does not take the step with it, but later, with `Take`."""


class Take(Struct, frozen=True, forbid_unknown_fields=True):
    """Takes a step that was fetched ahead, after the trainer waited for it for `waited_s`."""

    job: JobId
    rank: Count
    step: Count
    session: Session
    instance: Session
    generation: Count
    waited_s: Seconds


class Hello(Struct, frozen=True, forbid_unknown_fields=True):
    """The first request of a client, sent again after it lost its server."""

    version: int
    rank: Count
    needs_flight: bool = False
    """The client cannot reach the local address of the server that has its steps."""
    nodes: NodeNames = ()
    """By which a cluster may know the client's node, the surest first (`runtime/whereabouts.py`)."""


class Welcome(Struct, frozen=True):
    """Which run this is, where it begins, and which server has the steps of the rank."""

    job: JobId
    instance: str
    """Different after the service was restarted."""
    address: str | None
    """None: this server, or none, where `local` is another server's that does not listen on the network."""
    start: Count
    generation: Count
    heartbeat_s: Heartbeat | None
    """How often a client must send a heartbeat; None when a silent client never counts as gone."""
    local: str | None = None
    """The unix socket of the same server, for clients on its host (`local_steps.py`)."""


class Presence(Struct, frozen=True, forbid_unknown_fields=True):
    """A heartbeat of a rank, or its leave."""

    job: JobId
    rank: Count
    session: Session


class Failure(Struct, frozen=True, tag="failure"):
    """An error of the run, for the client to raise again."""

    kind: str
    message: str
    notes: list[str]

    @staticmethod
    def of(error: Exception) -> Failure:
        envelope = ErrorEnvelope.of(error)
        return Failure(envelope.kind, envelope.message, list(envelope.notes))

    def error(self) -> Exception:
        """The same type where it is one of Overlord's own; otherwise an OverlordError that names it."""
        error = ErrorEnvelope(self.kind, self.message, tuple(self.notes)).open()
        error.add_note("raised in the service that this client is connected to")
        return error


class Value(Struct, Generic[T], frozen=True, tag="value"):
    """The reply of an action that succeeded."""

    value: T


class NotReady(Struct, frozen=True, tag="not_ready"):
    reason: str


class End(Struct, frozen=True, tag="end"):
    """The run ends before the step."""


class Moved(Struct, frozen=True, tag="moved"):
    """The run was moved to another state or mesh, or its service restarted, since the client's last call."""

    instance: str
    generation: Count


class Elsewhere(Struct, frozen=True, tag="elsewhere"):
    """The rank is no longer served here; a new `Hello` returns the address."""


# Fields are lists on the wire: a step has a dozen, and names of their attributes would take most of the time to read it.
class Array(Struct, frozen=True, array_like=True, tag="array"):
    """An array in `num_regions` regions from number `region` on, the first from byte `offset` on."""

    name: str
    dtype: Annotated[str, Meta(max_length=8)]
    """numpy's name for a type of number. `steps.number_type` refuses all others."""
    shape: Shape
    region: Count
    offset: Count
    num_regions: Annotated[int, Meta(ge=1, lt=1 << 53)] = 1


class Ragged(Struct, frozen=True, array_like=True, tag="ragged"):
    """A list of arrays."""

    name: str
    arrays: list[Array]


class Column(Struct, frozen=True, array_like=True, tag="column"):
    """An Arrow column, as an IPC stream in an array of bytes."""

    name: str
    stream: Array
    is_view: bool
    is_chunked: bool


class Shapes(Struct, frozen=True, array_like=True, tag="shapes"):
    """For a rank that gets its arrays by broadcast: name to shapes and dtypes, a list of them when ragged."""

    name: str
    shapes: dict[str, list[tuple[Shape, str]]]
    ragged: list[str]


class Scalar(Struct, frozen=True, array_like=True, tag="scalar"):
    name: str
    value: int | float | str | bool | None


class Derived(Struct, frozen=True, array_like=True, tag="derived"):
    """An array that the client computes from others of its microbatch, and from the places where it is not what they let
    expect (`service/lean_fields.py`)."""

    name: str
    shape: Shape
    exceptions: Array | None = None


Field = Array | Ragged | Column | Shapes | Scalar | Derived


class NumberPlace(Struct, frozen=True, array_like=True):
    """Numbers in a region, from byte `offset` on."""

    dtype: Annotated[str, Meta(max_length=8)]
    offset: Count
    num_entries: Count


class ChunkAt(Struct, frozen=True, array_like=True):
    """A chunk of a source in a region: what `TokenRows` says."""

    id: Count
    """Of this chunk on this connection."""
    source: Count
    number: Count
    region: Count
    values: NumberPlace
    begin: NumberPlace
    document_end: NumberPlace
    mask: NumberPlace | None


class Terms(Struct, frozen=True, array_like=True):
    """What the batch of a job declares that its fields of text depend on (`BatchTerms`)."""

    layout: Literal["packed", "padded"]
    pad_token: int
    document_multiple: Annotated[int, Meta(ge=1, lt=1 << 31)]
    image_token: int | None
    weighted: bool


class PlannedMicrobatch(Struct, frozen=True, array_like=True):
    """See `MicroPlan`."""

    num_samples: Count
    num_rows: Count
    row_tokens: Count


class PlannedStep(Struct, frozen=True, array_like=True):
    step: Count
    loss_tokens: Count | float
    microbatches: list[PlannedMicrobatch]


class Plans(Struct, frozen=True, tag="plans"):
    """A step, and maybe the next ones, which the client builds from chunks (`batches/unbuilt.py`): those that are in the
    regions, and those that earlier messages brought."""

    terms: Terms
    samples: Array
    """The tables of the `Samples` of all microbatches, and in a last line their rows."""
    chunks: list[ChunkAt]
    """Those that are new."""
    steps: list[PlannedStep]


class Contents(Struct, frozen=True, tag="contents"):
    """A step: the layout of the regions that follow."""

    step: Count
    loss_tokens: Count | float
    microbatches: list[list[Field]]


NoStep = NotReady | End | Moved | Elsewhere | Failure
Answer = Contents | NoStep
Refusal = NotReady | Moved | Elsewhere
"""Why a step is not taken."""


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes | memoryview, kind: type[T]) -> T:
    """Raises msgspec.DecodeError when the bytes are anything else."""
    return _decode(msgspec.msgpack.Decoder(kind), data)


def unpack_answer(data: bytes | memoryview) -> Answer:
    """Raises msgspec.DecodeError when the bytes are anything else."""
    return _decode(_ANSWERS, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # msgspec does not translate these
        raise msgspec.DecodeError(f"MessagePack data is malformed: {error}") from None


class Unreachable(Exception):
    """The server did not answer: it is gone, hangs, or is shutting down. A retry may help."""


class Refused(Exception):
    """A call that is not answered, with the reason."""

    def __init__(self, reason: str, *, is_unauthorized: bool = False) -> None:
        super().__init__(reason)
        self.is_unauthorized = is_unauthorized


def parse(data: bytes | memoryview, kind: type[T]) -> T:
    """Read a struct of the wire. Raises Refused for anything else."""
    try:
        return unpack(data, kind)
    except msgspec.DecodeError as error:
        raise refusal(f"not a {kind.__name__} of overlord's wire: {error}") from None


def refusal(text: str) -> Refused:
    _log.warning("refused a call: %s", text)
    return Refused(text)


def job_id(fingerprint: Mapping[str, Any]) -> str:
    """The same for all runs with interchangeable cursors, so that a client recognises its run after a restart, even when
    files were copied and so have other times."""
    meant = {name: value for name, value in fingerprint.items() if name != "files"}
    return hashlib.blake2b(orjson.dumps(meant, option=orjson.OPT_SORT_KEYS), digest_size=12).hexdigest()


def words_of(error: Exception) -> str:
    """The message of a Flight error, without what gRPC adds."""
    text = str(error).split(". Detail: ")[0].split(". gRPC client debug context: ")[0]
    return text.removeprefix("Flight returned unavailable error, with message: ")


_ANSWERS = msgspec.msgpack.Decoder(Answer)


class Action(Generic[Q, T]):
    """A Flight action: its name, the struct that it takes, and the type that it replies with."""

    def __init__(self, name: str, request: type[Q], reply: Any) -> None:
        self.name = name
        self.request = request
        self._reply = reply

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[Value[Any] | Failure]:
        return msgspec.msgpack.Decoder(Value[self._reply] | Failure)  # made late: a trainer uses few of the actions

    def unpack_reply(self, data: bytes | memoryview) -> T:
        """Raises what went wrong in the service, and msgspec.DecodeError when the bytes are anything else."""
        reply = _decode(self._decoder, data)
        if isinstance(reply, Failure):
            raise reply.error()
        return reply.value


# Between a client and its server. What may be called on the run itself is in `run_api`.
HELLO: Action[Hello, Welcome] = Action("hello", Hello, Welcome)
HERE: Action[Presence, None] = Action("here", Presence, None)
LEAVE: Action[Presence, None] = Action("leave", Presence, None)
TAKE: Action[Take, Refusal | None] = Action("take", Take, Refusal | None)
