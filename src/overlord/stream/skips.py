"""Rows, files and sources that a run leaves out from a step on: which rows of a chunk these are follows from its facts."""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.stream.facts import ChunkFacts, Ints, Samples

_NONE = np.zeros(0, np.int64)


@record
class SkipSet:
    """What is left out at a step. Sources are named by their index."""

    rows: Mapping[int, Mapping[int, frozenset[int] | None]]
    """source to unit to the rows of it; None: all of the unit."""
    sources: frozenset[int]
    """Sources that are left out as a whole."""

    def rows_of(self, source: int, facts: ChunkFacts) -> Ints:
        """The rows of a chunk that are left out, in order."""
        of_source, origins = self.rows.get(source), facts.origins
        if of_source is None or origins is None or not any(unit in of_source for unit in origins.units):
            return _NONE
        left_out = np.zeros(facts.num_rows, bool)
        for place, unit in enumerate(origins.units):
            if unit in of_source:
                here = np.ones(facts.num_rows, bool) if origins.place is None else origins.place == place
                rows = of_source[unit]
                left_out |= here if rows is None else here & np.isin(origins.row, sorted(rows))
        return np.flatnonzero(left_out)


class SkipSchedule:
    """What is left out at each step: everything that was decided up to it. `at` returns the same object for as long as that
    stays the same."""

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._steps: list[int] = []
        self._values: list[tuple[int, int, Mapping[str, Any]]] = []
        self._sets: dict[int, SkipSet] = {}

    def add(self, step: int, value: Mapping[str, Any]) -> None:
        """Leave something out from a step on, which must not have been drawn yet. `value` is that of the decision."""
        if value["source"] not in self._numbers:
            return  # of a source that this job does not have
        insort(self._steps, step)
        insort(self._values, (step, len(self._values), value), key=lambda entry: entry[:2])
        self._sets.clear()

    def at(self, step: int) -> SkipSet | None:
        count = bisect_right(self._steps, step)
        if count == 0:
            return None
        if count not in self._sets:
            self._sets[count] = self._set_of([value for _, _, value in self._values[:count]])
        return self._sets[count]

    def _set_of(self, values: Sequence[Mapping[str, Any]]) -> SkipSet:
        rows: dict[int, dict[int, frozenset[int] | None]] = {}
        sources: set[int] = set()
        for value in values:
            number = self._numbers[value["source"]]
            if value["rows"] is None:
                sources.add(number)
                continue
            of_source = rows.setdefault(number, {})
            for unit, listed in value["rows"]:
                known = of_source.get(unit, frozenset[int]())
                of_source[unit] = None if listed is None or known is None else known | frozenset(listed)
        return SkipSet(rows, frozenset(sources))


def without_skipped(samples: Samples, skips: SkipSet | None, describe: Callable[[int, int], ChunkFacts]) -> Samples:
    """The samples that are not left out. `describe` returns the facts of a chunk."""
    if skips is None or len(samples) == 0:
        return samples
    kept = ~np.isin(samples.source, sorted(skips.sources))
    for source, chunk in {*zip(samples.source.tolist(), samples.chunk.tolist(), strict=True)}:
        if source in skips.rows:
            here = (samples.source == source) & (samples.chunk == chunk)
            kept &= ~(here & np.isin(samples.row, skips.rows_of(source, describe(source, chunk))))
    return samples if kept.all() else samples.take(np.flatnonzero(kept))
