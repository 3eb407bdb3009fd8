"""The fields of a microbatch that follow from its tokens and the places of its documents.

`collate` fills them with the functions of this file, and so does a client to which only tokens and exceptions were sent
(`service/lean_fields.py`): the same arrays, a quarter of the bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

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
    labels: NDArray[np.int64], tokens: NDArray[np.int32], places: NDArray[np.integer], following: NDArray[np.integer]
) -> None:
    """Write the next token of each place, except at some `places`, where another label follows."""
    labels[:-1] = tokens[1:]
    labels[-1:] = NO_LOSS
    labels[places] = following


def fill_default_mask(
    loss_mask: NDArray[np.bool_], last_places: NDArray[np.integer], following: NDArray[np.integer]
) -> None:
    """Set the mask of a microbatch without padding and without masks: only the last place of a document may lack a
    label."""
    loss_mask.fill(True)
    loss_mask[last_places] = following >= 0


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
