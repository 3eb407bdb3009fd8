"""A step for a trainer on the same host: its arrays stay where they were built, in shared memory, and a small message says
where. Both sides of it.

A message is MessagePack, never pickle. With it travel the descriptors of segments that the trainer has not mapped yet.
Region 0 of a step lies in the message and holds the small arrays; the others are segments that are lent to the trainer until
its last array over them is collected. A large array that was not built in shared memory is copied there. A step that the
trainer builds comes as a plan, and segments are the chunks that it needs (`unbuilt_steps.py`); the trainer returns them when
the service says that no step needs them any more.

How many built steps a trainer may hold, and how large, the pool's `LendLimit` says. Beyond that each is copied into memory
of its own, which the service does not keep: whoever keeps batches pays for them, and the service's memory stays bounded.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from overlord.batches.buffers import segment_of
from overlord.batches.lending import Borrower, Lender, Loan
from overlord.runtime.shared_memory import SharedSegment, address_of
from overlord.service.steps import (
    SMALL_BYTES,
    DamagedStepError,
    SmallArrays,
    bytes_of,
    pack_fields,
    sendable_type,
    unpack_step,
)
from overlord.service.wire import Answer, Array, Contents, Count, NoStep, Plans, Session, Ticket, pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Delivery
    from overlord.runtime.shared_memory import Connection
    from overlord.service.unbuilt_steps import KnownChunks, LentChunks, UnbuiltStep

MOST_BYTES = 1 << 16
"""Of one message."""

MOST_LONG_BYTES = 1 << 30
"""Of a request or a reply in shared memory: states of jobs with very many sources."""

TRYING, TAKEN, STEP, WAITED_NS, IS_OPEN = range(5)
"""The words of a page of takes (`taking.py`). The service writes the last, the client the others."""

_IN_MESSAGE = 1 << 15
"""A longer body lies in shared memory."""
_MOST_DESCRIPTORS = 60
_ALIGNMENT = 64
_FIRST_OF_CHUNKS = 1 << 40
"""The number of the first loan of a chunk: those of batches are lower."""
_log = logging.getLogger(__name__)


class Greeting(Struct, frozen=True, forbid_unknown_fields=True, tag="greeting"):
    """The first message on a connection."""

    version: int
    token: str | None


class Returned(Struct, frozen=True, forbid_unknown_fields=True, tag="returned"):
    """The loans that ended: `free` can be used again; of `kept` a forked child may hold arrays. There is no reply."""

    free: list[Count]
    kept: list[Count]
    is_last: bool = False
    """The client closes the connection, and goes on with others."""


class Fetch(Struct, frozen=True, forbid_unknown_fields=True, tag="fetch"):
    ticket: Ticket
    returned: Returned
    most_unbuilt: Annotated[int, Meta(ge=0, le=64)] = 0
    """The step may come unbuilt (`unbuilt_steps.py`), if it is fetched ahead, with so many in all."""
    goes_on: bool = False
    """Not the step of the ticket, but the one after the last that was sent here, or that was not ready."""


class ShareTakes(Struct, frozen=True, forbid_unknown_fields=True, tag="share_takes"):
    """Asks for a page on which a client takes steps (`taking.py`). Its descriptor comes with the reply; the connection is
    used for nothing else, and the page ends with it."""

    rank: Count
    session: Session


class Act(Struct, frozen=True, forbid_unknown_fields=True, tag="act"):
    """An action of the service, as over Flight."""

    name: Annotated[str, Meta(max_length=64)]
    body: bytes


LocalRequest = Greeting | Returned | Fetch | ShareTakes | Act


def send_long(connection: Connection, message: Act | bytes) -> None:
    """Send a request or a reply. One that is too long for a message lies in shared memory, whose descriptor is sent."""
    body = message.body if isinstance(message, Act) else message
    if len(body) <= MOST_BYTES - (1 << 10):
        connection.send_raw(pack(message) if isinstance(message, Act) else message)
        return
    segment = SharedSegment.create(len(body))
    segment.memory[:] = np.frombuffer(body, np.uint8)
    connection.send_raw(pack(Act(message.name, b"")) if isinstance(message, Act) else b"\0", segments=[segment])


def read_long(descriptors: Sequence[int]) -> memoryview:
    """The bytes of a request or reply that was too long for its message. They are read, not mapped: the sender could cut
    the memory. Raises ValueError where there are too many of them."""
    try:
        num_bytes = os.fstat(descriptors[0]).st_size
        if num_bytes > MOST_LONG_BYTES:
            raise ValueError(f"a message of {num_bytes:,} bytes; at most {MOST_LONG_BYTES:,} are taken")
        return memoryview(os.pread(descriptors[0], num_bytes, 0))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class NotLocal(Struct, frozen=True, tag="not_local"):
    """There is no shared memory for the step: the client must use Flight."""

    reason: str


class _Body(Struct, frozen=True):
    answer: Answer | Plans | NotLocal
    small: bytes = b""


class _Envelope(Struct, frozen=True):
    """A message about a step."""

    loans: list[tuple[int, int]] = []
    """The number of each loan, and its segment: the regions of the step from 1 on."""
    unmapped: list[int] = []
    """The segments whose descriptors come with the message, in their order."""
    gone: list[int] = []
    dropped: list[int] = []
    """The chunks that no step needs any more, by id."""
    has_own: bool = False
    """The last descriptor is memory of the step's own, in place of loans."""
    body: bytes = b""
    body_at: tuple[Count, Count, Count] | None = None
    """The region of a long body, its begin and its end there."""
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

    def __init__(self, arenas: Arenas) -> None:
        self._arenas = arenas
        self._lender = Lender()
        self._chunk_lender = Lender(first=_FIRST_OF_CHUNKS)
        self._lent_chunks: LentChunks | None = None  # made with the first step that is not built here
        self._open: dict[int, set[int]] = {}  # the loans of each step that the trainer holds, by the first of them
        self._first: dict[int, int] = {}  # the loans that are open, with the first of their step
        self.num_copied = 0
        """How many steps were copied because the trainer held so much."""

    def pack(self, delivery: Delivery) -> list[LocalMessage]:
        """The messages for a step; one, unless it has very many segments."""
        is_copied = bool(delivery.microbatches) and not self._arenas.lend_limit.allows(
            len(self._open) + 1, self.lent_bytes + _num_bytes(delivery)
        )
        self.num_copied += is_copied
        regions = _SharedRegions(is_copied)
        if delivery.unbuilt:
            from overlord.service.unbuilt_steps import LentChunks, pack_plans

            if self._lent_chunks is None:
                self._lent_chunks = LentChunks()
            contents = pack_plans(regions, delivery, self._lent_chunks)
        else:
            microbatches = [pack_fields(regions, fields, {}) for fields in delivery.microbatches]
            contents = Contents(delivery.step, delivery.loss_tokens, microbatches)
        body, body_at = pack(_Body(contents, regions.small.joined())), None
        if len(body) > _IN_MESSAGE:
            region, begin = regions.copy(np.frombuffer(body, np.uint8))
            body, body_at = b"", (region, begin, begin + len(body))
        if is_copied:
            segment = regions.copy_apart()
            envelope = _Envelope([], [], self._take_gone(), self._take_dropped(), True, body, body_at)
            return [LocalMessage(pack(envelope), [segment])]
        regions.copy_into(self._arenas)
        lent = (self._chunk_lender if delivery.unbuilt else self._lender).lend(regions.held)
        numbers = [loan.number for loan in lent.loans]
        if numbers and not delivery.unbuilt:
            self._arenas.lenders[self] = lambda: self.lent_bytes
            self._open[numbers[0]] = set(numbers)
            self._first |= dict.fromkeys(numbers, numbers[0])
        *bulks, new = _in_bulks(lent.unmapped)
        loans = [(loan.number, loan.segment) for loan in lent.loans]
        unmapped = [segment.number for segment in new]
        last = _Envelope(loans, unmapped, self._take_gone(), self._take_dropped(), False, body, body_at)
        return [*(_only_descriptors(bulk) for bulk in bulks), LocalMessage(pack(last), new)]

    def take_back(self, returned: Returned) -> None:
        """Note which loans the trainer has returned."""
        for lender in (self._lender, self._chunk_lender):
            lender.take_back(returned.free)
            lender.retire(returned.kept)
        for number in (*returned.free, *returned.kept):
            first = self._first.pop(number, None)
            if first is not None:
                self._open[first].discard(number)
                if not self._open[first]:
                    del self._open[first]

    def _take_gone(self) -> list[int]:
        return [*self._lender.take_gone(), *self._chunk_lender.take_gone()]

    def _take_dropped(self) -> list[int]:
        return [] if self._lent_chunks is None else self._lent_chunks.take_dropped()

    @property
    def num_lent(self) -> int:
        """How many steps the trainer holds."""
        return len(self._open)

    @property
    def lent_bytes(self) -> int:
        """The bytes of the buffers that the trainer holds."""
        return self._lender.lent_bytes

    def close(self) -> None:
        """Retire every loan: the trainer cannot be reached, and may still hold arrays."""
        self._arenas.lenders.pop(self, None)
        self._lender.close()
        self._chunk_lender.close()


