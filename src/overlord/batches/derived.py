"""The fields of a microbatch that follow from its tokens and the places of its documents.

`collate` fills them with the functions of this file, and a client to which only tokens, places and exceptions were sent
(`service/steps.py`) computes them with the same functions: the same arrays, a quarter of the bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

NO_LOSS = -100
"""The label that torch's cross_entropy ignores unless told otherwise."""

_LONGEST_CACHED = 1 << 20


def padding_slices(ends: NDArray[np.integer], gaps: NDArray[np.integer] | None) -> Iterator[slice]:
    """The runs of places that no document covers. `gaps` is the number of such places before each document and after the
    last, `ends` the end of each document."""
    if gaps is not None:
        for begin, gap in zip([0, *ends.tolist()], gaps.tolist(), strict=True):
            if gap:
                yield slice(begin, begin + gap)


def fill_next_tokens(
    labels: NDArray[np.int64], tokens: NDArray[np.int32], ends: NDArray[np.integer], following: NDArray[np.integer]
) -> None:
    """Write the next token of each place; at the last place of each document, the one that follows the document."""
    labels[:-1] = tokens[1:]
    labels[-1:] = NO_LOSS
    labels[ends - 1] = following


def fill_default_mask(loss_mask: NDArray[np.bool_], ends: NDArray[np.integer], following: NDArray[np.integer]) -> None:
    """Set the mask of a microbatch without padding and without masks: only the last place of a document may lack a
    label."""
    loss_mask.fill(True)
    loss_mask[ends - 1] = following >= 0


def fill_positions(position_ids: NDArray[np.int32], starts: NDArray[np.int32], segments: NDArray[np.integer]) -> None:
    """Count from 0 in each segment."""
    np.subtract(_ramp(len(position_ids)), starts.repeat(segments), out=position_ids)


def _ramp(n: int) -> NDArray[np.int32]:
    """The numbers from 0 to n - 1, out of a cached array."""
    return _ramp_of(1 << max(n - 1, 0).bit_length())[:n] if n <= _LONGEST_CACHED else np.arange(n, dtype=np.int32)


@lru_cache(maxsize=4)
def _ramp_of(n: int) -> NDArray[np.int32]:
    ramp = np.arange(n, dtype=np.int32)
    ramp.setflags(write=False)
    return ramp


def image_rows(places: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Image places numbered in order; -1 elsewhere."""
    return np.where(places, np.cumsum(places) - 1, -1).astype(np.int32)


class Places:
    """Where the documents and segments of a microbatch lie. Made from fields that are always sent; raises ValueError where
    they contradict one another, so that nothing outside the arrays is ever touched."""

    def __init__(
        self, num_tokens: int, starts: NDArray[np.int32], lengths: NDArray[np.int32], bounds: NDArray[np.int32]
    ) -> None:
        with_text = lengths > 0
        if not with_text.all():
            starts, lengths = starts[with_text], lengths[with_text]
        if (starts[1:] < starts[:-1]).any():
            order = np.argsort(starts, kind="stable")
            starts, lengths = starts[order], lengths[order]
        self.num_tokens = num_tokens
        self.bounds = bounds
        self.ends: NDArray[np.int64] = starts.astype(np.int64) + lengths
        gaps = np.append(starts.astype(np.int64), num_tokens)
        gaps[1:] -= self.ends
        self.segments = np.diff(bounds)
        fit = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == num_tokens and (self.segments >= 0).all()
        if not fit or (gaps < 0).any():
            raise ValueError(f"documents and segments do not fit into {num_tokens} places")
        self.gaps = gaps if gaps.any() else None

    @property
    def num_with_text(self) -> int:
        return len(self.ends)

    @property
    def num_covered(self) -> int:
        """How many places lie in documents."""
        return self.num_tokens - (0 if self.gaps is None else int(self.gaps.sum()))


def derive_labels(
    labels: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    places: Places,
    *,
    tokens: NDArray[np.int32],
    following: NDArray[np.int64],
    loss_bits: NDArray[np.uint8] | None,
) -> None:
    """Fill the labels and the loss mask. `following` is the label at the last place of each document with text, by place;
    `loss_bits` the packed mask, where it is not the default one."""
    fill_next_tokens(labels, tokens, places.ends, following)
    if loss_bits is not None:
        loss_mask.view(np.uint8)[:] = np.unpackbits(loss_bits, count=places.num_tokens)
        np.copyto(labels, NO_LOSS, where=~loss_mask)
        return
    fill_default_mask(loss_mask, places.ends, following)
    for gap in padding_slices(places.ends, places.gaps):
        labels[gap] = NO_LOSS
        loss_mask[gap] = False


def derive_attention(position_ids: NDArray[np.int32], starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.bool_]:
    """The attention mask of a padded batch: true on tokens. A row holds at most one document."""
    num_rows, width = position_ids.shape
    of_row = np.zeros((num_rows, 1), np.int32)
    if width:
        of_row[starts // width, 0] = lengths
    return position_ids < of_row
