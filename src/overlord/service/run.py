"""`start` puts the roles of a job on an engine, `take_over` finds them there; both return the running job, a `Loader`."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overlord.checkpoint.fingerprint import Fingerprint
from overlord.declare.arguments import whole
from overlord.declare.policies import Log
from overlord.errors import SpecError
from overlord.planlog.lineage_run import record_units
from overlord.planlog.log_lock import lock_log
from overlord.planlog.plan_log import begin_run, chunks_of_saved
from overlord.roles.assembly import check_caches, cut_units, list_units, with_caches, with_windows
from overlord.runtime.embedded import Embedded
from overlord.runtime.engine import EarlyLoad, Engine, WorkplaceSize
from overlord.service.loader import Loader
from overlord.service.run_options import RunOptions, warn_of_small_store
from overlord.service.run_roles import RunRoles
from overlord.service.takeover import RunRecord, find_left_loaders, find_left_run

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from overlord.declare.job import Job
    from overlord.fleet.autoscaler import Autoscale
    from overlord.fleet.hosts import FleetState
    from overlord.loaders.model import Budget, Partition
    from overlord.planlog.log_lock import LogLock
    from overlord.planlog.plan_log import ClusterLog
    from overlord.runtime.ray.engine import Ray


def start(  # noqa: PLR0913 - all but the job by name
    job: Job,
    *,
    engine: Engine | None = None,
    resume: Mapping[str, Any] | str | bytes | None = None,
    accept_changes: Collection[str] | bool = (),
    world_size: int | None = None,
    log: str | Path | Log | ClusterLog | None = None,
    partition: Partition | None = None,
    autoscale: Autoscale | Budget | None = None,
    shadows: Budget | None = None,
    near: Sequence[str] = (),
    profile: str | Path | None = None,
) -> Loader:
    """Start a job. Use the loader in a `with` block, or call `close`.

    `engine` is where roles run; by default in this process. `resume` is a state from `state_dict`, or its JSON text, from
    any mesh. `accept_changes` names differences between the job and the state to accept. `world_size`, where given, must fit
    the mesh; a mesh without `dp` takes its dp from it.

    `log` is where the planner records its decisions, so that a planner that is made again returns the same plans. On a
    cluster it always does so: by default in the cluster's own table, which ends with the run. A checkpoint belongs to a
    model, so `resume=state` decides where a run continues, whatever the log says. `resume="log"` is for a run whose trainers
    lived on: it continues with the first step that the log does not know to be taken by all of them, up to `prefetch` + 1
    steps before the first that was not.

    `partition` says which loaders share a process, on a cluster. With `autoscale`, loaders are added and removed during the
    run, within that budget. `shadows` is what Shadow Loaders may use in addition, on a cluster. `near` names, for each
    data-parallel group, the node of its trainers, on a cluster. `profile` is a file for who did what when, for Perfetto,
    or "otel" for OpenTelemetry. None of them changes the contents of a step.
    """
    if world_size is not None:
        job = replace(job, mesh=job.mesh.for_world(whole(world_size, "world_size", least=1)))
    options = RunOptions(log=log, partition=partition, autoscale=autoscale, shadows=shadows, near=near, profile=profile)
    if resume == "log" and log is None:
        raise SpecError("resume='log' continues from a log: say where it is with log=...")
    engine = engine or Embedded()
    options.place(engine)
    with engine.recorder.current():
        # First: its processes start while files are listed.
        engine.open(WorkplaceSize(job.num_workers, job.num_processes), _early_loads(job, engine))
        try:
            warn_of_small_store(engine, job)
            return _start_roles(job, engine, options, resume=resume, accept_changes=accept_changes)
        except BaseException:
            engine.close()
            raise


def _early_loads(job: Job, engine: Engine) -> list[EarlyLoad]:
    """The vocabularies that worker processes of this machine share."""
    if engine.is_in_process or not engine.is_one_machine or not any(source.transforms for source in job.sources.values()):
        return []
    from overlord.chunks.transforms.apply import tokenizer_files

    files = [file for source in job.sources.values() for file in tokenizer_files(source.transforms)]
    return [EarlyLoad("overlord.chunks.transforms.tokenize", "load_encoding", file) for file in dict.fromkeys(files)]


def _start_roles(
    job: Job,
    engine: Engine,
    options: RunOptions,
    *,
    resume: Mapping[str, Any] | str | bytes | None,
    accept_changes: Collection[str] | bool = (),
    left_loaders: FleetState | None = None,
) -> Loader:
    """Start the roles of a run on an engine that is open. `left_loaders` run already."""
    job = with_caches(job)
    check_caches(job)
    units = list_units(job.sources)
    log = options.log_on(engine)
    lock = _lock(log)
    try:
        saved = chunks_of_saved(resume, log, job.sources)
        units = cut_units(job, units, saved)
        job = with_windows(job, units, saved)
        fingerprint = Fingerprint.of(job, units)
        progress, steered, era = begin_run(job, fingerprint, resume, log, accept_changes)
        if era is not None and era.has_lineage:
            record_units(era, units)
        record = RunRecord(
            job=job,
            fingerprint=fingerprint,
            start=progress,
            steered=steered,
            era=era,
            generation=0,
            instance=secrets.token_hex(8),
            accept_changes=accept_changes,
        )
        roles = RunRoles(engine, record, units, options.loaders, left_loaders=left_loaders)
        return Loader(roles, start, profile=options.profile, lock=lock)
    except BaseException:
        if lock is not None:
            lock.release()
        raise


def _lock(log: Log | ClusterLog | None) -> LogLock | None:
    """Lock the log of a run that begins, or is taken over, in this process."""
    return lock_log(log) if isinstance(log, Log) else None


def take_over(job: Job, engine: Ray, options: RunOptions) -> Loader:
    """Go on with a run whose roles have outlived its process, in the namespace of the engine. If they do not make a whole
    run, it starts from its log, with the loaders and in the processes that there are."""
    options.place(engine)
    with engine.recorder.current():
        return _take_roles_over(job, engine, options)


def _take_roles_over(job: Job, engine: Ray, options: RunOptions) -> Loader:
    engine.open(WorkplaceSize(job.num_workers, job.num_processes))
    try:
        running = engine.take_over()
        left = find_left_run(engine, running)
        if left is None:
            loaders = find_left_loaders(engine, running)
            engine.empty([name for name in running if loaders is None or name not in loaders.hosts])
            return _start_roles(job, engine, options, resume="log", left_loaders=loaders)
        lock = _lock(None if left.record.era is None else left.record.era.log)
        roles = RunRoles(engine, left.record, left.units, options.loaders, left=left)
        return Loader(roles, start, profile=options.profile, lock=lock)
    except BaseException:
        engine.close()
        raise
