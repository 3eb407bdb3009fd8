"""Lends arrays to other processes of the machine, without a copy.

The owner of a shared pool has a `Lender` for each process that borrows; that process has a `Borrower`. A loan holds arrays
until the borrower returns it, which it does when its last view was collected. Only then is the memory used again. A borrower
that disconnects may still hold views, so its loans are retired: their memory is never written to again, and the kernel frees
it with the last mapping. The same holds for loans that are open while the borrower forks, because the child's views are not
counted.

Borrowers keep segments mapped, because mapping memory costs more than copying it. The lender tells which of them are gone.

A borrower may lend on what it has borrowed. It returns a loan when all of its own borrowers have; where one of these was
lost, it says, as of loans that a forked child may read, that the memory may be read for ever.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.batches.buffers import SegmentMemory, segment_of
from overlord.runtime.shared_memory import address_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from overlord.runtime.shared_memory import SharedSegment


@dataclass(frozen=True, slots=True)
class Loan:
    """The right of a borrower to read a segment until it returns the loan."""

    number: int
    segment: int


@dataclass(frozen=True, slots=True)
class Lent:
    """Arrays as their borrower finds them."""

    loans: list[Loan]
    places: list[tuple[int, int] | None]
    """For each array, the index of its loan and its first byte in the segment; None where it is not in shared memory, or not
    contiguous, and must be copied."""
    unmapped: list[SharedSegment]
    """Segments of these loans whose descriptors the borrower does not have yet."""


class Lender:
    """Lends arrays to one borrower. One thread at a time may use it."""

    def __init__(self, first: int = 0) -> None:
        """`first`: the number of the first loan. Where a borrower has several lenders, their numbers differ."""
        self._numbers = count(first)
        self._lent: dict[int, tuple[SharedSegment, list[NDArray[Any]]]] = {}
        self._known: dict[int, weakref.ref[SharedSegment]] = {}
        self._gone: deque[int] = deque()

    def lend(self, arrays: Sequence[NDArray[Any]]) -> Lent:
        """Lend arrays; those in one segment make one loan."""
        lent = Lent([], [], [])
        index_of: dict[int, int] = {}
        for array in arrays:
            segment = segment_of(array) if array.flags.c_contiguous else None
            if segment is None:
                lent.places.append(None)
                continue
            index = index_of.get(segment.number)
            if index is None:
                index = index_of[segment.number] = len(lent.loans)
                lent.loans.append(Loan(next(self._numbers), segment.number))
                self._lent[lent.loans[index].number] = segment, []
                if segment.number not in self._known:
                    self._known[segment.number] = weakref.ref(segment, lambda _, n=segment.number: self._gone.append(n))
                    lent.unmapped.append(segment)
            self._lent[lent.loans[index].number][1].append(array)
            lent.places.append((index, address_of(array) - segment.address))
        return lent

    def take_back(self, numbers: Iterable[int]) -> None:
        """End loans whose borrower has no views left."""
        for number in numbers:
            self._lent.pop(number, None)

    def retire(self, numbers: Iterable[int]) -> None:
        """End loans whose borrower may have views for ever."""
        for number in numbers:
            lent = self._lent.pop(number, None)
            if lent is not None:
                lent[0].is_retired = True

    def close(self) -> None:
        """Retire every loan: the borrower is out of reach, and may be alive."""
        self.retire(list(self._lent))

    def take_gone(self) -> list[int]:
        """The segments that ceased to exist since the last call. The borrower can unmap them."""
        gone: list[int] = []
        while self._gone:
            gone.append(self._gone.popleft())
        for number in gone:
            self._known.pop(number, None)
        return gone

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def lent_bytes(self) -> int:
        """The bytes of the segments that are lent."""
        return sum(segment.num_bytes for segment in {segment for segment, _ in list(self._lent.values())})


class Borrower:
    """Borrows arrays from one lender. Views may be collected in any thread; one thread at a time may use the rest.

    One that `lends_on` can lend the same memory to further processes, for which it keeps descriptors. Memory that one of
    these may read for ever is not returned to be used again.
    """

    def __init__(self, *, lends_on: bool = False) -> None:
        self._lends_on = lends_on
        self._mapped: dict[int, _Mapped] = {}
        # No lock: a loan is returned by a finalizer, which may run inside any other call. A deque is atomic.
        self._returned: deque[int] = deque()
        self._kept: deque[int] = deque()

    def map(self, number: int, segment: SharedSegment) -> None:
        """Note the memory of a segment that the lender calls `number`."""
        self._mapped[number] = mapped = segment.memory.view(_Mapped)
        if self._lends_on:
            # The segment of a lender in this process is its own to drop: it holds it as long as there are loans.
            is_received = not segment.memory.flags.writeable
            mapped.received, mapped.segment = segment if is_received else None, weakref.ref(segment)

    def unmap(self, numbers: Iterable[int]) -> None:
        """Forget segments that ceased to exist; views of them stay valid."""
        for number in numbers:
            self._mapped.pop(number, None)

    def borrow(self, loan: Loan) -> NDArray[np.uint8]:
        """The whole segment of a loan, read-only. The loan is returned when the last view of it is collected. KeyError where
        the segment was never mapped."""
        view = self._mapped[loan.segment].view(_Borrowed)
        view.loan = loan.number
        view.num_forks = _num_forks
        view.returned, view.kept = self._returned, self._kept
        return view.view(np.ndarray)

    def take_returned(self) -> tuple[list[int], list[int]]:
        """The loans that ended since the last call: those to take back, and those to retire."""
        return _drain(self._returned), _drain(self._kept)

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)


def _drain(numbers: deque[int]) -> list[int]:
    drained: list[int] = []
    while numbers:
        drained.append(numbers.popleft())
    return drained


class _Mapped(SegmentMemory):
    """A mapped segment. A class of its own, for the reason that `_Arena` in `buffers` has."""

    received: SharedSegment | None = None
    segment: weakref.ref[SharedSegment] | None = None

    def find_segment(self) -> SharedSegment | None:
        return None if self.segment is None else self.segment()


class _Borrowed(np.ndarray):
    """Stands between a mapped segment and the views of a loan; its finalizer returns the loan."""

    loan: int
    num_forks: int
    returned: deque[int]
    kept: deque[int]

    def __del__(self) -> None:
        # No global of this module but the counter: at interpreter exit globals become None.
        segment = self.base.find_segment()  # type: ignore[union-attr] - a _Mapped, by construction
        is_kept = self.num_forks != _num_forks or (segment is not None and segment.is_retired)
        (self.kept if is_kept else self.returned).append(self.loan)


_num_forks = 0
"""How often this process has forked. Views of loans that were open at a fork may live on in the child."""


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


os.register_at_fork(before=_count_fork)
