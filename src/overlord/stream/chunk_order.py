"""The order of a source: which units make chunk k, and the order of its rows. Pure functions of (seed, source, k).

Permutations come from sorting the raw output of a counter-based generator, whose bits are the same in every version of
numpy. A library shuffle might change its algorithm.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, zip_longest
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.declare.source import Unit
    from overlord.stream.facts import Ints


CHUNK_BYTES = 16 << 20
JOB_BYTES = 128 << 20
"""Decoded, of one chunk of every source of a job: what is read before the first step, and the least that is in memory."""
LEAST_CHUNKS = 4
"""In an epoch, so that the next chunk can be read ahead, and several loaders have something to do."""


def chunks_per_epoch(num_units: int, window: int) -> int:
    """The number of chunks of `window` units in an epoch; the last may be smaller."""
    return -(-num_units // window)


def default_window(unit_bytes: Sequence[int], *, buffer_bytes: int, num_sources: int) -> int:
    """Units per chunk of a shuffled source: as many as take about 16 MiB, decoded. One where some size is not known."""
    if min(unit_bytes) <= 0:
        return 1
    goal = min(CHUNK_BYTES, buffer_bytes // 8, JOB_BYTES // num_sources)
    window = min(goal * len(unit_bytes) // sum(unit_bytes), len(unit_bytes) // LEAST_CHUNKS)
    largest = accumulate(sorted(unit_bytes, reverse=True)[: max(window, 0)])
    window = max(1, sum(num_bytes <= 2 * goal for num_bytes in largest))
    return -(-len(unit_bytes) // chunks_per_epoch(len(unit_bytes), window))  # so that the last chunk is not much smaller


PARTS_OF_CHUNK = 4
LEAST_PART_BYTES = 1 << 20
MOST_PARTS = 64


def default_part_bytes(unit_bytes: Sequence[int], *, buffer_bytes: int, num_sources: int) -> int:
    """About how many bytes, decoded, a part of a large unit has, where rows are transformed: a quarter of a chunk, 4 MiB.
    0 where no unit is cut: none is large, some size is not known, or a unit takes more than half of the buffer."""
    if min(unit_bytes) <= 0 or max(unit_bytes) > buffer_bytes // 2:
        return 0
    goal = min(CHUNK_BYTES, buffer_bytes // 8, JOB_BYTES // num_sources)
    part_bytes = max(goal // PARTS_OF_CHUNK, LEAST_PART_BYTES)
    return part_bytes if count_parts(max(unit_bytes), part_bytes) > 1 else 0


def count_parts(unit_bytes: int, part_bytes: int) -> int:
    """How many parts a unit is cut into."""
    return 1 if unit_bytes <= 2 * part_bytes else min(-(-unit_bytes // part_bytes), MOST_PARTS)


MOST_LANES = 8
"""Runs of units that are read side by side."""


@dataclass(frozen=True, slots=True)
class UnitRuns:
    """The units of a source, as far as their order depends on them."""

    num_units: int
    lengths: tuple[int, ...] | None = None
    """The lengths of runs, in which each unit follows the one before it; None where every unit stands by itself."""
    num_lanes: int = MOST_LANES
    """How many runs are read side by side."""

    @staticmethod
    def of(units: Sequence[Unit]) -> UnitRuns:
        begins: list[int] = []
        has_parts = False
        for i, unit in enumerate(units):
            has_parts = has_parts or unit.part is not None
            if not (unit.follows and i):
                begins.append(i)
        if len(begins) == len(units):
            return UnitRuns(len(units))
        lengths = tuple(stop - start for start, stop in pairwise([*begins, len(units)]))
        # All rows of a unit are in memory while its parts are used, so they are used one unit after the other.
        return UnitRuns(len(units), lengths, 1 if has_parts else MOST_LANES)


class RunTurns:
    """Which run each chunk of one unit belongs to, where one run is read after the other, counted through all epochs. So a
    loader host gets all chunks of a run, and reads what they share once."""

    def __init__(self, seed: int, source: str, runs: UnitRuns, *, shuffle: bool) -> None:
        self._of = seed, source, runs, shuffle
        self._num_runs = 0 if runs.lengths is None else len(runs.lengths)
        self._ends: dict[int, Ints] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_turns, self._of

    def turn(self, chunk: int) -> int:
        """The number of a chunk's run."""
        epoch, index = divmod(chunk, self._of[2].num_units)
        return epoch * self._num_runs + int(self._ends_of(epoch).searchsorted(index, side="right"))

    def turns(self, chunks: Ints) -> Ints:
        """The same of many chunks."""
        known = {chunk: self.turn(chunk) for chunk in np.unique(chunks).tolist()}
        return np.array([known[chunk] for chunk in chunks.tolist()], np.int64)

    def last_chunk(self, chunk: int) -> int:
        """The last chunk of the same run."""
        epoch, index = divmod(chunk, self._of[2].num_units)
        ends = self._ends_of(epoch)
        return chunk - index + int(ends[ends.searchsorted(index, side="right")]) - 1

    def _ends_of(self, epoch: int) -> Ints:
        """The end of each run of an epoch, in their order."""
        found = self._ends.get(epoch)
        if found is None:
            seed, source, runs, shuffle = self._of
            lengths = np.array(runs.lengths)
            order = _permutation(self._num_runs, "units", seed, source, epoch) if shuffle else np.arange(self._num_runs)
            found = np.cumsum(lengths[order])
            self._ends = {**dict(list(self._ends.items())[-2:]), epoch: found}  # replaced whole: other threads read it
        return found


