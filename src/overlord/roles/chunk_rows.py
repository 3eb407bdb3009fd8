"""Takes planned rows out of chunks that are in memory: in the buffer of a loader host, or in memory that a host shares with
the processes of its machine.

Tokens and masks are taken as views, images are decoded, other columns are gathered. Who has the chunks is behind
`ChunkShelf`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import pyarrow as pa

from overlord.arrange.vision.images import sizes_of
from overlord.batches.payload import Payload
from overlord.batches.text_fields import token_views
from overlord.errors import DataError, SourceError
from overlord.sources.column_types import merge_arrays
from overlord.sources.numbers import array_of
from overlord.sources.views import combine_chunks, compact, take_rows
from overlord.stream.facts import ONLY_IMAGE, Ints, Samples

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.batches.buffers import Arenas
    from overlord.runtime.threads import Executor


class ChunkRows(Protocol):
    """The rows of a chunk. Row r is `values[begin[r]:...]`, of a document that ends at `document_end[r]`, and row
    `table_row[r]` of `table`."""

    values: NDArray[np.integer] | None
    begin: memoryview
    document_end: memoryview
    mask: NDArray[np.generic] | None
    left: int
    """Tokens (or rows, for a source without text) and images that were not taken yet."""

    @property
    def table(self) -> pa.Table: ...

    @property
    def table_row(self) -> Ints: ...


Find = Callable[[int], ChunkRows | None]
"""Returns the chunk of a number if it is in memory."""


class ChunkShelf(Protocol):
    """Where the chunks are that rows are taken from."""

    def finders(self, names: tuple[str, ...]) -> Sequence[Find]:
        """For each of these sources, the function that finds a chunk in memory."""
        ...

    def obtain(self, source: str, number: int) -> ChunkRows:
        """A chunk that is not in memory yet. Waits for it."""
        ...

    def decoder(self, source: str) -> Any:
        """How the images of a source are decoded; None for a source without images."""
        ...

    def note_bad_decode(self, source: str, number: int, chunk: ChunkRows, table_row: int, error: str) -> None:
        """Report an image that cannot be decoded. Raises where the source's policy does not allow it."""
        ...

    def note_delivered(self, source: str, number: int) -> None:
        """Every row of a chunk was taken."""
        ...

    @property
    def has_decoders(self) -> bool:
        """True if some source has images that are decoded on delivery."""
        ...

    @property
    def counts_down(self) -> bool:
        """True if a chunk is dropped when all of it was taken."""
        ...


class RowTaker:
    """Takes the payload of planned samples from the chunks of a shelf."""

    def __init__(self, shelf: ChunkShelf, columns: Sequence[str], threads: Executor, arenas: Arenas) -> None:
        """Images are decoded on `threads`, into memory of `arenas`."""
        self._shelf = shelf
        self._columns = tuple(columns)
        self._threads = threads
        self._arenas = arenas

    def take(self, samples: Samples) -> Payload:
        """Return the payload of planned samples, in their order."""
        shelf = self._shelf
        found = find_chunks(shelf, samples)
        views = token_views(found, samples)
        if shelf.counts_down:
            _count_down(found, samples)
        images: dict[int, Sequence[NDArray[np.uint8]]] = {}
        ignored: set[int] = set()
        has_more = bool(self._columns) or shelf.has_decoders
        parts = (
            [_OfChunk(key, places, found[places.item(0)]) for key, places in _places_by_chunk(samples)] if has_more else []
        )
        for part, decoded in self._decode(samples, parts):
            images[decoded.place] = decoded.images
            part.chunk.left -= len(decoded.images)
            if decoded.error is not None:
                source, number = part.key
                shelf.note_bad_decode(samples.source_names[source], number, part.chunk, decoded.table_row, decoded.error)
                ignored.add(decoded.place)
        if shelf.counts_down and any(one.left <= 0 for one in found):
            for key, places in _places_by_chunk(samples):
                if found[places.item(0)].left <= 0:
                    shelf.note_delivered(samples.source_names[key[0]], key[1])
        return Payload(
            tokens=views.tokens,
            following=views.following,
            loss_masks=views.loss_masks,
            images=[images.get(i, ()) for i in range(len(samples))] if images else None,
            columns=_columns(self._columns, parts, samples),
            ignored=frozenset(ignored),
        )

    def _decode(self, samples: Samples, parts: Sequence[_OfChunk]) -> Iterator[tuple[_OfChunk, _Decoded]]:
        """Decode the images of samples. A row that cannot be decoded gets blank ones of the planned size."""
        if not self._shelf.has_decoders:
            return
        rooms = ImageRooms(samples, self._arenas)
        calls = [(part, call) for part in parts for call in self._decoding_calls(samples, part, rooms)]
        # Of all chunks at once, as a chunk may have few of the samples. Shared and not one future each: waiting for those
        # would wake this thread after every picture, in turn with the threads that decode.
        decoded = self._threads.share([call for _, call in calls])
        yield from zip((part for part, _ in calls), decoded, strict=True)

    def _decoding_calls(self, samples: Samples, part: _OfChunk, rooms: ImageRooms) -> Iterator[Callable[[], _Decoded]]:
        """A call for each sample of one chunk, which decodes its images."""
        decoder, chunk = self._shelf.decoder(samples.source_names[part.key[0]]), part.chunk
        if decoder is None:
            return
        column = chunk.table.column(decoder.column)
        places = part.places[rooms.only[part.places] >= 0]
        rows = chunk.table_row[samples.row[places]]
        for place, row in zip(places.tolist(), rows.tolist(), strict=True):
            yield partial(_decode_row, decoder, column, row, rooms, place)


