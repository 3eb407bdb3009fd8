"""Smaller declarations: the plan log, sizes that grow, and very long documents that wait for one another."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple

from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence


LongDocuments = Literal["split", "truncate", "drop", "fail"]
Entries = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Log:
    """The planner's log, for `start(log=...)`. A run whose planner is lost, or that is started with resume="log", continues
    from it."""

    location: str | os.PathLike[str]
    """A folder (on a cluster, one that all machines see), or the URL of an object store."""
    snapshot_every: int = 1000
    """Steps between two snapshots; records before the last two snapshots are deleted."""
    sync_s: float = 1.0
    """Seconds between two fsyncs: a crash of the machine loses at most so much."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    """Endpoint, region and credentials of an object store, as obstore names them."""
    lineage: bool = True
    """Also record which documents made which step, about four bytes for each, so that `overlord trace`, `find` and `spikes`
    can tell without reading data. These records are never deleted."""
    chunks_every_s: float | None = None
    """Seconds between two snapshots of the chunks in the buffers of loaders, of those that take longer to make again than to
    read; None saves none. In a folder only."""

    def __post_init__(self) -> None:
        if not self.location or not isinstance(self.location, (str, os.PathLike)):
            raise SpecError(
                f"a log needs a place: a folder, or a URL such as s3://bucket/run/log; got location={self.location!r}"
            )
        object.__setattr__(self, "location", os.path.expanduser(os.fspath(self.location)))
        if self.snapshot_every < 1:
            raise SpecError(f"snapshot_every is a number of steps, at least 1, got {self.snapshot_every}")
        if self.sync_s <= 0:
            raise SpecError(f"sync_s is a positive number of seconds, got {self.sync_s}")
        if self.chunks_every_s is not None and not self.chunks_every_s > 0:
            raise SpecError(f"chunks_every_s is a positive number of seconds or None, got {self.chunks_every_s}")
        if self.chunks_every_s is not None and "://" in os.fspath(self.location):
            raise SpecError(
                f"chunks_every_s saves chunks in a folder, and location={self.location!r} is a URL: name a folder that "
                "loaders see, or leave chunks_every_s out"
            )


@dataclass(frozen=True, slots=True)
class Skip:
    """Leaves out rows, a file or a whole source from a step on, for `Job(skip=...)`. Everything else comes in the same
    order: what follows moves up."""

    source: str
    file: str | None = None
    """Its path, or the end of it; None: the whole source. FILE#3 is its unit 3, as `overlord trace` prints it."""
    rows: Sequence[int] | None = None
    """Rows of the file (or of the unit); None: all of them."""
    from_step: int = 0

    def __post_init__(self) -> None:
        if self.file is not None:
            object.__setattr__(self, "file", os.fspath(self.file))
        if self.rows is not None and self.file is None:
            raise SpecError(f"Skip(rows=...) needs file=...: rows of which file of source {self.source!r}?")
        rows = None if self.rows is None else tuple(self.rows)
        if rows is not None and (not rows or not all(type(row) is int and row >= 0 for row in rows)):
            raise SpecError(f"Skip(rows=...) is a list of row numbers from 0 on, got {self.rows!r}")
        object.__setattr__(self, "rows", rows)
        if type(self.from_step) is not int or self.from_step < 0:
            raise SpecError(f"Skip(from_step=...) is a step from 0 on, got {self.from_step!r}")


