"""Rows that wait to be drawn, in the order of their virtual times."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from overlord.planning.facts import ChunkFacts, Floats, Ints, Samples
from overlord.planning.images.image_sizes import ImageSizes
from overlord.records import record


@record
class Pool:
    """Rows waiting for their turn: row `order[i]` of `rows`, which lie as they came, has the time `times[i]`.

    Rows that were taken stay in `rows` until all are: most are moved twice, once in and once out.
    """

    rows: Samples
    order: Ints
    times: Floats

    @staticmethod
    def empty(names: tuple[str, ...]) -> Pool:
        return Pool(Samples.none(names), np.zeros(0, np.int64), np.zeros(0))

    def with_rows(self, new: Samples, times: Sequence[Floats]) -> Pool:
        rows = Samples.concatenated([self.rows, new]) if len(self.times) else new
        first = len(rows) - len(new)
        order = np.concatenate([self.order, np.arange(first, len(rows))])
        all_times = np.concatenate([self.times, *times])
        by_time = all_times.argsort(kind="stable")  # quick on what is a few sorted runs
        in_order = all_times[by_time]
        if (in_order[1:] == in_order[:-1]).any():
            by_time = np.lexsort((rows.source[order], all_times))
            in_order = all_times[by_time]
        return Pool(rows, order[by_time], in_order)

    def num_before(self, time: float, source: int) -> int:
        """How many rows come before that time, or at it and are of that source or an earlier one."""
        first, last = self.times.searchsorted(time, "left"), self.times.searchsorted(time, "right")
        return int(first + np.count_nonzero(self.rows.source[self.order[first:last]] <= source))

    def first(self, count: int) -> Samples:
        return self.rows.take(self.order[:count])

    def without_first(self, count: int) -> Pool:
        return Pool(self.rows, self.order[count:], self.times[count:])


@record
class Span:
    """Rows `begin` to `end` of a chunk."""

    source: int
    chunk: int
    facts: ChunkFacts
    begin: int
    end: int


def samples_of(names: tuple[str, ...], spans: Sequence[Span]) -> Samples:
    """The rows of each span, one span after the other."""
    counts = [span.end - span.begin for span in spans]
    rows = [(span.facts, span.begin, span.end) for span in spans]
    tokens = np.concatenate([facts.tokens[begin:end] for facts, begin, end in rows])
    size_names = dict.fromkeys(name for facts, _, _ in rows for name in facts.sizes)
    return Samples.of_columns(
        names,
        np.repeat(np.array([span.source for span in spans], np.int64), counts),
        np.repeat(np.array([span.chunk for span in spans], np.int64), counts),
        np.concatenate([np.arange(begin, end) for _, begin, end in rows]),
        np.zeros(len(tokens), np.int64),
        tokens,
        tokens,
        np.concatenate([facts.loss_tokens[begin:end] for facts, begin, end in rows]),
        sizes={
            name: np.concatenate(
                [
                    facts.sizes[name][begin:end] if name in facts.sizes else np.zeros(end - begin, np.int64)
                    for facts, begin, end in rows
                ]
            )
            for name in size_names
        },
        images=ImageSizes.concatenated(
            [None if facts.images is None else facts.images.take(slice(begin, end)) for facts, begin, end in rows], counts
        ),
    )
