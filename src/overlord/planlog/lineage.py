"""The lineage of a run: which documents made which step, in blocks of a few steps, written as steps are drawn.

A step's samples are a function of the facts of every chunk before it, so drawing a late step again means reading the data
again. These blocks make that unnecessary: a block has the samples of its steps as they were drawn, with the unit and row
that each was read from. The arrangement is not in them: it is a function of the samples, the mesh and the learned costs.

A block is columns, most of them in the order of sources: within a source the chunks and rows of consecutive draws are
consecutive numbers, whose differences compress to next to nothing. A document takes about four bytes. Every now and then a
block also has the progress after it, from which a run can go on drawing, and by which a document is found.
"""

from __future__ import annotations

import logging
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa

from overlord.errors import OverlordError, StateError
from overlord.runtime.threads import StealingFuture, Threads
from overlord.stream.facts import ImageSizes, Ints, Samples
from overlord.stream.membership import DrawnStep
from overlord.stream.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from overlord.planlog.lineage_files import LineageFiles
    from overlord.stream.facts import RowOrigins

_log = logging.getLogger("overlord.lineage")

VERSION = 1
_SIZES = struct.Struct("<IIII")  # of the description and of the columns: compressed, and as they are
_STEPS_AFTER = 64  # between two blocks with a progress
_BLOCK_STEPS = 16
_BLOCK_SAMPLES = 16_384
_CARRIED_STEPS = 32  # after the start of a planner: later, nothing comes that was carried over
_MOST_WAITING = 16  # blocks that wait for slow storage
UNKNOWN = -2
"""The unit of a sample whose chunk was described before the planner was made; row -1: a transform lost the lineage."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step as it was drawn, and where its samples were read."""

    drawn: DrawnStep
    unit: Ints
    """The number of each sample's unit among those of its source, or UNKNOWN."""
    unit_row: Ints
    """The row within the unit; -1 where it is not known."""
    token: Ints
    """The token of its document that each sample's row begins with: more than 0 for pieces of documents that were split."""
    costs: Any = None
    """The value of the decision about learned costs that the step was arranged by; None where there was none."""


@dataclass(frozen=True, slots=True)
class LineageBlock:
    """Consecutive steps, and the progress after the last of them where it was recorded."""

    first: int
    names: tuple[str, ...]
    counts: Ints
    """The number of samples of each step."""
    samples: Samples
    """Of all steps. Columns of sizes that a step does not have are 0 there."""
    unit: Ints
    unit_row: Ints
    token: Ints
    rows: Ints | None
    weights: NDArray[np.float64]
    """Of each step."""
    costs: tuple[Any, ...]
    size_names: tuple[tuple[str, ...], ...]
    has_images: NDArray[np.bool_]

    @property
    def end(self) -> int:
        return self.first + len(self.counts)

    def step(self, number: int) -> RecordedStep:
        at = number - self.first
        begin = int(self.counts[:at].sum())
        of_step = slice(begin, begin + int(self.counts[at]))
        samples = self.samples.take(of_step)
        sizes = {name: samples.sizes[name] for name in self.size_names[at]}
        samples = Samples(self.names, samples.table, sizes, samples.images if self.has_images[at] else None)
        rows = None if self.rows is None else self.rows[of_step]
        drawn = DrawnStep(number, samples, rows, self.weights[at], _no_progress)
        return RecordedStep(drawn, self.unit[of_step], self.unit_row[of_step], self.token[of_step], self.costs[at])

    def step_of(self, sample: int) -> int:
        """The step of a sample, by its place among the samples of the block."""
        return self.first + int(np.searchsorted(self.counts.cumsum(), sample, side="right"))


def _no_progress() -> Progress:
    raise NotImplementedError("a recorded step has no progress of its own")


Origins = Callable[[Samples], tuple[Ints, Ints, Ints]]
"""Returns the unit of each sample, the row in it, and the token of its document that the row begins with."""


