"""How each role is made from a job. Functions of plain values, so that any engine can call them anywhere, and again."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.strategies import plain
from overlord.chunks.bad_rows import BadRowLog
from overlord.chunks.chunk_maker import ChunkMaker
from overlord.errors import SourceError, SpecError
from overlord.loaders.model import (
    Partition,
    Share,
    by_share,
    evenly,
)
from overlord.planlog.plan_log import Era, PlanLog
from overlord.roles.loader_host import Held, LoaderHost
from overlord.roles.planner import Planner
from overlord.roles.source_loader import SourceLoader
from overlord.runtime.long_waits import waiting
from overlord.runtime.threads import Threads
from overlord.sources.storage import is_remote
from overlord.steering.steering import Steering
from overlord.stream.chunk_order import chunks_per_epoch
from overlord.stream.drawing import Extent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Source, Unit
    from overlord.roles.routes import Routes
    from overlord.runtime.engine import Engine, Workplace
    from overlord.steering.decisions import Steered
    from overlord.stream.progress import Progress

    pass


_LISTING_THREADS = 16  # listing waits for storage, not for the processor


def list_units(sources: Mapping[str, Source]) -> dict[str, Sequence[Unit]]:
    """Every source's units, listed side by side. A source without any is an error."""
    threads = Threads(min(_LISTING_THREADS, len(sources)), "overlord-list")
    pending = {name: threads.submit(source.units) for name, source in sources.items()}
    listed: dict[str, Sequence[Unit]] = {}
    try:
        for name, future in pending.items():
            try:
                with waiting(lambda name=name: f"source {name!r} lists its files"):
                    listed[name] = future.result()
            except Exception as error:
                error.add_note(f"while listing source {name!r}")
                raise
            if not listed[name]:
                raise SourceError(f"source {name!r} has no data: its files hold no rows; remove it or check its paths")
    finally:
        threads.shutdown()  # after an error or Ctrl-C a listing may still wait for storage: it is left behind
    return listed


def make_partition(
    job: Job, units: Mapping[str, Sequence[Unit]], num_hosts: int | None, given: Partition | None = None
) -> Partition:
    """How sources are spread over loader hosts: as given, if it is; by the bytes that steps are expected to take of each,
    over `num_hosts`; share i of every source in host i where the hosts stand in one process (None)."""
    if given is not None:
        given.check_sources(job.sources)
        return given
    num_shares = {name: source.loaders for name, source in job.sources.items()}
    if num_hosts is None:
        return by_share(num_shares)
    return evenly(num_shares, {name: _expected_load(job, name, units[name]) for name in job.sources}, num_hosts)


def publish_units(engine: Engine, units: Mapping[str, Sequence[Unit]]) -> None:
    """Let any loader host open any source."""
    for name, listed in units.items():
        engine.publish(f"units/{name}", listed)


def make_loader_host(
    job: Job, engine: Engine, shares: Sequence[Share], num_threads: int | None, workplace: Workplace
) -> LoaderHost:
    """The host of some shares of sources, whose units are published. It reads on `num_threads` threads of its own, on those
    of its process where None."""
    threads = workplace.read_threads if num_threads is None else Threads(num_threads, "overlord-read")
    num_held = Counter(share.source for share in shares)
    num_shares = {share.source: share.of for share in shares}
    # The threads of the process contend for the GIL with each other and with the thread that builds steps.
    release_gil = num_threads is None and threads.num_threads > 0

    def opened(name: str) -> Held:
        source = job.sources[name]
        bad_rows = BadRowLog(name, source.bad_rows)
        units: Sequence[Unit] = engine.published(f"units/{name}")
        maker = ChunkMaker(
            name,
            source,
            units,
            seed=job.seed,
            batch=job.batch,
            bad_rows=bad_rows,
            processes=workplace.processes,
            release_gil=release_gil,
        )
        # Never less than one of the declared loaders has: a source that is dealt to more of them must not find that its
        # chunks no longer fit.
        part = source.buffer_bytes * num_held[name] // num_shares.get(name, 1)
        buffer_bytes = max(part, source.buffer_bytes // source.loaders)
        # A remote store may keep one waiting at any time: what it is asked for ahead is left to threads.
        is_local = not any(is_remote(unit.path) for unit in units[:1])
        make = maker.make, maker.expected_bytes
        loader = SourceLoader(name, *make, buffer_bytes, threads, at_close=maker.close, makes_ahead=is_local)
        return Held(loader, bad_rows, source.decode, maker.report_bad_decode)

    return LoaderHost(opened, tuple(num_held), job.batch.columns, threads, own_threads=num_threads is not None)


def is_kept(job: Job, era: Era | None, engine: Engine) -> bool:
    """Whether what a planner decides outlives it: it is written down, or the planner lives and dies with the run."""
    if era is None and engine.num_hosts is not None:
        if job.mix.feedback is not None:
            raise SpecError(
                "a mixture with feedback decides while the job runs, and on a cluster the planner may be lost: let it write "
                "that down with start(log=...)"
            )
        return False
    return True


def make_planner(
    job: Job,
    num_units: Mapping[str, int],
    start: Progress,
    steered: Steered,
    routes: Routes,
    era: Era | None,
    is_safe: bool,
    is_served: bool,
    workplace: Workplace,
) -> Planner:
    """`is_safe` says whether what the planner decides outlives it; `is_served`, that trainers in other processes come."""
    max_lead = job.prefetch + 2
    place = ClientPlaceTree(job.mesh)
    log = None if era is None else PlanLog(era, start, max_lead, steered)
    return Planner(
        start,
        job.batch,
        job.mix,
        job.strategy or plain(),
        place,
        [Extent(chunks_per_epoch(num_units[name], s.window), s.num_epochs) for name, s in job.sources.items()],
        routes,
        masked=job.is_masked,
        max_lead=max_lead,
        log=log,
        steering=Steering(job.mix, start, place, steered, log, is_safe),
        expected=range(job.mesh.dp) if is_served else (),
    )


def _expected_load(job: Job, name: str, units: Sequence[Unit]) -> float:
    """Bytes of a source that a sample of the mixture takes on average, where the schedule gives the source most."""
    weight = max(job.mix.at(step).get(name, 0.0) for step, _ in job.mix.schedule)
    num_bytes = sum(unit.num_bytes for unit in units)
    num_rows = sum(unit.num_rows or 0 for unit in units)
    per_sample = num_bytes / num_rows if num_rows and job.mix.unit == "samples" else 1.0
    return weight * (per_sample or 1.0)
