"""A step for a trainer on the same host: its arrays stay where they were built, in shared memory, and a small message says
where. Both sides of it.

A message is MessagePack, never pickle. With it travel the descriptors of segments that the trainer has not mapped yet.
Region 0 of a step lies in the message and holds the small arrays; the others are segments that are lent to the trainer until
its last array over them is collected. A large array that was not built in shared memory is copied there.

A trainer may hold `MOST_LENT` steps. While it holds that many, each further step is copied into memory of its own, which the
service does not keep: whoever keeps batches pays for them, and the service's memory stays bounded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from overlord.batches.buffers import segment_of
from overlord.batches.lending import Borrower, Lender, Loan
from overlord.runtime.shared_memory import SharedSegment
from overlord.service.steps import (
    SMALL_BYTES,
    DamagedStepError,
    Region,
    SmallArrays,
    bytes_of,
    check_sendable,
    pack_fields,
    unpack_step,
)
from overlord.service.wire import Answer, Array, Contents, Count, NoStep, Ticket, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery

MOST_LENT = 16
"""How many steps a trainer may hold, fetched ahead or in use, before further ones are copied."""

MOST_BYTES = 1 << 16
"""Of one message."""

_IN_MESSAGE = 1 << 15
"""A longer body lies in shared memory."""
_MOST_DESCRIPTORS = 60
_ALIGNMENT = 64
_log = logging.getLogger(__name__)


class Greeting(Struct, frozen=True, forbid_unknown_fields=True, tag="greeting"):
    """The first message on a connection."""

    version: int
    token: str | None


class Returned(Struct, frozen=True, forbid_unknown_fields=True, tag="returned"):
    """The loans that ended: `free` can be used again; of `kept` a forked child may hold arrays. There is no reply."""

    free: list[Count]
    kept: list[Count]


class Fetch(Struct, frozen=True, forbid_unknown_fields=True, tag="fetch"):
    ticket: Ticket
    returned: Returned


class Act(Struct, frozen=True, forbid_unknown_fields=True, tag="act"):
    """An action of the service, as over Flight."""

    name: Annotated[str, Meta(max_length=64)]
    body: bytes


LocalRequest = Greeting | Returned | Fetch | Act


class NotLocal(Struct, frozen=True, tag="not_local"):
    """There is no shared memory for the step: the client must use Flight."""

    reason: str


class _Body(Struct, frozen=True):
    answer: Answer | NotLocal
    small: bytes = b""


class _Envelope(Struct, frozen=True):
    """A message about a step."""

    loans: list[tuple[int, int]] = []
    """The number of each loan, and its segment: the regions of the step from 1 on."""
    unmapped: list[int] = []
    """The segments whose descriptors come with the message, in their order."""
    gone: list[int] = []
    has_own: bool = False
    """The last descriptor is memory of the step's own, in place of loans."""
    body: bytes = b""
    body_at: tuple[Count, Count] | None = None
    """The region and the length of a long body, at the region's begin."""
    is_complete: bool = True
    """False: the message only brings descriptors for the next."""


_REQUESTS = msgspec.msgpack.Decoder(LocalRequest)
_ENVELOPES = msgspec.msgpack.Decoder(_Envelope)
_BODIES = msgspec.msgpack.Decoder(_Body)


def unpack_request(data: memoryview) -> LocalRequest:
    """Raises msgspec.DecodeError when the bytes are anything else."""
    try:
        return _REQUESTS.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(f"MessagePack data is malformed: {error}") from None


class NoSharedMemoryError(Exception):
    """There is no shared memory for a step."""


class LocalMessage:
    """Bytes, and the segments whose descriptors go with them."""

    __slots__ = ("data", "segments")

    def __init__(self, data: bytes, segments: Sequence[SharedSegment] = ()) -> None:
        self.data = data
        self.segments = segments


