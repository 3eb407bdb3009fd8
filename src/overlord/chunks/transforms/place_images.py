"""Reserves places for images in texts: one token for each row of an encoded image that the backbone will insert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.chunks.transforms.outcome import row_error
from overlord.errors import DataError, SchemaError, SpecError
from overlord.sources.views import combine_chunks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.arrange.vision.images import PatchGrid
    from overlord.media.images import DecodeImage
    from overlord.stream.facts import Ints


@dataclass(frozen=True, slots=True)
class PlaceImages:
    """Insert `token` into the column `tokens` once for each token that `grid` makes of the row's images, so that lengths,
    packing and mixtures count images as the backbone does.

    `decode` is that of the source, which sets the size of images. A `marker` in the text is the place of an image, one for
    each image in order; without a marker images come before the text. No loss is taken on predicting an image's places:
    the column `loss_mask` says so, and is made where there is none. Give its name to the source (loss_mask=..., or
    loss_weights=... where the column has weights). A `token` or `marker` below 0 is one of `Batch.special_ids`.
    """

    decode: DecodeImage
    grid: PatchGrid
    token: int
    marker: int | None = None
    tokens: str = "tokens"
    loss_mask: str = "loss_mask"

    def __post_init__(self) -> None:
        for name in ("token", "marker"):
            value = getattr(self, name)
            if value is not None and not -(2**31) <= value < 2**31:
                raise SpecError(f"{name} is a token id that int32 can hold, got {value}")

    def __call__(self, table: pa.Table) -> pa.Table:
        missing = [name for name in (self.tokens, self.decode.column) if name not in table.column_names]
        if missing:
            raise SchemaError(
                f"PlaceImages: no column {', '.join(map(repr, missing))}; "
                f"Tokenize(..., keep=({self.decode.column!r},)) keeps images beside their text"
            )
        facts, bad = self.decode.facts(table.column(self.decode.column))
        sizes = facts.images.compact()
        text, lengths = self._text(table)
        mask = self._mask(table, lengths)
        row = row_of(lengths)
        if self.marker is None:
            at = np.repeat(np.cumsum(lengths) - lengths, sizes.count)
            is_place = np.insert(np.zeros(len(text), bool), at, True)
            text, mask, row = (np.insert(each, at, new) for each, new in ((text, 0), (mask, 0), (row, row_of(sizes.count))))
        else:
            # A row with a bad image has no sizes. It is dropped and reported later, by `decode`.
            is_place = (text == self.marker) & ~np.isin(row, [number for number, _ in bad])
            self._check_markers(table, np.bincount(row[is_place], minlength=len(lengths)), sizes.count)
        repeats = np.ones(len(text), np.int64)
        repeats[is_place] = self.grid.tokens(sizes.height, sizes.width)
        new = {
            self.tokens: np.repeat(np.where(is_place, np.int32(self.token), text.astype(np.int32)), repeats),
            self.loss_mask: np.repeat(np.where(is_place, mask.dtype.type(0), mask), repeats),
        }
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row, repeats, len(lengths)).astype(np.int64))])
        for name, values in new.items():
            column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
            at_index = table.schema.get_field_index(name)
            table = table.append_column(name, column) if at_index < 0 else table.set_column(at_index, name, column)
        return table

    def _text(self, table: pa.Table) -> tuple[NDArray[np.integer], Ints]:
        text, lengths = _lists(table, self.tokens)
        if text.dtype.kind not in "iu":
            raise SchemaError(f"PlaceImages: column {self.tokens!r} must be a list of integers, it is of {text.dtype}")
        if not np.can_cast(text.dtype, np.int32):
            wrong = np.flatnonzero((text < -(2**31)) | (text >= 2**31))
            if len(wrong):
                cause = DataError(f"PlaceImages: token id {text[wrong[0]]} is not an id that int32 can hold")
                raise row_error(table, int(row_of(lengths)[wrong[0]]), cause)
        return text, lengths

    def _mask(self, table: pa.Table, lengths: Ints) -> NDArray[Any]:
        if self.loss_mask not in table.column_names:
            return np.ones(int(lengths.sum()), np.int8)
        mask, mask_lengths = _lists(table, self.loss_mask)
        wrong = np.flatnonzero(mask_lengths != lengths)
        if len(wrong):
            n, m = int(lengths[wrong[0]]), int(mask_lengths[wrong[0]])
            cause = DataError(f"PlaceImages: {self.loss_mask!r} must have one entry per token, it has {m} for {n} tokens")
            raise row_error(table, int(wrong[0]), cause)
        return mask.astype(np.int8) if mask.dtype == bool else mask

    def _check_markers(self, table: pa.Table, markers: Ints, images: Ints) -> None:
        wrong = np.flatnonzero(markers != images)
        if len(wrong):
            first = int(wrong[0])
            cause = DataError(f"PlaceImages: a text has {markers[first]} markers for {images[first]} images")
            raise row_error(table, first, cause)


def row_of(counts: Ints) -> Ints:
    """The row that each of `counts[i]` entries of row i belongs to."""
    return np.repeat(np.arange(len(counts)), counts)


def _lists(table: pa.Table, name: str) -> tuple[NDArray[Any], Ints]:
    """The concatenated values of a column of lists, and the lengths of the lists."""
    array: Any = combine_chunks(table.column(name))
    kind = array.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    value = kind.value_type if is_list else kind
    if not is_list or not (pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)):
        raise SchemaError(f"PlaceImages: column {name!r} must be a list of numbers, it is {kind}")
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    flat = array.flatten()
    if flat.null_count:
        at = int(np.flatnonzero(~flat.is_valid().to_numpy(zero_copy_only=False))[0])
        raise row_error(table, int(row_of(lengths)[at]), DataError(f"PlaceImages: {name!r} has a null inside its list"))
    return flat.to_numpy(zero_copy_only=False), lengths
