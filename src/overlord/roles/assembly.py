"""How each role is made from a job. Functions of plain values, so that any engine can call them anywhere, and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from overlord.data.bad_rows import BadRowLog
from overlord.data.chunk_maker import ChunkMaker
from overlord.planning.drawing import Extent
from overlord.planning.order import chunks_per_epoch
from overlord.planning.place_tree import ClientPlaceTree
from overlord.planning.progress import Progress
from overlord.planning.scaling import Partition, Share, by_share, evenly
from overlord.planning.strategies import plain
from overlord.roles.loader_host import Held, LoaderHost
from overlord.roles.plan_log import Era, PlanLog
from overlord.roles.planner import Planner
from overlord.roles.routes import Routes
from overlord.roles.source_loader import SourceLoader
from overlord.spec import Job, Unit
from overlord.workplace import Workplace


def make_partition(job: Job, units: Mapping[str, Sequence[Unit]], num_hosts: int | None) -> Partition:
    """How sources are spread over loader hosts: by the bytes that steps are expected to take of each, over `num_hosts`;
    share i of every source in host i where the hosts stand in one process (None)."""
    num_shares = {name: source.loaders for name, source in job.sources.items()}
    if num_hosts is None:
        return by_share(num_shares)
    return evenly(num_shares, {name: _expected_load(job, name, units[name]) for name in job.sources}, num_hosts)


def make_loader_host(
    job: Job, units: Mapping[str, Sequence[Unit]], shares: Sequence[Share], workplace: Workplace
) -> LoaderHost:
    """The host of some shares of sources; `units` has those of these sources at least."""
    held = {}
    for name, num_held in Counter(share.source for share in shares).items():
        source = job.sources[name]
        bad_rows = BadRowLog(name, source.bad_rows)
        maker = ChunkMaker(name, source, units[name], job.seed, job.batch, bad_rows, workplace.processes)
        buffer_bytes = source.buffer_bytes * num_held // source.loaders
        loader = SourceLoader(name, maker.make, maker.expected_bytes, buffer_bytes, workplace.read_threads)
        held[name] = Held(loader, bad_rows, source.decode, maker.bad_decode)
    return LoaderHost(held, job.batch.columns, workplace.read_threads)


def make_planner(
    job: Job, num_units: Mapping[str, int], start: Progress, routes: Routes, era: Era | None, workplace: Workplace
) -> Planner:
    max_lead = job.prefetch + 2
    return Planner(
        start,
        job.batch,
        job.mix,
        job.strategy or plain(),
        ClientPlaceTree(job.mesh),
        [Extent(chunks_per_epoch(num_units[name], s.window), s.num_epochs) for name, s in job.sources.items()],
        routes,
        masked=any(source.loss_mask is not None for source in job.sources.values()),
        max_lead=max_lead,
        log=None if era is None else PlanLog(era, start, keep=max_lead),
    )


def _expected_load(job: Job, name: str, units: Sequence[Unit]) -> float:
    """Bytes of a source that a sample of the mixture takes on average, where the schedule gives the source most."""
    weight = max(job.mix.at(step).get(name, 0.0) for step, _ in job.mix.schedule)
    num_bytes = sum(unit.num_bytes for unit in units)
    num_rows = sum(unit.num_rows or 0 for unit in units)
    per_sample = num_bytes / num_rows if num_rows and job.mix.unit == "samples" else 1.0
    return weight * (per_sample or 1.0)