class StepLender:
    """Lends steps to one connection of a trainer. One thread at a time may use it."""

    def __init__(self, arenas: Arenas, most_lent: int = MOST_LENT) -> None:
        self._arenas = arenas
        self._most_lent = most_lent
        self._lender = Lender()
        self._open: dict[int, set[int]] = {}  # the loans of each step that the trainer holds, by the first of them
        self._first: dict[int, int] = {}  # the loans that are open, with the first of their step
        self.num_copied = 0
        """How many steps were copied because the trainer held so many."""

    def pack(self, delivery: Delivery) -> list[LocalMessage]:
        """The messages for a step; one, unless it has very many segments."""
        if len(self._open) >= self._most_lent:
            self.num_copied += 1
            return self._pack_copied(delivery)
        regions = _LentRegions(self._arenas)
        body = _pack_body(delivery, regions, regions.small)
        body_at = None
        if len(body) > _IN_MESSAGE:
            body_at, body = (regions.copy(np.frombuffer(body, np.uint8)), len(body)), b""
        lent = self._lender.lend(regions.held)
        numbers = [loan.number for loan in lent.loans]
        if numbers:
            self._open[numbers[0]] = set(numbers)
            self._first |= dict.fromkeys(numbers, numbers[0])
        messages: list[LocalMessage] = []
        new = lent.unmapped
        while len(new) > _MOST_DESCRIPTORS:
            some, new = new[:_MOST_DESCRIPTORS], new[_MOST_DESCRIPTORS:]
            envelope = _Envelope(unmapped=[segment.number for segment in some], is_complete=False)
            messages.append(LocalMessage(pack(envelope), some))
        envelope = _Envelope(
            loans=[(loan.number, loan.segment) for loan in lent.loans],
            unmapped=[segment.number for segment in new],
            gone=self._lender.take_gone(),
            body=body,
            body_at=body_at,
        )
        return [*messages, LocalMessage(pack(envelope), new)]

    def _pack_copied(self, delivery: Delivery) -> list[LocalMessage]:
        regions = _CopiedRegions()
        body = _pack_body(delivery, regions, regions.small)
        body_at = None
        if len(body) > _IN_MESSAGE:  # at the region's begin
            regions = _CopiedRegions(len(body))
            long = np.frombuffer(_pack_body(delivery, regions, regions.small), np.uint8)
            segment = regions.copied(long)
            body_at, body = (1, len(long)), b""
        else:
            segment = regions.copied()
        envelope = _Envelope(gone=self._lender.take_gone(), has_own=True, body=body, body_at=body_at)
        return [LocalMessage(pack(envelope), [segment])]

    def take_back(self, returned: Returned) -> None:
        """Note which loans the trainer has returned."""
        self._lender.take_back(returned.free)
        self._lender.retire(returned.kept)
        for number in (*returned.free, *returned.kept):
            first = self._first.pop(number, None)
            if first is not None:
                self._open[first].discard(number)
                if not self._open[first]:
                    del self._open[first]

    @property
    def num_lent(self) -> int:
        """How many steps the trainer holds."""
        return len(self._open)

    def close(self) -> None:
        """Retire every loan: the trainer cannot be reached, and may still hold arrays."""
        self._lender.close()


def pack_answer(answer: Answer | NotLocal) -> LocalMessage:
    """The message for an answer that is no step."""
    return LocalMessage(pack(_Envelope(body=pack(_Body(answer)))))


def _pack_body(delivery: Delivery, regions: _LentRegions | _CopiedRegions, small: SmallArrays) -> bytes:
    microbatches = [pack_fields(regions, fields, {}) for fields in delivery.microbatches]
    return pack(_Body(Contents(delivery.step, delivery.loss_tokens, microbatches), small.joined().tobytes()))


