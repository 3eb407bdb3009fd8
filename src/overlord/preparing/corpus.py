"""Prepares the sources of a job: divides each into parts, has those made that are missing, and writes its manifest.

Each part is a function of some units and the transforms, so parts are made in any order, by any process, and again. The
manifest is written when all parts of a source are there.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import cloudpickle
import pyarrow as pa

from overlord.checkpoint.code_reads import ReadsDescriber
from overlord.checkpoint.fingerprint import reader_text, transform_digests, units_digest
from overlord.chunks.transforms.apply import is_keyed_by_chunk, keeps_rows_apart, name_of
from overlord.declare.source import MIB, Source
from overlord.errors import BadRowError, SpecError, StorageError
from overlord.preparing.parts import PartRecord, PartTask, make_part, read_record, write_whole
from overlord.preparing.workers import run_in_processes, run_on_ray
from overlord.roles.assembly import list_units
from overlord.runtime.cores import num_usable_cores
from overlord.sources.parquet import Parquet
from overlord.sources.prepared import (
    FORMAT,
    MANIFEST,
    UNIT_SCHEMA,
    UNITS,
    Manifest,
    Prepared,
    PreparedPart,
    encode_bad,
    encode_manifest,
    wider_types,
)
from overlord.sources.storage import is_remote

if TYPE_CHECKING:
    from overlord.declare.job import Job
    from overlord.declare.source import Unit

PART_BYTES = 64 * MIB
"""Decoded, of the units of one part: what a worker process has in memory, and what is made again after a kill."""
_MOST_UNITS = 512
_log = logging.getLogger("overlord.prepare")
_LONGEST_RUN = 8  # parts: units that are read quickly only one after the other are kept together up to this

RunTasks = Callable[[Sequence[PartTask]], Iterator[tuple[PartTask, PartRecord]]]
"""Makes parts, in any order."""


@dataclass(frozen=True, slots=True)
class PrepareProgress:
    """How far preparing is."""

    source: str
    done_bytes: int
    all_bytes: int
    """Of the units, decoded; their number where sizes are unknown."""
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _SourcePlan:
    name: str
    source: Source
    folder: Path
    tasks: tuple[PartTask, ...]
    reader: str
    transforms: tuple[str, ...]
    packages: Mapping[str, str]
    fingerprint: str

    @property
    def num_stages(self) -> int:
        return len(self.transforms)


def prepare(
    job: Job,
    to: str | os.PathLike[str],
    *,
    num_processes: int | None = None,
    ray: str | None = None,
    pack: int | None = None,
    overwrite: bool = False,
    on_progress: Callable[[PrepareProgress], None] | None = None,
) -> Job:
    """Write the rows of a job's sources, after their transforms, to a folder, and return the job that reads them there: the
    same stream, without the cost of the transforms.

    Rows are written as Parquet, with one folder for each source. What is there already is not made again, so a call that was
    stopped continues. Transforms from the first on that takes a `Context` or a random generator are left to the run, since
    their rows are others in every epoch. `num_processes` worker processes make the rows, by default one for each core; or
    `ray`, the address of a Ray cluster whose nodes see the files and the folder ("local" starts one on this machine).
    `overwrite` replaces rows that were prepared from another declaration. `on_progress` is called after each part.

    With `pack`, documents are packed into rows of at most so many tokens, for trainers that read finished sequences: whole
    documents by best fit, longer ones cut into pieces, with the lengths of the documents of a row in the column
    `document_lengths`. That is another corpus, not the stream of the job: the returned job reads its rows as documents.
    """
    if is_remote(os.fspath(to)):
        raise SpecError(f"prepare writes to a folder, and {os.fspath(to)!r} is a URL: prepare to a folder, and copy it")
    run = _in_processes(num_processes) if ray is None else lambda tasks: run_on_ray(tasks, None if ray == "local" else ray)
    folder = Path(to).expanduser()
    units = list_units(job.sources)
    places = {name: folder / folder_name(name) for name in job.sources}
    plans = [_plan(name, source, units[name], places[name], pack) for name, source in job.sources.items()]
    sources: dict[str, Source] = {}
    with _locked(folder):
        for plan in plans:
            _check_folder(plan, overwrite)
        for plan in plans:
            if _prepared_fingerprint(plan.folder) != plan.fingerprint:
                _prepare_source(plan, run, on_progress)
            sources[plan.name] = _prepared(plan)
    return replace(job, sources=sources)


def folder_name(source: str) -> str:
    """The folder of a source, under the one that a job is prepared to."""
    return quote(source, safe=" ()+,=@[]^~") if source.strip(".") else source.replace(".", "%2E")


def _plan(name: str, source: Source, units: Sequence[Unit], folder: Path, pack: int | None) -> _SourcePlan:
    if isinstance(source, Prepared):
        raise SpecError(f"source {name!r} is prepared already: it reads {source.folder}")
    describer = ReadsDescriber()
    reader = reader_text(source, f"sources.{name}", describer)
    stages = _num_stages(source)
    if pack is not None:
        _check_packing(name, source, stages, pack)
    transforms = tuple(transform_digests(name, source, describer)[:stages])
    packages = dict(sorted(describer.packages.items()))
    for line in describer.unseen:
        _log.warning(
            "%s: rows that are prepared already are taken as they are though it may have changed; prepare to another folder "
            "after a change, or give it an identity() method that names all that it depends on",
            line,
        )
    pickled = cloudpickle.dumps(source)
    base = repr((FORMAT, name, reader, transforms, sorted(packages.items()), source.bad_rows.policy == "fail"))
    base += "" if pack is None else f" packed {pack} {source.tokens} {source.loss_mask} {source.loss_weights}"
    base += repr(describer.reads_text) if describer.reads else ""
    tasks = []
    for number, part in enumerate(_parts(source, units)):
        digest = _digest(base, units_digest(part), *(unit.version for unit in part))
        tasks.append(PartTask(name, pickled, stages, tuple(part), str(folder), number, digest, pack))
    fingerprint = _digest(*(task.digest for task in tasks))
    return _SourcePlan(name, source, folder, tuple(tasks), reader, transforms, packages, fingerprint)


def _check_packing(name: str, source: Source, stages: int, pack: int) -> None:
    if type(pack) is not int or pack < 1:
        raise SpecError(f"pack is a number of tokens, at least 1, got {pack!r}")
    if source.tokens is None or source.decode is not None or source.pairs is not None:
        raise SpecError(f"source {name!r} cannot be packed: it is not plain text (tokens=None, decode or pairs)")
    if stages < len(source.transforms):
        raise SpecError(
            f"source {name!r} cannot be packed: {name_of(source.transforms[stages])} depends on the epoch, and packed rows "
            "are the same in every epoch; leave the transform out, or prepare without packing"
        )


def _num_stages(source: Source) -> int:
    """How many transforms, from the first on, do not depend on the chunk."""
    keyed = (i for i, fn in enumerate(source.transforms) if is_keyed_by_chunk(fn))
    return next(keyed, len(source.transforms))


def _parts(source: Source, units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    first = 0
    sizes = [0, *accumulate(source.decoded_bytes(unit) for unit in units)]
    for i in range(1, len(units) + 1):
        num_bytes = sizes[i] - sizes[first]
        is_full = num_bytes >= PART_BYTES or i - first >= _MOST_UNITS
        is_run = i < len(units) and units[i].follows and num_bytes < _LONGEST_RUN * PART_BYTES
        if i == len(units) or (is_full and not is_run):
            yield units[first:i]
            first = i


def _digest(*texts: str) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps a second preparation out of the folder. The lock ends with the process that holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to: {error.strerror}; name another folder") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(f"another process prepares to {folder} now: wait for it, or name another folder") from None
        yield
    finally:
        os.close(descriptor)


def _prepared_fingerprint(folder: Path) -> str | None:
    return Prepared(str(folder)).manifest().fingerprint if (folder / MANIFEST).is_file() else None


def _check_folder(plan: _SourcePlan, overwrite: bool) -> None:
    if overwrite or _prepared_fingerprint(plan.folder) in (None, plan.fingerprint):
        return
    found = Prepared(str(plan.folder)).manifest()
    changed = [
        text
        for text, is_changed in (
            ("its reader, paths or columns", found.reader != plan.reader),
            ("its transforms", found.transforms != list(plan.transforms)),
            ("the versions of packages", dict(found.packages) != dict(plan.packages)),
        )
        if is_changed
    ]
    named = " and ".join(changed) or "its files, or files that its transforms read,"
    raise SpecError(
        f"{plan.folder} holds source {found.source!r} as it was prepared from another declaration: {named} changed "
        "since; name another folder, or replace it with overwrite (--overwrite)"
    )


def _prepare_source(plan: _SourcePlan, run: RunTasks, on_progress: Callable[[PrepareProgress], None] | None) -> None:
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        (plan.folder / MANIFEST).unlink(missing_ok=True)  # it must not describe parts that are about to be replaced
    except OSError as error:
        raise StorageError(f"{plan.folder} cannot be written to: {error.strerror}; name another folder") from error
    found = {task.number: record for task in plan.tasks if (record := read_record(task.record_path, task.digest))}
    missing = [task for task in plan.tasks if task.number not in found]
    if on_progress is not None:
        on_progress(_progress(plan, found))
    for task, record in run(missing):
        found[task.number] = record
        if on_progress is not None:
            on_progress(_progress(plan, found))
    _finish(plan, [found[task.number] for task in plan.tasks])


def _progress(plan: _SourcePlan, found: Mapping[int, PartRecord]) -> PrepareProgress:
    def weight(tasks: Iterable[PartTask]) -> int:
        return sum(plan.source.decoded_bytes(unit) or 1 for task in tasks for unit in task.units)

    files = [file for record in found.values() for file in record.files]
    return PrepareProgress(
        plan.name,
        weight(task for task in plan.tasks if task.number in found),
        weight(plan.tasks),
        sum(file.num_rows for file in files),
        sum(file.num_tokens or 0 for file in files),
    )


def _finish(plan: _SourcePlan, records: Sequence[PartRecord]) -> None:
    """Write the list of units and the manifest, and remove what only making the parts needed."""
    _check_bad_rows(plan, records)
    schemas: list[bytes] = []
    parts: list[PreparedPart] = []
    rows: list[dict[str, object]] = []
    for task, record in zip(plan.tasks, records, strict=True):
        first = len(parts)
        for file in record.files:
            if file.schema not in schemas:
                schemas.append(file.schema)
            parts.append(PreparedPart(file.name, file.num_bytes, file.num_rows, file.num_tokens, schemas.index(file.schema)))
        for unit, made in zip(task.units, record.units, strict=True):
            rows.append(
                {
                    "path": unit.path.encode("utf-8", "surrogatepass"),
                    "index": unit.index,
                    "num_rows": unit.num_rows,
                    "num_bytes": unit.num_bytes,
                    "version": unit.version,
                    "follows": unit.follows,
                    "decoded_bytes": plan.source.decoded_bytes(unit),
                    "part": first + made.file if made.file >= 0 else -1,
                    "group": made.group,
                    "num_read": made.num_read,
                    "bad": encode_bad(made.bad),
                }
            )
    _check_schemas(plan, schemas)
    units = _parquet_bytes(pa.Table.from_pylist(rows, UNIT_SCHEMA))
    tokens = [part.num_tokens for part in parts]
    manifest = Manifest(
        format=FORMAT,
        source=plan.name,
        fingerprint=plan.fingerprint,
        reader=plan.reader,
        transforms=list(plan.transforms),
        transform_names=[name_of(fn) for fn in plan.source.transforms[: plan.num_stages]],
        packages=dict(plan.packages),
        num_units=len(rows),
        num_rows=sum(part.num_rows for part in parts),
        num_tokens=None if None in tokens else sum(count for count in tokens if count is not None),
        num_bad_rows=sum(len(unit.bad) for record in records for unit in record.units),
        parts=parts,
        schemas=schemas,
        units_checksum=zlib.crc32(units),
        packed=plan.tasks[0].pack,
        loss_mask=plan.source.loss_mask,
        loss_weights=plan.source.loss_weights,
        pairs=plan.source.pairs,
        whole=plan.source.is_whole,
        keeps_rows_apart=keeps_rows_apart(plan.source.transforms[: plan.num_stages]),
    )
    write_whole(plan.folder / UNITS, units)
    write_whole(plan.folder / MANIFEST, encode_manifest(manifest))
    kept = {part.file for part in parts}
    for path in plan.folder.iterdir():
        if path.name not in kept and path.name.lstrip(".").startswith("part-"):
            path.unlink(missing_ok=True)


def _check_bad_rows(plan: _SourcePlan, records: Sequence[PartRecord]) -> None:
    bad = [
        (unit, row, error)
        for task, record in zip(plan.tasks, records, strict=True)
        for unit, made in zip(task.units, record.units, strict=True)
        for row, error, _ in made.bad
    ]
    budget = plan.source.bad_rows.budget
    if len(bad) > budget:
        unit, row, error = bad[budget]
        raise BadRowError(
            f"source {plan.name!r}: {len(bad)} bad rows are more than its budget of {budget}; one of them is {unit}, row "
            f"{row}: {error}. Repair the data or raise ol.policies.BadRows(budget=)"
        )


def _check_schemas(plan: _SourcePlan, schemas: Sequence[bytes]) -> None:
    found = [_without_origin(pa.ipc.read_schema(pa.py_buffer(each))) for each in schemas]
    if found and wider_types(found) is None:
        other = next(schema for schema in found if wider_types([found[0], schema]) is None)
        raise SpecError(
            f"source {plan.name!r}: its transforms return ({_fields(found[0])}) for some units and ({_fields(other)}) for "
            "others; they must return the same columns and types for every unit"
        )


def _without_origin(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name != "__origin__"])


def _fields(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _parquet_bytes(table: pa.Table) -> bytes:
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _prepared(plan: _SourcePlan) -> Source:
    """The prepared source, with the options of the original and the transforms that are left."""
    options = {each.name: getattr(plan.source, each.name) for each in fields(Source)}
    options["transform"] = plan.source.transforms[plan.num_stages :]
    if plan.tasks[0].pack is not None:
        options["max_rows"] = None  # what it leaves out was not packed
        return Parquet(f"{plan.folder}/part-*.parquet", **options)
    return Prepared(str(plan.folder), whole=plan.source.is_whole, **options)


def _in_processes(num_processes: int | None) -> RunTasks:
    count = num_usable_cores() if num_processes is None else num_processes
    if count < 1:
        raise SpecError(f"num_processes must be at least 1, got {count}")
    return _run_here if count == 1 else lambda tasks: run_in_processes(tasks, count)


def _run_here(tasks: Sequence[PartTask]) -> Iterator[tuple[PartTask, PartRecord]]:
    for task in tasks:
        yield task, make_part(task)