def _decode_row(decoder: Any, column: pa.ChunkedArray[Any], row: int, rooms: ImageRooms, place: int) -> _Decoded:
    number = int(rooms.only[place])
    try:
        return _Decoded(place, row, decoder.decode_row(column, row, rooms.of(place), number - 1 if number else None))
    except SourceError:
        raise  # the file is gone or was changed: not the fault of this row
    except DataError as error:
        return _Decoded(place, row, rooms.blank(place), str(error))


@dataclass(frozen=True, slots=True)
class _OfChunk:
    """The samples of one chunk, and their places in the payload."""

    key: tuple[int, int]
    """Source and number."""
    places: NDArray[np.int64]
    chunk: ChunkRows


@dataclass(frozen=True, slots=True)
class _Decoded:
    place: int
    table_row: int
    images: Sequence[NDArray[np.uint8]]
    error: str | None = None


def find_chunks(shelf: ChunkShelf, samples: Samples) -> Sequence[ChunkRows]:
    """The chunk of every sample."""
    names = samples.source_names
    sources, numbers = cast("list[list[int]]", samples.table[:2].tolist())
    finders = shelf.finders(names)
    found = [finders[source](number) for source, number in zip(sources, numbers, strict=True)]
    if all(found):
        return cast("list[ChunkRows]", found)
    obtained: dict[tuple[int, int], ChunkRows] = {}  # once: there may be no room for it on the shelf
    for place, key in enumerate(zip(sources, numbers, strict=True)):
        if found[place] is None:
            obtained[key] = found[place] = obtained.get(key) or shelf.obtain(names[key[0]], key[1])
    return cast("list[ChunkRows]", found)


def _count_down(found: Sequence[ChunkRows], samples: Samples) -> None:
    """Note what was taken of each chunk."""
    only, starts, stops = samples.sizes.get(ONLY_IMAGE), *cast("list[list[int]]", samples.table[3:5].tolist())
    for place, (one, start, stop) in enumerate(zip(found, starts, stops, strict=True)):
        one.left -= stop - start if one.values is not None else int(only is None or only[place] <= 0)


def _places_by_chunk(samples: Samples) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
    """Yields ((source, chunk), places of its samples) for each chunk that the samples come from."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(samples.source.tolist(), samples.chunk.tolist(), strict=True)):
        places.setdefault(key, []).append(place)
    return ((key, np.array(found)) for key, found in places.items())


def _columns(names: Sequence[str], parts: Sequence[_OfChunk], samples: Samples) -> dict[str, pa.Array[Any]]:
    if not names or not parts:
        return {}
    places = np.concatenate([part.places for part in parts])
    back = np.empty(len(samples), np.int64)
    back[places] = np.arange(len(samples))
    rows = [part.chunk.table_row[samples.row[part.places]] for part in parts]
    # Which source and chunk each part of a column is of, for error messages.
    owners = [f"source {samples.source_names[part.key[0]]!r} (chunk {part.key[1]})" for part in parts]
    found: dict[str, pa.Array[Any]] = {}
    for name in names:
        arrays: list[pa.Array[Any]] = [
            combine_chunks(compact(take_rows(part.chunk.table.select([name]), of_part)).column(0))
            if name in part.chunk.table.column_names
            else pa.nulls(len(of_part))
            for part, of_part in zip(parts, rows, strict=True)
        ]
        found[name] = merge_arrays(name, arrays, owners).take(array_of(back))
    return found


class ImageRooms:
    """Memory for the images of samples: one block if all have the same planned size; else each decode allocates its own."""

    def __init__(self, samples: Samples, arenas: Arenas) -> None:
        self.only = samples.sizes.get(ONLY_IMAGE, np.zeros(len(samples), np.int64))
        """Which image of each sample is wanted, as `ONLY_IMAGE` says it."""
        self._sizes = sizes_of(samples)
        self._counts: Ints = np.where(self.only < 0, 0, self._sizes.count)
        self._first = np.cumsum(self._counts) - self._counts
        self._block: NDArray[np.uint8] | None = None
        wanted = self._sizes.take(np.flatnonzero(self._counts)).compact()
        if len(wanted.height) and (wanted.height == wanted.height[0]).all() and (wanted.width == wanted.width[0]).all():
            shape = (len(wanted.height), int(wanted.height[0]), int(wanted.width[0]), 3)
            self._block = arenas.lease(int(np.prod(shape))).reshape(shape)

    def of(self, place: int) -> list[NDArray[np.uint8]] | None:
        """Where the images of a sample are decoded to; None when each decode allocates its own memory."""
        if self._block is None:
            return None
        first = int(self._first[place])
        return [self._block[first + i] for i in range(int(self._counts[place]))]

    def blank(self, place: int) -> list[NDArray[np.uint8]]:
        """Black images of the planned sizes."""
        rooms = self.of(place)
        if rooms is None:
            first = int(self._sizes.first[place])
            numbers = range(first, first + int(self._counts[place]))
            rooms = [np.empty((self._sizes.height[i], self._sizes.width[i], 3), np.uint8) for i in numbers]
        for room in rooms:
            room.fill(0)
        return rooms
