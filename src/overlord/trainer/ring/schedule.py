"""Which queries attend to which keys in each turn of a ring, as calls of a variable-length kernel.

With N ranks, rank i has chunks i and 2 N - 1 - i of each document: an early and a late one. Of the keys of rank p it needs

- p = i: a triangle. Its two chunks stand one after the other, and every late query sees all early keys, so this is plain
  causal attention over the rank's tokens of a document.
- p < i: the early keys, all of them, for all queries. The late chunk of p comes after both chunks of i.
- p > i: all keys, for the late queries. The early queries come before both chunks of p.

So no kernel needs a mask but the triangle, and all turns but the first take half of a full rectangle.

With a sliding window the keys end `window` tokens before a query. Kernels align the window of a rectangle at its last query
and last key, so each pair of chunks has its own. Queries that see no key of a chunk, and keys that no query sees, are left
out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from overlord.trainer.ring.pieces import Piece, Ring

NO_WINDOW = -1


class TokenSpan(NamedTuple):
    """The tokens [begin, end) of a rank's microbatch."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Attention of spans of queries to spans of keys, one to one.

    Let a span have m queries and n keys. Query j of it is aligned with key j + n - m. If `causal`, it sees no later key.
    With `window` >= 0 it sees no key more than `window` before that one.
    """

    queries: tuple[TokenSpan, ...]
    keys: tuple[TokenSpan, ...]
    causal: bool
    window: int = NO_WINDOW


def calls_of(ring: Ring, part: int, window: int = NO_WINDOW) -> tuple[KernelCall, ...]:
    """The calls between this rank's queries and the keys of `part`. Own keys come first in the ring, and the first call on
    them has all queries."""
    calls = _within(ring, window) if part == ring.index else _across(ring, part, window)
    return tuple(calls)


def _within(ring: Ring, window: int) -> Iterator[KernelCall]:
    own = ring.pieces[ring.index]
    if not own:
        return
    if window == NO_WINDOW:
        documents = tuple(_span(pieces) for pieces in _by_document(own).values())
        yield KernelCall(documents, documents, True)
        return
    each = tuple(TokenSpan(piece.begin, piece.end) for piece in own)
    yield KernelCall(each, each, True, window)
    for pieces in _by_document(own).values():
        if len(pieces) == 2:
            yield from _windowed(pieces[1], pieces[0], window)


def _across(ring: Ring, part: int, window: int) -> Iterator[KernelCall]:
    own, other = _by_document(ring.pieces[ring.index]), _by_document(ring.pieces[part])
    queries, keys = [], []
    for document in sorted(own.keys() & other.keys()):
        # Chunks may be empty where a document has fewer tokens than twice the ranks, so they are told apart by offset.
        seen = [piece for piece in other[document] if piece.offset < own[document][-1].offset]
        seeing = [piece for piece in own[document] if seen and piece.offset > seen[0].offset]
        if not seen:
            continue
        if window == NO_WINDOW:
            queries.append(_span(seeing))
            keys.append(_span(seen))
            continue
        for query in seeing:
            for key in seen:
                yield from _windowed(query, key, window)
    if queries:
        yield KernelCall(tuple(queries), tuple(keys), False)


def _windowed(query: Piece, key: Piece, window: int) -> Iterator[KernelCall]:
    """The call between two chunks, the keys before the queries, without what lies outside the window of all."""
    if key.offset >= query.offset:
        return
    first = max(key.begin, key.begin + query.offset - window - key.offset)
    offset = key.offset + first - key.begin
    last_key = key.offset + key.end - key.begin - 1
    num_queries = min(query.end - query.begin, last_key + window - query.offset + 1)
    num_keys = key.end - first
    if num_queries < 1 or num_keys < 1:
        return
    aligned = window - (query.offset - offset) + num_keys - num_queries
    yield KernelCall((TokenSpan(query.begin, query.begin + num_queries),), (TokenSpan(first, key.end),), False, aligned)


def _by_document(pieces: tuple[Piece, ...]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.document, []).append(piece)
    return found


def _span(pieces: list[Piece]) -> TokenSpan:
    return TokenSpan(pieces[0].begin, pieces[-1].end)
