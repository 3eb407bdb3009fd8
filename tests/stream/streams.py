"""Made-up sources for tests of drawing: facts as a function of (source, chunk), as loaders promise them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.stream.drawing import ComputedFacts, Extent
from overlord.stream.facts import ChunkFacts
from overlord.stream.membership import DrawnStep, StepDrawer
from overlord.stream.progress import Progress

Peek = Callable[[int, int], ChunkFacts | None]


@dataclass(frozen=True)
class Stream:
    """Sources with `rows[i]` rows in each of `chunks[i]` chunks an epoch, lengths from 1 to `longest`."""

    rows: tuple[int, ...]
    chunks: tuple[int, ...]
    epochs: tuple[int | None, ...]
    longest: int
    seed: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"s{i}" for i in range(len(self.rows)))

    @property
    def extents(self) -> list[Extent]:
        return [Extent(c, e) for c, e in zip(self.chunks, self.epochs, strict=True)]

    def describe(self, source: int, chunk: int) -> ChunkFacts:
        rng = np.random.default_rng([self.seed, source, chunk])
        # The same rows every epoch would hide mistakes; a chunk may also be empty.
        count = 0 if chunk % 5 == 4 and self.chunks[source] > 1 else self.rows[source]
        tokens = rng.integers(1, self.longest + 1, count)
        return ChunkFacts(tokens, np.maximum(tokens - 1, 0), {"image_pixels": tokens * 7} if source % 2 else {})

    def drawer(
        self, batch: Batch, mixture: Mixture, progress: Progress | None = None, peek: Peek | None = None
    ) -> StepDrawer:
        start = progress or Progress.start(self.names)
        return StepDrawer(start, batch, mixture, self.extents, ComputedFacts(self.describe, peek))


def steps(drawer: StepDrawer, most: int) -> list[DrawnStep]:
    found = []
    while len(found) < most and (step := drawer.next_step()) is not None:
        found.append(step)
    return found


def keys(step: DrawnStep) -> list[tuple[int, ...]]:
    """Every sample of a step as (source, chunk, row, start, stop, loss tokens), in the order drawn."""
    s = step.samples
    columns = (s.source, s.chunk, s.row, s.start, s.stop, s.loss_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def streams(draw: st.DrawFn, finite: bool | None = None, longest: int = 20) -> Stream:
    n = draw(st.integers(1, 5))

    def some(strategy: st.SearchStrategy) -> tuple:
        return tuple(draw(st.lists(strategy, min_size=n, max_size=n)))

    epochs = st.integers(1, 2) if finite else st.none() if finite is False else st.none() | st.integers(1, 2)
    return Stream(some(st.integers(1, 12)), some(st.integers(1, 4)), some(epochs), longest, draw(st.integers(0, 99)))


def weights(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, float]]:
    return st.fixed_dictionaries({name: st.floats(0.01, 10) for name in names})
