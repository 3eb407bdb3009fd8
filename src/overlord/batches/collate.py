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

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.arrange.vision.encoding import stack_images
from overlord.batches.derived import (
    NO_LOSS,
    fill_default_mask,
    fill_next_tokens,
    fill_positions,
    image_rows,
    padding_slices,
)
from overlord.batches.pairs import in_sides
from overlord.declare.source import CHOSEN_TOKENS
from overlord.errors import DataError, SpecError
from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from overlord.arrange.plan import MicroPlan
    from overlord.batches.buffers import Arenas
    from overlord.batches.payload import Payload
    from overlord.declare.batch import Batch
    from overlord.messages import Fields
    from overlord.stream.facts import Ints

PADDING_SEGMENT = 512
"""The longest run of row padding that attends to itself: attention is a small part of its cost."""


@record
class _Layout:
    """The places of documents and padding. `order` lists the documents with text by place; None when all documents have
    text and lie in the order of the plan."""

    starts: Ints
    lengths: Ints
    order: Ints | None
    bounds: Ints
    """The begin of each segment, and the end of the last one."""
    ends: Ints
    """The end of each document of `order`."""
    gaps: Ints | None
    """The number of padding places before each document of `order`, and after the last; None without padding."""

    @property
    def num_tokens(self) -> int:
        return self.bounds.item(-1)

    @property
    def segments(self) -> Ints:
        """The length of each segment."""
        return self.lengths if self.order is None else np.diff(self.bounds)

    def padding_slices(self) -> Iterator[slice]:
        """The runs of places that no document covers."""
        return padding_slices(self.ends, self.gaps)


def collate(
    micro: MicroPlan, payload: Payload, batch: Batch, arenas: Arenas | None = None, weighted: bool = False
) -> Fields:
    """The whole microbatch of a data-parallel group, not yet sliced for context-parallel ranks.

    With `arenas` the large fields share one pooled buffer. With `weighted` there are loss weights.
    """
    _check_payload(micro, payload)
    of_pairs: Fields = {}
    if CHOSEN_TOKENS in micro.samples.sizes:
        micro, payload, of_pairs = in_sides(micro, payload, batch)
    packed = batch.layout == "packed"
    layout = _packed_layout(micro, batch.document_multiple) if packed else _padded_layout(micro, batch)
    segments, bounds, num_tokens = layout.segments, layout.bounds.astype(np.int32), layout.num_tokens
    labels, tokens, position_ids, loss_weights, loss_mask = _large_fields(num_tokens, arenas, weighted)
    np.concatenate(_pieces(layout, payload.tokens, batch.pad_token), out=tokens, casting="same_kind")
    _fill_labels(labels, loss_mask, layout, tokens, payload)
    fill_positions(position_ids, bounds[:-1], segments)
    fields: Fields = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "max_seqlen": int(segments.max(initial=0)),
        "num_documents": len(layout.starts),
        "num_rows": micro.num_rows if micro.row_tokens or not packed else 1,
        "num_tokens": num_tokens,
        "document_starts": layout.starts.astype(np.int32),
        "document_lengths": layout.lengths.astype(np.int32),
        "document_sources": micro.samples.source.astype(np.int32),
        "document_chunks": micro.samples.chunk.copy(),  # the plan's own column is shared by all ranks
        "document_rows": micro.samples.row.astype(np.int32),
        **of_pairs,
    }
    if weighted:
        _fill_weights(loss_weights, loss_mask, layout, payload)
        fields["loss_weights"] = loss_weights
    if batch.image_token is not None:
        fields["image_row"] = _image_rows(tokens, layout, batch.image_token)
    fields |= _cu_seqlens(layout, bounds, batch.document_multiple) if packed else _fold(layout, fields, micro.row)
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


def document_places(micro: MicroPlan, batch: Batch) -> Ints:
    """The place of each document's first token in its microbatch: `document_starts`, from the plan alone."""
    packed = batch.layout == "packed"
    return (_packed_layout(micro, batch.document_multiple) if packed else _padded_layout(micro, batch)).starts


def _check_payload(micro: MicroPlan, payload: Payload) -> None:
    samples = micro.samples
    given = list(map(len, payload.tokens))
    planned = samples.tokens.tolist()
    if len(given) != len(planned):
        raise DataError(f"the plan has {len(planned)} samples, the payload {len(given)}")
    if given == planned:
        return
    i = next(i for i, (a, b) in enumerate(zip(given, planned, strict=True)) if a != b)
    raise DataError(
        f"row {samples.row[i]} of chunk {samples.chunk[i]} of source "
        f"{samples.source_names[samples.source[i]]!r} was planned with {planned[i]} tokens and came with "
        f"{given[i]}: reading it twice gave two results; make the source and its transform deterministic"
    )


