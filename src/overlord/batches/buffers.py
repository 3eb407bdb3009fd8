"""A pool of reusable buffers for batches.

Fresh memory is the largest cost of delivering large arrays, because the system zeroes each page first. A buffer returns to
the pool when the last array or tensor over it is collected, so a batch that the trainer keeps is never overwritten.

Buffers of a shared pool can be lent to other processes, see `lending`.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.runtime.shared_memory import SharedSegment

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEP = 1 << 16
"""Sizes are rounded up to a multiple of this, so that batches of nearly equal size share buffers."""


_log = logging.getLogger(__name__)


class Arenas:
    """A pool that keeps at most `most` idle buffers. With `shared`, other processes can map them; where the system has no
    such memory left, a warning says so, and buffers are private from then on."""

    def __init__(self, most: int = 0, *, shared: bool = False) -> None:
        self.most = most
        self.is_shared = shared
        self._segments: weakref.WeakSet[SharedSegment] = weakref.WeakSet()
        # No lock: a buffer returns from a finalizer, which may run inside any other call. Operations of a deque are atomic.
        self._idle: deque[_Arena] = deque()

    def lease(self, num_bytes: int) -> NDArray[np.uint8]:
        """An uninitialised array of `num_bytes`."""
        size = max(-(-num_bytes // _STEP), 1) * _STEP
        memory = self._idle_of(size)
        if memory is None:
            memory = self._allocate(size)
        lease = memory.view(_Lease)
        lease.owner = self
        return lease.view(np.ndarray)[:num_bytes]

    def keep_more(self, number: int) -> None:
        """Raise the number of idle buffers to keep, or lower it where `number` is negative."""
        self.most += number
        with contextlib.suppress(IndexError):
            while len(self._idle) > self.most:
                self._idle.popleft()

    def take_back(self, memory: _Arena) -> None:
        is_retired = memory.segment is not None and memory.segment.is_retired
        if len(self._idle) < self.most and not is_retired:
            self._idle.append(memory)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def shared_bytes(self) -> int:
        """The bytes of all shared buffers of this pool: idle, in use, and lent."""
        return sum(segment.num_bytes for segment in list(self._segments))

    def _allocate(self, size: int) -> _Arena:
        if self.is_shared:
            try:
                segment = SharedSegment.create(size)
            except OSError as error:
                self.is_shared = False
                _log.warning(
                    "the system refuses %s bytes of shared memory (%s): batches are copied to trainers in other processes",
                    f"{size:,}",
                    error,
                )
            else:
                self._segments.add(segment)
                memory = segment.memory.view(_Arena)
                memory.segment = segment
                return memory
        return np.empty(size, np.uint8).view(_Arena)

    def _idle_of(self, size: int) -> _Arena | None:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.pop()  # the one used last may still be in the cache
            except IndexError:
                return None
            if size <= len(memory) <= 2 * size:
                return memory
            # A buffer of another size is dropped: the next request is likely to be of the present size.
        return None


class _Arena(np.ndarray):
    """A pooled buffer. A subclass of its own, because numpy collapses `.base` chains of arrays of one class, which would
    drop the lease in between."""

    segment: SharedSegment | None = None


class _Lease(np.ndarray):
    """Stands between a buffer and the arrays over it. It lives as long as any of them, and its finalizer returns the
    buffer to the pool."""

    owner: Arenas

    def __del__(self) -> None:
        # No global of this module here or in `take_back`: at interpreter exit globals become None before the arrays that a
        # script still holds are collected.
        self.owner.take_back(self.base)  # type: ignore[arg-type] - an _Arena, by construction


def segment_of(array: NDArray[Any]) -> SharedSegment | None:
    """The shared memory that an array lies in; None for an array in private memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, _Arena):
            return base.segment
        base = base.base
    return None
