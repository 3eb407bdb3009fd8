"""One place where Source Loaders live together, so that many small sources cost one process and one ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from overlord.data.arenas import Arenas
from overlord.data.bad_rows import BadRowLog
from overlord.data.chunk import Chunk
from overlord.data.payload import Payload
from overlord.data.views import compact, joined, take_rows
from overlord.errors import DataError
from overlord.planning.facts import ChunkFacts, Samples
from overlord.roles.source_loader import BufferUse, SourceLoader


@dataclass(frozen=True, slots=True)
class Held:
    """A Source Loader and what its rows need on the way out."""

    loader: SourceLoader
    bad_rows: BadRowLog
    decode: Any = None
    bad_decode: Callable[[Chunk, int, str], None] | None = None
    """Called with (chunk, table row, error) when a deferred decode fails."""


class LoaderHost:
    """Answers for all sources (or shares of sources) that it holds."""

    def __init__(self, held: Mapping[str, Held], columns: Sequence[str], threads: Executor) -> None:
        self._held = held
        self._columns = tuple(columns)
        self._threads = threads
        self._arenas = Arenas(_MOST_IDLE_ARENAS)

    def describe(self, source: str, chunk: int, keep_from: int = 0) -> ChunkFacts:
        return self._held[source].loader.describe(chunk, keep_from)

    def prefetch(self, source: str, chunk: int) -> None:
        self._held[source].loader.prefetch(chunk)

    def count_loss(self, source: str, chunk: int, row: int, start: int, stop: int) -> int:
        return self._held[source].loader.chunk(chunk).count_loss(row, start, stop)

    def give(self, samples: Samples) -> Payload:
        """The payload of planned samples, in their order."""
        given = _Given(self._held, samples)
        some_deferred = self._columns or any(
            self._held[name].decode is not None for name in {samples.source_names[s] for s, _ in given.chunks}
        )
        images: dict[int, Sequence[NDArray[np.uint8]]] = {}
        ignored: set[int] = set()
        columns: list[tuple[NDArray[np.int64], Chunk, NDArray[np.int64]]] = []
        if some_deferred:
            rooms = _Rooms(samples, self._arenas)
            for (source, number), places in _places_by_chunk(samples):
                held, chunk = self._held[samples.source_names[source]], given.chunks[source, number]
                if held.decode is not None:
                    for decoded in self._decode(held, chunk, samples, places, rooms):
                        images[decoded.place] = decoded.images
                        if decoded.is_bad:
                            ignored.add(decoded.place)
                columns.append((places, chunk, chunk.table_row[samples.row[places]]))
        for (source, number), amount in given.amounts.items():
            self._held[samples.source_names[source]].loader.given(number, amount)
        return Payload(
            tokens=given.tokens,
            following=given.following,
            loss_masks=given.masks if given.some_mask else None,
            images=[images.get(i, ()) for i in range(len(samples))] if images else None,
            columns=_columns(self._columns, columns, len(samples)),
            ignored=frozenset(ignored),
        )

    def doing(self) -> list[str]:
        return [line for held in self._held.values() for line in held.loader.doing()]

    def buffer_use(self) -> dict[str, BufferUse]:
        return {name: held.loader.buffer_use() for name, held in self._held.items()}

    def num_bad_rows(self) -> dict[str, int]:
        """How many rows of each source were dropped as bad."""
        return {name: held.bad_rows.num_dropped for name, held in self._held.items()}

    def close(self) -> None:
        for held in self._held.values():
            held.loader.close()

    def _decode(
        self, held: Held, chunk: Chunk, samples: Samples, places: NDArray[np.int64], rooms: _Rooms
    ) -> Iterator[_Decoded]:
        """The images of samples of one chunk. A row that cannot be decoded gets blank ones of the planned size."""
        column = chunk.table.column(held.decode.column)
        rows = chunk.table_row[samples.row[places]].tolist()
        outs = [rooms.of(place) for place in places.tolist()]
        decode = held.decode.decode_row
        futures = [self._threads.submit(decode, column, row, out) for row, out in zip(rows, outs, strict=True)]
        for place, row, out, future in zip(places.tolist(), rows, outs, futures, strict=True):
            try:
                # What no thread has begun is done here: the threads may all be waiting for storage.
                images = decode(column, row, out) if future.cancel() else future.result()
            except DataError as error:
                if held.bad_decode is not None:
                    held.bad_decode(chunk, row, str(error))
                yield _Decoded(place, rooms.blank(place), is_bad=True)
            else:
                yield _Decoded(place, images)


class _Rooms:
    """Where the images of a microbatch are decoded to: one piece of memory, if all have the same planned size."""

    def __init__(self, samples: Samples, arenas: Arenas) -> None:
        none = np.zeros(len(samples), np.int64)
        self._counts, self._heights, self._widths = (
            samples.sizes.get(name, none) for name in ("num_images", "image_height", "image_width")
        )
        shapes = {(h, w) for n, h, w in zip(self._counts, self._heights, self._widths, strict=True) if n}
        self._first = np.cumsum(self._counts) - self._counts
        self._block: NDArray[np.uint8] | None = None
        if len(shapes) == 1:
            shape = (int(self._counts.sum()), *(int(side) for side in shapes.pop()), 3)
            self._block = arenas.lease(int(np.prod(shape))).reshape(shape)

    def of(self, place: int) -> list[NDArray[np.uint8]] | None:
        """The places for the images of a sample; None when they bring their own memory."""
        if self._block is None:
            return None
        first = int(self._first[place])
        return [self._block[first + i] for i in range(int(self._counts[place]))]

    def blank(self, place: int) -> list[NDArray[np.uint8]]:
        """Black images of the planned size."""
        rooms = self.of(place)
        if rooms is None:
            shape = (int(self._heights[place]), int(self._widths[place]), 3)
            rooms = [np.empty(shape, np.uint8) for _ in range(int(self._counts[place]))]
        for room in rooms:
            room.fill(0)
        return rooms


@dataclass(frozen=True, slots=True)
class _Decoded:
    place: int
    images: Sequence[NDArray[np.uint8]]
    is_bad: bool = False


_NO_TOKENS = np.zeros(0, np.int32)
_MOST_IDLE_ARENAS = 2


class _Given:
    """The token views of samples, and the chunks they are of."""

    def __init__(self, held: Mapping[str, Held], samples: Samples) -> None:
        self._held = held
        self._names = samples.source_names
        self.chunks: dict[tuple[int, int], Chunk] = {}
        self.amounts: dict[tuple[int, int], int] = {}
        self.tokens: list[NDArray[np.integer]] = []
        self.following = np.full(len(samples), -1, np.int64)
        self.masks: list[NDArray[np.integer] | None] = []
        self.some_mask = False
        opened: dict[tuple[int, int], tuple] = {}
        columns = (samples.source, samples.chunk, samples.row, samples.start, samples.stop)
        # A loop over samples: collation needs one view of each anyway, and with many sources a chunk has few of them.
        for place, (source, number, row, start, stop) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            key = (source, number)
            parts = opened.get(key)
            if parts is None:
                parts = opened[key] = self._open(key)
            values, begin_of, end_of, mask = parts
            if values is None:
                self.tokens.append(_NO_TOKENS)
                self.masks.append(None)
                self.amounts[key] += 1
                continue
            begin = begin_of(row)
            end = begin + stop
            self.tokens.append(values[begin + start : end])
            self.amounts[key] += stop - start
            goes_on = end < end_of(row)
            if goes_on:
                self.following[place] = values[end]
            self.masks.append(None if mask is None else _mask(mask, begin + start, end, goes_on))

    def _open(self, key: tuple[int, int]) -> tuple:
        source, number = key
        chunk = self._held[self._names[source]].loader.chunk(number)
        self.chunks[key] = chunk
        self.amounts[key] = 0
        self.some_mask = self.some_mask or chunk.mask is not None
        return chunk.values, chunk.begin.item, chunk.document_end.item, chunk.mask


def _mask(mask: NDArray[np.integer], begin: int, end: int, goes_on: bool) -> NDArray[np.integer]:
    """One entry per token and one for the token that follows, 0 where none does."""
    return mask[begin : end + 1] if goes_on else np.append(mask[begin:end], 0)


def _places_by_chunk(samples: Samples) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
    """((source, chunk), places of its samples) for each chunk that the samples come from."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(samples.source.tolist(), samples.chunk.tolist(), strict=True)):
        places.setdefault(key, []).append(place)
    return ((key, np.array(found)) for key, found in places.items())


def _columns(
    names: Sequence[str], parts: list[tuple[NDArray[np.int64], Chunk, NDArray[np.int64]]], n: int
) -> dict[str, pa.Array]:
    if not names or not parts:
        return {}
    places = np.concatenate([part[0] for part in parts])
    back = np.empty(n, np.int64)
    back[places] = np.arange(n)
    found = {}
    for name in names:
        taken = [
            joined(compact(take_rows(chunk.table.select([name]), rows)).column(0))
            if name in chunk.table.column_names
            else None
            for _, chunk, rows in parts
        ]
        kind = next((array.type for array in taken if array is not None), pa.null())
        arrays = [
            pa.nulls(len(rows), kind) if array is None else array for array, (_, _, rows) in zip(taken, parts, strict=True)
        ]
        found[name] = pa.concat_arrays(arrays).take(back)
    return found