def _packed_layout(micro: MicroPlan, multiple: int) -> _Layout:
    full = _full_layout(micro) if multiple == 1 else None
    if full is not None:
        return full
    lengths, row_tokens = micro.samples.tokens, micro.row_tokens
    spans = lengths if multiple == 1 else -(-lengths // multiple) * multiple
    rows = micro.row if row_tokens else np.zeros_like(lengths)
    num_rows = micro.num_rows if row_tokens else 1
    used = np.bincount(rows, spans, num_rows).astype(np.int64)
    _check_rows(used, num_rows, row_tokens)
    row_starts = np.arange(num_rows) * row_tokens
    order = np.argsort(rows, kind="stable")
    starts = np.empty_like(lengths)
    starts[order] = np.cumsum(spans[order]) - spans[order]
    starts += (row_starts - (np.cumsum(used) - used))[rows]
    total = num_rows * row_tokens if row_tokens else int(used[0])
    order = order[lengths[order] > 0]
    bounds = _bounds(starts[order], row_starts + used, row_tokens, total, multiple)
    return _layout_with_gaps(starts, lengths, order, bounds, total)


def _full_layout(micro: MicroPlan) -> _Layout | None:
    """The layout when documents follow one another in the order of the plan and fill every row; otherwise None. This is the
    usual case, and a few array operations recognise it."""
    lengths, row_tokens = micro.samples.tokens, micro.row_tokens
    if np.count_nonzero(lengths) < len(lengths) or not len(lengths):
        return None
    bounds = np.zeros(len(lengths) + 1, np.int64)
    starts, ends = bounds[:-1], bounds[1:]
    np.add.accumulate(lengths, out=ends)
    if row_tokens:
        if bounds.item(-1) != micro.num_rows * row_tokens:
            return None
        row, place = np.divmod(starts, row_tokens)
        # As many documents begin at the start of a row as there are rows, so no document crosses a row.
        if len(place) - np.count_nonzero(place) != micro.num_rows or np.count_nonzero(row != micro.row):
            return None
    return _Layout(starts, lengths, None, bounds, ends, gaps=None)


def _layout_with_gaps(starts: Ints, lengths: Ints, order: Ints, bounds: Ints, total: int) -> _Layout:
    ends = starts[order] + lengths[order]
    gaps = np.append(starts[order], total)
    gaps[1:] -= ends
    return _Layout(starts, lengths, order, bounds, ends, gaps)


def _check_rows(used: Ints, num_rows: int, row_tokens: int) -> None:
    if len(used) > num_rows:
        raise SpecError(f"the strategy put a document in row {len(used) - 1} of a microbatch of {num_rows} rows")
    if row_tokens and used.max(initial=0) > row_tokens:
        raise SpecError(
            f"the strategy put {used.max()} tokens, padding to document_multiple included, in row "
            f"{used.argmax()} of a microbatch whose rows hold {row_tokens}"
        )


def _bounds(starts: Ints, row_ends: Ints, row_tokens: int, total: int, multiple: int) -> Ints:
    """Segments begin at documents and, after a row's last one, every PADDING_SEGMENT places up to its end."""
    if not row_tokens:
        return np.append(starts, total)
    piece = -(-PADDING_SEGMENT // multiple) * multiple
    limits = np.arange(1, len(row_ends) + 1) * row_tokens
    padding = [
        place for begin, end in zip(row_ends.tolist(), limits.tolist(), strict=True) for place in range(begin, end, piece)
    ]
    return np.sort(np.concatenate([starts, np.array([*padding, total], np.int64)]))


def _padded_layout(micro: MicroPlan, batch: Batch) -> _Layout:
    lengths, rows = micro.samples.tokens, micro.row
    if len(np.unique(rows)) != len(rows):
        raise SpecError("layout='padded' holds one document a row, but the strategy put several in one row; use 'packed'")
    # Without samples, one row of one place: ranks run collectives together, so this one needs an input too.
    longest, multiple = int(lengths.max()) if len(lengths) else 1, batch.document_multiple
    width = micro.row_tokens or -(-longest // multiple) * multiple
    used = np.bincount(rows, lengths, micro.num_rows).astype(np.int64)
    _check_rows(used, micro.num_rows, micro.row_tokens)
    starts = rows * width
    order = np.argsort(rows, kind="stable")
    order = order[lengths[order] > 0]
    return _layout_with_gaps(starts, lengths, order, np.arange(micro.num_rows + 1) * width, micro.num_rows * width)


def _pieces(layout: _Layout, documents: Sequence[NDArray[Any]], fill: int) -> Sequence[NDArray[Any]]:
    """The arrays to concatenate: each document at its place, with filler in the gaps."""
    if layout.gaps is None or layout.order is None:
        return documents
    filler = np.full(layout.gaps.max(), fill, np.int32)
    pieces = [filler[:0]]
    # A loop over documents, not tokens: it only collects views for the copy.
    for gap, i in zip(layout.gaps.tolist(), [*layout.order.tolist(), None], strict=True):
        if gap:
            pieces.append(filler[:gap])
        if i is not None:
            pieces.append(documents[i])
    return pieces


def _large_fields(n: int, arenas: Arenas | None, weighted: bool) -> tuple[NDArray[Any], ...]:
    """Uninitialised labels, tokens, position_ids, loss_weights (empty unless weighted) and loss_mask, in one buffer."""
    w = n if weighted else 0
    num_bytes = 17 * n + 4 * w
    memory = np.empty(num_bytes, np.uint8) if arenas is None else arenas.lease(num_bytes)
    return (
        np.ndarray(n, np.int64, memory),
        np.ndarray(n, np.int32, memory, 8 * n),
        np.ndarray(n, np.int32, memory, 12 * n),
        np.ndarray(w, np.float32, memory, 16 * n),
        np.ndarray(n, np.bool_, memory, 16 * n + 4 * w),
    )


def _fill_labels(
    labels: NDArray[np.int64],
    loss_mask: NDArray[np.bool_],
    layout: _Layout,
    tokens: NDArray[np.int32],
    payload: Payload,
) -> None:
    """Write the next token of each place that has a loss, and set `loss_mask` there."""
    following = payload.following if layout.order is None else payload.following[layout.order]
    last_places = layout.ends - 1
    fill_next_tokens(labels, tokens, last_places, following)
    if payload.loss_masks is None and not payload.ignored and layout.gaps is None:
        fill_default_mask(loss_mask, last_places, following)
        return
    for places in layout.padding_slices():
        labels[places] = NO_LOSS
    if payload.loss_masks is not None:
        np.copyto(labels, NO_LOSS, where=np.concatenate(_shift_masks(layout, payload.loss_masks)) == 0)
    for i in payload.ignored:
        labels[layout.starts[i] : layout.starts[i] + layout.lengths[i]] = NO_LOSS
    np.not_equal(labels, NO_LOSS, out=loss_mask)


def _fill_weights(weights: NDArray[np.float32], loss_mask: NDArray[np.bool_], layout: _Layout, payload: Payload) -> None:
    """Write the weight of each label: 0 where there is no loss, 1 for documents without weights."""
    if payload.loss_masks is None:
        np.copyto(weights, loss_mask)
        return
    np.concatenate(_shift_masks(layout, payload.loss_masks), out=weights, casting="same_kind")
    np.copyto(weights, 0, where=~loss_mask)


def _shift_masks(layout: _Layout, masks: Sequence[NDArray[np.generic] | None]) -> Sequence[NDArray[np.generic]]:
    """Loss masks or weights shifted to the places they apply to: entry t of a mask is about predicting token t, which
    happens at place t - 1. Padding gets 1."""
    ones = np.ones(layout.lengths.max(initial=0) + 1, np.bool_)
    shifted = []
    for i, (mask, n) in enumerate(zip(masks, layout.lengths.tolist(), strict=True)):
        if mask is None:
            mask = ones[: n + 1]
        elif n and len(mask) != n + 1:
            raise DataError(
                f"sample {i} of the microbatch has {n} tokens, so its loss mask needs {n + 1} entries (the "
                f"last for the token that follows), not {len(mask)}"
            )
        shifted.append(mask[1:])
    return _pieces(layout, shifted, 1)


def _cu_seqlens(layout: _Layout, bounds: NDArray[np.int32], multiple: int) -> Fields:
    if multiple == 1:
        return {"cu_seqlens": bounds}
    real = np.zeros(len(bounds), np.int32)
    with_text = slice(None) if layout.order is None else layout.order
    real[np.searchsorted(layout.bounds, layout.starts[with_text]) + 1] = layout.lengths[with_text]
    return {"cu_seqlens": np.cumsum(real, dtype=np.int32), "cu_seqlens_padded": bounds}


def _fold(layout: _Layout, fields: Fields, rows: Ints) -> Fields:
    num_rows = len(layout.bounds) - 1
    width = layout.num_tokens // num_rows
    lengths = np.zeros((num_rows, 1), np.int32)
    lengths[rows, 0] = layout.lengths
    per_place = ("tokens", "labels", "loss_mask", "loss_weights", "position_ids", "image_row")
    folded: Fields = {name: fields[name].reshape(num_rows, width) for name in per_place if name in fields}
    return folded | {"attention_mask": folded["position_ids"] < lengths}


def _images(images: Sequence[Sequence[NDArray[np.uint8]]]) -> Fields:
    flat = [image for of_document in images for image in of_document]
    counts = [len(of_document) for of_document in images]
    return {"images": stack_images(flat), "image_document": np.repeat(np.arange(len(images), dtype=np.int32), counts)}


def _image_rows(tokens: NDArray[np.int32], layout: _Layout, image_token: int) -> NDArray[np.int32]:
    """Image places numbered in order. Padding has none, even where the pad token is the image token."""
    places = tokens == image_token
    for gap in layout.padding_slices():
        places[gap] = False
    return image_rows(places)
