"""Steps that the client builds from chunks in shared memory (`batches/unbuilt.py`), as they travel, and back.

A chunk is lent to a client once, with the first step that needs it, and the client returns it when the service says that no
step does any more. Both sides of a connection keep a list of them.
"""

from __future__ import annotations

import weakref
from collections import deque
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np

from overlord.batches.unbuilt import UnbuiltMicrobatch
from overlord.errors import OverlordError
from overlord.messages import Delivery
from overlord.service.steps import BuildError, DamagedStepError, array_at, number_type
from overlord.service.wire import Array, ChunkAt, NumberPlace, PlannedMicrobatch, PlannedStep, Plans, Terms
from overlord.stream.facts import COLUMNS, Samples

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.batches.unbuilt import NumbersAt, PlacedChunk
    from overlord.messages import Fields


class LendingRegions(Protocol):
    """Where arrays are put that travel with a message."""

    def add(self, name: str, array: NDArray[Any]) -> Array: ...
    def add_memory(self, memory: NDArray[np.uint8]) -> int:
        """Lend the segment that the memory lies in; returns its region."""
        ...


class LentChunks:
    """The chunks that the client of a connection has. One thread at a time may use it; chunks may be collected in any."""

    def __init__(self) -> None:
        self._numbers = count()
        self._known: dict[int, tuple[int, weakref.ref[PlacedChunk]]] = {}  # by the identity of the chunk in this process
        self._dropped: deque[int] = deque()

    def take_dropped(self) -> list[int]:
        """The ids of chunks that were collected in this process since the last call: no step needs them."""
        dropped: list[int] = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        return dropped

    def number_new(self, chunk: PlacedChunk) -> int | None:
        """A new id for a chunk that the client does not have yet."""
        key, known, dropped = id(chunk), self._known, self._dropped
        if key in known:
            return None
        number = next(self._numbers)

        def drop(_: object) -> None:
            known.pop(key, None)
            dropped.append(number)

        known[key] = number, weakref.ref(chunk, drop)
        return number


def pack_plans(regions: LendingRegions, delivery: Delivery, lent: LentChunks) -> Plans:
    """The unbuilt step of a delivery, and those that follow it. Their chunks are all those of the first."""
    steps = [(each, cast("Sequence[UnbuiltMicrobatch]", each.unbuilt)) for each in (delivery, *delivery.following)]
    micros = [micro for _, unbuilt in steps for micro in unbuilt]
    table = np.empty((len(COLUMNS) + 1, sum([len(micro.row) for micro in micros])), np.int64)
    np.concatenate([micro.samples.table for micro in micros], axis=1, out=table[:-1])
    np.concatenate([micro.row for micro in micros], out=table[-1])
    first = micros[0]
    terms, chunks = first.terms, cast("Mapping[tuple[int, int], PlacedChunk]", first.chunks)
    new = [(number, key, chunk) for key, chunk in chunks.items() if (number := lent.number_new(chunk)) is not None]
    return Plans(
        Terms(cast("Any", terms.layout), terms.pad_token, terms.document_multiple, terms.image_token, first.weighted),
        regions.add("samples", table),
        [_pack_chunk(regions, number, key, chunk) for number, key, chunk in new],
        [
            PlannedStep(
                each.step,
                each.loss_tokens,
                [PlannedMicrobatch(len(micro.row), micro.num_rows, micro.row_tokens) for micro in unbuilt],
            )
            for each, unbuilt in steps
        ],
    )


def _pack_chunk(regions: LendingRegions, number: int, key: tuple[int, int], chunk: PlacedChunk) -> ChunkAt:
    place = chunk.place
    assert place is not None  # else the step is built before it is sent
    mask = None if place.mask is None else _place_of(place.mask)
    region = regions.add_memory(place.memory)
    arrays = _place_of(place.values), _place_of(place.begin), _place_of(place.document_end), mask
    return ChunkAt(number, *key, region, *arrays)


def _place_of(at: NumbersAt) -> NumberPlace:
    return NumberPlace(*at)


class _Chunk(NamedTuple):
    """A chunk in memory that the service lends."""

    values: NDArray[np.integer]
    begin: memoryview
    document_end: memoryview
    mask: NDArray[np.generic] | None


