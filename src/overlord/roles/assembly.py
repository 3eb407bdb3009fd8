"""Makes each role from a job. Functions of plain values, so that any engine can call them anywhere, and again."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from overlord.arrange.graph import deal_rows
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.batches.buffers import Arenas
from overlord.caches.bucket import open_cache
from overlord.caches.folder import CacheFolder
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.chunks.shared_rows import ChunkArenas, share_chunk
from overlord.chunks.transforms.apply import Transforms, keeps_rows_apart
from overlord.errors import SourceError, SpecError
from overlord.loaders.model import (
    Partition,
    Share,
    by_share,
    evenly,
    hosts_beside,
    in_balance,
    shares_by_load,
)
from overlord.planlog.lineage_run import begin_lineage
from overlord.planlog.plan_log import Era, PlanLog
from overlord.roles.borrowed_chunks import BorrowedChunks, BorrowedRows
from overlord.roles.chunk_copies import ChunkCopies
from overlord.roles.chunk_snapshots import ChunkSnapshots
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.loader_host import LoaderHost, OpenSource
from overlord.roles.plan_requests import HostPlans, SinglePlans
from overlord.roles.plan_window import STEPS_AHEAD
from overlord.roles.planner import Planner
from overlord.roles.rows_ahead import RowsAhead
from overlord.roles.source_loader import SourceLoader
from overlord.runtime.cores import lay_out
from overlord.runtime.long_waits import warn_if_long
from overlord.runtime.memory import return_free_memory
from overlord.runtime.threads import Threads, make_executor
from overlord.sources.arrow_ipc import ArrowIpc
from overlord.sources.files import units_of
from overlord.sources.megatron import MegatronBin
from overlord.sources.parquet import Parquet
from overlord.sources.prepared import Prepared
from overlord.sources.storage import is_remote
from overlord.sources.unit_parts import UnitParts
from overlord.steering.steering import Steering
from overlord.stream.chunk_order import RunTurns, UnitRuns, chunks_per_epoch, count_parts, default_part_bytes, default_window
from overlord.stream.drawing import Extent

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from overlord.checkpoint.fingerprint import SavedChunks
    from overlord.chunks.chunk import Chunk
    from overlord.declare.batch import Batch
    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit
    from overlord.roles.chunk_snapshots import SnapshotPlace
    from overlord.roles.plan_window import SharedPlans
    from overlord.roles.routes import Routes
    from overlord.runtime.engine import Engine, Handle, Workplace
    from overlord.runtime.threads import Executor
    from overlord.steering.decisions import Steered
    from overlord.stream.facts import ChunkFacts
    from overlord.stream.progress import Progress


_PLANS_TOGETHER = STEPS_AHEAD + 1
"""Plans that a group requests together, where processes share memory: as many as the planner has ready."""
_LONGER_LEAD = 20
"""Steps that groups in other processes may be further ahead of each other while steps take only milliseconds."""
PLANNER = "planner"
"""The name of the planner's role."""
SOURCES = "sources"
"""Under which sources that were added to a run are published, by name."""
_INLINE_S = 0.1
"""To make a chunk, in a process whose threads contend for the GIL. Steps are built ahead: nobody notices so short a time."""
_COLUMNAR = (Parquet, ArrowIpc, MegatronBin, Prepared)
_IDLE_VALUES = 2  # buffers for the values of chunks that a process keeps for the next ones
_LISTING_THREADS = 16  # listing waits for storage, not for the processor


def list_units(sources: Mapping[str, Source]) -> dict[str, Sequence[Unit]]:
    """List the units of every source, sources side by side. A source without any is an error."""
    threads = Threads(min(_LISTING_THREADS, len(sources)), "overlord-list")
    pending = {name: threads.submit(units_of, source) for name, source in sources.items()}
    listed: dict[str, Sequence[Unit]] = {}
    try:
        for name, future in pending.items():
            try:
                with warn_if_long(lambda name=name: f"source {name!r} lists its files"):
                    wait([future])  # on its thread: storage that hangs must not block Ctrl-C
                listed[name] = future.result()
            except Exception as error:
                error.add_note(f"while listing source {name!r}")
                raise
            if not listed[name]:
                raise SourceError(f"source {name!r} has no data: its files hold no rows; remove it or check its paths")
    finally:
        threads.shutdown()  # after an error or Ctrl-C a listing may still wait for storage: it is abandoned
    return_free_memory()  # the footers of thousands of files were read
    return listed