@dataclass(frozen=True, slots=True)
class OutlierDelay:
    """Very long documents wait for one another and come together in one step, so that no rank has one alone.

    It decides which step a document is in, so it is part of the stream: keep it whatever mesh a run has.
    """

    lengths: tuple[int, ...]
    """Rising lengths in tokens, one queue for each: a document waits in the queue of the largest that it reaches."""
    together: int
    """How many documents of a queue come at once: the microbatches of a step over all ranks, so that each gets one."""
    most_steps: int = 8
    """The longest that a document waits, in steps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.lengths or sorted({0, *self.lengths}) != [0, *self.lengths]:
            raise SpecError(f"lengths are rising numbers of tokens, at least one of them, got {self.lengths}")
        if self.together < 1:
            raise SpecError(f"together is how many long documents come at once, at least 1, got {self.together}")
        if self.most_steps < 1:
            raise SpecError(f"most_steps is the longest that a document waits, at least 1, got {self.most_steps}")


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A size that grows while a run goes on: of steps with `Batch(warm_up=...)`, of documents with `document_limits=`.

    It is a function of the number of a step alone, so it is the same on every mesh and engine, and wherever a run is cut.
    """

    sizes: Mapping[int, int]
    """{start: size}, from 0 on: the size from that step on."""
    by: Literal["steps", "tokens", "samples"] = "steps"
    """What the starts count. tokens, samples: those that the steps before hold, as steps are declared: a step of 1M tokens
    counts as 1M, also where whole documents leave a little of it empty."""
    ramp: Literal["hold", "linear"] = "hold"
    """Between two starts: hold the size of the first, or interpolate linearly."""
    multiple: int | None = None
    """A linear ramp goes up by multiples of this: the tokens of one microbatch on every rank, say. Unless given, steps grow
    by rows (by single samples), and documents by `document_multiple`."""

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Mapping) or not self.sizes or min(self.sizes) != 0:
            raise SpecError(f"WarmUp takes {{start: size}} and begins at 0, got {self.sizes!r}")
        for start, size in self.sizes.items():
            if type(start) is not int or type(size) is not int or size < 1:
                raise SpecError(f"WarmUp takes {{start: size}} in whole numbers, sizes from 1 on, got {start!r}: {size!r}")
        for (start, size), (later, then) in pairwise(self.entries):
            if then < size:
                raise SpecError(f"the sizes of a WarmUp never fall: {size:,} at {start:,}, then {then:,} at {later:,}")
        if self.by not in ("steps", "tokens", "samples"):
            raise SpecError(f"a WarmUp is by steps, tokens or samples, not {self.by!r}")
        if self.ramp not in ("hold", "linear"):
            raise SpecError(f"a WarmUp's ramp is hold or linear, not {self.ramp!r}")
        if self.multiple is not None and (type(self.multiple) is not int or self.multiple < 1):
            raise SpecError(f"multiple is a whole number from 1 on, got {self.multiple!r}")

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        """(start, size), in order."""
        return tuple(sorted(self.sizes.items()))

    def size_after(self, amount: int, least_multiple: int) -> int:
        """The size after so many steps, tokens or samples."""
        return _size_after(self.entries, self.ramp == "linear", self.multiple or least_multiple, amount)

    def phases(self, least_multiple: int) -> Phases:
        """The steps of each size, where it is the size of steps."""
        return _phases(self.entries, self.ramp == "linear", self.multiple or least_multiple, self.by != "steps")


class Phases(NamedTuple):
    """Steps of growing size. Phase i begins at step `first[i]`, before which steps hold `before[i]`, and its steps hold
    `size[i]`."""

    first: tuple[int, ...]
    before: tuple[int, ...]
    size: tuple[int, ...]

    def size_at(self, step: int) -> int:
        return self.size[bisect_right(self.first, step) - 1]

    def before_step(self, step: int) -> int:
        """What the steps before this one hold together."""
        at = bisect_right(self.first, step) - 1
        return self.before[at] + (step - self.first[at]) * self.size[at]


def _size_after(entries: Entries, is_linear: bool, multiple: int, amount: int) -> int:
    at = bisect_right(entries, amount, key=itemgetter(0)) - 1
    start, size = entries[at]
    if not is_linear or at + 1 == len(entries):
        return size
    later, then = entries[at + 1]
    return size + (amount - start) * (then - size) // (later - start) // multiple * multiple  # exact: whole numbers


