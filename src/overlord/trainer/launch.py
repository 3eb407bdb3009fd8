"""`attach`, which every process of a torch training run calls to get the batch iterator of its rank.

Rank 0 starts the job and serves it; the others get its address through torch's own rendezvous and connect. On a single node
the service listens on loopback only. On several nodes rank 0 listens on all interfaces, and a random token, passed through
the rendezvous, admits only the ranks of this run. On Ray, ranks first tell rank 0 on which nodes they are, so that their
constructors are placed there; in a cluster that does not end with rank 0 the run is a role of the cluster, and rank 0 a
trainer like the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.chunks.transforms.apply import engines_used
from overlord.declare.arguments import whole
from overlord.errors import ServiceError, SpecError
from overlord.runtime.cores import num_usable_cores
from overlord.runtime.processes.engine import default_engine
from overlord.runtime.ray.engine import Ray
from overlord.runtime.whereabouts import node_names
from overlord.service.auth import Address
from overlord.service.channel import connect
from overlord.service.run import Loader, start
from overlord.service.run_options import RunOptions
from overlord.trainer.cluster_run import ClusterRun

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from overlord.declare.job import Job
    from overlord.declare.mesh import Axis
    from overlord.declare.policies import Log
    from overlord.fleet.autoscaler import Autoscale
    from overlord.loaders.model import Budget, Partition
    from overlord.runtime.engine import Engine
    from overlord.service.client import Client

_attached = count()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class World:
    """This process's rank in the training run."""

    rank: int
    """By which the processes meet: that of torch, if there is one."""
    size: int
    master: str
    """The host of rank 0, as other nodes reach it."""
    is_one_node: bool
    reader: int
    """The rank of the mesh that this process reads as."""
    is_told: bool
    """Whether `reader` was given, so that it may be wrong."""
    is_torch: bool
    """Whether torch, or its launcher, says how many processes there are."""

    @staticmethod
    def find(rank: int | None, world: int | None) -> World:
        """Read the rank from the initialised process group, or from the variables that torchrun sets, unless it is given.
        Without any of these a process is a world of its own."""
        rank = None if rank is None else whole(rank, "rank")
        world = None if world is None else whole(world, "world", least=1)
        if dist.is_available() and dist.is_initialized():
            found = dist.get_rank(), dist.get_world_size()
        else:
            found = _read_environment()
        if found is None and world not in (None, 1) and rank is None:
            raise SpecError(f"world={world} needs the rank of this process too: attach(job, rank=..., world={world})")
        if found is not None and world not in (None, 1, found[1]):
            raise SpecError(
                f"world={world}, but torch's training run has {found[1]} processes; leave it out, or pass world=1 for a run "
                "that this process reads alone"
            )
        own, size = (0, 1) if world == 1 else found or (rank or 0, world or 1)
        reader = own if rank is None else rank
        if reader >= size:
            raise SpecError(
                f"rank={reader} is not one of the world's ranks 0 to {size - 1}; pass world=..., the number of processes, "
                "or start them with torchrun"
            )
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        local = os.environ.get("LOCAL_WORLD_SIZE")
        one_node = int(local) == size if local else Address(master, 0).is_loopback
        return World(own, size, master, one_node or size == 1, reader, rank is not None, found is not None)


class Meeting(msgspec.Struct, frozen=True):
    """The message from rank 0 to the others: where to connect, or why the job could not start."""

    address: str = ""
    token: str | None = None
    error: str | None = None


