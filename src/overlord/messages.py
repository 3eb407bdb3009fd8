"""The values that roles and processes send each other: steps, reports, decisions, and answers that are not ready yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from overlord.errors import SpecError
from overlord.records import record


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


if TYPE_CHECKING:
    from typing_extensions import TypedDict as ExtensibleTypedDict

    class MicrobatchWithColumns(Microbatch, ExtensibleTypedDict, extra_items=Any):
        """A `Microbatch` with names of `Batch(columns=...)`, and fields that features add."""


@dataclass(frozen=True, slots=True)
class Later:
    """The answer is not ready, and why: the caller is ahead of other ranks or of the data. Call again."""

    reason: str


@record
class Delivery:
    """One rank's part of a step."""

    step: int
    loss_tokens: int | float
    microbatches: tuple[Fields, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One rank's part of one global step: iterate over its microbatches, each a dict of arrays.

    `loss_tokens` is the number of loss tokens of the whole step over all ranks. Divide the sum of token losses by it, and
    the gradient does not depend on how the step was arranged. If a source has loss weights, it is the sum of the weights of
    these tokens, the divisor of the weighted sum.
    """

    number: int
    loss_tokens: int | float
    microbatches: tuple[MicrobatchWithColumns, ...]

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
