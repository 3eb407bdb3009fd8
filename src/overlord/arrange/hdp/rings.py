"""Rings: which ranks run a microbatch together, the fields that a rank gets for it, and how a document is cut over its
ranks.

A whole document is one piece. A document that is cut has two pieces on each of its ranks, an early and a late chunk. In
addition to the fields that `collate` makes, a rank gets

    hdp_ranks        int32 [ranks]          the trainer ranks that run this microbatch together, in the order of the ring;
                                            itself alone where all documents are whole
    hdp_index        int                    the index of this rank among them
    hdp_number       int                    a rank runs its rings by rising number; -1 when it runs the microbatch alone
    piece_offsets    int32 [num_documents]  where in its document each piece begins
    whole_lengths    int32 [num_documents]  the tokens of the whole document
    offload_ratios   float32 [num_documents]  the share of its activations that the plan assumes is moved to the host

`position_ids` count from the beginning of the document, labels cross the cuts, `cu_seqlens` are the ends of the pieces.
Images come with the first piece of a document on each rank.

`chunk_begins` and `chunks_of` define how a document is cut for N ranks that attend to it together. Planner, Data Constructor
and trainer all use them.

A document of n tokens is cut into 2 N chunks, numbered from its beginning. Rank i takes chunks i and 2 N - 1 - i: an early
one, whose tokens see little, and a late one, whose tokens see much, so that causal attention is the same work for all.

Nothing is padded. With n = 2 N q + r, the last r chunks have q + 1 tokens and the others q. So chunk j begins at j q +
max(0, j - (2 N - r)), and because late chunks go to ranks 0, 1, 2, ... from the end, every rank has n / N tokens, rounded
down or up: no rank has more than the capacity that N was found for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.mesh_tree import ClientPlaceTree, Place
    from overlord.arrange.microbatches import Arrangement
    from overlord.arrange.plan import Plan
    from overlord.messages import Fields
    from overlord.stream.facts import Floats, Ints, Samples


@dataclass(frozen=True, slots=True)
class RingPart:
    """One rank's part of one microbatch, for a trainer that attends over several ranks.

    `offset`, `whole` and `offload` have an entry for each sample of the microbatch. A sample is a piece of a document: it
    begins `offset` tokens into the document, which has `whole` tokens.
    """

    number: int
    """A rank runs its rings by rising number; -1 for a microbatch that it runs alone."""
    places: Ints
    """The ranks that run the microbatch, as dp * cp size + cp index, in the order of the ring; a single one where all
    documents are whole."""
    index: int
    """The index of this rank in `places`."""
    offset: Ints
    whole: Ints
    offload: Floats
    """The share of its activations that each document must move to the host to fit."""

    @property
    def more_samples(self) -> None:
        """A ring needs no samples but those of its microbatch."""
        return None

    def build(self, fields: Fields, images: Sequence[NDArray[np.uint8]] = ()) -> tuple[Fields, RingPart]:
        """Add the fields of pieces to a collated microbatch. Shifts `position_ids` in place."""
        del images  # the images of the pieces are in `fields` already
        lengths = fields["document_lengths"]
        if self.offset.any():
            fields["position_ids"] += np.repeat(self.offset, lengths).astype(np.int32)
        pieces: Fields = {
            "hdp_index": self.index,
            "hdp_number": self.number,
            "piece_offsets": self.offset.astype(np.int32),
            "whole_lengths": self.whole.astype(np.int32),
            "offload_ratios": self.offload.astype(np.float32),
        }
        return fields | pieces | self._images_once(fields), self

    def fields_for(self, place: Place, tree: ClientPlaceTree) -> Fields:
        """The trainer ranks of the ring that have the pipeline stage and the tensor-parallel index of `place`."""
        cp = tree.mesh.cp
        ranks = [tree.rank_of(pp=place.pp, dp=at // cp, cp=at % cp, tp=place.tp) for at in self.places.tolist()]
        return {"hdp_ranks": np.array(ranks, np.int32)}

    def _images_once(self, fields: Fields) -> Fields:
        """Drop repeated images: those of a document are read with each of its pieces, and only the first piece keeps
        them."""
        if "image_document" not in fields or self.number < 0:
            return {}
        document: NDArray[Any] = fields["image_document"]
        late = np.flatnonzero(self.offset[:-1] < self.offset[1:]) + 1
        kept = np.flatnonzero(~np.isin(document, late))
        images: NDArray[Any] | list[NDArray[Any]] = fields["images"]
        kept_images = images[kept] if isinstance(images, np.ndarray) else [images[i] for i in kept.tolist()]
        return {"images": kept_images, "image_document": document[kept]}


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of a plan: the part that `hdp.split` adds to it (`plan.part(Rings)`).

    `of_micro[m]` is the ring of microbatch m, or -1; the ranks of ring k are `members[bounds[k]:bounds[k + 1]]`. The other
    columns have an entry for each of the plan's samples, which are pieces of documents.
    """

    of_micro: Ints
    members: Ints
    bounds: Ints
    offset: Ints
    """The token of its document at which each piece begins."""
    whole: Ints
    """The tokens of the whole document."""
    offload: Floats
    """The share of its activations that the document must move to the host to fit."""
    cost: Floats
    """The cost of each piece on its rank: a share of the cost of the whole document."""
    communication: float = 0.0
    """The cost of receiving the keys and values of one token that `cost` assumes."""

    def parts_of_pieces(self, plan: Plan) -> Ints:
        """The number of ranks that share the document of each piece."""
        sizes = np.append(np.diff(self.bounds), 1)  # -1, no ring, is the last
        parts = np.empty(len(plan.order), np.int64)
        parts[plan.order] = sizes[self.of_micro][plan.micro_of_order()]
        return parts

    def in_plan(self, arrangement: Arrangement, order: Ints) -> Rings:
        """Rings do not depend on the order of the samples."""
        del arrangement, order
        return self

    def microbatch(self, plan: Plan, group: int, micro: int, documents: Ints, samples: Samples) -> tuple[Samples, RingPart]:
        """The part of one rank in a microbatch. Every rank is a group of its own."""
        del plan
        number = int(self.of_micro[micro])
        places = np.array([group]) if number < 0 else self.members[self.bounds[number] : self.bounds[number + 1]]
        index = int(np.flatnonzero(places == group)[0])
        columns = (self.offset[documents], self.whole[documents], self.offload[documents])
        return samples, RingPart(number, places, index, *columns)


class TokenRange(NamedTuple):
    """The tokens [begin, end) of a document."""

    begin: int
    end: int


def chunk_begins(lengths: Ints, num_parts: Ints, chunks: Ints) -> Ints:
    """The token at which each chunk begins, in documents of these lengths cut for `num_parts` ranks. The arrays
    broadcast."""
    size, longer = np.divmod(lengths, 2 * num_parts)
    return chunks * size + np.maximum(0, chunks - (2 * num_parts - longer))


def chunks_of(length: int, num_parts: int, part: int) -> list[TokenRange]:
    """The token ranges of one document that rank `part` of `num_parts` gets: an early and a late chunk, without empty ones;
    the whole document where there is a single rank."""
    if num_parts == 1:
        return [TokenRange(0, length)]
    chunks = np.array([part, 2 * num_parts - 1 - part])
    begins, ends = (chunk_begins(np.array(length), np.array(num_parts), c).tolist() for c in (chunks, chunks + 1))
    return [TokenRange(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
