"""The planned rows that a Source Loader returns, as views into its chunks.

A pickled payload is a few flat arrays with the planned rows and nothing else of their chunks. With protocol 5 these travel
out of band, and the receiver's arrays are views of the memory they arrived in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from overlord.records import record
from overlord.runtime.transport import table_from_stream, table_to_stream

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray


@record
class Payload:
    """The planned samples of one microbatch, in packing order. Every sequence has one entry per sample.

    `following[i]` is the token that comes after sample i in its document, or NO_LOSS where the document ends with it: the
    last label of a cut document is known. `loss_masks[i]`, if present, has one entry per token of the sample and one
    more for `following`; 0 means no loss on predicting that token, floats are loss weights. `images[i]` are the decoded
    uint8 images of sample i (height, width, channels). `ignored` names samples whose deferred decode failed:
    no loss is taken on them.
    """

    tokens: Sequence[NDArray[np.integer]]
    following: NDArray[np.integer]
    loss_masks: Sequence[NDArray[np.generic] | None] | None = None
    images: Sequence[Sequence[NDArray[np.uint8]]] | None = None
    columns: Mapping[str, pa.Array] = field(default_factory=dict)
    ignored: frozenset[int] = frozenset()

    def __reduce__(self) -> tuple[Any, ...]:
        masks = None if self.loss_masks is None else FlatArrays.of(self.loss_masks)
        images = None
        if self.images is not None:
            flat = FlatArrays.of([image for images in self.images for image in images])
            images = flat, [len(images) for images in self.images]
        columns = _write_stream(self.columns) if self.columns else None
        return _unflatten, ((FlatArrays.of(self.tokens), masks), self.following, images, columns, self.ignored)

    @property
    def column_bytes(self) -> int:
        """What the columns take."""
        columns: Mapping[str, pa.Array[Any]] = self.columns
        return sum(column.nbytes for column in columns.values())

    def split(self, counts: Iterable[int]) -> Iterator[Payload]:
        """Payloads of `counts` samples each. A part has masks or images only where one of its samples has them."""
        begin = 0
        for count in counts:
            end = begin + count
            masks = self.loss_masks[begin:end] if self.loss_masks is not None else ()
            images = self.images[begin:end] if self.images is not None else ()
            yield Payload(
                tokens=self.tokens[begin:end],
                following=self.following[begin:end],
                loss_masks=masks if any(mask is not None for mask in masks) else None,
                images=images if any(images) else None,
                columns={name: column.slice(begin, count) for name, column in self.columns.items()},
                ignored=frozenset(i - begin for i in self.ignored if begin <= i < end),
            )
            begin = end

    @staticmethod
    def merge(parts: Sequence[Payload], places: Sequence[NDArray[np.integer]], owners: Sequence[str] = ()) -> Payload:
        """One payload from several: sample j of part i goes to `places[i][j]`. `owners` names the sources of each part, for
        error messages."""
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
            columns=_merge_columns(parts, order, owners or [f"part {i}" for i in range(len(parts))]),
            ignored=frozenset(int(where[i]) for part, where in zip(parts, places, strict=True) for i in part.ignored),
        )


@dataclass(frozen=True, slots=True)
class FlatArrays:
    """Many arrays as one flat array for each dtype, of which there is rarely more than one."""

    flat: tuple[NDArray[Any], ...]
    kind: NDArray[np.int8]
    """The index in `flat` of each array; -1 for None. Arrays of one dtype follow one another."""
    shapes: NDArray[np.int64]
    """[array, dimension]"""

    @staticmethod
    def of(arrays: Sequence[NDArray[Any] | None]) -> FlatArrays:
        by_dtype: dict[np.dtype, list[NDArray[Any]]] = {}
        kind, shapes = np.full(len(arrays), -1, np.int8), []
        num_dimensions = max((array.ndim for array in arrays if array is not None), default=1)
        number: dict[np.dtype, int] = {}
        for i, array in enumerate(arrays):
            if array is None:
                shapes.append((0,) * num_dimensions)
                continue
            kind[i] = number.setdefault(array.dtype, len(number))
            by_dtype.setdefault(array.dtype, []).append(array.reshape(-1))
            shapes.append(array.shape)
        flat = tuple(np.concatenate(same) for same in by_dtype.values())
        return FlatArrays(flat, kind, np.array(shapes, np.int64).reshape(len(arrays), num_dimensions))

    def views(self) -> list[NDArray[Any] | None]:
        """The arrays again, as views."""
        found: list[NDArray[Any] | None] = [None] * len(self.kind)
        one_dimensional = self.shapes.shape[1] == 1
        for number, flat in enumerate(self.flat):
            where = np.flatnonzero(self.kind == number)
            ends = np.cumsum(self.shapes[where].prod(axis=1)).tolist()
            for i, begin, end in zip(where.tolist(), [0, *ends], ends, strict=False):
                view = flat[begin:end]
                found[i] = view if one_dimensional else view.reshape(self.shapes[i])
        return found


def _unflatten(
    tokens_and_masks: tuple[FlatArrays, FlatArrays | None],
    following: NDArray[np.integer],
    images_and_counts: tuple[FlatArrays, Sequence[int]] | None,
    columns: pa.Buffer | None,
    ignored: frozenset[int],
) -> Payload:
    tokens, masks = tokens_and_masks
    images, counts = images_and_counts or (None, ())
    all_images: Any = iter(() if images is None else images.views())
    return Payload(
        tokens=cast("Any", tokens.views()),
        following=following,
        loss_masks=None if masks is None else masks.views(),
        images=None if images is None else [list(islice(all_images, count)) for count in counts],
        columns={} if columns is None else _read_stream(columns),
        ignored=ignored,
    )


def _write_stream(columns: Mapping[str, pa.Array]) -> pa.Buffer:
    """The columns as one Arrow stream. Pickled arrays would carry the whole buffers that they are slices of."""
    import pyarrow as pa

    from overlord.sources.views import compact

    return table_to_stream(compact(pa.table(dict(columns))))


def _read_stream(buffer: pa.Buffer) -> dict[str, pa.Array]:
    from overlord.sources.views import combine_chunks

    table = table_from_stream(buffer)
    return {name: combine_chunks(table.column(name)) for name in table.column_names}


def _merge_columns(parts: Sequence[Payload], order: NDArray[np.int64], owners: Sequence[str]) -> dict[str, pa.Array]:
    import pyarrow as pa

    from overlord.sources.column_types import merge_arrays
    from overlord.sources.numbers import array_of

    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part.columns):
        arrays = [part.columns[name] if name in part.columns else pa.nulls(len(part.tokens)) for part in parts]
        merged[name] = merge_arrays(name, arrays, owners).take(array_of(order))
    return merged
