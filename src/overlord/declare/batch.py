"""What one global step holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from overlord.declare.arguments import column_names
from overlord.declare.policies import LongDocuments, OutlierDelay, Phases, WarmUp, check_limits, check_warm_up, limit_at
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one global step holds, over all ranks. Only the batch and the mixture decide which samples a step has.

    Give `tokens` or `samples`, not both.
    """

    sequence_length: int
    """Tokens of a row, and of the longest document."""
    tokens: int | None = None
    """Tokens of a step, a multiple of `sequence_length`. A step holds as many whole documents as can be packed into
    tokens / sequence_length rows."""
    samples: int | None = None
    """Documents of a step: each step holds exactly this many."""
    cut_documents: bool = False
    """With `tokens`: fill the step to the last token by cutting the document at its end; the rest comes first
    in the next step."""
    long_documents: LongDocuments = "split"
    """What to do with documents longer than sequence_length: split, truncate or drop them, or fail. Sources of conversations
    and preference pairs drop them instead of cutting them, and any source may have a policy of its own."""
    layout: Literal["packed", "padded"] = "packed"
    """packed: documents one after the other with cu_seqlens (thd). padded: one document a row (bshd)."""
    pad_to: Literal["longest", "sequence_length"] = "longest"
    """How wide the rows of layout="padded" are: as its longest document in each microbatch, so that shapes differ between
    microbatches and ranks, or always sequence_length, for a model that is compiled for one shape."""
    micro_tokens: int | None = None
    """Mean tokens of a microbatch; sequence_length unless given. A rank runs tokens / dp / micro_tokens of them."""
    document_multiple: int = 1
    """Pad each document to a multiple of this (2 x cp for ring attention that needs equal slices)."""
    pad_token: int = 0
    """The token id of padding."""
    special_ids: tuple[int, ...] = ()
    """Ids below 0 that token columns may hold, such as the -200 of LLaVA. They are inputs and never labels: no loss is taken
    on predicting one. Any other id below 0 is a bad row."""
    image_token: int | None = None
    """The token in every place of an image in texts; with it, batches say which encoded row goes where (`image_row`)."""
    columns: tuple[str, ...] = ()
    """Other columns to hand to the trainer, as Arrow arrays. Each source has all of them, or says so with `null_columns`."""
    outliers: OutlierDelay | None = None
    """Which long documents wait for others, and how long; none unless given."""
    drop_last: bool = False
    """Drop the last, partial step of a finite run instead of delivering it."""
    document_limits: Mapping[int, int] | WarmUp | None = None
    """A length curriculum, {step: tokens} or a `policies.WarmUp`: from that step on documents are cut into parts of at most
    so many tokens, all of which are in the step."""
    warm_up: WarmUp | None = None
    """Steps that grow to `tokens` or `samples`, which the last entry of the `policies.WarmUp` names too."""

    def __post_init__(self) -> None:  # noqa: C901 - a flat list of checks
        if self.sequence_length < 1:
            raise SpecError(f"sequence_length must be positive, got {self.sequence_length}")
        if (self.tokens is None) == (self.samples is None):
            raise SpecError("a Batch needs tokens=... or samples=..., and not both")
        if self.tokens is not None and (self.tokens < self.sequence_length or self.tokens % self.sequence_length):
            raise SpecError(
                f"tokens per step must be a multiple of sequence_length: {self.tokens} is not a multiple of "
                f"{self.sequence_length}; the nearest is "
                f"{max(1, round(self.tokens / self.sequence_length)) * self.sequence_length}"
            )
        if self.samples is not None and self.samples < 1:
            raise SpecError(f"samples per step must be positive, got {self.samples}")
        if self.cut_documents and self.tokens is None:
            raise SpecError("cut_documents fills a step to a number of tokens: give tokens=...")
        if self.cut_documents and self.document_multiple != 1:
            raise SpecError("cut_documents fills rows to the last token; document_multiple must stay 1")
        if self.outliers is not None and (self.cut_documents or self.document_limits is not None):
            raise SpecError("outliers delays whole documents; it does not go with cut_documents or document_limits")
        if self.cut_documents and self.layout == "padded":
            raise SpecError("cut_documents packs rows; it does not go with layout='padded'")
        if self.document_multiple < 1 or self.sequence_length % self.document_multiple:
            raise SpecError(
                f"document_multiple must divide sequence_length: {self.document_multiple} does not divide "
                f"{self.sequence_length}"
            )
        if self.long_documents not in ("split", "truncate", "drop", "fail"):
            raise SpecError(f"long_documents must be split, truncate, drop or fail, not {self.long_documents!r}")
        if self.layout not in ("packed", "padded"):
            raise SpecError(f"layout must be packed or padded, not {self.layout!r}")
        if self.pad_to not in ("longest", "sequence_length"):
            raise SpecError(f"pad_to must be longest or sequence_length, not {self.pad_to!r}")
        object.__setattr__(self, "columns", column_names(self.columns, "columns"))
        object.__setattr__(self, "special_ids", _special_ids(self.special_ids))
        for name in ("pad_token", "image_token"):
            value = getattr(self, name)
            if value is not None and not -(2**31) <= value < 2**31:
                raise SpecError(f"{name} is a token id that int32 can hold, got {value}")
        if self.micro_tokens is not None and self.micro_tokens % self.sequence_length:
            raise SpecError(
                f"micro_tokens must be a multiple of sequence_length: {self.micro_tokens} is not a multiple of "
                f"{self.sequence_length}"
            )
        if self.document_limits is not None:
            check_limits(self.document_limits, self.tokens, self.sequence_length, self.document_multiple)
        if self.warm_up is not None:
            check_warm_up(self.warm_up, self.tokens, self.samples, self.sequence_length)

    def at(self, step: int) -> Batch:
        """The batch of one step: while steps grow, with the size of this one."""
        phases = self.phases
        if phases is None or step >= phases.first[-1]:
            return self
        size = phases.size_at(step)
        return replace(
            self, tokens=None if self.tokens is None else size, samples=size if self.tokens is None else None, warm_up=None
        )

    @property
    def phases(self) -> Phases | None:
        """The steps of each size; None where all have the same."""
        return None if self.warm_up is None else self.warm_up.phases(1 if self.tokens is None else self.sequence_length)

    def document_limit(self, step: int) -> int | None:
        """The most tokens of a document in this step; None where `sequence_length` alone bounds them."""
        limits = self.document_limits
        if limits is None:
            return None
        if not isinstance(limits, WarmUp):
            return limit_at(limits, step)
        phases = self.phases
        before = step * (self.tokens or 0) if phases is None else phases.before_step(step)
        return limits.size_after(step if limits.by == "steps" else before, self.document_multiple)

    @property
    def num_rows(self) -> int | None:
        """Rows of sequence_length tokens in a step; None when a step is counted in samples."""
        return None if self.tokens is None else self.tokens // self.sequence_length

    @property
    def rows_per_microbatch(self) -> int:
        return (self.micro_tokens or self.sequence_length) // self.sequence_length


def _special_ids(ids: Iterable[int] | int) -> tuple[int, ...]:
    if isinstance(ids, int):
        raise SpecError(f"special_ids is a sequence of ids: write special_ids=({ids},)")
    found = tuple(ids)
    for value in found:
        if not isinstance(value, int) or not -(2**31) <= value < 0:
            raise SpecError(f"special_ids are ids from -2**31 to -1, got {value!r}; ids from 0 on are tokens like any other")
    return found
