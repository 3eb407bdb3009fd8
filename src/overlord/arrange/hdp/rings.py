"""Which ranks run which microbatches of a step together, and what a rank finds in a microbatch whose documents are pieces.

A whole document is one piece; a document that is cut is two on each of its ranks, an early and a late chunk.
Beside what `collate` returns, a rank finds

    hdp_ranks        int32 [ranks]          the trainer ranks that run this microbatch together, in the order of the ring;
                                            itself alone where all documents are whole
    hdp_index        int                    which of them it is itself
    hdp_number       int                    a rank runs the rings it is part of by rising number; -1 when it is alone
    piece_offsets    int32 [num_documents]  where in its document each piece begins
    whole_lengths    int32 [num_documents]  the tokens of the whole document
    offload_ratios   float32 [num_documents]  the part of its activations that the plan counts on moving to the host

`position_ids` count from the beginning of the document, labels cross the cuts, `cu_seqlens` are the ends of the pieces.
Images come with the first piece of a document on each rank.

`chunk_begins` and `chunks_of` say how a document is cut for N ranks that attend to it together; planner, constructor and
trainer all ask them.

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
    """One rank's side of one microbatch, for a trainer that attends over several ranks.

    `places` are the ranks that run it together, as numbers dp * cp size + cp index, in the order of the ring: one alone for
    a microbatch of whole documents. The columns have an entry for each sample of the microbatch, which is a piece of a
    document: it begins `offset` tokens into it, and the whole has `whole` tokens.
    """

    number: int
    """In which order ranks run the rings they share: each runs its own by rising number. -1 for one that is run alone."""
    places: Ints
    index: int
    """Which of `places` this rank is."""
    offset: Ints
    whole: Ints
    offload: Floats
    """The part of its activations that each document moves to the host, for it to fit."""

    @property
    def more_samples(self) -> None:
        """A ring needs no samples but those of its microbatch."""
        return None

    def build(self, fields: Fields, images: Sequence[NDArray[np.uint8]] = ()) -> tuple[Fields, RingPart]:
        """The fields of a collated microbatch whose documents are pieces. Positions are moved in place."""
        del images  # those of the pieces are in `fields`
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
        """The ranks of the ring as a rank of one pipeline stage and one tensor-parallel index sees them."""
        cp = tree.mesh.cp
        ranks = [tree.rank_of(pp=place.pp, dp=at // cp, cp=at % cp, tp=place.tp) for at in self.places.tolist()]
        return {"hdp_ranks": np.array(ranks, np.int32)}

    def _images_once(self, fields: Fields) -> Fields:
        """A row's images are read with each of its pieces: keep those of the early chunk, which comes first."""
        if "image_document" not in fields or self.number < 0:
            return {}
        document: NDArray[Any] = fields["image_document"]
        late = np.flatnonzero(self.offset[:-1] < self.offset[1:]) + 1
        kept = np.flatnonzero(~np.isin(document, late))
        images = fields["images"]
        kept_images = images[kept] if isinstance(images, np.ndarray) else [images[i] for i in kept.tolist()]
        return {"images": kept_images, "image_document": document[kept]}


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of a plan. `of_micro[m]` is the ring that microbatch m is part of, or -1; the ranks of ring k are
    `members[bounds[k]:bounds[k + 1]]`. The other columns have an entry for each of the plan's samples."""

    of_micro: Ints
    members: Ints
    bounds: Ints
    offset: Ints
    whole: Ints
    offload: Floats
    cost: Floats
    """What each piece costs its rank: its part of what the whole document costs."""

    def in_plan(self, arrangement: Arrangement, order: Ints) -> Rings:
        """Rings are the same in whatever order the samples are run."""
        del arrangement, order
        return self

    def microbatch(self, plan: Plan, group: int, micro: int, documents: Ints, samples: Samples) -> tuple[Samples, RingPart]:
        """The side that a rank (each is a group of its own) has of a microbatch."""
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
    """Where these chunks begin, in documents of these lengths that are cut for so many ranks. The arrays broadcast."""
    size, longer = np.divmod(lengths, 2 * num_parts)
    return chunks * size + np.maximum(0, chunks - (2 * num_parts - longer))


def chunks_of(length: int, num_parts: int, part: int) -> list[TokenRange]:
    """What rank `part` of `num_parts` takes of one document: its early and its late chunk, without empty ones; all of it in
    one piece when there is one rank."""
    if num_parts == 1:
        return [TokenRange(0, length)]
    chunks = np.array([part, 2 * num_parts - 1 - part])
    begins, ends = (chunk_begins(np.array(length), np.array(num_parts), c).tolist() for c in (chunks, chunks + 1))
    return [TokenRange(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
