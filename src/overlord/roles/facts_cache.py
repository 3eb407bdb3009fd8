"""The facts that drawing needs, requested from loaders once and remembered as long as draws may need them.

Drawing never waits. Where facts are missing it says which, and whoever draws fetches them here, all in one request to each
host, while others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from overlord.roles.reading_ahead import Lookout
from overlord.runtime.recorder import current_recorder
from overlord.stream.drawing import FactsMissing
from overlord.stream.facts import Losses
from overlord.stream.outliers import count_delays

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.roles.routes import Routes
    from overlord.stream.facts import ChunkFacts, RowOrigins, Samples, TokenSpans


_log = logging.getLogger(__name__)

_MOST_RECEIVED = 16
"""Chunks of a source whose facts are kept before they are needed."""


@dataclass(slots=True)
class FetchedFacts:
    """What a caller has fetched to draw a step. It belongs to the caller: others may draw other steps meanwhile."""

    facts: dict[tuple[int, int], ChunkFacts] = field(default_factory=lambda: {})
    """By source and chunk."""
    losses: dict[bytes, Losses] = field(default_factory=lambda: {})
    """By the bytes of the table of `TokenSpans`."""


class FactsCache:
    """A `FactSource` over loaders. Also counts what was split, truncated, dropped, delayed or empty in the chunks seen."""

    def __init__(
        self,
        routes: Routes,
        names: Sequence[str],
        ends: Sequence[int | None],
        first_chunk: Callable[[int], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        on_facts: Callable[[int, int, RowOrigins | None], None] | None = None,
    ) -> None:
        """`ends`: the chunk that each source ends before, None where it never does. `first_chunk`: of a source, the first
        chunk that is still needed; its loader may drop earlier ones. `on_facts` is called with the origins of each chunk
        that is drawn from."""
        self._on_facts = on_facts
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
        self.waited_s = 0.0
        """How long drawing has waited for facts."""
        self._given = FetchedFacts()
        self._fetch_lock = threading.Lock()
        self._fetching: dict[tuple[int, int], Future[dict[tuple[int, int], ChunkFacts]]] = {}
        self._spans = current_recorder().spans
        self._waits: dict[object, str] = {}  # what callers wait for, in words

    def find(self, source: int, chunk: int) -> ChunkFacts | None:
        known_chunk, facts = self._known.get(source, (-1, None))
        if facts is not None and known_chunk == chunk:
            return facts
        facts = self._take_received(source, chunk)
        if facts is not None:
            return facts
        facts = self._given.facts.get((source, chunk))
        if facts is None:
            facts = self._routes.peek(source, chunk, self._keep_from(source, chunk), may_make=False)
        if facts is not None:
            self._remember(source, chunk, facts)
        return facts

    def give(self, fetched: FetchedFacts) -> None:
        """Let facts that a caller has fetched be found, until others are given."""
        self._given = fetched

    def fetch(self, missing: FactsMissing, into: FetchedFacts) -> None:
        """Fetch missing facts from loaders, and wait for them: without the planner's lock. Facts that another thread is
        fetching are waited for, not requested again."""
        with self._fetch_lock:
            under_way = [self._fetching[key] for key in missing.chunks if key in self._fetching]
            mine = [key for key in missing.chunks if key not in self._fetching]
            done: Future[dict[tuple[int, int], ChunkFacts]] = Future()
            self._fetching.update(dict.fromkeys(mine, done))
        turn, began, began_at = object(), self._clock(), time.perf_counter()
        self._waits[turn] = self._in_words(missing)
        try:
            if mine:
                wanted = [(source, chunk, self._keep_from(source, chunk)) for source, chunk in mine]
                found = dict(zip(mine, self._routes.describe_all(wanted), strict=True))
                done.set_result(found)
                into.facts.update(found)
            if missing.spans is not None:
                into.losses[missing.spans.table.tobytes()] = self._routes.count_losses(missing.spans)
            for other in under_way:
                into.facts.update(other.result())
        except BaseException as error:
            if not done.done():
                done.set_exception(error)
            if any(other.done() and other.exception() is error for other in under_way):
                return  # raised in the thread that has fetched them; this one tries itself
            raise
        finally:
            if self._spans.is_on:
                self._spans.add(f"wait for {self._waits[turn]}", began_at)
            del self._waits[turn]
            with self._fetch_lock:
                for key in mine:
                    del self._fetching[key]
                waited_s = self._clock() - began
                self.waited_s += waited_s
                self._lookout = self._lookout.after_facts(waited_s)

    def _in_words(self, missing: FactsMissing) -> str:
        if not missing.chunks:
            return "the losses of parts of documents"
        source, chunk = missing.chunks[0]
        others = len(missing.chunks) - 1
        more = f" and of {others} other{'s' * (others > 1)}" if others else ""
        return f"the facts of chunk {chunk} of source {self._names[source]!r}{more}"

    @property
    def waits_for(self) -> str:
        """The chunk whose facts somebody waits for, in words."""
        return next(iter(list(self._waits.values())), "")

    def origins(self, source: int, chunk: int) -> RowOrigins | None:
        """Where the rows of a chunk were read that the run has drawn from before."""
        return self._routes.describe_all([(source, chunk, self._keep_from(source, chunk))])[0].origins

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

    def expect_all(self, chunks: Mapping[int, int]) -> None:
        """Announce the chunk of each source that the first step needs, before those that hosts make meanwhile: else some of
        them would wait behind these."""
        self._routes.prefetch_firsts(chunks)
        for source, chunk in chunks.items():
            self.expect(source, chunk)

    def count_losses(self, spans: TokenSpans) -> Losses:
        if not len(spans):
            return Losses(np.zeros(0, np.int64), np.zeros(0, np.int64))
        found = self._given.losses.get(spans.table.tobytes())
        if found is None:
            raise FactsMissing(spans=spans)
        return found

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
        if self._on_facts is not None:
            self._on_facts(source, chunk, facts.origins)
        if chunk >= self._counted_to.get(source, 0):
            self._counted_to[source] = chunk + 1
            name = self._names[source]
            with self._counts_lock:
                is_first = "dropped" in facts.counts and not self._counts[name]["dropped"]
                self._counts[name].update(facts.counts)
            if is_first:
                _log.warning(
                    "source %r: %d of %d documents of its chunk %d are longer than sequence_length and are left out; the "
                    "report and the metrics count them",
                    name,
                    facts.counts["dropped"],
                    facts.counts["dropped"] + facts.num_rows,
                    chunk,
                )