def encode_block(drawn: Sequence[DrawnStep], costs: Sequence[Any], origins: Origins, after: Progress | None) -> bytes:
    """Encode consecutive steps. `costs` are those that each was arranged by; `origins` returns where samples were read."""
    samples = Samples.concatenate([each.samples for each in drawn])
    unit, unit_row, token = origins(samples)
    by_source = samples.source.argsort(kind="stable")
    source, (_, chunk, row, start, stop, tokens, loss) = samples.source[by_source], samples.table[:, by_source]
    begins = np.flatnonzero(np.diff(source, prepend=-1))
    weights = [each.weights for each in drawn]
    distinct = [i for i, each in enumerate(weights) if i == 0 or each is not weights[i - 1]]
    columns: dict[str, Any] = {
        "counts": np.array([len(each.samples) for each in drawn]),
        "source": samples.source,
        "chunk": _differences(chunk, begins),
        "row": _differences(row, begins),
        "start": start,
        "stop": stop - start - tokens,
        "tokens": tokens,
        "loss": tokens - loss,
        "unit": unit[by_source],
        "unit_row": unit_row[by_source],
        "token": token[by_source],
        "weights": np.concatenate([weights[i] for i in distinct]),
        "weights_of": np.cumsum([i in distinct for i in range(len(weights))]) - 1,
        "has_images": np.array([each.samples.images is not None for each in drawn], np.int8),
    }
    columns |= {f"size:{name}": column[by_source] for name, column in samples.sizes.items()}
    if drawn[0].rows is not None:
        columns["rows"] = np.concatenate([each.rows if each.rows is not None else np.zeros(0, np.int64) for each in drawn])
    if samples.images is not None:
        images = samples.images.compact()
        columns |= {"image:count": images.count, "image:height": images.height, "image:width": images.width}
    arrays = {name: _narrow(np.asarray(column)) for name, column in columns.items()}
    size_names = [list(each.samples.sizes) for each in drawn]
    description = {
        "version": VERSION,
        "step": drawn[0].number,
        "names": samples.source_names,
        "columns": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
        "sizes": [size_names[0]] if all(names == size_names[0] for names in size_names) else size_names,
        "costs": [costs[0]] if all(each is costs[0] for each in costs) else list(costs),
    }
    if after is not None:
        description["after"] = after.to_plain()
    plain, data = orjson.dumps(description), b"".join(array.tobytes() for array in arrays.values())
    packed, packed_data = _compress(plain), _compress(data)
    return _SIZES.pack(len(packed), len(plain), len(packed_data), len(data)) + packed + packed_data


def describe_block(body: bytes, name: str) -> dict[str, Any]:
    """What a block says of itself, without its columns. `name`: where it is, for errors."""
    try:
        packed, plain, _, _ = _SIZES.unpack_from(body)
        found: dict[str, Any] = orjson.loads(_decompress(body[_SIZES.size : _SIZES.size + packed], plain))
    except (struct.error, OSError, ValueError) as error:
        raise StateError(f"{name} is damaged: {error}; delete it, and its steps are drawn again") from error
    if found.get("version") != VERSION:
        raise StateError(f"{name} has version {found.get('version')!r}; this release reads version {VERSION}")
    return found


def decode_block(body: bytes, name: str) -> LineageBlock:
    description = describe_block(body, name)
    packed, _, packed_data, num_bytes = _SIZES.unpack_from(body)
    begin = _SIZES.size + packed
    try:
        data = _decompress(body[begin : begin + packed_data], num_bytes)
        columns: dict[str, Any] = {}
        offset = 0
        for column, kind, length in description["columns"]:
            columns[column] = np.frombuffer(data, kind, length, offset)
            offset += columns[column].nbytes
        return _block_of(description, columns)
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise StateError(f"{name} is damaged: {error}; delete it, and its steps are drawn again") from error


def progress_after(description: Mapping[str, Any]) -> Progress | None:
    """The progress after a block, where it has one."""
    after = description.get("after")
    return None if after is None else Progress.from_plain(after)


