"""How a document is cut for N ranks that attend to it together: the one place that planner, constructor and trainer ask.

A document of n tokens is cut into 2 N chunks, numbered from its beginning. Rank i takes chunks i and 2 N - 1 - i: an early
one, whose tokens see little, and a late one, whose tokens see much, so that causal attention is the same work for all.

Nothing is padded. With n = 2 N q + r, the last r chunks have q + 1 tokens and the others q. So chunk j begins at
j q + max(0, j - (2 N - r)), and because late chunks go to ranks 0, 1, 2, ... from the end, every rank has n / N tokens,
rounded down or up: no rank has more than the capacity that N was found for.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from overlord.planning.facts import Ints


class Chunk(NamedTuple):
    """The tokens [begin, end) of a document."""

    begin: int
    end: int


def chunk_begins(lengths: Ints, num_parts: Ints, chunks: Ints) -> Ints:
    """Where these chunks begin, in documents of these lengths that are cut for so many ranks. The arrays broadcast."""
    size, longer = np.divmod(lengths, 2 * num_parts)
    return chunks * size + np.maximum(0, chunks - (2 * num_parts - longer))


def chunks_of(length: int, num_parts: int, part: int) -> list[Chunk]:
    """What rank `part` of `num_parts` takes of one document: its early and its late chunk, without empty ones; all of it in
    one piece when there is one rank."""
    if num_parts == 1:
        return [Chunk(0, length)]
    chunks = np.array([part, 2 * num_parts - 1 - part])
    begins, ends = (chunk_begins(np.array(length), np.array(num_parts), c).tolist() for c in (chunks, chunks + 1))
    return [Chunk(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
