"""The fields of text of a microbatch: tokens, labels, positions, masks, and where documents lie.

Data Constructors fill them when they collate, and so do trainers that build their steps from chunks in shared memory
(`unbuilt.py`): with numpy alone, so that these load little. A client to which only tokens and exceptions were sent computes
the other fields with the same functions (`service/lean_fields.py`): the same arrays, a quarter of the bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from overlord.errors import DataError, SpecError
from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.messages import Fields
    from overlord.stream.facts import Ints, Samples

NO_LOSS = -100
"""The label that torch's cross_entropy ignores unless told otherwise."""

PADDING_SEGMENT = 512
"""The longest run of row padding that attends to itself: attention is a small part of its cost."""

_LONGEST_CACHED = 1 << 20

_NO_TOKENS = np.zeros(0, np.int32)


class TokenRows(Protocol):
    """The tokens of a chunk. Row r is `values[begin[r]:...]`, of a document that ends at `document_end[r]`."""

    @property
    def values(self) -> NDArray[np.integer] | None:
        """None for a source without text."""
        ...

    @property
    def begin(self) -> memoryview: ...
    @property
    def document_end(self) -> memoryview: ...
    @property
    def mask(self) -> NDArray[np.generic] | None: ...


@record
class TokenViews:
    """One entry for each sample. The fields are those of `Payload`."""

    tokens: Sequence[NDArray[np.integer]]
    following: NDArray[np.integer]
    loss_masks: Sequence[NDArray[np.generic] | None] | None
    ignored: frozenset[int] = frozenset()


def token_views(found: Sequence[TokenRows], samples: Samples) -> TokenViews:
    """The tokens of samples, of which each is in the chunk that was `found` for it. Raises DataError where a chunk does not
    have what was planned."""
    tokens: list[NDArray[np.integer]] = []
    masks: list[NDArray[np.generic] | None] = []
    following: dict[int, int] = {}
    rows, starts, stops = cast("list[list[int]]", samples.table[2:5].tolist())
    # A loop over samples: collation needs one view of each anyway, and with many sources a chunk has few of them.
    for one, row, start, stop in zip(found, rows, starts, stops, strict=True):
        values = one.values
        if values is None:
            tokens.append(_NO_TOKENS)
            continue
        try:
            begin, document_end = one.begin[row], one.document_end[row]
        except IndexError:
            raise DataError(_changed_row(samples, len(tokens), "there is no such row")) from None
        end = begin + stop
        if end > document_end:
            raise DataError(_changed_row(samples, len(tokens), f"it ends before token {stop}"))
        tokens.append(values[begin + start : end])
        if end < document_end:
            following[len(tokens) - 1] = values.item(end)
        if one.mask is not None:
            masks += [None] * (len(tokens) - 1 - len(masks))
            masks.append(_mask(one.mask, begin + start, end, end < document_end))
    next_tokens = np.full(len(samples), NO_LOSS)
    for place, token in following.items():
        next_tokens[place] = token
    return TokenViews(tokens, next_tokens, [*masks, *[None] * (len(samples) - len(masks))] if masks else None)


def _changed_row(samples: Samples, place: int, why: str) -> str:
    source, chunk, row = (int(column[place]) for column in (samples.source, samples.chunk, samples.row))
    return (
        f"row {row} of chunk {chunk} of source {samples.source_names[source]!r} has changed since it was planned: {why}. "
        "The source returns other rows than before, or the run was resumed from an edited state; restore the data, or start "
        "from a checkpoint"
    )


def _mask(mask: NDArray[np.generic], begin: int, end: int, goes_on: bool) -> NDArray[np.generic]:
    """One entry per token, and one for the token after them; 0 where there is none."""
    return mask[begin : end + 1] if goes_on else np.append(mask[begin:end], np.zeros(1, mask.dtype))


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
        if self.gaps is not None:
            for begin, gap in zip([0, *self.ends.tolist()], self.gaps.tolist(), strict=True):
                if gap:
                    yield slice(begin, begin + gap)


class PlacedSamples(Protocol):
    """Planned samples and the rows that they lie in. See `MicroPlan`, which is one."""

    @property
    def samples(self) -> Samples: ...
    @property
    def row(self) -> Ints: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def row_tokens(self) -> int: ...


class SampleTokens(Protocol):
    """The tokens of samples. See `Payload`, which is one."""

    @property
    def tokens(self) -> Sequence[NDArray[np.integer]]: ...
    @property
    def following(self) -> NDArray[np.integer]: ...
    @property
    def loss_masks(self) -> Sequence[NDArray[np.generic] | None] | None: ...
    @property
    def ignored(self) -> Collection[int]: ...