def pack_answer(answer: Answer | NotLocal) -> LocalMessage:
    """The message for an answer that is no step."""
    return LocalMessage(pack(_Envelope(body=pack(_Body(answer)))))


def _num_bytes(delivery: Delivery) -> int:
    """The bytes of the arrays of a step, those in lists not counted: they are few."""
    return sum(
        value.nbytes for fields in delivery.microbatches for value in fields.values() if isinstance(value, np.ndarray)
    )


def _in_bulks(segments: list[SharedSegment]) -> list[list[SharedSegment]]:
    """As many as a message may bring, at least one bulk."""
    begins = range(0, max(len(segments), 1), _MOST_DESCRIPTORS)
    return [segments[begin : begin + _MOST_DESCRIPTORS] for begin in begins]


def _only_descriptors(segments: list[SharedSegment]) -> LocalMessage:
    envelope = _Envelope(unmapped=[segment.number for segment in segments], is_complete=False)
    return LocalMessage(pack(envelope), segments)


class _SharedRegions:
    """Finds the segments that arrays lie in, and collects those that must be copied into one more, in any case all where
    `copies`."""

    def __init__(self, copies: bool) -> None:
        self.small = SmallArrays()
        self.held: list[NDArray[Any]] = []
        """An array in each segment: it keeps the segment from being used again. Region i + 1 is that of entry i."""
        self._copies = copies
        self._found: dict[int, int] = {}  # the region of each segment
        self._copied: list[tuple[int, NDArray[np.uint8]]] = []
        self._copy_region = 0
        self._copy_bytes = 0

    def add(self, name: str, array: NDArray[Any]) -> Array:
        dtype, shape, num_bytes = sendable_type(name, array), array.shape, array.nbytes
        if not self._copies and num_bytes > _ALIGNMENT and array.flags.c_contiguous:
            segment = segment_of(array)
            if segment is not None:
                return Array(name, dtype, shape, self._region_of(segment, array), address_of(array) - segment.address)
        if num_bytes <= SMALL_BYTES:
            return Array(name, dtype, shape, 0, self.small.add(array))
        return Array(name, dtype, shape, *self.copy(bytes_of(array)))

    def add_memory(self, memory: NDArray[np.uint8]) -> int:
        """Lend the segment that the memory lies in; returns its region."""
        segment = segment_of(memory)
        assert segment is not None  # `ChunkPlace.of` saw to it
        return self._region_of(segment, memory)

    def copy(self, content: NDArray[np.uint8]) -> tuple[int, int]:
        """Copy bytes; returns the region and the offset where they will be."""
        if not self._copied:
            self.held.append(content)  # replaced by the copy
            self._copy_region = len(self.held)
        offset = self._copy_bytes
        self._copied.append((offset, content))
        self._copy_bytes += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
        return self._copy_region, offset

    def copy_into(self, arenas: Arenas) -> None:
        """Copy what is not in shared memory into a buffer of the pool."""
        if not self._copied:
            return
        memory = arenas.lease(self._copy_bytes)
        if segment_of(memory) is None:
            raise NoSharedMemoryError(arenas.why_private or "batches are built in private memory")
        self._write(memory)
        self.held[self._copy_region - 1] = memory

    def copy_apart(self) -> SharedSegment:
        """Copy everything into memory of its own."""
        try:
            segment = SharedSegment.create(self._copy_bytes)
        except OSError as error:
            raise NoSharedMemoryError(f"the system refuses {self._copy_bytes:,} bytes of shared memory: {error}") from None
        self._write(segment.memory)
        return segment

    def _write(self, memory: NDArray[np.uint8]) -> None:
        for offset, content in self._copied:
            memory[offset : offset + len(content)] = content

    def _region_of(self, segment: SharedSegment, array: NDArray[Any]) -> int:
        found = self._found.get(segment.number)
        if found is None:
            self.held.append(array)
            found = self._found[segment.number] = len(self.held)
        return found


