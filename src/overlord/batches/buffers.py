"""A pool of reusable buffers for batches.

Fresh memory is the largest cost of delivering large arrays, because the system zeroes each page first. A buffer returns to
the pool when the last array or tensor over it is collected, so a batch that the trainer keeps is never overwritten.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEP = 1 << 16
"""Sizes are rounded up to a multiple of this, so that batches of nearly equal size share buffers."""


class Arenas:
    """A pool that keeps at most `most` idle buffers."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        # No lock: a buffer returns from a finalizer, which may run inside any other call. Operations of a deque are atomic.
        self._idle: deque[NDArray[np.uint8]] = deque()

    def lease(self, num_bytes: int) -> NDArray[np.uint8]:
        """An uninitialised array of `num_bytes`."""
        size = max(-(-num_bytes // _STEP), 1) * _STEP
        memory = self._idle_of(size)
        if memory is None:
            memory = np.empty(size, np.uint8).view(_Arena)
        lease = memory.view(_Lease)
        lease.owner = self
        return lease.view(np.ndarray)[:num_bytes]

    def keep_more(self, number: int) -> None:
        """Raise the number of idle buffers to keep, or lower it where `number` is negative."""
        self.most += number
        with contextlib.suppress(IndexError):
            while len(self._idle) > self.most:
                self._idle.popleft()

    def take_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self._idle) < self.most:
            self._idle.append(memory)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def _idle_of(self, size: int) -> NDArray[np.uint8] | None:
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


class _Lease(np.ndarray):
    """Stands between a buffer and the arrays over it. It lives as long as any of them, and its finalizer returns the
    buffer to the pool."""

    owner: Arenas

    def __del__(self) -> None:
        # No global of this module here or in `take_back`: at interpreter exit globals become None before the arrays that a
        # script still holds are collected.
        self.owner.take_back(self.base)  # type: ignore[arg-type] - an _Arena, by construction
