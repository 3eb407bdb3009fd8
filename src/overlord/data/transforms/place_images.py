"""Making room for images in texts: a token in every place that the backbone will fill with a row of an encoded image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from overlord.data.images import DecodeImage
from overlord.data.views import joined
from overlord.errors import DataError, SchemaError, SpecError
from overlord.planning.facts import Ints
from overlord.planning.images.vision import PatchGrid


@dataclass(frozen=True, slots=True)
class PlaceImages:
    """Put `token` into the column `tokens` once for every token that an image of the row has by `grid`. So lengths, packing
    and mixtures count images as what they are to the backbone.

    `decode` is that of the source: images are as large as it makes them. A `marker` in the text says where an image goes,
    one for each in their order; without it images come before the text. No loss is taken on predicting an image's places:
    the column `loss_mask` says so, and is made where there is none. Give its name to the source (loss_mask=...).
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
            if value is not None and not 0 <= value < 2**31:
                raise SpecError(f"{name} is a token id from 0 to 2**31 - 1, got {value}")

    def __call__(self, table: pa.Table) -> pa.Table:
        missing = [name for name in (self.tokens, self.decode.column) if name not in table.column_names]
        if missing:
            raise SchemaError(
                f"PlaceImages: no column {', '.join(map(repr, missing))}; "
                f"Tokenize(..., keep=({self.decode.column!r},)) keeps images beside their text"
            )
        facts, _ = self.decode.facts(table.column(self.decode.column))  # a bad image has no place here, and is dropped later
        sizes = facts.images.compact()
        text, lengths = _lists(table, self.tokens)
        mask = _lists(table, self.loss_mask)[0] if self.loss_mask in table.column_names else np.ones(len(text), np.int8)
        row = np.repeat(np.arange(len(lengths)), lengths)
        if self.marker is None:
            at = np.repeat(np.cumsum(lengths) - lengths, sizes.count)
            is_place = np.insert(np.zeros(len(text), bool), at, True)
            text, mask, row = (np.insert(each, at, new) for each, new in ((text, 0), (mask, 0), (row, row_of(sizes.count))))
        else:
            is_place = text == self.marker
            self._check(np.bincount(row[is_place], minlength=len(lengths)), sizes.count)
        repeats = np.ones(len(text), np.int64)
        repeats[is_place] = self.grid.tokens(sizes.height, sizes.width)
        new = {
            self.tokens: np.repeat(np.where(is_place, self.token, text), repeats).astype(np.int32),
            self.loss_mask: np.repeat(np.where(is_place, 0, mask), repeats).astype(np.int8),
        }
        offsets = np.concatenate([[0], np.cumsum(np.bincount(row, repeats, len(lengths)).astype(np.int64))])
        for name, values in new.items():
            column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
            at_index = table.schema.get_field_index(name)
            table = table.append_column(name, column) if at_index < 0 else table.set_column(at_index, name, column)
        return table

    def _check(self, markers: Ints, images: Ints) -> None:
        wrong = np.flatnonzero(markers != images)
        if len(wrong):
            raise DataError(f"PlaceImages: a text has {markers[wrong[0]]} markers for {images[wrong[0]]} images")


def row_of(counts: Ints) -> Ints:
    """The row that each of `counts[i]` entries of row i belongs to."""
    return np.repeat(np.arange(len(counts)), counts)


def _lists(table: pa.Table, name: str) -> tuple[NDArray[np.integer], Ints]:
    """A column of lists as their values, one after the other, and their lengths."""
    array: Any = joined(table.column(name))
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise SchemaError(f"PlaceImages: column {name!r} must be a list of integers, it is {array.type}")
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return array.flatten().to_numpy(zero_copy_only=False), lengths
