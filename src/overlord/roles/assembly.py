"""How each role is made from a job. Functions of plain values, so that any engine can call them anywhere, and again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlord.data.bad_rows import BadRowLog
from overlord.data.chunk_maker import ChunkMaker
from overlord.engine import Handle
from overlord.planning.drawing import Extent
from overlord.planning.order import chunks_per_epoch
from overlord.planning.place_tree import ClientPlaceTree
from overlord.planning.progress import Progress
from overlord.planning.strategies import plain
from overlord.roles.data_constructor import DataConstructor
from overlord.roles.loader_host import Held, LoaderHost
from overlord.roles.planner import Planner
from overlord.roles.routes import Routes
from overlord.roles.source_loader import SourceLoader
from overlord.spec import Job, Unit
from overlord.workplace import Workplace


def num_hosts(job: Job) -> int:
    """Loader hosts of a job: share i of every source lives in host i."""
    return max(source.loaders for source in job.sources.values())


def make_routes(job: Job, hosts: Sequence[Handle[LoaderHost]]) -> Routes:
    return Routes(hosts, {name: range(source.loaders) for name, source in job.sources.items()})


def make_loader_host(job: Job, units: Mapping[str, Sequence[Unit]], index: int, workplace: Workplace) -> LoaderHost:
    """The host of share `index` of every source that has that many."""
    held = {}
    for name, source in job.sources.items():
        if index >= source.loaders:
            continue
        bad_rows = BadRowLog(name, source.bad_rows)
        maker = ChunkMaker(name, source, units[name], job.seed, job.batch, bad_rows, workplace.processes)
        share = source.buffer_bytes // source.loaders
        loader = SourceLoader(name, maker.make, maker.expected_bytes, share, workplace.read_threads)
        held[name] = Held(loader, bad_rows, source.decode, maker.bad_decode)
    return LoaderHost(held, job.batch.columns, workplace.read_threads)


def make_planner(job: Job, num_units: Mapping[str, int], start: Progress, routes: Routes, workplace: Workplace) -> Planner:
    return Planner(
        start,
        job.batch,
        job.mix,
        job.strategy or plain(),
        ClientPlaceTree(job.mesh),
        [Extent(chunks_per_epoch(num_units[name], s.window), s.num_epochs) for name, s in job.sources.items()],
        routes,
        masked=any(source.loss_mask is not None for source in job.sources.values()),
        max_lead=job.prefetch + 2,
    )


def make_constructor(
    job: Job, group: int, planner: Handle[Planner], routes: Routes, workplace: Workplace
) -> DataConstructor:
    tree = ClientPlaceTree(job.mesh)
    return DataConstructor(group, job.batch, tree, planner, routes, job.prefetch, workplace.build_threads)
