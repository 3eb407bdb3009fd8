"""The whole progress of a run: a step number, one cursor per source, the mixture's balance, and carried samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from overlord.planning.facts import Floats, Ints, Samples


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands before `step`. Arrays have one entry per source, in the order of `names`.

    The next sample of source i is row `row[i]` of chunk `chunk[i]`; a row past the chunk's end means the next chunk.
    `since` counts what was drawn (in the mixture's unit) since the weights last changed, and `lead` how far ahead of its
    share the source was at that moment: together they are its position in virtual time, exactly, wherever a run is cut.
    `read_once` marks finite sources that have been read to their end.
    """

    step: int
    names: tuple[str, ...]
    chunk: Ints
    row: Ints
    samples: Ints
    tokens: Ints
    since: Ints
    lead: Floats
    weights: Floats
    read_once: NDArray[np.bool_]
    carried: Samples

    @staticmethod
    def start(names: tuple[str, ...]) -> Progress:
        def zeros() -> Ints:
            return np.zeros(len(names), np.int64)

        return Progress(
            step=0,
            names=names,
            chunk=zeros(),
            row=zeros(),
            samples=zeros(),
            tokens=zeros(),
            since=zeros(),
            lead=np.zeros(len(names)),
            weights=np.zeros(len(names)),
            read_once=np.zeros(len(names), bool),
            carried=Samples.none(names),
        )

    def for_sources(self, names: tuple[str, ...]) -> Progress:
        """The same progress for another set of sources: new ones start at their beginning, others are forgotten."""
        if names == self.names:
            return self
        old = {name: i for i, name in enumerate(self.names)}
        kept = [(new, old[name]) for new, name in enumerate(names) if name in old]
        new_index, old_index = (np.array(side, np.int64) for side in zip(*kept, strict=True)) if kept else ([], [])
        fresh = Progress.start(names)
        columns = {}
        for column in ("chunk", "row", "samples", "tokens", "since", "lead", "weights", "read_once"):
            values = getattr(fresh, column)
            values[new_index] = getattr(self, column)[old_index]
            columns[column] = values
        return replace(fresh, step=self.step, carried=self.carried.for_sources(names), **columns)
