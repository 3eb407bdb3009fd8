"""The chunks that a loader host lends to the other processes of its machine.

A chunk lies in shared memory once. A borrower is a process; its requests follow one another, and each says what it has
returned. The memory of a chunk is used again when the host has dropped the chunk and every borrower has returned it. A
borrower that is gone, or that has lost an answer, returns nothing any more: what it had is never written to again.
"""

from __future__ import annotations

import os
import select
import threading
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.batches.lending import Lender
from overlord.errors import ClosedError
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.batches.lending import Loan
    from overlord.chunks.shared_rows import BytePlaces, RowsInMemory
    from overlord.runtime.shared_memory import SharedSegment

MOST_TOGETHER = 32
"""Chunks in one request. A message carries at most 64 descriptors, one for each piece of memory."""


@dataclass(frozen=True, slots=True)
class LoanRequest:
    """A borrower's request for chunks."""

    borrower: str
    """Unique. A borrower that has lost an answer goes on under another name."""
    process: int
    wanted: Sequence[tuple[str, int]]
    """Sources and chunks."""
    lender: str = ""
    """The lender that `returned` and `kept` are for."""
    returned: Sequence[int] = ()
    """Loans without views."""
    kept: Sequence[int] = ()
    """Loans that may have views for ever."""
    was: Sequence[str] = ()
    """Earlier names of the borrower."""
    needed_from: Mapping[str, int] = field(default_factory=dict[str, int])
    """For some sources, the first chunk that may still be needed by anybody."""


@dataclass(frozen=True, slots=True)
class LentChunk:
    """A chunk, as its borrower finds it in the memory of a loan."""

    loan: Loan
    first: int
    """The chunk's first byte in the segment."""
    num_bytes: int
    places: BytePlaces


@dataclass(frozen=True, slots=True)
class LoanAnswer:
    """The answer to a request."""

    lender: str
    """Unique. Changes when the host is made again."""
    chunks: Sequence[LentChunk | ErrorEnvelope | None]
    """For each chunk that was wanted; None for one that is not in shared memory."""
    segments: Sequence[tuple[int, SharedSegment]]
    """The memory of these loans that the borrower does not have yet, with the lender's numbers."""
    gone: Sequence[int]
    """Memory that ceased to exist."""


class ChunkLoans:
    """What a loader host has lent to whom. Thread-safe."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._borrowers: dict[str, _Account] = {}
        self._ends = select.poll()  # of all their processes: with many borrowers, one call each would cost more than lending
        self._is_closed = False

    def lend(self, request: LoanRequest, found: Sequence[RowsInMemory | ErrorEnvelope | None]) -> LoanAnswer:
        """Lend what was found of the chunks that a request names, and take back what it returns. Raises ClosedError after
        `close`."""
        with self._lock:
            if self._is_closed:  # a loan made now would end with this object, while its borrower reads the memory
                raise ClosedError("the loader host is closed and lends no more chunks")
            self._close_accounts([*request.was, *self._gone()])
            account = self._borrowers.get(request.borrower)
            if account is None:
                account = self._borrowers[request.borrower] = _Account(request.process)
                if account.descriptor is not None:
                    self._ends.register(account.descriptor, select.POLLIN)
            lender = account.lender
            if request.lender == self._name:
                lender.take_back(request.returned)
                lender.retire(request.kept)
            segments: list[tuple[int, SharedSegment]] = []
            chunks: list[LentChunk | ErrorEnvelope | None] = []
            for rows in found:
                if rows is None or isinstance(rows, ErrorEnvelope):
                    chunks.append(rows)
                    continue
                lent = lender.lend([rows.memory])
                segments += [(segment.number, segment) for segment in lent.unmapped]
                place = lent.places[0]
                if place is None:
                    chunks.append(None)
                else:
                    chunks.append(LentChunk(lent.loans[place[0]], place[1], len(rows.memory), rows.places))
            return LoanAnswer(self._name, chunks, segments, lender.take_gone())

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._close_accounts(list(self._borrowers))

    @property
    def lent_bytes(self) -> int:
        """The bytes of the memory that is lent to each borrower, summed over borrowers."""
        with self._lock:
            return sum(account.lender.lent_bytes for account in self._borrowers.values())

    def _gone(self) -> list[str]:
        """The borrowers whose processes have ended."""
        ended = {descriptor for descriptor, _ in self._ends.poll(0)}
        return [name for name, one in self._borrowers.items() if one.was_gone or one.descriptor in ended]

    def _close_accounts(self, names: Sequence[str]) -> None:
        for name in names:
            account = self._borrowers.pop(name, None)
            if account is not None:
                if account.descriptor is not None:
                    self._ends.unregister(account.descriptor)
                account.close()


class _Account:
    """The loans of one borrower, and the descriptor that tells when its process ends."""

    def __init__(self, process: int) -> None:
        self.lender = Lender()
        self.descriptor: int | None = None
        self.was_gone = False
        if process == os.getpid():
            return
        try:
            self.descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            self.was_gone = True
        except (OSError, AttributeError):
            pass  # a system without such descriptors: what a lost process had stays lent

    def close(self) -> None:
        self.lender.close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
