"""Where the images of planned samples are decoded to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from overlord.data.arenas import Arenas
from overlord.planning.facts import ONLY_IMAGE, Ints, Samples
from overlord.planning.images.vision import sizes_of


class ImageRooms:
    """One piece of memory, if all images have the same planned size; otherwise images bring their own."""

    def __init__(self, samples: Samples, arenas: Arenas) -> None:
        self.only = samples.sizes.get(ONLY_IMAGE, np.zeros(len(samples), np.int64))
        """Which image of each sample is wanted, as `ONLY_IMAGE` says it."""
        self._sizes = sizes_of(samples)
        self._counts: Ints = np.where(self.only < 0, 0, self._sizes.count)
        self._first = np.cumsum(self._counts) - self._counts
        self._block: NDArray[np.uint8] | None = None
        wanted = self._sizes.take(np.flatnonzero(self._counts)).compact()
        if len(wanted.height) and (wanted.height == wanted.height[0]).all() and (wanted.width == wanted.width[0]).all():
            shape = (len(wanted.height), int(wanted.height[0]), int(wanted.width[0]), 3)
            self._block = arenas.lease(int(np.prod(shape))).reshape(shape)

    def of(self, place: int) -> list[NDArray[np.uint8]] | None:
        """The places for the images of a sample; None when they bring their own memory."""
        if self._block is None:
            return None
        first = int(self._first[place])
        return [self._block[first + i] for i in range(int(self._counts[place]))]

    def blank(self, place: int) -> list[NDArray[np.uint8]]:
        """Black images of the planned sizes."""
        rooms = self.of(place)
        if rooms is None:
            first = int(self._sizes.first[place])
            numbers = range(first, first + int(self._counts[place]))
            rooms = [np.empty((self._sizes.height[i], self._sizes.width[i], 3), np.uint8) for i in numbers]
        for room in rooms:
            room.fill(0)
        return rooms