def cut_units(
    job: Job, units: Mapping[str, Sequence[Unit]], saved: Mapping[str, SavedChunks] | None = None
) -> dict[str, Sequence[Unit]]:
    """The units of each source, large ones in parts where their rows are transformed and no window is declared: as `saved`
    in the state that the job resumes; else by their bytes."""
    found = dict(units)
    for name, listed in units.items():
        source = job.sources[name]
        if source.window is not None or isinstance(listed, UnitParts) or any(unit.follows for unit in listed):
            continue
        sizes = [source.decoded_bytes(unit) for unit in listed]
        if saved is not None and name in saved:
            part_bytes = saved[name].part_bytes
        else:
            part_bytes = default_part_bytes(sizes, buffer_bytes=source.declared_buffer_bytes, num_sources=len(job.sources))
            can_cut = (
                _has_own_chunks(source, sizes, len(job.sources))
                if source.shuffle
                else all(unit.num_rows is not None for unit in listed)
            )
            part_bytes = part_bytes if part_bytes and can_cut and _transforms_row_by_row(source) else 0
        if part_bytes:
            counts = [count_parts(size, part_bytes) for size in sizes]
            found[name] = UnitParts(listed, counts, part_bytes, is_strided=source.shuffle)
    return found


def _has_own_chunks(source: Source, sizes: Sequence[int], num_sources: int) -> bool:
    """Whether units would be chunks of their own: those that are mixed with others stay whole."""
    return default_window(sizes, buffer_bytes=source.declared_buffer_bytes, num_sources=num_sources) == 1


def _transforms_row_by_row(source: Source) -> bool:
    """Whether a source, or the one that it was prepared from, has transforms which are known to treat rows independently."""
    if not isinstance(source, Prepared):
        return bool(source.transforms) and keeps_rows_apart(source.transforms)
    manifest = source.manifest()
    has_some = bool(manifest.transforms or source.transforms)
    return has_some and manifest.keeps_rows_apart and keeps_rows_apart(source.transforms)


def with_windows(job: Job, units: Mapping[str, Sequence[Unit]], saved: Mapping[str, SavedChunks] | None = None) -> Job:
    """The job with a window for every source that is listed: as declared; else as `saved` in the state that it resumes; else
    by the bytes of its units. A part of a unit is a chunk."""
    sources = dict(job.sources)
    for name, source in job.sources.items():
        if source.window is not None or name not in units:
            continue
        window = 1 if isinstance(units[name], UnitParts) else None
        if saved is not None and name in saved:
            window = saved[name].window
        if window is None and source.shuffle:
            sizes = [source.decoded_bytes(unit) for unit in units[name]]
            window = default_window(sizes, buffer_bytes=source.declared_buffer_bytes, num_sources=len(sources))
        sources[name] = source.with_window(window or 1)
    return replace(job, sources=sources)


def with_caches(job: Job) -> Job:
    """The job with its cache for every source that has none of its own."""
    cache = job.cache
    if cache is None:
        return job
    sources = {name: source.with_cache(source.cache or cache) for name, source in job.sources.items()}
    return replace(job, sources=sources)


def check_caches(job: Job) -> None:
    """Raise SpecError for a cache that can never be used; what may pass is logged."""
    for cache in {source.cache for source in job.sources.values() if source.cache is not None}:
        store = open_cache(cache)
        if isinstance(store, CacheFolder):
            store.check()


def make_partition(
    job: Job, units: Mapping[str, Sequence[Unit]], engine: Engine, given: Partition | None = None
) -> Partition:
    """How sources are spread over loader hosts: as `given`; or over the engine's hosts, by the bytes that steps are expected
    to take of each source; or, where all hosts run in one process, share i of every source in host i. Where hosts are
    processes of one machine, a source that takes more than one of them can deliver gets several: few if its files are
    compressed and cut into units, because each host decompresses all of them. Sources that are read without further work get
    the processes that have no constructor."""
    if given is not None:
        given.check_sources(job.sources)
        return given
    num_shares = {name: source.loaders for name, source in job.sources.items()}
    num_hosts = engine.num_hosts
    if num_hosts is None:
        return by_share(num_shares)
    shares = [job.mix.at(step) for step, _ in job.mix.schedule]
    most = {name: max(share.get(name, 0.0) for share in shares) for name in job.sources}
    loads = {name: _expected_load(most[name], units[name], job.mix.unit) for name in job.sources}
    if engine.is_one_machine:
        most = {name: _most_shares(source, units[name]) for name, source in job.sources.items()}
        if not all(_is_light(source, units[name]) for name, source in job.sources.items()):
            return in_balance(num_shares, most, loads, num_hosts)
        # Shares are few: each keeps chunks of its own in memory.
        is_lean = only_reads(job, units, engine)
        num_hosts = lay_out(num_hosts, job.mesh.dp).hosts if is_lean else hosts_beside(num_hosts, job.mesh.dp)
        spread = shares_by_load(num_shares, loads, num_hosts)
        num_shares |= {name: max(num_shares[name], min(n, most[name])) for name, n in spread.items()}
    return evenly(num_shares, loads, num_hosts)


