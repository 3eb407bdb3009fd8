"""The facts that drawing needs, requested from loaders once and remembered as long as draws may need them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from overlord.roles.reading_ahead import Lookout
from overlord.stream.outliers import count_delays

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.roles.routes import Routes
    from overlord.stream.facts import ChunkFacts, LossCount, Samples


_MOST_RECEIVED = 16
"""Chunks of a source whose facts are kept before they are needed."""


class FactsCache:
    """A `FactSource` over loaders. Also counts what was split, truncated, dropped, delayed or empty in the chunks seen."""

    def __init__(
        self,
        routes: Routes,
        names: Sequence[str],
        ends: Sequence[int | None],
        first_chunk: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ends`: the chunk that each source ends before, None where it never does. `first_chunk`: of a source, the first
        chunk that is still needed; its loader may drop earlier ones."""
        self._routes = routes
        self._names = names
        self._ends = ends
        self._first_chunk = first_chunk
        self._clock = clock
        self._lookout = Lookout()
        self._known: dict[int, tuple[int, ChunkFacts]] = {}
        self._received: list[dict[int, ChunkFacts]] = [{} for _ in names]  # facts that loaders sent before they were needed
        self._prefetched: dict[int, int] = {}  # source to the last chunk that was prefetched
        self._counted_to: dict[int, int] = {}
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._counts_lock = threading.Lock()
        self.waits_for = ""
        """The chunk whose facts somebody waits for, in words."""

    def describe(self, source: int, chunk: int) -> ChunkFacts:
        known_chunk, facts = self._known.get(source, (-1, None))
        if facts is not None and known_chunk == chunk:
            return facts
        facts = self._take_received(source, chunk)
        if facts is not None:
            return facts
        self.waits_for = f"the facts of chunk {chunk} of source {self._names[source]!r}"
        began = self._clock()
        facts = self._routes.describe(source, chunk, self._keep_from(source, chunk))
        self._lookout = self._lookout.after_facts(self._clock() - began)
        self.waits_for = ""
        self._remember(source, chunk, facts)
        return facts

    def receive(self, source: int, chunk: int, facts: ChunkFacts) -> None:
        """Keep facts that a loader sent when it had made a chunk: they will be needed soon. Safe to call at any time."""
        received = self._received[source]
        received[chunk] = facts
        if len(received) > _MOST_RECEIVED:
            received.pop(min(received.copy()), None)

    def _take_received(self, source: int, chunk: int) -> ChunkFacts | None:
        facts = self._received[source].pop(chunk, None)
        if facts is not None:
            self._routes.note_described(source, chunk, self._keep_from(source, chunk))
            self._remember(source, chunk, facts)
        return facts

    def peek(self, source: int, chunk: int) -> ChunkFacts | None:
        facts = self._take_received(source, chunk)
        if facts is not None:
            return facts
        facts = self._routes.peek(source, chunk, self._keep_from(source, chunk))
        if facts is not None:
            self._remember(source, chunk, facts)
        return facts

    @property
    def num_expected(self) -> int:
        return self._lookout.num_sources

    def expect(self, source: int, chunk: int) -> None:
        if self._prefetched.get(source) != chunk:
            self._prefetched[source] = chunk
            self._routes.prefetch(source, chunk, self._ends[source])

    def count_loss(self, source: int, chunk: int, row: int, start: int, stop: int) -> LossCount:
        return self._routes.count_loss(source, chunk, row, start, stop)

    def count_delays(self, samples: Samples) -> None:
        """Count the samples of a step that outlier delay has moved."""
        with self._counts_lock:
            count_delays(samples, self._counts)

    def counts(self) -> dict[str, dict[str, int]]:
        """Per source, documents split, truncated, dropped or empty, in the chunks seen so far. Returns at once."""
        with self._counts_lock:
            return {name: dict(counts) for name, counts in self._counts.items()}

    def _keep_from(self, source: int, chunk: int) -> int:
        return min(self._first_chunk(source), chunk)

    def _remember(self, source: int, chunk: int, facts: ChunkFacts) -> None:
        # One chunk per source is enough: draws move on, and a rewind requests it again.
        self._known[source] = (chunk, facts)
        if chunk >= self._counted_to.get(source, 0):
            self._counted_to[source] = chunk + 1
            with self._counts_lock:
                self._counts[self._names[source]].update(facts.counts)