class BatchTerms(Protocol):
    """What a batch declares that its fields of text depend on. See `Batch`, which is one."""

    @property
    def layout(self) -> str: ...
    @property
    def pad_token(self) -> int: ...
    @property
    def document_multiple(self) -> int: ...
    @property
    def image_token(self) -> int | None: ...


def text_fields(
    micro: PlacedSamples, payload: SampleTokens, batch: BatchTerms, arenas: Arenas | None = None, weighted: bool = False
) -> Fields:
    """The fields of text. With `arenas` the large ones share one pooled buffer; with `weighted` there are loss weights."""
    check_samples(micro, payload)
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
    }
    if weighted:
        _fill_weights(loss_weights, loss_mask, layout, payload)
        fields["loss_weights"] = loss_weights
    if batch.image_token is not None:
        fields["image_row"] = _image_rows(tokens, layout, batch.image_token)
    return fields | (_cu_seqlens(layout, bounds, batch.document_multiple) if packed else _fold(layout, fields, micro.row))


def document_places(micro: PlacedSamples, batch: BatchTerms) -> Ints:
    """The place of each document's first token in its microbatch: `document_starts`, from the plan alone."""
    packed = batch.layout == "packed"
    return (_packed_layout(micro, batch.document_multiple) if packed else _padded_layout(micro, batch)).starts


def num_places(micro: PlacedSamples, batch: BatchTerms) -> int:
    """`num_tokens` of the microbatch, padding included, from the plan alone."""
    if batch.layout == "padded":
        return micro.num_rows * _row_width(micro, batch)
    multiple = batch.document_multiple
    return micro.num_rows * micro.row_tokens or int((-(-micro.samples.tokens // multiple) * multiple).sum())


def check_samples(micro: PlacedSamples, payload: SampleTokens) -> None:
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


def _packed_layout(micro: PlacedSamples, multiple: int) -> _Layout:
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


def _full_layout(micro: PlacedSamples) -> _Layout | None:
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


def _padded_layout(micro: PlacedSamples, batch: BatchTerms) -> _Layout:
    lengths, rows = micro.samples.tokens, micro.row
    if len(np.unique(rows)) != len(rows):
        raise SpecError("layout='padded' holds one document a row, but the strategy put several in one row; use 'packed'")
    width = _row_width(micro, batch)
    used = np.bincount(rows, lengths, micro.num_rows).astype(np.int64)
    _check_rows(used, micro.num_rows, micro.row_tokens)
    starts = rows * width
    order = np.argsort(rows, kind="stable")
    order = order[lengths[order] > 0]
    return _layout_with_gaps(starts, lengths, order, np.arange(micro.num_rows + 1) * width, micro.num_rows * width)


def _row_width(micro: PlacedSamples, batch: BatchTerms) -> int:
    """The places of each row of a padded microbatch."""
    # Without samples, one row of one place: ranks run collectives together, so this one needs an input too.
    lengths, multiple = micro.samples.tokens, batch.document_multiple
    longest = int(lengths.max()) if len(lengths) else 1
    return micro.row_tokens or -(-longest // multiple) * multiple


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
    payload: SampleTokens,
) -> None:
    """Write the next token of each place that has a loss, and set `loss_mask` there."""
    following = payload.following if layout.order is None else payload.following[layout.order]
    last_places = layout.ends - 1
    fill_next_tokens(labels, tokens, last_places, following)
    if payload.loss_masks is None and not payload.ignored and layout.gaps is None:
        _fill_default_mask(loss_mask, last_places, following)
        return
    for places in layout.padding_slices():
        labels[places] = NO_LOSS
    if payload.loss_masks is not None:
        np.copyto(labels, NO_LOSS, where=np.concatenate(_shift_masks(layout, payload.loss_masks)) == 0)
    for i in payload.ignored:
        labels[layout.starts[i] : layout.starts[i] + layout.lengths[i]] = NO_LOSS
    np.not_equal(labels, NO_LOSS, out=loss_mask)


def _fill_weights(
    weights: NDArray[np.float32], loss_mask: NDArray[np.bool_], layout: _Layout, payload: SampleTokens
) -> None:
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


def _image_rows(tokens: NDArray[np.int32], layout: _Layout, image_token: int) -> NDArray[np.int32]:
    """Image places numbered in order, -1 elsewhere. Padding has none, even where the pad token is the image token."""
    places = tokens == image_token
    for gap in layout.padding_slices():
        places[gap] = False
    return np.where(places, np.cumsum(places) - 1, -1).astype(np.int32)


def fill_next_tokens(
    labels: NDArray[np.int64], tokens: NDArray[np.int32], places: NDArray[np.integer], following: NDArray[np.integer]
) -> None:
    """Write the next token of each place, except at some `places`, where another label follows."""
    labels[:-1] = tokens[1:]
    labels[-1:] = NO_LOSS
    labels[places] = following


def _fill_default_mask(
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
