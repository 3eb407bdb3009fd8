"""The values that roles and processes send each other: steps, reports, decisions, and answers that are not ready yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, cast

from overlord.errors import SpecError
from overlord.records import record

if TYPE_CHECKING:
    from overlord.declare.mesh import Mesh


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's report of one step. Numbers are not checked here: the code that uses them ignores invalid ones."""

    step: int
    rank: int
    losses: Mapping[str, float] = field(default_factory=dict)
    """The mean loss of each source on this rank."""
    tokens: Mapping[str, float] = field(default_factory=dict)
    """The number of tokens in each mean; 1 for a source that is left out."""
    seconds: tuple[float, ...] = ()
    """The compute time of the rank: of the whole step, or of each of its microbatches."""

    @staticmethod
    def of(
        step: int,
        rank: int,
        losses: Mapping[str, float] | None,
        tokens: Mapping[str, float] | None,
        seconds: float | Sequence[float] | None,
    ) -> StepReport:
        """Make a report from the numbers of a trainer: floats, numpy numbers, or tensors with one entry."""
        if seconds is None:
            times: tuple[float, ...] = ()
        elif isinstance(seconds, Sequence):
            times = tuple(_number("seconds", value) for value in seconds)
        else:
            times = (_number("seconds", seconds),)
        return StepReport(step, rank, _numbers("losses", losses), _numbers("tokens", tokens), times)


@dataclass(frozen=True, slots=True)
class WeightChange:
    """New weights of the mixture from `from_step` on, or from the first possible step. None restores the job's weights."""

    weights: Mapping[str, float] | None
    from_step: int | None
    id: str
    """The same when the request is repeated, so that it is applied once."""

    def check(self, sources: Sequence[str]) -> None:
        if self.from_step is not None and self.from_step < 0:
            raise SpecError(f"from_step is a step from 0 on, got {self.from_step}")
        if self.weights is None:
            return
        unknown = [name for name in self.weights if name not in sources]
        if unknown:
            listed = ", ".join(map(repr, sources))
            raise SpecError(f"there is no source {', '.join(map(repr, unknown))}; the job's sources are {listed}")
        for name, weight in self.weights.items():
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
                raise SpecError(f"the weight of {name!r} must be a number >= 0, got {weight!r}")
        if not any(self.weights.values()):
            raise SpecError("every weight is 0: nothing to train on; give at least one source a weight above 0")


@dataclass(frozen=True, slots=True)
class MeshChange:
    """Another mesh for a run; see `Loader.resize`."""

    mesh: Mesh
    at: int | None
    timeout_s: float
    id: str
    """The same when the request is repeated, so that it is applied once."""


@dataclass(frozen=True, slots=True)
class SkipChange:
    """Rows of a file, a file, or a whole source to leave out from `from_step` on, or from the first possible step."""

    source: str
    file: str | None
    rows: tuple[int, ...] | None
    from_step: int | None
    id: str
    """The same when the request is repeated, so that it is applied once."""


@dataclass(frozen=True, slots=True)
class SourceChange:
    """A source to add from `from_step` on, or from the first possible step."""

    source: str
    share: float
    from_step: int | None
    id: str
    """The same when the request is repeated, so that it is applied once."""

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise SpecError(f"a source's name is a non-empty string, got {self.source!r}")
        if not (isinstance(self.share, (int, float)) and 0 < self.share < 1):
            raise SpecError(
                f"share is the part of the mixture that comes from source {self.source!r}, between 0 and 1, got "
                f"{self.share!r}"
            )


@dataclass(frozen=True, slots=True)
class SeatRequest:
    """A trainer of an elastic run asks which rank it is; see `ElasticClient`."""

    rank: int
    """Its rank in the mesh that the run was served with."""
    session: str
    unfinished: int | None
    """The first step that it has not finished; None where it has no model yet."""
    after: str | None
    """The number of the seat that is of no use any more."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Which rank a trainer is, in the present mesh of an elastic run."""

    rank: int
    world_size: int
    mesh: Mapping[str, int]
    """The size of each axis, in the order of the mesh."""
    step: int
    """The first step of this mesh: training goes on with it."""
    generation: int
    number: str
    """The same for all trainers of the mesh, and another one for every other mesh: to name a process group."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change that holds from a step on and cannot be derived from the job."""

    step: int
    name: str
    value: Any
    """A JSON value."""

    def to_plain(self) -> list[Any]:
        return [self.step, self.name, self.value]


def _numbers(what: str, given: Mapping[str, float] | None) -> dict[str, float]:
    return {} if given is None else {str(name): _number(f"{what}[{name!r}]", value) for name, value in given.items()}


def _number(what: str, value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type] - other types raise TypeError
    except (TypeError, ValueError) as error:
        raise SpecError(f"{what} must be a number, got {value!r}") from error