def attach(  # noqa: PLR0913 - a declaration: all options but the job are keyword-only
    job: Job | None = None,
    *,
    device_mesh: Any = None,
    rank: int | None = None,
    world: int | None = None,
    cut: Sequence[Axis] | None = None,
    address: str | None = None,
    token: str | None = None,
    tls_root: str | None = None,
    engine: Engine | None = None,
    resume: Mapping[str, Any] | None = None,
    accept_changes: Collection[str] | bool = (),
    log: str | Path | Log | None = None,
    partition: Partition | None = None,
    autoscale: Autoscale | Budget | None = None,
    shadows: Budget | None = None,
    near: Sequence[str] = (),
    profile: str | Path | None = None,
    timeout_s: float | None = 300.0,
    torch: bool = True,
    pin_memory: bool = False,
    device: Any = None,
    fetch_ahead: int | None = None,
    linger_s: float = 60.0,
) -> Client:
    """Return the batch iterator of this process's rank in a torch training run.

    Every rank must make the same calls in the same order. Rank 0 starts the job and serves it to the others; nothing else
    has to be started. A line on its standard error says which processes load, and what encodes texts. With `address`, no
    job is started: every rank connects to the service there. A process that is in no training run of torch is a world of
    one.

    On a Ray cluster that runs already (`engine=ol.Ray(address)`) the run lives in the cluster: if rank 0 is lost, the other
    ranks read on. It ends with rank 0's client, or a minute after the last rank.

    Every rank has to read: while one has read nothing yet, the others get only the first few steps, and after `timeout_s`
    an error that names it. Close the client of a rank that is not to read.

    - `device_mesh`: a torch DeviceMesh of the whole world. Without it the job's own mesh is used; if that leaves dp out, dp
      is the world size divided by cp x tp x pp.
    - `rank`: the rank of the mesh that this process reads as, where that is not its rank in torch. Every process gives its
      own. `world`: the number of processes, where torch does not know it; 1 starts a run for this process alone.
    - `cut`: as `Job.cut`; `()` leaves slices for context parallelism, and the fields of pipeline stages, to the framework.
    - `address`, `token`, `tls_root`: a service that runs already, its token and its root certificate.
    - `engine`, `resume`, `accept_changes`: as in `ol.start`; `resume` is the state to continue from. By default a world of
      several ranks is loaded for by all cores of the machine of rank 0 (`ol.Processes()`, if it has more than two), a single
      rank in its own process.
    - `log`, `partition`, `autoscale`, `shadows`, `near`, `profile`: as in `ol.start`.
    - `timeout_s`: the most seconds to wait for a step; None waits without limit.
    - `torch`, `pin_memory`, `device`, `fetch_ahead`: as in `ol.connect`; torch tensors, in pinned memory or on a device
      ("cuda": the one that is current at the first `next`), where steps are copied ahead of the trainer.
    - `linger_s`: how long rank 0 keeps serving after its own client is closed (at the latest when the process exits), until
      the other ranks have left.
    """
    place = World.find(rank, world)
    run = RunOptions(log=log, partition=partition, autoscale=autoscale, shadows=shadows, near=near, profile=profile)
    options: dict[str, Any] = {"timeout_s": timeout_s, "torch": torch, "pin_memory": pin_memory, "device": device}
    if fetch_ahead is not None:
        options["fetch_ahead"] = fetch_ahead
    if address is not None:
        if run != RunOptions() or cut is not None:
            raise SpecError(
                "log, partition, autoscale, shadows, near, profile and cut are options of the run that the service at "
                "`address` carries out: give them to `overlord serve` there, and cut to its Job"
            )
        return _close_at_exit(connect(address, rank=place.reader, token=token, tls_root=tls_root, **options))
    if job is None:
        raise SpecError("attach needs a job to start, or the address=... of a service that runs one")
    job = _on_mesh(job if cut is None else replace(job, cut=cut), device_mesh, place)

    meeting_place = None if place.size == 1 else _Rendezvous(place)
    find_nodes = _share_nodes(job, place, meeting_place)

    def start_job(token: str) -> tuple[Loader | ClusterRun, str]:
        where, reason = (engine, "") if engine is not None or place.size == 1 else default_engine(job.num_workers)
        if meeting_place is not None and place.is_told:
            _check_readers(meeting_place.readers(), place.size)
        if isinstance(where, Ray):
            nodes = [] if run.near else find_nodes()
            if meeting_place is not None and not where.cluster.is_own:
                kept = ClusterRun(
                    where,
                    job,
                    options=run,
                    token=token,
                    advertise=None if place.is_one_node else place.master,
                    trainer_nodes=nodes,
                    resume=resume,
                    accept_changes=accept_changes,
                )
                return kept, "in the Ray cluster, where the run goes on if this process is lost"
            where.expect_trainers(nodes)
        elif where is not None and place.is_one_node:
            where.expect_trainers([node_names()] * job.mesh.dp)
        engines = _tokenizer_engines(job) if where is None or where.is_one_machine else []
        loader = start(job, engine=where, resume=resume, accept_changes=accept_changes, **run.to_arguments())
        own = f"in its own process on {num_usable_cores()} cores{f' ({reason})' if reason else ''}"
        encoded = f"; texts are encoded by {', '.join(engines)}" if engines else ""
        return loader, f"{where or own}{encoded}"

    return _close_at_exit(_meet(start_job, place, meeting_place, linger_s, options))


