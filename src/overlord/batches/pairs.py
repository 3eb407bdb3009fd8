"""Preference pairs in a batch: chosen and rejected of a sample as two documents side by side.

A pair is one sample wherever samples are drawn, packed, balanced and placed, so nothing can separate or cut it. Only here,
when a microbatch is collated, does it become two documents, so that attention, positions and labels end with each side.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from overlord.batches.text_fields import NO_LOSS
from overlord.declare.source import CHOSEN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.plan import MicroPlan
    from overlord.batches.payload import Payload
    from overlord.declare.batch import Batch
    from overlord.messages import Fields
    from overlord.stream.facts import Ints


def in_sides(micro: MicroPlan, payload: Payload, batch: Batch) -> tuple[MicroPlan, Payload, Fields]:
    """The microbatch with each pair as two documents, and the fields that say which documents are whose. For all
    microbatches of a job with pairs, so that all have these fields."""
    samples = micro.samples
    chosen = samples.sizes[CHOSEN_TOKENS]
    is_pair = chosen > 0
    owner = np.repeat(np.arange(len(samples)), 1 + is_pair)
    is_second = np.zeros(len(owner), bool)
    is_second[np.cumsum(1 + is_pair)[is_pair] - 1] = True
    begins = -(-chosen // batch.document_multiple) * batch.document_multiple  # of the rejected sides
    begin = np.where(is_second, begins[owner], 0)
    end = np.where(is_pair[owner] & ~is_second, chosen[owner], samples.tokens[owner])
    row, num_rows = micro.row[owner], micro.num_rows
    if batch.layout == "padded":  # one document a row: a pair takes two rows, and so does every other document
        row, num_rows = 2 * row + is_second, 2 * num_rows
    made = replace(micro, samples=samples.take(owner).with_columns(tokens=end - begin), row=row, num_rows=num_rows)
    pair = np.where(is_pair, np.cumsum(is_pair) - 1, -1)[owner].astype(np.int32)
    fields: Fields = {"document_pairs": pair, "document_chosen": is_pair[owner] & ~is_second}
    if not is_pair.any():
        return made, payload, fields
    return made, _payload_in_sides(payload, owner, begin, end), fields


def _payload_in_sides(payload: Payload, owner: Ints, begin: Ints, end: Ints) -> Payload:
    places = list(zip(owner.tolist(), begin.tolist(), end.tolist(), strict=True))
    is_last = np.append(np.diff(owner) != 0, True)
    masks = payload.loss_masks
    return replace(
        payload,
        tokens=[payload.tokens[i][start:stop] for i, start, stop in places],
        following=np.where(is_last, payload.following[owner], NO_LOSS),
        loss_masks=None if masks is None else [_mask(masks[i], start, stop) for i, start, stop in places],
        images=None
        if payload.images is None
        else [cast("Sequence[Any]", payload.images[i]) if start == 0 else () for i, start, _ in places],
        columns={name: column.take(cast("Any", owner)) for name, column in payload.columns.items()},
        ignored=frozenset(j for j, (i, _, _) in enumerate(places) if i in payload.ignored),
    )


def _mask(mask: NDArray[np.generic] | None, begin: int, end: int) -> NDArray[np.generic] | None:
    """The mask of a side: one entry per token, and one for the token after it."""
    return None if mask is None else mask[begin : end + 1]
