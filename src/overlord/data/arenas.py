"""Memory for batches that is used again as soon as nobody holds any part of it.

Fresh memory is the largest cost of handing out large arrays: the system clears every page of it first. An arena is given
back by itself when the last array (or tensor) that looks into it is gone, so a batch that is kept stays what it was.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

_STEP = 1 << 16
"""Arenas are multiples of this, so that batches of nearly one size share them."""


class Arenas:
    """Keeps at most `most` arenas that nobody uses."""

    def __init__(self, most: int) -> None:
        self._most = most
        # No lock: an arena comes back wherever its last array dies, which may be inside any other call. Each
        # operation of a deque is atomic.
        self._idle: deque[NDArray[np.uint8]] = deque()

    def lease(self, num_bytes: int) -> NDArray[np.uint8]:
        """An array of that many bytes, with anything in it."""
        size = max(-(-num_bytes // _STEP), 1) * _STEP
        memory = self._idle_of(size)
        if memory is None:
            memory = np.empty(size, np.uint8)
        # Typed as Any: the checkers' idea of what is a buffer leaves out ctypes.
        owner: Any = (ctypes.c_char * len(memory)).from_buffer(cast(Any, memory))
        weakref.finalize(owner, self._take_back, memory).atexit = False
        return np.frombuffer(owner, np.uint8, num_bytes)

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

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self._idle) < self._most:
            self._idle.append(memory)