class StepBorrower:
    """The trainer's side of a `StepLender`. One thread at a time may use it; arrays may be collected in any."""

    def __init__(self) -> None:
        self._borrower = Borrower()
        self._chunks: KnownChunks | None = None

    def take_returned(self) -> Returned:
        """The loans that ended since the last call."""
        return Returned(*self._borrower.take_returned())

    @property
    def num_mapped(self) -> int:
        return self._borrower.num_mapped

    def drop_chunks(self) -> None:
        """Return all chunks: no step of this connection is built any more."""
        self._chunks = None

    def receive(
        self, data: memoryview, descriptors: list[int], arenas: Arenas
    ) -> Delivery | list[UnbuiltStep] | NoStep | NotLocal | None:
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
            if self._chunks is not None:
                for number in envelope.dropped:
                    self._chunks.drop(number)
            body = envelope.body
            if envelope.body_at is not None:
                region, begin, end = envelope.body_at
                body = memories[region - 1][begin:end].tobytes()
            answer = _BODIES.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError, KeyError, ValueError) as error:
            raise DamagedStepError(f"the message cannot be read: {error!r}") from None
        regions = [np.frombuffer(answer.small, np.uint8), *memories]
        if isinstance(answer.answer, Plans):
            from overlord.service.unbuilt_steps import KnownChunks, unpack_plans

            if self._chunks is None:
                self._chunks = KnownChunks()
            return unpack_plans(answer.answer, regions, arenas, self._chunks)
        if not isinstance(answer.answer, Contents):
            return answer.answer
        return unpack_step(answer.answer, regions, arenas)
