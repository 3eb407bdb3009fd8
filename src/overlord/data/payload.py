"""What a Source Loader gives for planned rows: views into its chunks, never copies it need not make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Payload:
    """The planned samples of one microbatch, in packing order. Every sequence has one entry per sample.

    `following[i]` is the token that comes after sample i in its document, or -1 where the document ends with it: the
    last label of a cut document is known. `loss_masks[i]`, where given, has one entry per token of the sample and one
    more for `following`; 0 means no loss on predicting that token. `images[i]` are the decoded uint8 images of sample i
    (height, width, channels). `ignored` names samples whose deferred decode failed: no loss is taken on them.
    """

    tokens: Sequence[NDArray[np.integer]]
    following: NDArray[np.integer]
    loss_masks: Sequence[NDArray[np.integer] | None] | None = None
    images: Sequence[Sequence[NDArray[np.uint8]]] | None = None
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    ignored: frozenset[int] = frozenset()

    @staticmethod
    def merged(parts: Sequence[Payload], places: Sequence[NDArray[np.integer]]) -> Payload:
        """One payload from several, where sample j of part i belongs at `places[i][j]`."""
        n = sum(len(where) for where in places)
        order = np.empty(n, np.int64)
        order[np.concatenate(list(places)) if n else []] = np.arange(n)

        def ordered(lists: Sequence[Sequence]) -> list:
            flat = [entry for entries in lists for entry in entries]
            return [flat[i] for i in order.tolist()]

        some_masks = any(part.loss_masks is not None for part in parts)
        some_images = any(part.images is not None for part in parts)
        return Payload(
            tokens=ordered([part.tokens for part in parts]),
            following=np.concatenate([part.following for part in parts])[order] if n else np.zeros(0, np.int64),
            loss_masks=ordered([part.loss_masks or [None] * len(part.tokens) for part in parts]) if some_masks else None,
            images=ordered([part.images or [()] * len(part.tokens) for part in parts]) if some_images else None,
            columns=_merged_columns(parts, order),
            ignored=frozenset(int(where[i]) for part, where in zip(parts, places, strict=True) for i in part.ignored),
        )


def _merged_columns(parts: Sequence[Payload], order: NDArray[np.int64]) -> dict[str, pa.Array]:
    import pyarrow as pa

    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        kinds = [part.columns[name].type for part in parts if name in part.columns]
        kind = next((k for k in kinds if not pa.types.is_null(k)), pa.null())
        arrays = [
            part.columns[name].cast(kind) if name in part.columns else pa.nulls(len(part.tokens), kind) for part in parts
        ]
        merged[name] = pa.concat_arrays(arrays).take(order)
    return merged
