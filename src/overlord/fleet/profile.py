"""Measures the cost of a chunk of each source by making a few, within limits of time and bytes, one source after the other.

A source that fails is reported with its error and does not stop the others.
"""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

import pyarrow as pa

from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.errors import DataError, SpecError, WaitTimeoutError
from overlord.loaders.model import Profile
from overlord.runtime.memory import rss_bytes
from overlord.runtime.threads import Threads, cpu_time
from overlord.stream.chunk_order import chunks_per_epoch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from overlord.chunks.chunk import Chunk
    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit

_ROWS_DECODED = 16  # enough to estimate the cost of decoding the images of a chunk
_SLOW_START = 2.0  # a first chunk that is this many times slower than any later one includes opening the source


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of profiling one source, which ends at the first that is reached."""

    num_chunks: int = 3
    seconds: float = 10.0
    """A source that has made no chunk by then has failed."""
    num_bytes: int = 1 << 30
    """Bytes of decoded chunks."""
    is_alone: bool = False
    """Nothing else runs in this process, so its CPU time is that of the source: with the threads that a transform starts."""

    def __post_init__(self) -> None:
        if self.num_chunks < 1:
            raise SpecError(f"a profile needs at least 1 chunk, got num_chunks={self.num_chunks}")
        if not self.seconds > 0:
            raise SpecError(f"profiling needs some time, got seconds={self.seconds}")
        if self.num_bytes < 1:
            raise SpecError(f"profiling needs some bytes, got num_bytes={self.num_bytes}")


@dataclass(frozen=True, slots=True)
class SourceProfiles:
    """The profiles of the sources that could be profiled, and the errors of the others."""

    profiles: Mapping[str, Profile]
    failed: Mapping[str, Exception]


def profile_sources(
    job: Job,
    units: Mapping[str, Sequence[Unit]],
    effort: Effort | None = None,
    begin: Callable[[str], None] | None = None,
) -> SourceProfiles:
    """Profile each source in `units` by making its first chunks. `begin` is called with the name of each source first."""
    profiles: dict[str, Profile] = {}
    failed: dict[str, Exception] = {}
    abandoned: list[Threads] = []
    effort = effort or Effort()
    for name, listed in units.items():
        if begin is not None:
            begin(name)
        # In its own thread: storage that does not answer must not block the other sources. Such a thread is abandoned.
        thread = Threads(1, f"overlord-profile-{name}")
        is_alone = effort.is_alone and all(other.join(0.0) for other in abandoned)
        try:
            profiles[name] = _profile_source(name, job, listed, replace(effort, is_alone=is_alone), thread)
        except Exception as error:  # noqa: BLE001 - a user's source and transforms may raise anything
            failed[name] = error
        finally:
            thread.shutdown(wait=False)
            abandoned.append(thread)
    return SourceProfiles(profiles, failed)


def _profile_source(name: str, job: Job, units: Sequence[Unit], effort: Effort, thread: Threads) -> Profile:
    source = job.sources[name]
    maker = _maker(name, job, units)
    made: list[_ChunkCost] = []
    clock = time.process_time if effort.is_alone else cpu_time
    ends = time.monotonic() + effort.seconds
    try:
        for number in range(chunks_per_epoch(len(units), source.units_per_chunk)):
            future = thread.submit(_make_and_measure, maker, number, source, clock)
            found = _wait_for(future, ends - time.monotonic())
            if found is None:
                break
            made.append(found)
            # More chunks than that only if filters dropped every row so far, which leaves nothing to measure.
            if len(made) >= effort.num_chunks and any(chunk.rows for chunk in made):
                break
            if sum(chunk.num_bytes for chunk in made) >= effort.num_bytes or time.monotonic() >= ends:
                break
    finally:
        maker.close()
    if not made:
        raise WaitTimeoutError(
            f"source {name!r} made no chunk within {effort.seconds:g} s; give profiling more time, or write smaller units"
        )
    if not sum(chunk.rows for chunk in made):
        raise DataError(f"the first {len(made)} chunk(s) of source {name!r} have no usable row")
    return _mean_profile(name, source, units, made)


def _maker(name: str, job: Job, units: Sequence[Unit]) -> ChunkMaker:
    source = job.sources[name]
    policy = source.bad_rows
    if policy.policy == "quarantine":
        policy = replace(policy, policy="skip", path=None)  # profiling must not quarantine rows
    # Without worker processes: transforms run in this process, where their CPU time can be measured.
    return ChunkMaker(name, source, units, seed=job.seed, batch=job.batch, bad_rows=BadRowLog(name, policy))


@dataclass(frozen=True, slots=True)
class _ChunkCost:
    """The measured cost of making one chunk."""

    seconds: float
    cpu_s: float
    rows: int
    tokens: int
    num_bytes: int
    expected_bytes: int
    grown_bytes: int
    """Growth of the process, without the chunk itself."""


def _make_and_measure(maker: ChunkMaker, number: int, source: Source, cpu_clock: Callable[[], float]) -> _ChunkCost:
    pa.default_memory_pool().release_unused()
    rss = rss_bytes()
    began, began_cpu = time.monotonic(), cpu_clock()
    chunk = maker.make(number)
    seconds, cpu_s = time.monotonic() - began, cpu_clock() - began_cpu
    pa.default_memory_pool().release_unused()
    grown = rss_bytes() - rss - chunk.num_bytes
    decoding_s = _decoding_s(chunk, source)
    return _ChunkCost(
        seconds=seconds + decoding_s,
        cpu_s=cpu_s + decoding_s,
        rows=chunk.facts.num_rows,
        tokens=int(chunk.facts.tokens.sum()),
        num_bytes=chunk.num_bytes,
        expected_bytes=maker.expected_bytes(number),
        grown_bytes=max(grown, 0),
    )


def _decoding_s(chunk: Chunk, source: Source) -> float:
    """Seconds to decode all rows of a chunk, as a run does, estimated from a few rows."""
    rows = chunk.table_row[:_ROWS_DECODED].tolist()
    if source.decode is None or not rows:
        return 0.0
    column = chunk.table.column(source.decode.column)
    began = time.thread_time()
    for row in rows:
        try:
            source.decode.decode_row(column, row)
        except DataError:
            continue  # a run delivers a blank image and counts it
    return (time.thread_time() - began) / len(rows) * chunk.facts.num_rows


def _wait_for(future: Future[_ChunkCost], seconds: float) -> _ChunkCost | None:
    """Return the result, or None if it does not arrive in time."""
    try:
        return future.result(max(seconds, 0.0))
    except TimeoutError:
        return future.result() if future.done() else None  # done: the source itself raised TimeoutError


def _mean_profile(name: str, source: Source, units: Sequence[Unit], made: Sequence[_ChunkCost]) -> Profile:
    """Means over chunks. The first may include opening the source, so it counts only if it is the only one. The means are
    scaled from the chunks that were read to the mean chunk, by the sizes of units."""
    first, later = made[0], made[1:] or made
    expected = fmean(chunk.expected_bytes for chunk in later)
    scale = _mean_chunk_bytes(source, units) / expected if expected else 1.0
    open_s = first.seconds - fmean(chunk.seconds for chunk in later)
    was_slow = first.seconds > _SLOW_START * max(chunk.seconds for chunk in later)
    ratio = max(chunk.num_bytes / chunk.expected_bytes if chunk.expected_bytes else 0.0 for chunk in made)
    largest = sum(sorted((unit.num_bytes for unit in units), reverse=True)[: source.units_per_chunk])
    return Profile(
        source=name,
        cpu_s=scale * fmean(chunk.cpu_s for chunk in later),
        wait_s=scale * fmean(max(chunk.seconds - chunk.cpu_s, 0.0) for chunk in later),
        rows=scale * (fmean(chunk.rows for chunk in later) or fmean(chunk.rows for chunk in made)),
        tokens=scale * fmean(chunk.tokens for chunk in later),
        chunk_bytes=max(int(ratio * largest), *(chunk.num_bytes for chunk in made)),
        open_bytes=len(pickle.dumps(units)) + first.grown_bytes,
        open_s=open_s if was_slow else 0.0,
        buffer_bytes=source.buffer_bytes,
        num_chunks=len(made),
        sent_bytes=scale * fmean(chunk.num_bytes for chunk in later),
    )


def _mean_chunk_bytes(source: Source, units: Sequence[Unit]) -> float:
    return sum(unit.num_bytes for unit in units) / chunks_per_epoch(len(units), source.units_per_chunk)
