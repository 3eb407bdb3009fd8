"""From planned samples to the arrays of one microbatch.

Both layouts work alike: documents lie at `starts` in a flat run of token places, and places that no document covers are
padding. `packed` (thd) leaves the run flat; `padded` (bshd) folds it into rows of one
document each. A packed batch holds, for `num_tokens` places in `num_rows` rows of equal length (or in one
row of any length):

    tokens             int32 [num_tokens]     pad_token on padding
    labels             int64 [num_tokens]     the token to predict; -100 where there is no loss
    loss_mask          bool  [num_tokens]     labels != -100
    loss_weights       float32 [num_tokens]   only where a source has them: the weight of each label in the loss, 0 where
                                              there is no loss; 1 for labels of other sources
    position_ids       int32 [num_tokens]     from 0 in each segment
    cu_seqlens         int32 [segments + 1]   ends of the segments that attention must not cross, from 0
    cu_seqlens_padded  int32 [segments + 1]   only with document_multiple > 1, see below
    max_seqlen         int                    the longest segment, its padding included
    num_documents, num_rows, num_tokens       int
    document_starts    int32 [num_documents]  the place of each document's first token
    document_lengths   int32 [num_documents]  its tokens, without padding; 0 for samples without text
    document_sources   int32 [num_documents]  the number of its source, in the order in which the job declares them
    document_chunks    int64 [num_documents]  the chunk of its source that it was read in; with the row it names the
    document_rows      int32 [num_documents]  document, and `Loader.locate` turns these three into its file and row
    document_pairs     int32 [num_documents]  only where a source has preference pairs: the number of its pair, or -1. The
                                              two sides of a pair are documents, the chosen one first
    document_chosen    bool  [num_documents]  likewise: whether it is the chosen side of a pair
    image_row          int32 [num_tokens]     only with Batch.image_token: which row of the encoded images lies there, or -1
    images             uint8 [n, h, w, c]     or a list of [h, w, c] where sizes differ; if there are any
    image_document     int32 [n]              the document each image belongs to
    ...                Arrow arrays           the columns of Batch.columns, one entry per document

A padded batch has tokens, labels, loss_mask, loss_weights and position_ids as [num_rows, width], `attention_mask`
(bool) of that shape, true on tokens, and no cu_seqlens. The width is that of the longest document, up to a
multiple of document_multiple, or sequence_length with Batch.pad_to="sequence_length".

Documents, and with them columns, are numbered in the plan's order. Segments are documents and padding in
order of place. The places after the last document of a row are segments of their own, cut so short that an
empty row never takes the time of a long document; hence cu_seqlens ends at num_tokens, as varlen kernels
want.

With document_multiple > 1 the two arrays follow Transformer Engine and Megatron: cu_seqlens sums real
lengths (padding segments count 0), cu_seqlens_padded has the places where segments begin and end. A kernel
that takes one array gets cu_seqlens_padded: padding comes after a document's tokens, where causal attention
does not look. Without a multiple, a second array would only send Transformer Engine down a slower path, so
there is none.

Positions of a cut document's later piece start at 0 again, because attention does not see the earlier
piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.vision.encoding import stack_images
from overlord.batches.pairs import in_sides
from overlord.batches.text_fields import check_samples, text_fields
from overlord.declare.source import CHOSEN_TOKENS
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.plan import MicroPlan
    from overlord.batches.buffers import Arenas
    from overlord.batches.payload import Payload
    from overlord.declare.batch import Batch
    from overlord.messages import Fields


def collate(
    micro: MicroPlan, payload: Payload, batch: Batch, arenas: Arenas | None = None, weighted: bool = False
) -> Fields:
    """The whole microbatch of a data-parallel group, not yet sliced for context-parallel ranks.

    With `arenas` the large fields share one pooled buffer. With `weighted` there are loss weights.
    """
    of_pairs: Fields = {}
    if CHOSEN_TOKENS in micro.samples.sizes:
        check_samples(micro, payload)
        micro, payload, of_pairs = in_sides(micro, payload, batch)
    fields = text_fields(micro, payload, batch, arenas, weighted) | of_pairs
    if payload.images is not None:
        fields |= _images(payload.images)
    if not payload.columns:
        return fields
    taken = fields.keys() & payload.columns.keys()
    if taken:
        raise SpecError(
            f"Batch.columns names {sorted(taken)}, but a batch has fields of that name; rename the column in a transform"
        )
    return fields | dict(payload.columns)


def _images(images: Sequence[Sequence[NDArray[np.uint8]]]) -> Fields:
    flat = [image for of_document in images for image in of_document]
    counts = [len(of_document) for of_document in images]
    return {"images": stack_images(flat), "image_document": np.repeat(np.arange(len(images), dtype=np.int32), counts)}
