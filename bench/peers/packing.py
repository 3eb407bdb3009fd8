"""Concat-and-split packing in numpy, shared by every peer: 8 rows of 8,192 tokens, documents cut at row ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

ROW_TOKENS = 8192
ROWS = 8
BATCH_TOKENS = ROWS * ROW_TOKENS
IGNORED = -100

_COUNT = np.arange(ROW_TOKENS, dtype=np.int32)
_ROW_ENDS = tuple(range(ROW_TOKENS, BATCH_TOKENS + 1, ROW_TOKENS))


class Batch(TypedDict):
    tokens: NDArray[np.int32]
    labels: NDArray[np.int64]
    """The next token of the document; -100 where the document ends."""
    position_ids: NDArray[np.int32]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    loss_mask: NDArray[np.bool_]


def batches(documents: Iterable[NDArray[np.int32]]) -> Iterator[Batch]:
    """Fills batches to the last token; the rest of a document that is cut at a batch's end begins the next."""
    pieces: list[NDArray[np.int32]] = []
    ends: list[int] = []
    filled = 0
    for document in documents:
        filled += len(document)
        while filled >= BATCH_TOKENS:
            over = filled - BATCH_TOKENS
            rest = document[len(document) - over :]
            pieces.append(document[: len(document) - over])
            ends.append(BATCH_TOKENS)
            yield pack(pieces, ends, int(rest[0]) if over else IGNORED)
            pieces, ends, filled, document = [], [], over, rest
        if len(document):
            pieces.append(document)
            ends.append(filled)


def pack(pieces: list[NDArray[np.int32]], ends: list[int], following: int) -> Batch:
    """`following` is the label of the last token: the document's next token, or -100 if it ends here."""
    tokens = np.concatenate(pieces)
    last = np.array(ends) - 1
    labels = np.empty(BATCH_TOKENS, np.int64)
    labels[:-1] = tokens[1:]
    labels[last] = IGNORED
    labels[-1] = following
    loss_mask = np.ones(BATCH_TOKENS, np.bool_)
    loss_mask[last] = False
    loss_mask[-1] = following != IGNORED
    cuts = sorted({0, *ends, *_ROW_ENDS})
    lengths = [end - begin for begin, end in pairwise(cuts)]
    return {
        "tokens": tokens,
        "labels": labels,
        # Copying stretches of one ramp beats repeat and subtract: nothing is computed per token.
        "position_ids": np.concatenate([_COUNT[:length] for length in lengths]),
        "cu_seqlens": np.array(cuts, np.int32),
        "max_seqlen": max(lengths),
        "loss_mask": loss_mask,
    }