@lru_cache(maxsize=64)
def _phases(entries: Entries, is_linear: bool, multiple: int, by_size: bool) -> Phases:
    """Goes from size to size, not from step to step: a ramp over a million steps has as many sizes as multiples fit."""
    found: list[tuple[int, int, int]] = []
    step = held = 0
    while True:
        amount = held if by_size else step
        size = _size_after(entries, is_linear, multiple, amount)
        if not found or found[-1][2] != size:
            found.append((step, held, size))
        at = bisect_right(entries, amount, key=itemgetter(0)) - 1
        if at + 1 == len(entries):
            return Phases(*zip(*found, strict=True))
        (start, least), (change, most) = entries[at], entries[at + 1]
        if is_linear and most > least:
            up = size + multiple - least
            change = min(change, start - (-up * (change - start) // (most - least)))  # where the ramp is up by another one
        num_steps = -(-(change - amount) // size) if by_size else change - amount
        step, held = step + num_steps, held + num_steps * size


def check_warm_up(warm_up: WarmUp, tokens: int | None, samples: int | None, sequence_length: int) -> None:
    """Refuse a warm-up of steps that does not end with the size that the batch declares, or that has no whole rows."""
    if not isinstance(warm_up, WarmUp):
        raise SpecError(f"warm_up is a policies.WarmUp, got {warm_up!r}")
    unit, whole, least = ("tokens", tokens, sequence_length) if tokens is not None else ("samples", samples, 1)
    if warm_up.by not in ("steps", unit):
        raise SpecError(
            f"steps are counted in {unit}, so a warm-up of them is by='steps' or by={unit!r}, not {warm_up.by!r}"
        )
    multiple, (last, size) = warm_up.multiple or least, warm_up.entries[-1]
    if multiple % least:
        raise SpecError(f"multiple must be whole rows: {multiple:,} is not a multiple of sequence_length ({least:,})")
    for start, each in warm_up.entries:
        if each % multiple:
            what = f"multiple={multiple:,}" if warm_up.multiple else f"sequence_length ({least:,})"
            raise SpecError(f"the sizes of a warm-up are multiples of {what}: {each:,} at {start:,} is none")
    if size != whole:
        raise SpecError(
            f"a warm-up ends with the size of the batch: Batch({unit}={whole:,}) and {size:,} at {last:,} differ; make the "
            "last entry equal"
        )


def check_limits(
    limits: Mapping[int, int] | WarmUp, tokens: int | None, sequence_length: int, document_multiple: int
) -> None:
    """Refuse what is not {step: tokens}, and batches of `tokens` a step (None: of samples) that it makes no sense for."""
    if tokens is None:
        raise SpecError("document_limits cuts documents into several samples: count steps in tokens=...")
    multiple = document_multiple
    if isinstance(limits, WarmUp):
        if limits.by == "samples":
            raise SpecError("steps are counted in tokens, so document_limits are by='steps' or by='tokens', not 'samples'")
        limits, multiple = limits.sizes, limits.multiple or multiple
    if not limits or min(limits) != 0:
        raise SpecError(f"document_limits is {{step: tokens}} and begins at step 0, got {dict(limits)}")
    if multiple % document_multiple:
        raise SpecError(f"multiple={multiple} must be a multiple of document_multiple ({document_multiple})")
    for step, limit in limits.items():
        if not 1 <= limit <= sequence_length:
            raise SpecError(
                f"document_limits are from 1 to sequence_length ({sequence_length}) tokens, got {limit} at step {step}"
            )
        if limit % multiple:
            what = "document_multiple" if multiple == document_multiple else "multiple"
            raise SpecError(f"document_limits must be multiples of {what}: {limit} at step {step} is not one of {multiple}")


def limit_at(limits: Mapping[int, int], step: int) -> int:
    """The limit of a step, of {step: tokens}."""
    return _size_after(tuple(sorted(limits.items())), False, 1, step)
