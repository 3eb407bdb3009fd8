"""`attach`: from inside the processes of a torch training run, the iterator of each rank.

Rank 0 starts the job and serves it; the others learn the address through torch's own rendezvous and connect. One node
stays on loopback; over several nodes rank 0 listens on all interfaces, and a token made for the occasion lets in only the
ranks that came through the rendezvous.
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
from overlord.service.auth import Address
from overlord.service.channel import connect
from overlord.service.run import Loader, start

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from overlord.declare.job import Job
    from overlord.roles.client import Client
    from overlord.runtime.engine import Engine

_attached = count()
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among the trainers."""

    rank: int
    size: int
    master: str
    """The host of rank 0, as the others reach it."""
    is_one_node: bool

    @staticmethod
    def found() -> World:
        """From an initialised process group, or from the variables that torchrun sets."""
        master = os.environ.get("MASTER_ADDR", "127.0.0.1")
        if dist.is_available() and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = _number("RANK"), _number("WORLD_SIZE")
        local = os.environ.get("LOCAL_WORLD_SIZE")
        one_node = int(local) == size if local else Address(master, 0).is_loopback
        return World(rank, size, master, one_node or size == 1)


class Meeting(msgspec.Struct, frozen=True):
    """What rank 0 tells the others: where to connect, or why there is nothing to connect to."""

    address: str = ""
    token: str | None = None
    error: str | None = None


def attach(
    job: Job | None = None,
    *,
    device_mesh: Any = None,
    address: str | None = None,
    token: str | None = None,
    tls_root: str | None = None,
    engine: Engine | None = None,
    resume: Mapping[str, Any] | None = None,
    accept_changes: Collection[str] | bool = (),
    timeout_s: float | None = 300.0,
    torch: bool = True,
    pin_memory: bool = False,
    linger_s: float = 60.0,
) -> Client:
    """The iterator of this process's rank. Every rank of the world must call it, as often and in the same order.

    The mesh is that of `device_mesh` (a torch DeviceMesh of the whole world), or the job's own; where the job leaves dp out,
    it is the size of the world divided by cp x tp x pp. Rank 0 starts the job, on
    `engine` and from the state `resume`, and serves it until its client is closed (at the latest when the process ends) and
    the other ranks have left, which it waits for up to `linger_s`. With `address` nothing is started: every rank connects
    to the service that runs there, with its `token` and `tls_root`.
    """
    world = World.found()
    options: dict[str, Any] = {"timeout_s": timeout_s, "torch": torch, "pin_memory": pin_memory}
    if address is not None:
        return _until_exit(connect(address, rank=world.rank, token=token, tls_root=tls_root, **options))
    if job is None:
        raise SpecError("attach needs a job to start, or the address=... of a service that runs one")
    job = _on_mesh(job, device_mesh, world)

    def started() -> Loader:
        return start(job, engine=engine, resume=resume, accept_changes=accept_changes)

    if world.size == 1:
        return _until_exit(_hosting(started(), world, 0.0, options))
    tell, hear = _rendezvous(world)
    if world.rank == 0:
        return _until_exit(_hosting(_served(started, world, tell), world, linger_s, options))
    meeting = hear()
    if meeting.error is not None:
        raise ServiceError(f"rank 0 could not start the job: {meeting.error}")
    return _until_exit(connect(meeting.address, rank=world.rank, token=meeting.token, **options))


def _on_mesh(job: Job, device_mesh: Any, world: World) -> Job:
    mesh = job.mesh if device_mesh is None else ClientPlaceTree.from_device_mesh(device_mesh).mesh
    try:
        return replace(job, mesh=mesh.for_world(world.size))
    except SpecError as error:
        error.add_note("leave dp out of the job's mesh, and attach takes it from the world; or pass device_mesh=...")
        raise


def _served(make: Callable[[], Loader], world: World, tell: Callable[[Meeting], None]) -> Loader:
    """The job, served, with the others told; they are told of a failure too, or they would wait for ever."""
    made = secrets.token_urlsafe(32)
    try:
        loader = make()
        try:
            if world.is_one_node:
                address = loader.serve("127.0.0.1:0", token=made)
            else:
                address = loader.serve("0.0.0.0:0", token=made, advertise=world.master)
        except BaseException:
            loader.close()
            raise
    except Exception as error:
        tell(Meeting(error=f"{type(error).__name__}: {error}"))
        raise
    tell(Meeting(address, made))
    return loader


def _hosting(loader: Loader, world: World, linger_s: float, options: Mapping[str, Any]) -> Client:
    """Rank 0's client, which takes the loader with it when it is closed, after the other ranks."""
    client = loader.client(0, **options)
    client.at_close(loader.close)
    client.at_close(lambda: _linger(loader, world, linger_s))
    return client


def _linger(loader: Loader, world: World, linger_s: float) -> None:
    if not loader.wait_for_leave(range(1, world.size), linger_s):
        _log.warning("the service of this training run ends, though some ranks did not leave within %.0f s", linger_s)


def _until_exit(client: Client) -> Client:
    """The client, closed at the latest when the process ends: the others must not wait for it."""
    atexit.register(client.close)
    client.at_close(lambda: atexit.unregister(client.close))
    return client


def _rendezvous(world: World) -> tuple[Callable[[Meeting], None], Callable[[], Meeting]]:
    """How rank 0 tells the others something, and how they hear it."""
    if dist.is_initialized():

        def tell(meeting: Meeting) -> None:
            dist.broadcast_object_list([msgspec.json.encode(meeting)], src=0)

        def hear() -> Meeting:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0)
            return msgspec.json.decode(told[0], type=Meeting)

        return tell, hear
    # A key of its own for each time that workers are started, and for each `attach` in them.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"overlord/{attempt}/{next(_attached)}"
    store = _store(world)
    return (lambda meeting: store.set(key, msgspec.json.encode(meeting).decode())), (
        lambda: msgspec.json.decode(store.get(key), type=Meeting)
    )


@cache
def _store(world: World) -> Any:
    """Kept: unless torchrun has one, it lives in rank 0, and must outlast the others' looking into it."""
    store, _, _ = next(iter(rendezvous("env://", world.rank, world.size)))
    return store


def _number(name: str) -> int:
    value = os.environ.get(name)
    if value is None or not value.isdigit():
        raise SpecError(
            f"this process is no part of a torch training run: it has no process group, and {name} is {value!r}; start it "
            "with torchrun, call torch.distributed.init_process_group first, or use overlord.start and overlord.connect"
        )
    return int(value)
