"""Cutting documents into parts that are samples of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from overlord.planning.arrangement import cut_samples
from overlord.planning.facts import LOSS_EXTRA, LossCount, Samples
from overlord.planning.packing import Pieces

CountLoss = Callable[[int, int, int, int, int], LossCount]
"""(source index, chunk, row, start, stop) to the loss of that part of the row."""


def in_parts(samples: Samples, limit: int, count_loss: CountLoss | None = None) -> Samples:
    """The same tokens in samples of at most `limit` tokens, the parts of a document one after the other.

    The label of a part's last token is the first token of the next part, so no loss token is lost. Documents with images
    stay whole: their images belong to all of their text.
    """
    is_long = samples.tokens > limit
    if "num_images" in samples.sizes:
        is_long &= samples.sizes["num_images"] == 0
    if not is_long.any():
        return samples
    num_parts = np.where(is_long, -(-samples.tokens // limit), 1)
    sample = np.repeat(np.arange(len(samples)), num_parts)
    part = np.arange(len(sample)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    tokens = samples.tokens[sample]
    stop = np.where(is_long[sample], np.minimum((part + 1) * limit, tokens), tokens)
    found = cut_samples(samples, Pieces(sample, part * limit, stop, np.zeros(len(sample), np.int64)))
    if count_loss is None:
        return found
    loss = found.loss_tokens.copy()
    extra = found.sizes[LOSS_EXTRA].copy() if LOSS_EXTRA in found.sizes else np.zeros_like(loss)
    # One by one, since each is asked of a loader: only with loss masks, and only for what is cut.
    for i in np.flatnonzero(is_long[sample]).tolist():
        columns = (found.source, found.chunk, found.row, found.start, found.stop)
        loss[i], extra[i] = count_loss(*(column.item(i) for column in columns))
    return found.with_loss(loss, extra)