def _block_of(description: Mapping[str, Any], columns: Mapping[str, Any]) -> LineageBlock:
    names, source = tuple(description["names"]), columns["source"].astype(np.int64)
    by_source = source.argsort(kind="stable")
    begins = np.flatnonzero(np.diff(source[by_source], prepend=-1))

    def in_drawn_order(values: Ints) -> Ints:
        placed = np.empty(len(values), np.int64)
        placed[by_source] = values
        return placed

    start, tokens = columns["start"].astype(np.int64), columns["tokens"].astype(np.int64)
    table = [
        _sums(columns["chunk"], begins),
        _sums(columns["row"], begins),
        start,
        start + tokens + columns["stop"],
        tokens,
        tokens - columns["loss"],
    ]
    sizes = {name[5:]: in_drawn_order(column) for name, column in columns.items() if name.startswith("size:")}
    images = None
    if "image:count" in columns:
        count = columns["image:count"].astype(np.int64)
        height, width = columns["image:height"].astype(np.int64), columns["image:width"].astype(np.int64)
        images = ImageSizes(np.cumsum(count) - count, count, height, width)
    num_steps = len(columns["counts"])
    weights = columns["weights"].reshape(-1, len(names))[columns["weights_of"]]
    size_names, costs = description["sizes"], description["costs"]
    return LineageBlock(
        first=description["step"],
        names=names,
        counts=columns["counts"].astype(np.int64),
        samples=Samples.of_columns(names, source, *map(in_drawn_order, table), sizes=sizes, images=images),
        unit=in_drawn_order(columns["unit"]),
        unit_row=in_drawn_order(columns["unit_row"]),
        token=in_drawn_order(columns["token"]),
        rows=columns["rows"].astype(np.int64) if "rows" in columns else None,
        weights=weights,
        costs=tuple(costs if len(costs) == num_steps else costs * num_steps),
        size_names=tuple(map(tuple, size_names if len(size_names) == num_steps else size_names * num_steps)),
        has_images=columns["has_images"].astype(bool),
    )


def _differences(values: Ints, begins: Ints) -> Ints:
    """The difference of each value to the one before it; of the first of each source, the value."""
    differences = np.diff(values, prepend=0)
    differences[begins] = values[begins]
    return differences


def _sums(differences: NDArray[np.integer], begins: Ints) -> Ints:
    """The inverse of `_differences`."""
    sums = differences.astype(np.int64).cumsum()
    before = np.where(begins > 0, sums[begins - 1], 0)
    return sums - np.repeat(before, np.diff(begins, append=len(sums)))


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """The column in the smallest type of integers that holds it."""
    if column.dtype.kind == "f" or len(column) == 0:
        return column
    low, high = int(column.min()), int(column.max())
    return column.astype(np.promote_types(np.min_scalar_type(low), np.min_scalar_type(high)), copy=False)


def _compress(data: bytes) -> bytes:
    return pa.Codec("zstd", compression_level=3).compress(data, asbytes=True)


def _decompress(data: bytes, num_bytes: int) -> bytes:
    return pa.Codec("zstd").decompress(data, decompressed_size=num_bytes, asbytes=True)


def checksum(body: bytes) -> int:
    return zlib.crc32(body)