def _meet(
    start_job: Callable[[str], tuple[Loader | ClusterRun, str]],
    world: World,
    meeting_place: _Rendezvous | None,
    linger_s: float,
    options: Mapping[str, Any],
) -> Client:
    """Start the run if this is rank 0, else connect to that of rank 0. `start_job` takes the token for clients, and returns
    also what loads, in words."""
    if meeting_place is None:
        run, loads = start_job("")
        sys.stderr.write(f"overlord: this process reads alone: {loads}\n")
        return _make_host_client(run, Meeting(), world, 0.0, options)
    if world.rank == 0:
        run, meeting = _serve(start_job, world, meeting_place.send)
        return _make_host_client(run, meeting, world, linger_s, options)
    meeting = meeting_place.receive()
    if meeting.error is not None:
        raise ServiceError(f"rank 0 could not start the job: {meeting.error}")
    return connect(meeting.address, rank=world.reader, token=meeting.token, **options)


def _on_mesh(job: Job, device_mesh: Any, world: World) -> Job:
    mesh = job.mesh if device_mesh is None else ClientPlaceTree.from_device_mesh(device_mesh).mesh
    try:
        return replace(job, mesh=mesh.for_world(world.size))
    except SpecError as error:
        error.add_note("leave dp out of the job's mesh, and attach takes it from the world; or pass device_mesh=...")
        if not world.is_torch:
            error.add_note(
                "this process is in no training run of torch (no process group, no RANK), so it is a world of one: start it "
                "with torchrun, or pass rank= and world="
            )
        raise


def _check_readers(readers: Sequence[int], size: int) -> None:
    if missing := sorted(set(range(size)) - set(readers)):
        twice = sorted({rank for rank in readers if readers.count(rank) > 1})
        raise SpecError(
            f"every process gives attach another rank=, from 0 to {size - 1}: "
            f"{', '.join(map(str, twice))} came more than once, and {', '.join(map(str, missing))} not at all"
        )


def _serve(
    make: Callable[[str], tuple[Loader | ClusterRun, str]], world: World, send: Callable[[Meeting], None]
) -> tuple[Loader | ClusterRun, Meeting]:
    """Start the job, serve it, and send its address to the other ranks, or the error: otherwise they would wait forever."""
    token = secrets.token_urlsafe(32)
    try:
        run, loads = make(token)
        try:
            if isinstance(run, ClusterRun):
                address = run.address
            elif world.is_one_node:
                address = run.serve("127.0.0.1:0", token=token, wait_for_all=True)
            else:
                address = run.serve("0.0.0.0:0", token=token, advertise=world.master, wait_for_all=True)
        except BaseException:
            run.close()
            raise
    except Exception as error:
        send(Meeting(error=f"{type(error).__name__}: {error}"))
        raise
    meeting = Meeting(address, token)
    send(meeting)
    sys.stderr.write(f"overlord: rank {world.reader} loads for {world.size} ranks at {address}: {loads}\n")
    return run, meeting


def _tokenizer_engines(job: Job) -> list[str]:
    """What encodes texts, each engine once: one that is several times slower than another is seen at the start."""
    return list(dict.fromkeys(engine for source in job.sources.values() for engine in engines_used(source.transforms)))


def _make_host_client(
    run: Loader | ClusterRun, meeting: Meeting, world: World, linger_s: float, options: Mapping[str, Any]
) -> Client:
    """Return the client of the process that has started the run. Closing it waits for the other ranks to leave and then ends
    the run."""
    try:
        if isinstance(run, ClusterRun):
            client = connect(meeting.address, rank=world.reader, token=meeting.token, **options)
        else:
            client = run.client(world.reader, **options)
    except BaseException:
        run.close()
        raise
    client.at_close(run.close)
    client.at_close(lambda: _linger(run, world, linger_s))
    return client


def _linger(run: Loader | ClusterRun, world: World, linger_s: float) -> None:
    if not run.wait_for_leave([rank for rank in range(world.size) if rank != world.reader], linger_s):
        _log.warning("the service of this training run stops, though some ranks did not leave within %.0f s", linger_s)


