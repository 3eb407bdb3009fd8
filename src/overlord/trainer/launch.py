"""`attach`, which every process of a torch training run calls to get the batch iterator of its rank.

Rank 0 starts the job and serves it; the others get its address through torch's own rendezvous and connect. On a single node
the service listens on loopback only. On several nodes rank 0 listens on all interfaces, and a random token, passed through
the rendezvous, admits only the ranks of this run.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.errors import ServiceError, SpecError
from overlord.runtime.processes.engine import default_engine
from overlord.service.auth import Address
from overlord.service.channel import connect
from overlord.service.run import Loader, start
from overlord.service.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from overlord.declare.job import Job
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
    size: int
    master: str
    """The host of rank 0, as other nodes reach it."""
    is_one_node: bool

    @staticmethod
    def from_environment() -> World:
        """Read the rank from the initialised process group, or from the variables that torchrun sets."""
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = _number("RANK"), _number("WORLD_SIZE")
        local = os.environ.get("LOCAL_WORLD_SIZE")
        one_node = int(local) == size if local else Address(master, 0).is_loopback
        return World(rank, size, master, one_node or size == 1)


class Meeting(msgspec.Struct, frozen=True):
    """The message from rank 0 to the others: where to connect, or why the job could not start."""

    address: str = ""
    token: str | None = None
    error: str | None = None


def attach(  # noqa: PLR0913 - a declaration: all options but the job are keyword-only
    job: Job | None = None,
    *,
    device_mesh: Any = None,
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
    timeout_s: float | None = 300.0,
    torch: bool = True,
    pin_memory: bool = False,
    device: Any = None,
    fetch_ahead: int | None = None,
    linger_s: float = 60.0,
) -> Client:
    """Return the batch iterator of this process's rank in a torch training run.

    Every rank must make the same calls in the same order. Rank 0 starts the job and serves it to the others; nothing else
    has to be started. With `address`, no job is started: every rank connects to the service there.

    - `device_mesh`: a torch DeviceMesh of the whole world. Without it the job's own mesh is used; if that leaves dp out, dp
      is the world size divided by cp x tp x pp.
    - `address`, `token`, `tls_root`: a service that runs already, its token and its root certificate.
    - `engine`, `resume`, `accept_changes`: as in `ol.start`; `resume` is the state to continue from. By default a world of
      several ranks is loaded for by all cores of the machine of rank 0 (`ol.Processes()`, if it has more than two), a single
      rank in its own process.
    - `log`, `partition`, `autoscale`, `shadows`, `near`: as in `ol.start`.
    - `timeout_s`: the most seconds to wait for a step; None waits without limit.
    - `torch`, `pin_memory`, `device`, `fetch_ahead`: as in `ol.connect`; torch tensors, in pinned memory or on a device
      ("cuda": the one that is current at the first `next`), where steps are copied ahead of the trainer.
    - `linger_s`: how long rank 0 keeps serving after its own client is closed (at the latest when the process exits), until
      the other ranks have left.
    """
    world = World.from_environment()
    run = RunOptions(log=log, partition=partition, autoscale=autoscale, shadows=shadows, near=near)
    options: dict[str, Any] = {"timeout_s": timeout_s, "torch": torch, "pin_memory": pin_memory, "device": device}
    if fetch_ahead is not None:
        options["fetch_ahead"] = fetch_ahead
    if address is not None:
        if run != RunOptions():
            raise SpecError(
                "log, partition, autoscale, shadows and near are options of the run that the service at `address` carries "
                "out: give them to `overlord serve` there"
            )
        return _close_at_exit(connect(address, rank=world.rank, token=token, tls_root=tls_root, **options))
    if job is None:
        raise SpecError("attach needs a job to start, or the address=... of a service that runs one")
    job = _on_mesh(job, device_mesh, world)

    def start_job() -> Loader:
        where, reason = (engine, "") if engine is not None or world.size == 1 else default_engine(job.num_workers)
        loader = start(job, engine=where, resume=resume, accept_changes=accept_changes, **run.to_arguments())
        if world.size > 1:
            _log.info("rank 0 loads for %d ranks: %s", world.size, where or f"in its own process ({reason})")
        return loader

    if world.size == 1:
        return _close_at_exit(_make_host_client(start_job(), world, 0.0, options))
    send, receive = _rendezvous(world)
    if world.rank == 0:
        return _close_at_exit(_make_host_client(_serve(start_job, world, send), world, linger_s, options))
    meeting = receive()
    if meeting.error is not None:
        raise ServiceError(f"rank 0 could not start the job: {meeting.error}")
    return _close_at_exit(connect(meeting.address, rank=world.rank, token=meeting.token, **options))


def _on_mesh(job: Job, device_mesh: Any, world: World) -> Job:
    mesh = job.mesh if device_mesh is None else ClientPlaceTree.from_device_mesh(device_mesh).mesh
    try:
        return replace(job, mesh=mesh.for_world(world.size))
    except SpecError as error:
        error.add_note("leave dp out of the job's mesh, and attach takes it from the world; or pass device_mesh=...")
        raise


def _serve(make: Callable[[], Loader], world: World, send: Callable[[Meeting], None]) -> Loader:
    """Start the job, serve it, and send its address to the other ranks, or the error: otherwise they would wait forever."""
    token = secrets.token_urlsafe(32)
    try:
        loader = make()
        try:
            if world.is_one_node:
                address = loader.serve("127.0.0.1:0", token=token)
            else:
                address = loader.serve("0.0.0.0:0", token=token, advertise=world.master)
        except BaseException:
            loader.close()
            raise
    except Exception as error:
        send(Meeting(error=f"{type(error).__name__}: {error}"))
        raise
    send(Meeting(address, token))
    return loader


def _make_host_client(loader: Loader, world: World, linger_s: float, options: Mapping[str, Any]) -> Client:
    """Return the client of rank 0. Closing it waits for the other ranks to leave and then closes the loader."""
    client = loader.client(0, **options)
    client.at_close(loader.close)
    client.at_close(lambda: _linger(loader, world, linger_s))
    return client


def _linger(loader: Loader, world: World, linger_s: float) -> None:
    if not loader.wait_for_leave(range(1, world.size), linger_s):
        _log.warning("the service of this training run stops, though some ranks did not leave within %.0f s", linger_s)


def _close_at_exit(client: Client) -> Client:
    """Close the client when the process exits, so that other ranks do not wait for it. Returns the client."""
    atexit.register(client.close)
    client.at_close(lambda: atexit.unregister(client.close))
    return client


def _rendezvous(world: World) -> tuple[Callable[[Meeting], None], Callable[[], Meeting]]:
    """Return two functions: rank 0 sends the meeting with the first, the others receive it with the second."""
    if dist.is_initialized():

        def send(meeting: Meeting) -> None:
            dist.broadcast_object_list([msgspec.json.encode(meeting)], src=0)

        def receive() -> Meeting:
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0)
            return msgspec.json.decode(received[0], type=Meeting)

        return send, receive
    # A separate key for each restart of the workers, and for each call of `attach` in them.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"overlord/{attempt}/{next(_attached)}"
    store = _store(world)
    return (lambda meeting: store.set(key, msgspec.json.encode(meeting).decode())), (
        lambda: msgspec.json.decode(store.get(key), type=Meeting)
    )


@cache
def _store(world: World) -> Any:
    """Open the rendezvous store. Cached, because without torchrun it lives in rank 0 and must outlive the others' reads."""
    store, _, _ = next(iter(rendezvous("env://", world.rank, world.size)))
    return store


def _number(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdigit():
        raise SpecError(
            f"this process is not part of a torch training run: it has no process group, and {name} is {value!r}; start it "
            "with torchrun, call torch.distributed.init_process_group first, or use overlord.start and overlord.connect"
        )
    return int(value)