@dataclass(slots=True)
class LineageWriter:
    """Writes the lineage of one planner. The caller holds the planner's lock.

    Storage that fails costs nothing but the lineage: those steps are drawn again when somebody asks for them.
    """

    files: LineageFiles
    writer: int
    """The number of this writer: from its first step on, what earlier writers wrote of the same steps does not count."""
    look_up: Callable[[int, int], RowOrigins | None] | None = None
    """Returns the origins of a chunk that was drawn from before this planner was made: a part of it was carried over."""
    _steps: list[DrawnStep] = field(default_factory=list)
    _costs: list[Any] = field(default_factory=list)
    _num_samples: int = 0
    _num_added: int = 0
    _next: int | None = None
    _since_after: int = _STEPS_AFTER
    _origins: dict[tuple[int, int], RowOrigins] = field(default_factory=dict)
    _threads: Threads | None = None
    _waiting: list[StealingFuture[None]] = field(default_factory=list)
    _is_broken: bool = False

    def note_origins(self, source: int, chunk: int, origins: RowOrigins | None) -> None:
        """Remember where the rows of a chunk were read, for the steps that are drawn from it."""
        if origins is not None:
            self._origins[source, chunk] = origins

    def add(self, drawn: DrawnStep, costs: Any = None) -> None:
        """Record a step that was drawn. Steps that are drawn again are known already."""
        if self._is_broken or (self._next is not None and drawn.number < self._next):
            return
        if self._next is not None and drawn.number > self._next:  # never, but a gap must not be taken for steps
            self.flush()
        if self._num_added < _CARRIED_STEPS:  # while the loaders of what was carried over can be asked
            self._num_added += 1
            for source, chunk in {*zip(drawn.samples.source.tolist(), drawn.samples.chunk.tolist(), strict=True)}:
                self._origins_of(source, chunk)
        self._steps.append(drawn)
        self._costs.append(costs)
        self._num_samples += len(drawn.samples)
        self._next = drawn.number + 1
        self._since_after += 1
        most = _STEPS_AFTER if not self.files.writes_at_once else _BLOCK_STEPS
        if self._num_samples >= _BLOCK_SAMPLES or len(self._steps) >= most:
            self.flush()

    def flush(self, *, is_last: bool = False) -> None:
        """Write the steps since the last block."""
        if not self._steps or self._is_broken:
            return
        steps, costs, after = self._steps, self._costs, None
        self._steps, self._costs, self._num_samples = [], [], 0
        if is_last or self._since_after >= _STEPS_AFTER:
            after = steps[-1].after()
            self._since_after = 0
        body = encode_block(steps, costs, self._read_from, after)
        if after is not None:
            self._forget_before(after)
        self._write(steps[0].number, len(steps), body, has_after=after is not None)

    def close(self) -> None:
        self.flush(is_last=True)
        for call in self._waiting:
            call.result()
        if self._threads is not None:
            self._threads.shutdown()

    def _write(self, first: int, count: int, body: bytes, *, has_after: bool) -> None:
        if self.files.writes_at_once:
            self._append(first, count, body, has_after)
            return
        self._waiting = [call for call in self._waiting if not call.done()]
        if len(self._waiting) >= _MOST_WAITING:
            _log.warning("the lineage of steps %d to %d is left out: %s is slow", first, first + count - 1, self.files.place)
            return
        self._threads = self._threads or Threads(1, "overlord-lineage")
        self._waiting.append(self._threads.submit(lambda: self._append(first, count, body, has_after)))

    def _append(self, first: int, count: int, body: bytes, has_after: bool) -> None:
        if self._is_broken:
            return
        try:
            self.files.append(self.writer, first, count, body, has_after=has_after)
        except (OSError, OverlordError) as error:
            self._is_broken = True
            _log.warning(
                "the lineage of this run is not written from step %d on: %s: %s. The run goes on; `overlord trace` draws "
                "later steps again",
                first,
                self.files.place,
                error,
            )

    def _read_from(self, samples: Samples) -> tuple[Ints, Ints, Ints]:
        """The unit of every sample, the row in it, and the token of its document that the row begins with."""
        unit, unit_row, token = np.full(len(samples), UNKNOWN), np.full(len(samples), -1), np.zeros(len(samples), np.int64)
        keys = samples.source << 40 | samples.chunk
        order = keys.argsort(kind="stable")
        begins = np.flatnonzero(np.diff(keys[order], prepend=-1)).tolist()
        for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
            places = order[begin:end]
            origins = self._origins_of(samples.source.item(places[0]), samples.chunk.item(places[0]))
            if origins is not None:
                rows = samples.row[places]
                unit[places], unit_row[places] = origins.unit(rows), origins.row[rows]
                if origins.token is not None:
                    token[places] = origins.token[rows]
        return unit, unit_row, token

    def _origins_of(self, source: int, chunk: int) -> RowOrigins | None:
        if (source, chunk) not in self._origins and self.look_up is not None:
            try:
                self.note_origins(source, chunk, self.look_up(source, chunk))
            except OverlordError as error:  # whoever builds the step will tell
                _log.info("where the rows of chunk %d of source %d were read is not known: %s", chunk, source, error)
        return self._origins.get((source, chunk))

    def _forget_before(self, after: Progress) -> None:
        """Forget chunks that no later step is drawn from."""
        oldest = after.chunk.copy()
        np.minimum.at(oldest, after.carried.source, after.carried.chunk)
        first: list[int] = oldest.tolist()
        self._origins = {key: origins for key, origins in self._origins.items() if key[1] >= first[key[0]]}