def _close_at_exit(client: Client) -> Client:
    """Close the client when the process exits, so that other ranks do not wait for it. Returns the client."""
    atexit.register(client.close)
    client.at_close(lambda: atexit.unregister(client.close))
    return client


class _Rendezvous:
    """Where the ranks of a training run meet: their process group, or the store through which one is made."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_group = dist.is_initialized()
        if not self._is_group:
            # A separate key for each restart of the workers, and for each call of `attach` in them.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self._key = f"overlord/{attempt}/{next(_attached)}"
            self._store = _store(world.rank, world.size)
        if world.is_told:
            self._tell_reader()

    def _tell_reader(self) -> None:
        """Tell the others which rank of the mesh this process reads as."""
        if self._is_group:
            self._readers: list[Any] = [None] * self._world.size
            dist.all_gather_object(self._readers, self._world.reader)
        else:
            self._store.set(f"{self._key}/reader/{self._world.rank}", str(self._world.reader))

    def readers(self) -> list[int]:
        """The ranks that processes read as, in the order of the processes. For rank 0."""
        if self._is_group:
            return self._readers
        return [int(self._store.get(f"{self._key}/reader/{rank}")) for rank in range(self._world.size)]

    def send(self, meeting: Meeting) -> None:
        """Send the meeting from rank 0 to the others."""
        encoded = msgspec.json.encode(meeting)
        if self._is_group:
            dist.broadcast_object_list([encoded], src=0)
        else:
            self._store.set(self._key, encoded.decode())

    def receive(self) -> Meeting:
        """Receive the meeting from rank 0."""
        if not self._is_group:
            return msgspec.json.decode(self._store.get(self._key), type=Meeting)
        received: list[Any] = [None]
        dist.broadcast_object_list(received, src=0)
        return msgspec.json.decode(received[0], type=Meeting)

    def share(self, names: Sequence[str], ranks: Sequence[int]) -> Callable[[], list[tuple[str, ...]]]:
        """Share the names of some ranks' nodes; every rank calls it. The function that is returned is for rank 0, and
        returns them in the order of `ranks`."""
        if self._is_group:
            gathered: list[Any] = [None] * self._world.size
            dist.all_gather_object(gathered, (self._world.reader, tuple(names)))
            return lambda: [dict(gathered)[rank] for rank in ranks]
        if self._world.reader in ranks:
            self._store.set(f"{self._key}/node/{self._world.reader}", msgspec.json.encode(names).decode())

        def names_of(rank: int) -> tuple[str, ...]:
            return msgspec.json.decode(self._store.get(f"{self._key}/node/{rank}"), type=tuple[str, ...])

        return lambda: [names_of(rank) for rank in ranks]


def _share_nodes(job: Job, world: World, rendezvous: _Rendezvous | None) -> Callable[[], list[tuple[str, ...]]]:
    """Share where the first rank of each data-parallel group is; returns the function by which rank 0 finds out."""
    names = node_names("" if world.is_one_node else world.master)
    if rendezvous is None:
        return lambda: [names]
    tree = ClientPlaceTree(job.mesh)
    return rendezvous.share(names, [min(tree.ranks_of(group)) for group in range(job.mesh.dp)])


@cache
def _store(rank: int, size: int) -> Any:
    """Open the rendezvous store. Cached, because without torchrun it lives in rank 0 and must outlive the others' reads."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SpecError(
            f"the {size} processes of this run find each other at MASTER_ADDR and MASTER_PORT, and {missing[0]} is not set; "
            "set both, start the processes with torchrun, or call torch.distributed.init_process_group first"
        )
    store, _, _ = next(iter(rendezvous("env://", rank, size)))
    return store


def _read_environment() -> tuple[int, int] | None:
    """The rank and the number of processes as torchrun sets them; None where neither is set."""
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if not any(found.values()):
        return None
    for name, value in found.items():
        if value is None or not value.isdigit():
            other = next(each for each in found if each != name)
            raise SpecError(
                f"this process is not part of a torch training run: it has no process group, and {name} is {value!r} while "
                f"{other} is {found[other]!r}; start it with torchrun, call torch.distributed.init_process_group first, or "
                "unset both for a world of one"
            )
    return int(str(found["RANK"])), int(str(found["WORLD_SIZE"]))
