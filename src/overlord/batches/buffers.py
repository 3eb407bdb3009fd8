"""Memory for batches that is used again as soon as nobody holds any part of it.

Fresh memory is the largest cost of handing out large arrays: the system clears every page of it first. An arena is given
back by itself when the last array (or tensor) that looks into it is gone, so a batch that is kept stays what it was.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_STEP = 1 << 16
"""Arenas are multiples of this, so that batches of nearly one size share them."""


class Arenas:
    """Keeps at most `most` arenas that nobody uses."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        # No lock: an arena comes back wherever its last array dies, which may be inside any other call. Each
        # operation of a deque is atomic.
        self._idle: deque[NDArray[np.uint8]] = deque()

    def lease(self, num_bytes: int) -> NDArray[np.uint8]:
        """An array of that many bytes, with anything in it."""
        size = max(-(-num_bytes // _STEP), 1) * _STEP
        memory = self._idle_of(size)
        if memory is None:
            memory = np.empty(size, np.uint8).view(_Arena)
        lease = memory.view(_Lease)
        lease.owner = self
        return lease.view(np.ndarray)[:num_bytes]

    def keep_more(self, number: int) -> None:
        """Keep so many more arenas, fewer if it is negative: who shares them comes and goes."""
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
                memory = self._idle.pop()  # the one used last, which the processor may still have at hand
            except IndexError:
                return None
            if size <= len(memory) <= 2 * size:
                return memory
            # One of another size goes: what is asked for now is the best guess of what will be.
        return None


class _Arena(np.ndarray):
    """An arena. Of a class of its own, because an array made from a view holds what the view holds instead, where that is
    of the array's own class: a lease would be passed over."""


class _Lease(np.ndarray):
    """Stands between an arena and the arrays that look into it: it lives as long as any of them, and gives the arena back
    when it goes."""

    owner: Arenas

    def __del__(self) -> None:
        # No name of this module here, nor in `take_back`: when the program ends, those of modules are set to None before the
        # arrays that a script still holds are gone.
        self.owner.take_back(self.base)  # type: ignore[arg-type] - the arena, whatever numpy calls it
