"""One place where Source Loaders live together, so that many small sources cost one process and one ask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from overlord.data.bad_rows import BadRowLog
from overlord.data.chunk import Chunk
from overlord.data.payload import Payload
from overlord.data.views import joined, take_rows
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
            for (source, number), places in _places_by_chunk(samples):
                held, chunk = self._held[samples.source_names[source]], given.chunks[source, number]
                if held.decode is not None:
                    for decoded in self._decode(held, chunk, samples, places):
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

    def _decode(self, held: Held, chunk: Chunk, samples: Samples, places: NDArray[np.int64]) -> Iterator[_Decoded]:
        """The images of samples of one chunk. A row that cannot be decoded gets blank ones of the planned size."""
        column = chunk.table.column(held.decode.column)
        rows = chunk.table_row[samples.row[places]].tolist()
        futures = [self._threads.submit(held.decode.decode_row, column, row) for row in rows]
        for place, row, future in zip(places.tolist(), rows, futures, strict=True):
            try:
                # What no thread has begun is done here: the threads may all be waiting for storage.
                images = held.decode.decode_row(column, row) if future.cancel() else future.result()
            except DataError as error:
                if held.bad_decode is not None:
                    held.bad_decode(chunk, row, str(error))
                shape = (int(samples.sizes["image_height"][place]), int(samples.sizes["image_width"][place]), 3)
                blank = [np.zeros(shape, np.uint8)] * int(samples.sizes["num_images"][place])
                yield _Decoded(place, blank, is_bad=True)
            else:
                yield _Decoded(place, images)


@dataclass(frozen=True, slots=True)
class _Decoded:
    place: int
    images: Sequence[NDArray[np.uint8]]
    is_bad: bool = False


_NO_TOKENS = np.zeros(0, np.int32)


class _Given:
    """The token views of samples, and the chunks they are of."""

    def __init__(self, held: Mapping[str, Held], samples: Samples) -> None:
        self.chunks: dict[tuple[int, int], Chunk] = {}
        self.amounts: dict[tuple[int, int], int] = {}
        self.tokens: list[NDArray[np.integer]] = []
        self.following = np.full(len(samples), -1, np.int64)
        self.masks: list[NDArray[np.integer] | None] = []
        self.some_mask = False
        columns = (samples.source, samples.chunk, samples.row, samples.start, samples.stop)
        # A loop over samples: collation needs one view of each anyway, and with many sources a chunk has few of them.
        for place, (source, number, row, start, stop) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            key = (source, number)
            chunk = self.chunks.get(key)
            if chunk is None:
                chunk = self.chunks[key] = held[samples.source_names[source]].loader.chunk(number)
                self.amounts[key] = 0
            if chunk.values is None:
                self.tokens.append(_NO_TOKENS)
                self.masks.append(None)
                self.amounts[key] += 1
                continue
            base = chunk.begin.item(row)
            end = base + stop
            self.tokens.append(chunk.values[base + start : end])
            self.amounts[key] += stop - start
            goes_on = end < chunk.document_end.item(row)
            if goes_on:
                self.following[place] = chunk.values[end]
            if chunk.mask is None:
                self.masks.append(None)
            else:
                mask = chunk.mask[base + start : end + 1]
                self.masks.append(mask if goes_on else np.append(mask[: stop - start], 0))
                self.some_mask = True


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
        types = [chunk.table.schema.field(name).type for _, chunk, _ in parts if name in chunk.table.column_names]
        kind = types[0] if types else pa.null()
        arrays = [
            joined(take_rows(chunk.table.select([name]), rows).column(0))
            if name in chunk.table.column_names
            else pa.nulls(len(rows), kind)
            for _, chunk, rows in parts
        ]
        found[name] = pa.concat_arrays(arrays).take(back)
    return found
