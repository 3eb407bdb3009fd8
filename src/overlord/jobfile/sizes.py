"""How large the sources of a job are: bytes and rows by their lists of units, tokens from a sample or a manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.declare.source import BadRows
from overlord.errors import DataError, SpecError
from overlord.roles.assembly import cut_units, list_units, with_windows
from overlord.runtime.cores import num_usable_cores
from overlord.runtime.threads import Threads
from overlord.sources.prepared import Prepared
from overlord.stream.chunk_order import chunks_per_epoch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Unit


def measure(job: Job, unit: Literal["tokens", "rows", "bytes"] = "tokens", *, num_chunks: int = 2) -> dict[str, float]:
    """The size of one epoch of each source, for `temperature` and `unimax`.

    Bytes are those of the decoded rows, by the list of files alone. Rows too, where files tell their number. Tokens of a
    prepared source are counted in its manifest; of others they are estimated from the first `num_chunks` chunks, which are
    made as in a run.
    """
    if unit not in ("tokens", "rows", "bytes"):
        raise SpecError(f"unit is tokens, rows or bytes, got {unit!r}")
    if num_chunks < 1:
        raise SpecError(f"num_chunks is at least 1, got {num_chunks}")
    units = list_units(job.sources)
    if unit == "bytes":
        return {name: float(sum(map(job.sources[name].decoded_bytes, listed))) for name, listed in units.items()}
    units = cut_units(job, units)
    job = with_windows(job, units)
    threads = Threads(num_usable_cores(), "overlord-measure")
    try:
        pending = {name: threads.submit(_measure, job, name, listed, unit, num_chunks) for name, listed in units.items()}
        return {name: future.result() for name, future in pending.items()}
    finally:
        threads.shutdown()


def _measure(job: Job, name: str, units: Sequence[Unit], unit: str, num_chunks: int) -> float:
    source = job.sources[name]
    if unit == "rows" and all(each.num_rows is not None for each in units):
        return float(sum(each.num_rows or 0 for each in units))
    if isinstance(source, Prepared) and not source.transforms:
        manifest = source.manifest()
        known = manifest.num_tokens if unit == "tokens" else manifest.num_rows
        if known is not None:
            return float(known)
    if unit == "tokens" and source.tokens is None:
        raise SpecError(f"source {name!r} has no tokens to measure (tokens=None): measure rows or bytes")
    policy = source.bad_rows if source.bad_rows.policy == "fail" else BadRows("skip", budget=1 << 62)
    maker = ChunkMaker(name, source, units, seed=job.seed, batch=job.batch, bad_rows=BadRowLog(name, policy))
    amount, read, count = 0, 0, 0
    try:
        for number in range(min(num_chunks, chunks_per_epoch(len(units), source.units_per_chunk))):
            facts = maker.make(number).facts
            amount += int(facts.tokens.sum()) if unit == "tokens" else len(facts.tokens)
            chosen = maker.units_of(number)
            read += sum(map(source.decoded_bytes, chosen))
            count += len(chosen)
    finally:
        maker.close()
    if not amount:
        raise DataError(f"the first {num_chunks} chunk(s) of source {name!r} have no {unit}: give num_chunks= more")
    total = sum(map(source.decoded_bytes, units))
    return amount * (total / read if read and total else len(units) / count)
