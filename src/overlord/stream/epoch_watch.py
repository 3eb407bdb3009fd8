"""Says ahead, once a source, that it comes to the end of its epochs, or that it will be read very often.

Nothing is decided here: what happens at the end of a source is declared (`Source.repeat`, `Mixture.stop`), and is part of
the stream. How soon is estimated from the steps drawn so far.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.declare.mixture import Stop
    from overlord.stream.drawing import Extent
    from overlord.stream.progress import Progress

READINGS = 4
"""Of an endless source, before a warning that it is read once more. Up to about four, repeated data is nearly as good as new
data (Muennighoff et al. 2023)."""
LEAST_TOKENS, LEAST_SAMPLES = 1_000_000, 10_000
"""Of an epoch: smaller sources are read often on purpose. Samples count where there is no text."""
_AHEAD = 0.1  # of the epochs of a finite source, of the last epoch of an endless one
_MOST_LINES = 5


class EpochWatch:
    """Watches the sources of a run from a progress on. `warn` has `Source.warn_epochs` of each."""

    def __init__(self, start: Progress, extents: Sequence[Extent], stop: Stop, warn: Sequence[bool | int]) -> None:
        self._start = start
        self._stop = stop
        self._warn = warn
        self._extents = extents
        self._ends = np.array([-1 if extent.end is None else extent.end for extent in extents])
        # The chunk before which a source is told of: that of its end, or that of the reading that is one too many.
        self._limit = np.array([_limit(extent, often) for extent, often in zip(extents, warn, strict=True)])
        span = [extent.end or extent.chunks_per_epoch for extent in extents]
        early = np.maximum(1, np.ceil(_AHEAD * np.array(span))).astype(np.int64)
        self._from = np.where(self._limit < 0, np.iinfo(np.int64).max, np.maximum(self._limit - early, 1))
        self._from[(self._limit >= 0) & (start.chunk >= self._limit)] = np.iinfo(np.int64).max  # it was told before

    def look(self, at: Progress) -> list[str]:
        """What to say of the sources that have come near their limits since the last look."""
        due: list[int] = np.flatnonzero((at.chunk >= self._from) & (at.chunk > self._start.chunk)).tolist()
        found = [text for source in due if (text := self._text(source, at))]
        self._from[due] = np.iinfo(np.int64).max
        if len(found) > _MOST_LINES:
            more = f"{len(found) - _MOST_LINES + 1} more sources come to their last epochs: `overlord status` shows them"
            found = [*found[: _MOST_LINES - 1], more]
        return found

    def _text(self, source: int, at: Progress) -> str:
        extent, limit, name = self._extents[source], int(self._limit[source]), at.names[source]
        left, per_epoch = limit - int(at.chunk[source]), extent.chunks_per_epoch
        per_step = (int(at.chunk[source]) - int(self._start.chunk[source])) / max(at.step - self._start.step, 1)
        steps = f"in about {max(1, round(left / per_step)):,} steps"
        now = f"it is at {int(at.chunk[source]) / per_epoch:.2f} epochs"
        if extent.num_epochs is None:
            if self._warn[source] is True and not self._is_large(source, at):
                return ""
            again = f"for the {_ordinal(limit // per_epoch + 1)} time"
            when = f"will be read {again} {steps}; {now}" if left > 0 else f"is being read {again}"
            return f"source {name!r} {when}. repeat={limit // per_epoch} would end it there, warn_epochs=False says nothing"
        consequence = self._consequence(source, at)
        if not consequence:
            return ""
        cap = f"its cap of {extent.num_epochs} epoch{'s' * (extent.num_epochs > 1)}"
        when = f"will reach {cap} {steps}; {now}" if left > 0 else f"has reached {cap}"
        return f"source {name!r} {when}. Then {consequence}"

    def _consequence(self, source: int, at: Progress) -> str:
        """What happens at the end of a source; empty where nothing else is left to read, and the run simply ends."""
        goes_on = (at.weights > 0) & ((self._ends < 0) | (at.chunk < self._ends))
        goes_on[source] = False
        if not goes_on.any():
            return ""
        if self._stop == "first_exhausted":
            return "the run ends (stop='first_exhausted')"
        if self._stop == "all_exhausted":
            return "it is read again until every source has been (stop='all_exhausted')"
        return "the other sources share its weight (stop='drop_exhausted')"

    def _is_large(self, source: int, at: Progress) -> bool:
        epochs = int(at.chunk[source]) / self._extents[source].chunks_per_epoch
        tokens, samples = int(at.tokens[source]) / epochs, int(at.samples[source]) / epochs
        return tokens >= LEAST_TOKENS or (tokens == 0 and samples >= LEAST_SAMPLES)


def _limit(extent: Extent, often: bool | int) -> int:
    """The chunk at which a source has been read as often as it should be; -1 where that does not matter."""
    if often is False:
        return -1
    if extent.end is not None:
        return extent.end
    return extent.chunks_per_epoch * (READINGS if often is True else int(often))


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
