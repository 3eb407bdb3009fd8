"""A Data Constructor with a server of its own: its ranks read from where it runs, not through one front door."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.batches.buffers import LendLimit
from overlord.roles.assembly import make_constructor
from overlord.status import StoreUse

if TYPE_CHECKING:
    from collections.abc import Collection

    from overlord.batches.buffers import Arenas
    from overlord.declare.job import Job
    from overlord.roles.data_constructor import DataConstructor, HandedOut
    from overlord.roles.plan_window import SharedPlans
    from overlord.roles.planner import Planner
    from overlord.roles.rank_pace import Pace
    from overlord.roles.routes import Routes
    from overlord.runtime.engine import Handle, Workplace
    from overlord.runtime.recorder import SpanBatch
    from overlord.service.auth import Listen
    from overlord.service.server import Addresses, RankCalls, Service
    from overlord.status import ConstructorCounters


_LEAST_BEYOND = 2
"""How many steps a trainer may hold, beside as many as are built ahead, however large they are."""


def make_serving_constructor(
    job: Job, group: int, planner: Handle[Planner], routes: Routes, workplace: Workplace, *, generation: int
) -> ServingConstructor:
    tree = ClientPlaceTree(job.mesh, job.stage_fields, tuple(job.cut))
    constructor = make_constructor(job, group, tree, workplace, planner=planner, routes=routes)
    constructor.generation = generation
    workplace.arenas.lend_limit = LendLimit(least_steps=job.prefetch + _LEAST_BEYOND)
    return ServingConstructor(constructor, tree, group, workplace)


class ServerIdentity(NamedTuple):
    """Which run a server is of."""

    job: str
    instance: str
    generation: int


class ServingConstructor:
    """The Data Constructor of a group, and the server of its ranks once `serve` was called.

    Every call may be repeated. A constructor that was made again after a failure has no server until `serve` is called.
    """

    def __init__(self, constructor: DataConstructor, tree: ClientPlaceTree, group: int, workplace: Workplace) -> None:
        self._constructor = constructor
        self.fetch = constructor.fetch
        self.take = constructor.take
        self._tree = tree
        self._group = group
        self._workplace = workplace
        self._arenas = workplace.arenas
        self._serving = threading.Lock()
        self._service: Service | None = None

    # The server

    def serve(
        self,
        identity: ServerIdentity,
        listen: Listen,
        leave_after_s: float | None,
        needs_flight: bool,
        wait_for_all: bool = False,
    ) -> Addresses:
        """Serve the ranks of this group, unless it does already; returns where. Trainers on this host need no Flight server,
        so there is none until a client needs one."""
        from overlord.service.local_server import serving_threads
        from overlord.service.server import Service

        with self._serving:
            if self._service is None:
                self._constructor.generation = identity.generation
                ranks = self._tree.ranks_of(self._group)
                self.expect(ranks)  # a constructor that was made again does not know who reads
                self._service = Service(
                    identity.job,
                    listen,
                    instance=identity.instance,
                    steps=self,
                    serves=lambda rank: self._tree.coordinates(rank).dp == self._group,
                    ranks=lambda: ranks,
                    leave_after_s=leave_after_s,
                    arenas=self._arenas,
                    threads=self._workplace.share("serving threads", serving_threads),
                    on_network=False,
                    wait_for_all=wait_for_all,
                )
            if needs_flight or self._service.addresses.local is None:
                self._service.open_network()
            return self._service.addresses

    def arenas(self) -> Arenas:
        """Where its batches are built; for a server in the same process."""
        return self._arenas

    def store_use(self) -> tuple[int, StoreUse]:
        """The number of this process, and the use of its batches' shared memory: ready, and held by trainers."""
        lent = [lent_bytes() for lent_bytes in list(self._arenas.lenders.values())]
        limit = len(lent) * self._arenas.lend_limit.most_bytes
        return os.getpid(), StoreUse(self._arenas.shared_bytes, None, sum(lent), limit)

    def reading(self) -> dict[int, int]:
        """The ranks that read from here, with the next step of each."""
        service = self._service
        return {} if service is None else service.reading()

    def last(self) -> dict[int, int]:
        """Every rank that ever read from here, with the next step of each."""
        service = self._service
        return {} if service is None else service.last()

    def rank_calls(self) -> RankCalls | None:
        """What its server knows of its ranks; None where it has none yet."""
        service = self._service
        return None if service is None else service.rank_calls()

    def pause_takes(self) -> list[int]:
        """Let trainers take no step without a message until `resume_takes`; returns the ranks of which it is not known
        whether they take one now."""
        service = self._service
        return [] if service is None else service.pause_takes()

    def resume_takes(self) -> None:
        service = self._service
        if service is not None:
            service.takes.resume()

    def halt(self) -> int:
        """See `Service.halt`; -1 when nothing was ever served."""
        service = self._service
        return -1 if service is None else service.halt()

    def drain(self, last: int, timeout_s: float) -> bool:
        """See `Service.drain`."""
        service = self._service
        return True if service is None else service.drain(last, timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks has read from here and left again. False after `timeout_s`."""
        service = self._service
        return service is not None and service.ranks.wait_for_leave(ranks, timeout_s)

    def stop_serving(self) -> None:
        with self._serving:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def close(self) -> None:
        self.stop_serving()
        self._constructor.close()

    # The steps of its ranks: this is the `StepSource` of its server

    def generation(self) -> int:
        return self._constructor.generation

    def leave(self, rank: int) -> None:
        self._constructor.rank_left(rank)

    # The constructor, as the loader of the run uses it

    def receive_plans(self, plans: SharedPlans) -> None:
        self._constructor.receive_plans(plans)

    def expect(self, ranks: Collection[int], holds: bool = False) -> None:
        self._constructor.expect(ranks, holds)

    def late(self) -> frozenset[int]:
        return self._constructor.late()

    def freeze(self) -> HandedOut:
        return self._constructor.freeze()

    def thaw(self, to: int | None = None) -> HandedOut:
        return self._constructor.thaw(to)

    def restart(self, generation: int, keep_from: int | None = None) -> None:
        self._constructor.restart(generation, keep_from)

    def reached(self) -> int:
        return self._constructor.reached()

    def pace(self) -> Pace:
        return self._constructor.pace()

    def counters(self) -> ConstructorCounters:
        service = self._service
        if service is not None:
            service.takes.follow_all()
        return self._constructor.counters()

    def take_spans(self) -> SpanBatch:
        return self._constructor.take_spans()

    def status_lines(self) -> list[str]:
        return self._constructor.status_lines()
