"""Where a document was read, from the numbers that a batch has of it: without a run, by making its chunk again."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from overlord.checkpoint.fingerprint import SavedChunks, saved_chunks
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.declare.policies import Log
from overlord.errors import StateError
from overlord.messages import DocumentOrigin, document_ids
from overlord.planlog.plan_log import open_segments, read_newest
from overlord.roles.assembly import cut_units, list_units, with_windows
from overlord.service.step_documents import find_origins

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Unit
    from overlord.messages import DocumentIds


def locate(job: Job, documents: DocumentIds, *, log: str | os.PathLike[str] | None = None) -> list[DocumentOrigin]:
    """Returns the source, file and row of documents of a job, which need not run: of a microbatch, or of (source, chunk,
    row) each, as a microbatch names them. Every chunk that is named is read.

    `log` is the log of the run that had them. It is needed where that run resumed a state of other data: the size of its
    chunks was then decided before."""
    wanted, names = document_ids(documents), tuple(job.sources)
    used = [name for number, name in enumerate(names) if any(source == number for source, _, _ in wanted)]
    saved = {} if log is None else _chunks_of(log, used)
    # Chunks depend on the units of their own source alone.
    units = cut_units(job, list_units({name: job.sources[name] for name in used}), saved) if used else {}
    return find_origins(wanted, names, _ChunkOrigins(with_windows(job, units, saved), units))


def _chunks_of(log: str | os.PathLike[str], names: Sequence[str]) -> dict[str, SavedChunks]:
    newest = read_newest(open_segments(Log(log)))
    if newest is None:
        raise StateError(f"there is no log at {os.fspath(log)}; give the place that the run was started with as log=...")
    found = {name: saved_chunks(newest.header.fingerprint, name) for name in names}
    return {name: chunks for name, chunks in found.items() if chunks is not None}


class _ChunkOrigins:
    """Makes chunks, and tells where their rows were read."""

    def __init__(self, job: Job, units: Mapping[str, Sequence[Unit]]) -> None:
        self._job = job
        self._names = tuple(job.sources)
        self._units = units

    def origins(self, source: int, chunk: int, rows: Sequence[int]) -> list[tuple[str, int]]:
        name = self._names[source]
        declared = self._job.sources[name]
        policy = declared.bad_rows
        if policy.policy == "quarantine":
            policy = replace(policy, policy="skip", path=None)  # the run has quarantined them already
        bad_rows = BadRowLog(name, policy)
        maker = ChunkMaker(name, declared, self._units[name], seed=self._job.seed, batch=self._job.batch, bad_rows=bad_rows)
        try:
            return maker.make(chunk).origins_of(name, chunk, rows)
        finally:
            maker.close()
