"""A process-wide host of Source Loaders, so that many small sources cost one process and one request.

It serves any source. One that it does not hold yet is opened on request, because the caller may still use an older routing
table.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from overlord.arrange.vision.images import sizes_of
from overlord.batches.buffers import Arenas
from overlord.batches.payload import NO_LOSS, Payload
from overlord.chunks.bad_rows import BadRowKey, BadRowLog
from overlord.errors import ClosedError, DataError, SourceError
from overlord.roles.source_loader import BufferUse, HotChunk, SourceLoader, Work
from overlord.sources.column_types import merge_arrays
from overlord.sources.views import combine_chunks, compact, take_rows
from overlord.stream.facts import (
    ONLY_IMAGE,
    ChunkFacts,
    Ints,
    LossCount,
    Samples,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.chunks.chunk import Chunk
    from overlord.runtime.threads import Executor


@dataclass(frozen=True, slots=True)
class OpenSource:
    """A Source Loader, and how its rows are decoded when they are delivered."""

    loader: SourceLoader
    bad_rows: BadRowLog
    decode: Any = None
    bad_decode: Callable[[Chunk, int, str], None] | None = None
    """Called with (chunk, table row, error) when a deferred decode fails."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    """What a host holds and has done."""

    instance: str
    """Changes when the host is made again."""
    process: int
    holding: dict[str, list[int]]
    """The chunks of each source that it has or is making."""
    work: dict[str, Work]


class LoaderHost:
    """Serves chunks of the sources (or shares of sources) that it holds, and opens others on request."""

    def __init__(
        self,
        open_source: Callable[[str], OpenSource],
        sources: Collection[str],
        columns: Sequence[str],
        threads: Executor,
        *,
        owns_threads: bool = False,
    ) -> None:
        """`owns_threads`: shut `threads` down at `close`."""
        self._open_source = open_source
        self._columns = tuple(columns)
        self._threads = threads
        self._owns_threads = owns_threads
        self._arenas = Arenas(_MOST_IDLE_ARENAS)
        self._instance = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._closed = False
        self._sources: dict[str, OpenSource] = {}
        self._some_decode = False
        self._past: dict[str, tuple[Work, frozenset[BadRowKey]]] = {}  # of sources that were closed
        self._found_by: tuple[tuple[str, ...], Sequence[Find]] = (), ()
        for name in sources:
            self._open(name)

    def describe(self, source: str, chunk: int, keep_from: int = 0) -> ChunkFacts:
        return self._open(source).loader.describe(chunk, keep_from)

    def peek(self, source: str, chunk: int, keep_from: int = 0) -> ChunkFacts | None:
        """The facts of a chunk if that takes no waiting."""
        return self._open(source).loader.peek(chunk, keep_from)

    def prefetch(self, source: str, chunks: Sequence[int]) -> None:
        loader = self._open(source).loader
        for chunk in chunks:
            loader.prefetch(chunk)

    def count_loss(self, source: str, chunk: int, row: int, start: int, stop: int) -> LossCount:
        return self._open(source).loader.get(chunk).chunk.count_loss(row, start, stop)

    def origins(self, source: str, chunk: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        """The unit, and the row in it, that each of these rows was read from; row -1 where a transform lost track."""
        found = self._open(source).loader.get(chunk).chunk
        return [found.where(int(found.table_row[row])) for row in rows]

    def fetch(self, samples: Samples) -> Payload:
        """Return the payload of planned samples, in their order."""
        keep_all = bool(self._columns) or self._some_decode
        views = _TokenViews(self._finders(samples.source_names), self._open, samples, keep_all)
        images: dict[int, Sequence[NDArray[np.uint8]]] = {}
        ignored: set[int] = set()
        columns: list[tuple[NDArray[np.int64], Chunk, NDArray[np.int64]]] = []
        owners: list[str] = []  # which source and chunk each part of a column is of, for error messages
        if keep_all:
            rooms = ImageRooms(samples, self._arenas)
            for (source, number), places in _places_by_chunk(samples):
                of, hot = self._open(samples.source_names[source]), views.chunks[source, number]
                chunk = hot.chunk
                if of.decode is not None:
                    for decoded in self._decode(of, chunk, samples, places, rooms):
                        images[decoded.place] = decoded.images
                        hot.left -= len(decoded.images)
                        if decoded.is_bad:
                            ignored.add(decoded.place)
                columns.append((places, chunk, chunk.table_row[samples.row[places]]))
                owners.append(f"source {samples.source_names[source]!r} (chunk {number})")
        for source, number in [key for key, hot in views.chunks.items() if hot.left <= 0]:
            self._open(samples.source_names[source]).loader.release_if_empty(number)
        return Payload(
            tokens=views.tokens,
            following=views.following,
            loss_masks=views.masks if views.some_mask else None,
            images=[images.get(i, ()) for i in range(len(samples))] if images else None,
            columns=_columns(self._columns, columns, owners, len(samples)),
            ignored=frozenset(ignored),
        )

    def status_lines(self) -> list[str]:
        return [line for held in self._now().values() for line in held.loader.status_lines()]

    def buffer_use(self, sources: Sequence[str]) -> dict[str, BufferUse]:
        return {name: self._open(name).loader.buffer_use() for name in sources}

    def bad_rows(self) -> dict[str, frozenset[BadRowKey]]:
        """The rows of each source that were dropped as bad."""
        now = {name: held.bad_rows.dropped for name, held in self._now().items()}
        past = {name: rows for name, (_, rows) in self._past.items()}
        return {name: now.get(name, frozenset()) | past.get(name, frozenset()) for name in {**now, **past}}

    def status(self) -> HostStatus:
        now = self._now()
        work = {name: held.loader.work() for name, held in now.items()}
        for name, (before, _) in self._past.items():
            work[name] = work.get(name, Work()).plus(before)
        holding = {name: held.loader.chunks_held() for name, held in now.items()}
        return HostStatus(self._instance, os.getpid(), holding, work)

    def mirror(self, holding: Mapping[str, Sequence[int]]) -> None:
        """Hold the chunks that another host holds, as far as there is room: this one is its shadow."""
        self.keep(tuple(holding))
        for name, numbers in holding.items():
            self._open(name).loader.mirror(frozenset(numbers))

    def keep(self, sources: Collection[str]) -> None:
        """Close every other source, which frees its memory."""
        with self._lock:
            gone = {name: self._sources.pop(name) for name in list(self._sources) if name not in sources}
            self._found_by = (), ()
            for name, held in gone.items():
                work, rows = self._past.get(name, (Work(), frozenset[BadRowKey]()))
                self._past[name] = work.plus(held.loader.work()), rows | held.bad_rows.dropped
        for held in gone.values():
            held.loader.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.keep(())
        if self._owns_threads:
            self._threads.shutdown(wait=False)

    def _open(self, source: str) -> OpenSource:
        held = self._sources.get(source)
        if held is not None:
            return held
        with self._lock:
            if self._closed:
                raise ClosedError(f"the loader of source {source!r} is closed")
            if source not in self._sources:
                self._sources[source] = self._open_source(source)
                self._found_by = (), ()
                self._some_decode = self._some_decode or self._sources[source].decode is not None
            return self._sources[source]

    def _finders(self, names: tuple[str, ...]) -> Sequence[Find]:
        """For each of these sources, the function that finds a chunk in its buffer."""
        known, finders = self._found_by
        if known is not names and known != names:
            with self._lock:
                finders = [self._sources[name].loader.find if name in self._sources else _find_nothing for name in names]
                self._found_by = names, finders
        return finders

    def _now(self) -> dict[str, OpenSource]:
        return dict(self._sources)

    def _decode(
        self, held: OpenSource, chunk: Chunk, samples: Samples, places: NDArray[np.int64], rooms: ImageRooms
    ) -> Iterator[_Decoded]:
        """Decode the images of samples of one chunk. A row that cannot be decoded gets blank ones of the planned size."""
        column = chunk.table.column(held.decode.column)
        places = places[rooms.only[places] >= 0]
        rows = chunk.table_row[samples.row[places]].tolist()
        outs = [rooms.of(place) for place in places.tolist()]
        only = [number - 1 if number else None for number in rooms.only[places].tolist()]
        decode = held.decode.decode_row
        wanted = zip(rows, outs, only, strict=True)
        futures = [self._threads.submit(decode, column, *one) for one in wanted]
        for place, row, future in zip(places.tolist(), rows, futures, strict=True):
            try:
                images = future.result()
            except SourceError:
                raise  # the file is gone or was changed: not the fault of this row
            except DataError as error:
                if held.bad_decode is not None:
                    held.bad_decode(chunk, row, str(error))
                yield _Decoded(place, rooms.blank(place), is_bad=True)
            else:
                yield _Decoded(place, images)


@dataclass(frozen=True, slots=True)
class _Decoded:
    place: int
    images: Sequence[NDArray[np.uint8]]
    is_bad: bool = False


Find = Callable[[int], HotChunk | None]
"""Returns the chunk of a number if it is in the buffer."""

_NO_TOKENS = np.zeros(0, np.int32)
_MOST_IDLE_ARENAS = 2


class _TokenViews:
    """Views of the tokens of samples, and the chunks they are of: all chunks, or only those that are now delivered whole."""

    def __init__(
        self, finders: Sequence[Find], open_source: Callable[[str], OpenSource], samples: Samples, keep_all: bool
    ) -> None:
        self.chunks: dict[tuple[int, int], HotChunk] = {}
        self.tokens: list[NDArray[np.integer]] = []
        self.masks: list[NDArray[np.generic] | None] = []
        following: dict[int, int] = {}
        chunks, names, only = self.chunks, samples.source_names, samples.sizes.get(ONLY_IMAGE)
        tokens, masks = self.tokens, self.masks
        # A loop over samples: collation needs one view of each anyway, and with many sources a chunk has few of them.
        pieces = cast("Iterator[tuple[int, int, int, int, int]]", zip(*samples.table[:5].tolist(), strict=True))
        for source, number, row, start, stop in pieces:
            one = finders[source](number)
            if one is None:
                one = chunks.get((source, number)) or open_source(names[source]).loader.get(number)
                chunks[source, number] = one  # there may be no room for it in the buffer
            values = one.values
            if values is None:
                one.left -= only is None or only[len(tokens)] <= 0
                tokens.append(_NO_TOKENS)
                chunks[source, number] = one
                continue
            try:
                begin, document_end = one.begin[row], one.document_end[row]
            except IndexError:
                raise DataError(_changed_row(names[source], number, row, "there is no such row")) from None
            end = begin + stop
            if end > document_end:
                raise DataError(_changed_row(names[source], number, row, f"it ends before token {stop}"))
            tokens.append(values[begin + start : end])
            one.left = left = one.left - stop + start
            if keep_all or left <= 0:
                chunks[source, number] = one
            goes_on = end < document_end
            if goes_on:
                following[len(tokens) - 1] = values.item(end)
            if one.mask is not None:
                masks += [None] * (len(tokens) - 1 - len(masks))
                masks.append(_mask(one.mask, begin + start, end, goes_on))
        self.following = np.full(len(samples), NO_LOSS)
        for place, token in following.items():
            self.following[place] = token
        self.some_mask = bool(masks)
        masks += [None] * (len(samples) - len(masks))


def _changed_row(source: str, chunk: int, row: int, why: str) -> str:
    return (
        f"row {row} of chunk {chunk} of source {source!r} has changed since it was planned: {why}. The source returns other "
        "rows than before, or the run was resumed from an edited state; restore the data, or start from a checkpoint"
    )


def _find_nothing(_number: int) -> None:
    return None


def _mask(mask: NDArray[np.generic], begin: int, end: int, goes_on: bool) -> NDArray[np.generic]:
    """One entry per token, and one for the token after them; 0 where there is none."""
    return mask[begin : end + 1] if goes_on else np.append(mask[begin:end], np.zeros(1, mask.dtype))


def _places_by_chunk(samples: Samples) -> Iterator[tuple[tuple[int, int], NDArray[np.int64]]]:
    """Yields ((source, chunk), places of its samples) for each chunk that the samples come from."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(samples.source.tolist(), samples.chunk.tolist(), strict=True)):
        places.setdefault(key, []).append(place)
    return ((key, np.array(found)) for key, found in places.items())


def _columns(
    names: Sequence[str],
    parts: list[tuple[NDArray[np.int64], Chunk, NDArray[np.int64]]],
    owners: Sequence[str],
    n: int,
) -> dict[str, pa.Array[Any]]:
    if not names or not parts:
        return {}
    places = np.concatenate([part[0] for part in parts])
    back = np.empty(n, np.int64)
    back[places] = np.arange(n)
    found: dict[str, pa.Array[Any]] = {}
    for name in names:
        arrays: list[pa.Array[Any]] = [
            combine_chunks(compact(take_rows(chunk.table.select([name]), rows)).column(0))
            if name in chunk.table.column_names
            else pa.nulls(len(rows))
            for _, chunk, rows in parts
        ]
        found[name] = merge_arrays(name, arrays, owners).take(back)
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
