"""A pool of reusable buffers for batches.

Fresh memory is the largest cost of delivering large arrays, because the system zeroes each page first. A buffer returns to
the pool when the last array or tensor over it is collected, so a batch that the trainer keeps is never overwritten.

Buffers of a shared pool can be lent to other processes, see `lending`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.runtime.shared_memory import SharedSegment, may_share_more, why_unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_STEP = 1 << 16
"""Sizes are rounded up to a multiple of this, so that batches of nearly equal size share buffers."""
_MOST_OPEN_FILES = 1 << 16


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LendLimit:
    """How many steps of a pool a trainer may hold, fetched ahead or in use, before further ones are copied."""

    most_steps: int = 16
    most_bytes: int = 1 << 30
    """Of the buffers that they lie in."""
    least_steps: int = 4
    """However large they are: it could not fetch ahead otherwise."""

    def allows(self, num_steps: int, num_bytes: int) -> bool:
        """True if a trainer may hold so many steps, which take so many bytes."""
        return num_steps <= self.most_steps and (num_bytes <= self.most_bytes or num_steps <= self.least_steps)


class Arenas:
    """A pool that keeps at most `most` idle buffers: those that were used last.

    Buffers of a shared pool can be mapped by other processes. Where the system has no such memory, a warning says so once,
    and buffers are private from then on. They are so, too, while the process has few descriptors left.
    """

    most_descriptors = 0.75
    """The part of the descriptors of this process that may be in use when another buffer is shared."""

    def __init__(self, most: int = 0, *, shared: bool = False) -> None:
        self.most = most
        self.is_shared = False
        self.why_private = ""
        """Why buffers are private although they were to be shared."""
        self.lend_limit = LendLimit()
        """Of each trainer."""
        self.lenders: dict[Any, Callable[[], int]] = {}
        """Who lends buffers of this pool, and the bytes that each has lent."""
        self._segments: weakref.WeakSet[SharedSegment] = weakref.WeakSet()
        # No lock: a buffer returns from a finalizer, which may run inside any other call. Operations of a deque are atomic.
        self._idle: deque[_Arena] = deque()
        if shared:
            self.share()

    def share(self) -> bool:
        """Make new buffers in shared memory; returns False where the system has none."""
        if not self.is_shared and not self.why_private:
            reason = why_unavailable()
            self.is_shared = reason is None
            if reason is None:
                _allow_more_open_files()
            else:
                self._give_up(reason)
        return self.is_shared

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
        self._drop_surplus()

    def take_back(self, memory: _Arena) -> None:
        is_retired = memory.segment is not None and memory.segment.is_retired
        if not is_retired:
            self._idle.append(memory)
            self._drop_surplus()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def shared_bytes(self) -> int:
        """The bytes of all shared buffers of this pool: idle, in use, and lent."""
        return sum(segment.num_bytes for segment in list(self._segments))

    def _drop_surplus(self) -> None:
        while len(self._idle) > self.most:
            try:
                self._idle.popleft()
            except IndexError:  # another thread was faster
                return

    def _idle_of(self, size: int) -> _Arena | None:
        passed: list[_Arena] = []
        found = None
        while found is None:
            try:
                memory = self._idle.pop()  # the one used last may still be in the CPU's cache
            except IndexError:
                break
            if size <= len(memory) <= 2 * size and (memory.segment is not None) == self.is_shared:
                found = memory
            else:
                passed.append(memory)
        self._idle.extend(reversed(passed))
        return found

    def _allocate(self, size: int) -> _Arena:
        if self.is_shared and may_share_more(self.most_descriptors):
            try:
                segment = SharedSegment.create(size)
                # Reserved at once: a lack of memory would otherwise show as SIGBUS when the buffer is written.
                os.posix_fallocate(segment.descriptor, 0, size)
            except OSError as error:
                self._give_up(f"the system refuses {size:,} bytes of shared memory: {error}")
            else:
                self._segments.add(segment)
                memory = segment.memory.view(_Arena)
                memory.segment = segment
                return memory
        return np.empty(size, np.uint8).view(_Arena)

    def _give_up(self, reason: str) -> None:
        self.is_shared, self.why_private = False, reason
        _log.warning("batches are built in private memory, and copied to trainers in other processes: %s", reason)


def _allow_more_open_files() -> None:
    """Raise the soft limit of descriptors, which is often 1,024: a buffer in shared memory takes two."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class SegmentMemory(np.ndarray):
    """Memory by which arrays are found to lie in a segment."""

    def find_segment(self) -> SharedSegment | None:
        """The segment, if this process can share it with others."""
        return None


class _Arena(SegmentMemory):
    """A pooled buffer. A subclass of its own, because numpy collapses `.base` chains of arrays of one class, which would
    drop the lease in between."""

    segment: SharedSegment | None = None

    def find_segment(self) -> SharedSegment | None:
        return self.segment


class _Lease(np.ndarray):
    """Stands between a buffer and the arrays over it. It lives as long as any of them, and its finalizer returns the
    buffer to the pool."""

    owner: Arenas

    def __del__(self) -> None:
        # No global of this module here or in `take_back`: at interpreter exit globals become None before the arrays that a
        # script still holds are collected.
        self.owner.take_back(self.base)  # type: ignore[arg-type] - an _Arena, by construction


def segment_of(array: NDArray[Any]) -> SharedSegment | None:
    """The shared memory that an array lies in; None for an array in private memory, or in memory that another process lends
    to this one alone."""
    base: Any = array
    while base is not None:
        if isinstance(base, SegmentMemory):
            return base.find_segment()
        base = getattr(base, "base", None)  # an array with strides of its own has an object of numpy's as its base
    return None