class _LentRegions:
    """Finds the segments that arrays lie in."""

    def __init__(self, arenas: Arenas) -> None:
        self.small = SmallArrays()
        self.held: list[NDArray[Any]] = []
        """An array in each segment: it keeps the segment from being used again."""
        self._arenas = arenas
        self._found: dict[int, tuple[int, int]] = {}  # the region of each segment, and its address

    def add(self, name: str, array: NDArray[Any]) -> Array:
        check_sendable(name, array)
        dtype, shape = array.dtype.str, array.shape
        if array.nbytes > _ALIGNMENT and array.flags.c_contiguous:
            segment = segment_of(array)
            if segment is not None:
                region, address = self._region_of(segment, array)
                return Array(name, dtype, shape, region, _address(array) - address)
        content = bytes_of(array)
        if len(content) <= SMALL_BYTES:
            return Array(name, dtype, shape, 0, self.small.add(content))
        return Array(name, dtype, shape, self.copy(content), 0)

    def copy(self, content: NDArray[np.uint8]) -> int:
        """Copy bytes to the begin of a region; returns its number."""
        memory = self._arenas.lease(len(content))
        segment = segment_of(memory)
        if segment is None:
            raise NoSharedMemoryError(self._arenas.why_private or "batches are built in private memory")
        memory[:] = content
        return self._region_of(segment, memory)[0]

    def _region_of(self, segment: SharedSegment, array: NDArray[Any]) -> tuple[int, int]:
        found = self._found.get(segment.number)
        if found is None:
            self.held.append(array)
            found = self._found[segment.number] = len(self.held), _address(segment.memory)
        return found


class _CopiedRegions:
    """Collects arrays to be copied into one segment, from `first` bytes on."""

    def __init__(self, first: int = 0) -> None:
        self.small = SmallArrays()
        self._contents: list[tuple[int, NDArray[np.uint8]]] = []
        self._end = _aligned(first)

    def add(self, name: str, array: NDArray[Any]) -> Array:
        check_sendable(name, array)
        dtype, shape, content = array.dtype.str, array.shape, bytes_of(array)
        if len(content) <= SMALL_BYTES:
            return Array(name, dtype, shape, 0, self.small.add(content))
        offset = self._end
        self._contents.append((offset, content))
        self._end = _aligned(offset + len(content))
        return Array(name, dtype, shape, 1, offset)

    def copied(self, first: NDArray[np.uint8] | None = None) -> SharedSegment:
        try:
            segment = SharedSegment.create(self._end)
        except OSError as error:
            raise NoSharedMemoryError(f"the system refuses {self._end:,} bytes of shared memory: {error}") from None
        for offset, content in self._contents if first is None else [(0, first), *self._contents]:
            segment.memory[offset : offset + len(content)] = content
        return segment


class StepBorrower:
    """The trainer's side of a `StepLender`. One thread at a time may use it; arrays may be collected in any."""

    def __init__(self) -> None:
        self._borrower = Borrower()

    def take_returned(self) -> Returned:
        """The loans that ended since the last call."""
        return Returned(*self._borrower.take_returned())

    @property
    def num_mapped(self) -> int:
        return self._borrower.num_mapped

    def receive(self, data: memoryview, descriptors: list[int], arenas: Arenas) -> Delivery | NoStep | NotLocal | None:
        """Unpack a message; None when more are to come. Raises DamagedStepError where it cannot come from a StepLender. The
        descriptors are closed."""
        segments = [SharedSegment(descriptor, writable=False) for descriptor in descriptors]
        try:
            envelope = _ENVELOPES.decode(data)
            own = segments.pop() if envelope.has_own else None
            for number, segment in zip(envelope.unmapped, segments, strict=True):
                self._borrower.map(number, segment)
            if not envelope.is_complete:
                return None
            lent = [self._borrower.borrow(Loan(*loan)) for loan in envelope.loans]
            memories = lent if own is None else [own.memory]
            self._borrower.unmap(envelope.gone)
            body = envelope.body
            if envelope.body_at is not None:
                region, num_bytes = envelope.body_at
                body = memories[region - 1][:num_bytes].tobytes()
            answer = _BODIES.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError, KeyError, ValueError) as error:
            raise DamagedStepError(f"the message cannot be read: {error!r}") from None
        if not isinstance(answer.answer, Contents):
            return answer.answer
        small = np.frombuffer(answer.small, np.uint8)
        regions = [Region(memory, _address(memory)) for memory in (small, *memories)]
        return unpack_step(answer.answer, regions, arenas)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _address(array: NDArray[Any]) -> int:
    return array.__array_interface__["data"][0]
