"""What a microbatch carries beside its tokens when documents may be cut over ranks.

Its documents are then pieces: a whole document is one piece, a document that is cut is two on each of its ranks, an early
and a late chunk (`overlord.planning.hdp.zigzag`). On top of what `collate` gives, a rank finds

    hdp_ranks        int32 [ranks]          the trainer ranks that run this microbatch together, in the order of the ring;
                                            itself alone where all documents are whole
    hdp_index        int                    which of them it is itself
    hdp_number       int                    a rank runs the rings it is part of by rising number; -1 when it is alone
    piece_offsets    int32 [num_documents]  where in its document each piece begins
    whole_lengths    int32 [num_documents]  the tokens of the whole document
    offload_ratios   float32 [num_documents]  the part of its activations that the plan counts on moving to the host

`position_ids` count from the beginning of the document, labels cross the cuts, `cu_seqlens` are the ends of the pieces.
Images come with the first piece of a document on each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overlord.data.collate import Fields
from overlord.planning.hdp.rings import Ring
from overlord.planning.place_tree import ClientPlaceTree, Place
from overlord.planning.plan import GroupPlan


@dataclass(frozen=True, slots=True)
class PerRank:
    """The microbatches of a group of which each context-parallel rank has its own, `counts` of them one after the other."""

    counts: tuple[int, ...]
    rings: tuple[Ring | None, ...]

    @staticmethod
    def of(plan: GroupPlan) -> PerRank | None:
        """None where all ranks have slices of the same."""
        return None if plan.counts is None else PerRank(plan.counts, tuple(micro.ring for micro in plan.microbatches))

    def parts(self, microbatches: Sequence[Fields], place: Place, tree: ClientPlaceTree) -> list[Fields]:
        """Those of one rank."""
        first = sum(self.counts[: place.cp])
        own = slice(first, first + self.counts[place.cp])
        return [
            fields if ring is None else fields | {"hdp_ranks": hdp_ranks(ring, place, tree)}
            for fields, ring in zip(microbatches[own], self.rings[own], strict=True)
        ]


def with_pieces(fields: Fields, ring: Ring | None) -> Fields:
    """The fields of a collated microbatch whose documents are pieces; positions are moved in place."""
    if ring is None:
        return fields
    lengths = fields["document_lengths"]
    if ring.offset.any():
        fields["position_ids"] += np.repeat(ring.offset, lengths).astype(np.int32)
    pieces: Fields = {
        "hdp_index": ring.index,
        "hdp_number": ring.number,
        "piece_offsets": ring.offset.astype(np.int32),
        "whole_lengths": ring.whole.astype(np.int32),
        "offload_ratios": ring.offload.astype(np.float32),
    }
    return fields | pieces | _images_once(fields, ring)


def hdp_ranks(ring: Ring, place: Place, tree: ClientPlaceTree) -> NDArray[np.int32]:
    """The ranks of a ring as a rank of one pipeline stage and one tensor-parallel index sees them."""
    cp = tree.mesh.cp
    ranks = [tree.rank_of(pp=place.pp, dp=at // cp, cp=at % cp, tp=place.tp) for at in ring.places.tolist()]
    return np.array(ranks, np.int32)


def _images_once(fields: Fields, ring: Ring) -> Fields:
    """A row's images are read with each of its pieces: keep those of the early chunk, which comes first."""
    if "image_document" not in fields or ring.number < 0:
        return {}
    document: NDArray[Any] = fields["image_document"]
    late = np.flatnonzero(ring.offset[:-1] < ring.offset[1:]) + 1
    kept = np.flatnonzero(~np.isin(document, late))
    images = fields["images"]
    kept_images = images[kept] if isinstance(images, np.ndarray) else [images[i] for i in kept.tolist()]
    return {"images": kept_images, "image_document": document[kept]}