def _restore_turns(seed: int, source: str, runs: UnitRuns, shuffle: bool) -> RunTurns:
    return RunTurns(seed, source, runs, shuffle=shuffle)


def units_of_chunk(seed: int, source: str, units: UnitRuns, *, window: int, shuffle: bool, chunk: int) -> Ints:
    """The numbers of the units that make a chunk, in reading order."""
    epoch, index = divmod(chunk, chunks_per_epoch(units.num_units, window))
    order = _units_of_epoch(seed, source, units, epoch) if shuffle else np.arange(units.num_units)
    return order[index * window : (index + 1) * window]


def chunk_of_unit(seed: int, source: str, units: UnitRuns, *, window: int, shuffle: bool, unit: int, epoch: int) -> int:
    """The chunk that has a unit in an epoch: the inverse of `units_of_chunk`."""
    order = _units_of_epoch(seed, source, units, epoch) if shuffle else np.arange(units.num_units)
    return epoch * chunks_per_epoch(units.num_units, window) + int(np.flatnonzero(order == unit)[0]) // window


def row_order(seed: int, source: str, chunk: int, num_rows: int) -> Ints:
    """The order of a shuffled chunk's rows: entry r is the row, numbered in reading order, that comes r-th."""
    return _permutation(num_rows, "rows", seed, source, chunk)


@lru_cache(maxsize=1024)
def _units_of_epoch(seed: int, source: str, units: UnitRuns, epoch: int) -> Ints:
    if units.lengths is None:
        order = _permutation(units.num_units, "units", seed, source, epoch)
    else:
        order = _in_lanes(_permutation(len(units.lengths), "units", seed, source, epoch), units.lengths, units.num_lanes)
    order.setflags(write=False)
    return order


def _in_lanes(order: Ints, lengths: tuple[int, ...], num_lanes: int) -> Ints:
    """The units of runs in this order, from a few runs in turn. So neighbours in the stream are of different files, and yet
    each file is read from its beginning to its end, with few of them open at a time."""
    ends = list(accumulate(lengths))
    lanes: list[list[int]] = [[] for _ in range(min(num_lanes, len(lengths)))]
    runs: list[int] = order.tolist()
    for run in runs:
        min(lanes, key=len).extend(range(ends[run] - lengths[run], ends[run]))
    turns = zip_longest(*lanes, fillvalue=-1)
    return np.array([unit for turn in turns for unit in turn if unit >= 0])


def _permutation(n: int, purpose: str, seed: int, source: str, number: int) -> Ints:
    digest = hashlib.blake2b(f"{purpose}\0{seed}\0{source}\0{number}".encode(), digest_size=16).digest()
    return _raw_bits(np.frombuffer(digest, np.uint64), n).argsort(kind="stable")


_ZEROS = np.zeros(4, np.uint64)
_idle: deque[np.random.Philox] = deque(maxlen=16)


def _raw_bits(key: NDArray[np.uint64], n: int) -> NDArray[np.uint64]:
    """The result of `Philox(key=key).random_raw(n)`, from a generator that is reused: a new one would first read entropy
    from the system. Threads may share the deque, because each of its operations is atomic."""
    try:
        generator = _idle.pop()
    except IndexError:
        generator = np.random.Philox(0)
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": _ZEROS, "key": key},
        "buffer": _ZEROS,
        "buffer_pos": 4,
        "has_uint32": 0,
        "uinteger": 0,
    }
    raw = generator.random_raw(n)
    _idle.append(generator)
    return raw