class UnbuiltStep(NamedTuple):
    """A step that has come unbuilt. It holds the memory of its chunks."""

    step: int
    loss_tokens: int | float
    microbatches: Sequence[UnbuiltMicrobatch]
    arenas: Arenas

    def build(self) -> Delivery:
        """Build the step in memory of `arenas`. Its arrays are read-only, as those of other steps are. Raises BuildError."""
        try:
            built = [micro.build(self.arenas) for micro in self.microbatches]
        except (OverlordError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise BuildError(f"step {self.step} is left to the service to build: {error!r}") from error
        for fields in built:
            _protect(fields)
        return Delivery(self.step, self.loss_tokens, tuple(built))


class KnownChunks:
    """The chunks that a client has. One thread at a time may use it."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[tuple[int, int], _Chunk]] = {}
        self.by_key: dict[tuple[int, int], _Chunk] = {}
        """By source and number."""

    def drop(self, number: int) -> None:
        key, chunk = self._by_id.pop(number)
        if self.by_key.get(key) is chunk:  # else it was lent anew meanwhile
            del self.by_key[key]

    def add(self, at: ChunkAt, memory: NDArray[np.uint8]) -> None:
        key = at.source, at.number
        chunk = self.by_key[key] = _open(at, memory)
        self._by_id[at.id] = key, chunk


def unpack_plans(
    plans: Plans, regions: Sequence[NDArray[np.uint8]], arenas: Arenas, known: KnownChunks
) -> list[UnbuiltStep]:
    """The steps that were packed, at least one. Raises DamagedStepError where the data cannot come from a service."""
    try:
        for at in plans.chunks:
            known.add(at, regions[at.region])
        # Not a copy: the service drops no chunk of a step that the trainer has yet to take, and a client reads an answer
        # only when it has no other step.
        return _unpack(plans, regions, arenas, known.by_key)
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedStepError(f"the plan of a step cannot be read: {error!r}") from None


def _unpack(
    plans: Plans, regions: Sequence[NDArray[np.uint8]], arenas: Arenas, chunks: Mapping[tuple[int, int], _Chunk]
) -> list[UnbuiltStep]:
    table = array_at(plans.samples, regions, arenas)
    counts = [micro.num_samples for step in plans.steps for micro in step.microbatches]
    if table.dtype != _INT64 or table.shape != (len(COLUMNS) + 1, sum(counts)) or not plans.steps:
        raise ValueError(f"samples of {len(plans.steps)} steps came as {table.dtype} {table.shape}")
    bounds = pairwise([0, *np.cumsum(counts, dtype=np.int64).tolist()])
    terms, found = plans.terms, list[UnbuiltStep]()
    for step in plans.steps:
        micros: list[UnbuiltMicrobatch] = []
        for micro, (begin, end) in zip(step.microbatches, bounds, strict=False):
            samples, row = Samples((), table[:-1, begin:end]), table[-1, begin:end]
            size = micro.num_rows, micro.row_tokens
            micros.append(UnbuiltMicrobatch(samples, row, *size, chunks, terms, terms.weighted))
        found.append(UnbuiltStep(step.step, step.loss_tokens, micros, arenas))
    return found


_INT64 = np.dtype(np.int64)


def _open(at: ChunkAt, memory: NDArray[np.uint8]) -> _Chunk:
    words = memory.data.cast("q")
    values = _array(at.values, memory)
    if values.dtype.kind not in "iu":
        raise ValueError(f"tokens of type {values.dtype}")
    mask = None if at.mask is None else _array(at.mask, memory)
    return _Chunk(values, _words(at.begin, words), _words(at.document_end, words), mask)


def _array(at: NumberPlace, memory: NDArray[np.uint8]) -> NDArray[Any]:
    return np.ndarray(at.num_entries, number_type(at.dtype), memory, at.offset)


def _words(at: NumberPlace, words: memoryview) -> memoryview:
    first, rest = divmod(at.offset, 8)
    found = words[first : first + at.num_entries]
    if rest or number_type(at.dtype) != _INT64 or len(found) != at.num_entries:
        raise ValueError(f"{at.num_entries} places of type {at.dtype} at byte {at.offset} of {8 * len(words)}")
    return found


def _protect(fields: Fields) -> None:
    for value in fields.values():
        if isinstance(value, np.ndarray):
            cast("NDArray[Any]", value).setflags(write=False)