def only_reads(job: Job, units: Mapping[str, Sequence[Unit]], engine: Engine) -> bool:
    """True if the processes of a run are expected to do no more than read: no source takes further work, and trainers build
    their batches themselves from the chunks that loader hosts share (`batches/unbuilt.py`), which they do for text and in
    groups of one rank."""
    if not (engine.shares_memory and engine.trainers_are_near) or job.mesh.world_size != job.mesh.dp or job.batch.columns:
        return False
    return all(_is_light(source, units[name]) and not source.pairs for name, source in job.sources.items())


def turns_of(job: Job, name: str, units: Sequence[Unit]) -> RunTurns | None:
    """Which chunks of a source are parts of one unit, and go to one loader host; None where units are not cut."""
    if not isinstance(units, UnitParts):
        return None
    return RunTurns(job.seed, name, UnitRuns.of(units), shuffle=job.sources[name].shuffle)


def publish_units(engine: Engine, units: Mapping[str, Sequence[Unit]]) -> None:
    """Publish the units of every source, so that any loader host can open any source."""
    for name, listed in units.items():
        engine.publish(f"units/{name}", listed)


def make_loader_host(
    job: Job,
    engine: Engine,
    shares: Sequence[Share],
    num_threads: int | None,
    workplace: Workplace,
    *,
    place: SnapshotPlace | None = None,
    row_keys: Mapping[str, str] | None = None,
) -> LoaderHost:
    """The host of some shares of sources, whose units are published. It reads on `num_threads` threads of its own, or on
    those of its process (None). `place`: where chunks are saved. `row_keys`: what the rows in the caches of sources depend
    on beside their unit."""
    threads = workplace.read_threads if num_threads is None else make_executor(num_threads, "overlord-read")
    arenas = workplace.share("chunks", ChunkArenas) if engine.shares_memory else None
    opener = _SourceOpener(
        job=job,
        engine=engine,
        workplace=workplace,
        threads=threads,
        # The threads of the process contend for the GIL with each other and with the threads that build steps. Where there
        # is a process per core, what takes less CPU time is better.
        is_contended=num_threads is None and isinstance(threads, Threads) and not engine.shares_memory,
        arenas=arenas,
        place=place,
        row_keys=row_keys or {},
        num_held=Counter(share.source for share in shares),
        num_shares={share.source: share.of for share in shares},
    )
    return LoaderHost(
        opener.open,
        tuple(opener.num_held),
        job.batch.columns,
        threads,
        arenas=workplace.arenas,
        owns_threads=num_threads is not None,
        copies=None if arenas is None else ChunkCopies(engine, tuple(job.sources), arenas),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceOpener:
    """Makes the Source Loader of any source of a job, on one loader host."""

    job: Job
    engine: Engine
    workplace: Workplace
    threads: Executor
    is_contended: bool
    """True if threads contend for the GIL."""
    arenas: ChunkArenas | None
    place: SnapshotPlace | None
    row_keys: Mapping[str, str]
    num_held: Counter[str]
    """How many shares of each source the host has, of `num_shares`."""
    num_shares: Mapping[str, int]

    def open(self, name: str) -> OpenSource:
        job, engine = self.job, self.engine
        is_added = name not in job.sources
        source: Source = engine.look_up(f"{SOURCES}/{name}") if is_added else job.sources[name]
        bad_rows = BadRowLog(name, source.bad_rows)
        units: Sequence[Unit] = engine.look_up(f"units/{name}")
        maker = self._make_maker(name, source, units, bad_rows)
        columns = _columns_of(source, job.batch)
        snapshots = None if self.place is None or is_added else ChunkSnapshots(self.place, name, columns, bad_rows)
        # Never less than each of the declared loaders has: when a source is spread over more of them, its chunks must still
        # fit.
        num_own = 1 if is_added else self.num_held[name]
        num_loaders = self.num_shares.get(name, source.loaders if is_added else 1)
        part = source.buffer_bytes * num_own // num_loaders
        buffer_bytes = max(part, source.buffer_bytes // source.loaders)
        # A remote store may block at any time, so nothing is read from it before it is needed, except on threads.
        is_near = _is_near(source, units)
        is_plain = self.arenas is snapshots is None
        turns = maker.turns()
        loader = SourceLoader(
            name,
            maker.make if is_plain else partial(_make_chunk, maker, snapshots, columns, self.arenas),
            maker.expected_bytes,
            buffer_bytes=buffer_bytes,
            ahead_bytes=part,
            threads=self.threads,
            inline_s=_INLINE_S if self.is_contended and is_near else 0.0,
            makes_inline=is_near and not isinstance(self.threads, Threads),
            on_made=partial(_send_facts, engine, name) if engine.shares_memory else None,
            at_close=maker.close,
            held_bytes=int if turns is None else lambda: maker.held_bytes,
            last_of_run=None if num_loaders == 1 or turns is None else turns.last_chunk,
        )
        return OpenSource(loader, bad_rows, source.decode, maker.report_bad_decode, snapshots)

    def _make_maker(self, name: str, source: Source, units: Sequence[Unit], bad_rows: BadRowLog) -> ChunkMaker:
        key = self.row_keys.get(name)
        # A request for each unit to a store far away would cost more than reading it.
        is_kept = source.cache is not None and key is not None and (bool(source.transforms) or not source.cache.is_remote)
        return ChunkMaker(
            name,
            source,
            units,
            seed=self.job.seed,
            batch=self.job.batch,
            bad_rows=bad_rows,
            transforms=Transforms(source.transforms, self.workplace.processes, self.threads),
            release_gil=self.is_contended,
            arenas=self.workplace.share("chunk values", partial(Arenas, _IDLE_VALUES)),
            kept=(open_cache(source.cache), key) if is_kept and source.cache and key else None,
            has_peers=self.num_shares.get(name, 1) > 1,
        )


def _columns_of(source: Source, batch: Batch) -> frozenset[str]:
    """The columns of a source that delivery needs in addition to its tokens."""
    decode = getattr(source.decode, "column", None)
    return frozenset((*batch.columns, decode) if decode is not None else batch.columns)


def _make_chunk(
    maker: ChunkMaker, snapshots: ChunkSnapshots | None, columns: Collection[str], arenas: ChunkArenas | None, number: int
) -> Chunk:
    """A chunk from its snapshot, or made; in shared memory where there is some."""
    chunk = None if snapshots is None else snapshots.restore(number, maker.units_of(number), maker.unit_numbers(number))
    chunk = chunk or maker.make(number)
    return chunk if arenas is None else share_chunk(chunk, columns, arenas)


def _send_facts(engine: Engine, source: str, number: int, facts: ChunkFacts) -> None:
    """Send the facts of a chunk to the planner, which will need them soon, so that it need not wait for them."""
    engine.tell(PLANNER, Planner.receive_facts, source, number, facts)


def make_decode_threads(job: Job, workplace: Workplace) -> Executor:
    """Threads for the images of all constructors of a process: its share of the machine's cores."""
    if job.num_workers is not None or not any(source.decode for source in job.sources.values()):
        return workplace.read_threads
    return make_executor(workplace.size.num_decoders(job.mesh.dp), "overlord-decode")


def _send_plans(engine: Engine, group: int, plans: SharedPlans) -> None:
    engine.tell(constructor_name(group), DataConstructor.receive_plans, plans)


def constructor_name(group: int) -> str:
    """The name of the role of a data-parallel group's constructor."""
    return f"constructor/{group}"


def make_constructor(
    job: Job, group: int, tree: ClientPlaceTree, workplace: Workplace, *, planner: Handle[Planner], routes: Routes
) -> DataConstructor:
    """The Data Constructor of a group. Where processes share memory, it reads rows straight from the chunks of loader
    hosts, and shares what it gets from the planner with the other constructors of its process."""
    if planner.engine.shares_memory:
        # Of these sources: after one was added, a process may have constructors of both runs for a moment.
        known = f"of {len(job.sources)} sources"
        make_ahead = partial(RowsAhead, routes, has_columns=bool(job.batch.columns))
        ahead = None if planner.engine.is_one_machine else workplace.share(f"rows ahead {known}", make_ahead)
        make_chunks = partial(BorrowedChunks, routes, job.sources, job.batch.columns, ahead)
        chunks = workplace.share(f"borrowed chunks {known}", make_chunks)
        threads = workplace.share("decoding", partial(make_decode_threads, job, workplace))
        rows = BorrowedRows(chunks, routes, threads, workplace.arenas)
        # Of one mesh: after a resize a process may have constructors of both for a moment.
        of_host = workplace.share(f"plans of {tree.mesh} {known}", partial(HostPlans, planner, tree, chunks))
        plans = of_host.of_group(group)
    else:
        rows, plans = routes, SinglePlans(planner, group)
    return DataConstructor(
        group,
        job.batch,
        tree,
        planner=planner,
        plans=plans,
        rows=rows,
        prefetch=job.prefetch,
        threads=workplace.build_threads,
        arenas=workplace.arenas,
        weighted=job.is_weighted,
    )


def plans_together(engine: Engine) -> int:
    """How many plans a group gets at a time: several where a request goes to another process of this machine."""
    return _PLANS_TOGETHER if engine.shares_memory else 1


def are_decisions_safe(job: Job, era: Era | None, engine: Engine) -> bool:
    """True if the decisions of a planner outlive it: they are logged, or the planner lives and dies with the run."""
    if era is None and not engine.keeps_planner:
        if job.mix.feedback is not None or job.mix.function is not None:
            what = "with feedback" if job.mix.feedback is not None else "that is a function"
            raise SpecError(
                f"a mixture {what} decides while the job runs, and on a cluster the planner may be lost: let it write that "
                "down with start(log=...)"
            )
        return False
    return True


def make_planner(  # noqa: PLR0913 - a run is put together here, by name
    job: Job,
    num_units: Mapping[str, int],
    start: Progress,
    _workplace: Workplace,
    *,
    steered: Steered,
    routes: Routes,
    era: Era | None,
    is_safe: bool,
    is_served: bool,
    plans_together: int = 1,
    engine: Engine | None = None,
    skips: Sequence[tuple[int, Mapping[str, object]]] = (),
) -> Planner:
    """`is_safe`: the decisions of the planner outlive it; `is_served`: trainers in other processes will come;
    `plans_together`: how many plans a group gets at a time. `engine`: where processes share memory, and the planner sends
    plans to the constructors there. `skips`: what the job leaves out, with the units of its files."""
    usual_lead = job.prefetch + 1 + plans_together
    max_lead = usual_lead + (_LONGER_LEAD if plans_together > 1 else 0)
    place = ClientPlaceTree(job.mesh)
    log = None if era is None else PlanLog(era, start, max_lead, steered)
    return Planner(
        start,
        job.batch,
        job.mix,
        strategy=job.strategy or deal_rows,
        place=place,
        extents=[
            Extent(chunks_per_epoch(num_units[name], s.units_per_chunk), s.num_epochs) for name, s in job.sources.items()
        ],
        routes=routes,
        has_loss_masks=job.is_masked,
        size_columns=job.size_columns,
        max_lead=max_lead,
        usual_lead=usual_lead,
        log=log,
        steering=Steering(job.mix, start, place, steered, log=log, is_safe=is_safe, skips=skips),
        expected=range(job.mesh.dp) if is_served else (),
        send=None if engine is None else partial(_send_plans, engine),
        warn_epochs=[source.warn_epochs for source in job.sources.values()],
        lineage=None if era is None or not era.has_lineage else begin_lineage(era, job.mesh, start.step),
    )


def _is_light(source: Source, units: Sequence[Unit]) -> bool:
    """True if a chunk of a source costs less than the batches that are made of it: columns of tokens in local files."""
    is_read_only = isinstance(source, _COLUMNAR) and not source.transforms and source.decode is None
    return is_read_only and _is_near(source, units)


_MOST_DECOMPRESSING = 4
"""Hosts that share a compressed source with transforms: tokenising takes some twenty times what decompressing does."""


def _most_shares(source: Source, units: Sequence[Unit]) -> int:
    """The most hosts that should share a source. Where reading a unit takes reading those before it, as in compressed files,
    each host reads everything."""
    if isinstance(units, UnitParts) or not any(unit.follows for unit in units):
        return sys.maxsize
    return _MOST_DECOMPRESSING if source.transforms else 1


def _is_near(source: Source, units: Sequence[Unit]) -> bool:
    """True if reading a source never waits for a remote store."""
    return not any(is_remote(unit.path) for unit in units[:1]) and not (source.cache and source.cache.is_remote)


def _expected_load(weight: float, units: Sequence[Unit], unit: str) -> float:
    """Bytes of a source with this weight that a sample of the mixture takes on average."""
    num_bytes = sum(unit.num_bytes for unit in units)
    num_rows = sum(unit.num_rows or 0 for unit in units)
    per_sample = num_bytes / num_rows if num_rows and unit == "samples" else 1.0
    return weight * (per_sample or 1.0)