@dataclass(frozen=True, slots=True)
class DocumentOrigin:
    """Where a document was read."""

    source: str
    file: str
    """The file. Where it has several units, # and the number of the unit follow."""
    row: int
    """The row in that unit; -1 where a transform dropped the column `__origin__`."""


DocumentIds = Mapping[str, Any] | Iterable[Mapping[str, Any] | Sequence[int]]
"""Documents by number: a microbatch, a step, or (source, chunk, row) of each."""

_MOST_IDS = 1 << 16


def document_ids(documents: DocumentIds) -> list[tuple[int, int, int]]:
    """(source, chunk, row) of each document of a microbatch or step, or as given. Raises SpecError for what names none."""
    found: list[tuple[int, int, int]] = []
    listed: Iterable[Any] = [documents] if isinstance(documents, Mapping) else documents
    for given in listed:
        found += _ids_in_microbatch(given) if isinstance(given, Mapping) else [_document_id(given)]
    if len(found) > _MOST_IDS:
        raise SpecError(f"at most {_MOST_IDS:,} documents are located at a time, got {len(found):,}")
    return found


def _ids_in_microbatch(micro: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    names = "document_sources", "document_chunks", "document_rows"
    missing = [name for name in names if name not in micro]
    if missing:
        raise SpecError(f"a microbatch with {', '.join(names)} is needed; this one has no {missing[0]}")
    return list(zip(*(micro[name].tolist() for name in names), strict=True))


def _document_id(given: Any) -> tuple[int, int, int]:
    try:
        source, chunk, row = map(int, given)
    except (TypeError, ValueError):
        raise SpecError(f"a document is (source, chunk, row), three whole numbers, got {given!r}") from None
    if min(source, chunk, row) < 0:
        raise SpecError(f"source, chunk and row of a document are 0 or more, got {given!r}")
    return source, chunk, row


@dataclass(frozen=True, slots=True)
class EvalTerms:
    """When an evaluation is due, and how long it is."""

    name: str
    every: int | None
    limit: int | None


State = dict[str, Any]
"""What `state_dict()` returns: {"overlord": version, "step": next step, "state": JSON text}, always with these keys.

It is a dict and not a TypedDict, because torch's `Stateful` requires one. `checkpoint/form.py` documents its meaning."""

Fields = dict[str, Any]
"""The arrays of a microbatch under construction. Trainers get them as a `Microbatch`."""


class Microbatch(TypedDict):
    """The dict of arrays that a trainer gets for one microbatch: numpy arrays, or tensors with `torch=True`.

    The keys depend on the layout, the mesh and the job; docs/concepts.md has the table. N is the number of token positions,
    D the number of documents. Names in `Batch(columns=...)` are keys too.
    """

    tokens: Any
    """int32 [N]; padded: [num_rows, width]."""
    labels: Any
    """int64, like `tokens`: the token to predict, or -100 where there is no loss."""
    loss_mask: Any
    """bool, like `tokens`: where `labels` is not -100."""
    loss_weights: Any
    """float32, like `tokens`: the weight of each label. Only if a source has loss weights."""
    position_ids: Any
    """int32, like `tokens`: from 0 in each segment."""
    attention_mask: Any
    """bool, like `tokens`. Only in padded microbatches."""
    cu_seqlens: Any
    """int32 [segments + 1]: the ends of the segments, beginning with 0. Only in packed microbatches."""
    cu_seqlens_padded: Any
    """int32 [segments + 1]. Only with `document_multiple` > 1."""
    max_seqlen: int
    """The length of the longest segment."""
    num_documents: int
    num_rows: int
    num_tokens: int
    """N."""
    document_starts: Any
    """int32 [D]: the position of each document's first token."""
    document_lengths: Any
    """int32 [D]."""
    document_sources: Any
    """int32 [D]: the index of each document's source in `job.sources`."""
    document_chunks: Any
    """int64 [D]: the number of each document's chunk in its source."""
    document_rows: Any
    """int32 [D]: the row of each document in its chunk. `Client.run.locate` turns these three into a file and a row."""
    document_pairs: Any
    """int32 [D]: the number of the preference pair that a document is a side of, from 0 in each microbatch, or -1. The
    chosen side comes first. Only if a source has pairs."""
    document_chosen: Any
    """bool [D]: whether a document is the chosen side of a pair. Only if a source has pairs."""
    images: Any
    """uint8 [n, height, width, 3], or a list of images if their sizes differ."""
    image_document: Any
    """int32 [n]: the document of each image."""
    image_tokens: Any
    """int64 [n]: the number of rows of each encoded image. Only if images are encoded on other ranks."""
    image_row: Any
    """int32, like `tokens`: the row of the encoded images at a position, or -1. Only with `Batch(image_token=...)`."""
    cp_size: int
    """With `cp_index`: how `overlord.trainer.receive` cuts the arrays. Only if the trainer broadcasts along cp."""
    cp_index: int
    broadcast: Any
    """The shape and dtype name of each array that this rank gets by broadcast from another rank's trainer."""


HOST_FIELDS = frozenset({"hdp_ranks", "piece_offsets", "whole_lengths", "offload_ratios"})
"""Small fields that only the trainer's Python reads, to set up a ring. They stay on the host when a batch goes to a device:
to read them there, the host would have to wait until the device is done."""


if TYPE_CHECKING:
    from typing_extensions import TypedDict as ExtensibleTypedDict

    class MicrobatchWithColumns(Microbatch, ExtensibleTypedDict, extra_items=Any):
        """A `Microbatch` with names of `Batch(columns=...)`, and fields that features add."""


@dataclass(frozen=True, slots=True)
class Later:
    """The answer is not ready, and why: the caller is ahead of other ranks or of the data. Call again."""

    reason: str


class Unbuilt(Protocol):
    """A microbatch that the receiver builds, see `batches/unbuilt.py`."""

    @property
    def num_tokens(self) -> int: ...


@record
class Delivery:
    """One rank's part of a step."""

    step: int
    loss_tokens: int | float
    microbatches: tuple[Fields, ...]
    unbuilt: tuple[Unbuilt, ...] = ()
    """In place of `microbatches`, for a client that said that it can build them."""
    following: tuple[Delivery, ...] = ()
    """The next steps, where these came along: unbuilt, too."""


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of one global step: iterate over its microbatches, each a dict of arrays, which is the trainer's own.

    `loss_tokens` is the number of loss tokens of the whole step over all ranks. Divide the sum of token losses by it, and
    the gradient does not depend on how the step was arranged. If a source has loss weights, it is the sum of the weights of
    these tokens, the divisor of the weighted sum.

    Where torch is used, a step is a node of torch's pytrees: functions over trees see its numbers and arrays.
    """

    number: int
    loss_tokens: int | float
    microbatches: tuple[MicrobatchWithColumns, ...]
    origin: StepOrigin | None = field(default=None, repr=False, compare=False)
    """What knows the states of its run; None in a step that no client returned."""

    def __iter__(self) -> Iterator[MicrobatchWithColumns]:
        return iter(self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)

    def __getitem__(self, name: str) -> Any:
        """A field of the only microbatch, for steps that have just one."""
        if len(self.microbatches) != 1:
            raise SpecError(
                f"step {self.number} has {len(self.microbatches)} microbatches on this rank: "
                f"iterate over them (`for micro in step: micro[{name!r}]`)"
            )
        return self.microbatches[0][name]

    def state_after(self) -> State:
        """Returns the state that continues with the next step. Right for the last step that a model was trained on, whatever
        was fetched since: for libraries that look a batch ahead."""
        if self.origin is None:
            raise SpecError(
                f"step {self.number} did not come from a client of this process, so it knows no state; call "
                f"client.state_dict(before={self.number + 1})"
            )
        return self.origin.state_before(self.number + 1)

    def to(self, device: Any, non_blocking: bool = False) -> Step:
        """Returns the step with its tensors on a torch device, but those that only the host reads (`hdp_ranks`,
        `piece_offsets`, `whole_lengths`, `offload_ratios`); everything else stays as it is."""
        moved = self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), f"to({device!r})")
        micros = [
            {**there, **{name: here[name] for name in HOST_FIELDS & here.keys()}}
            for here, there in zip(self.microbatches, moved.microbatches, strict=True)
        ]
        return replace(moved, microbatches=cast("tuple[MicrobatchWithColumns, ...]", tuple(micros)))

    def pin_memory(self) -> Step:
        """Returns the step with its tensors copied into page-locked memory."""
        return self._with_tensors(lambda tensor: tensor.pin_memory(), "pin_memory()")

    def _with_tensors(self, convert: Callable[[Any], Any], call: str) -> Step:
        def converted(name: str, value: Any) -> Any:
            if isinstance(value, list):
                return [converted(name, each) for each in value]
            if hasattr(value, "pin_memory"):
                return convert(value)
            if hasattr(value, "__array_interface__") and hasattr(value, "flags"):
                raise SpecError(
                    f"step {self.number} has numpy arrays ({name!r} is one), and {call} is for torch tensors: make the "
                    "client with torch=True"
                )
            return value

        micros = [{name: converted(name, value) for name, value in micro.items()} for micro in self.microbatches]
        return replace(self, microbatches=cast("tuple[MicrobatchWithColumns, ...]", tuple(micros)))

    def __reduce__(self) -> tuple[object, ...]:
        return Step, (self.number, self.loss_tokens, self.microbatches)  # a client stays in its process


class StepOrigin(Protocol):
    """Where a step came from."""

    def state_before(self, step: int) -> State:
        """Returns the state from which the run of the step continues with another step."""
        ...
