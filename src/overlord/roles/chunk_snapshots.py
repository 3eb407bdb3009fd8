"""Snapshots of the chunks that are expensive to make again: the rare half of a differential checkpoint.

The planner's log records every step, in bytes. The buffers of loaders are large, and a function of the plan: they are saved
rarely, and only chunks that take longer to make than to write and read. A loader that starts again, in the same run or in
one that resumes, reads those chunks back and makes the others. A snapshot is never needed: a file that is missing, damaged
or of another job costs the time to make the chunk.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from overlord.chunks.chunk_files import decode_chunk, encode_chunk
from overlord.errors import StateError

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping, Sequence

    from overlord.checkpoint.fingerprint import Fingerprint
    from overlord.chunks.bad_rows import BadRowLog
    from overlord.chunks.chunk import Chunk
    from overlord.declare.job import Job
    from overlord.declare.source import Unit

_log = logging.getLogger(__name__)
_FOLDER = "chunks"
_ENDING = ".chunk"


@dataclass(frozen=True, slots=True)
class SnapshotPlace:
    """Where the chunks of a run are saved, how often, and what they depend on."""

    folder: str
    every_s: float
    key: str

    @staticmethod
    def of(location: str | os.PathLike[str], every_s: float, job: Job, fingerprint: Fingerprint) -> SnapshotPlace:
        """The place beside a log. Snapshots of other jobs are deleted there."""
        batch = job.batch
        rows = [repr((s.decode, s.tokens, s.loss_mask, s.loss_weights, s.size_columns)) for s in job.sources.values()]
        parts = (fingerprint.to_dict(), batch.sequence_length, batch.long_documents, batch.special_ids, batch.columns, rows)
        key = hashlib.sha256(msgspec.json.encode(parts, enc_hook=repr, order="sorted")).hexdigest()[:16]
        folder = Path(location) / _FOLDER
        with suppress(OSError):
            for other in folder.iterdir():
                if other.name != key:
                    shutil.rmtree(other, ignore_errors=True)
        return SnapshotPlace(str(folder / key), every_s, key)


class ChunkSnapshots:
    """The saved chunks of one source. One thread at a time may call `save`."""

    def __init__(self, place: SnapshotPlace, source: str, columns: Collection[str], bad_rows: BadRowLog) -> None:
        self._source = source
        self._columns = columns
        self._bad_rows = bad_rows
        self._folder = Path(place.folder) / hashlib.sha256(source.encode()).hexdigest()[:16]
        self._saved = self._list()
        self._has_warned = False

    def restore(self, number: int, units: Sequence[Unit], unit_numbers: Sequence[int]) -> Chunk | None:
        """A saved chunk, of these units of the source; None if there is none."""
        if number not in self._saved:
            return None
        try:
            content = self._path(number).read_bytes()
            chunk, bad_rows = decode_chunk(content, self._source, number, units=units, unit_numbers=unit_numbers)
        except (OSError, StateError) as error:
            _log.warning("chunk %d of source %r is made again: its snapshot cannot be read: %s", number, self._source, error)
            self._saved.discard(number)
            return None
        self._bad_rows.note_dropped(bad_rows)
        return chunk

    def save(self, chunks: Mapping[int, Chunk], keep_from: int) -> int:
        """Save chunks that are not saved yet, and delete those before `keep_from`. Returns the bytes written. An error is
        logged once: the run goes on without snapshots."""
        written = 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for number in sorted(chunks.keys() - self._saved):
                written += self._write(number, chunks[number])
            for number in [number for number in self._saved if number < keep_from]:
                self._saved.discard(number)
                self._path(number).unlink(missing_ok=True)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the chunks of source %r cannot be saved in %s: %s", self._source, self._folder, error)
        return written

    def _write(self, number: int, chunk: Chunk) -> int:
        parts = encode_chunk(chunk, self._source, number, columns=self._columns, bad_rows=self._bad_rows.dropped)
        if parts is None:
            return 0
        unfinished = self._folder / f"{number}.{uuid.uuid4().hex}"
        try:
            with unfinished.open("wb") as file:
                for part in parts:
                    file.write(part)
            unfinished.replace(self._path(number))
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise
        self._saved.add(number)
        return sum(map(len, parts))

    def _list(self) -> set[int]:
        try:
            names = [path.stem for path in self._folder.iterdir() if path.suffix == _ENDING]
        except OSError:
            return set()
        return {int(name) for name in names if name.isdecimal()}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}{_ENDING}"
