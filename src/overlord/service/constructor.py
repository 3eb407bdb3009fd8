"""A Data Constructor that serves its ranks itself, from wherever it runs: near its trainers, not through one door."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.roles.data_constructor import DataConstructor

if TYPE_CHECKING:
    from collections.abc import Collection

    from overlord.declare.job import Job
    from overlord.messages import Delivery, Later
    from overlord.roles.planner import Planner
    from overlord.roles.routes import Routes
    from overlord.runtime.engine import Handle, Workplace
    from overlord.service.auth import Listen
    from overlord.service.server import Service


def make_serving_constructor(
    job: Job, group: int, planner: Handle[Planner], routes: Routes, workplace: Workplace
) -> ServingConstructor:
    tree = ClientPlaceTree(job.mesh)
    return ServingConstructor(
        group,
        job.batch,
        tree,
        planner=planner,
        routes=routes,
        prefetch=job.prefetch,
        threads=workplace.build_threads,
        arenas=workplace.arenas,
        weighted=job.is_weighted,
    )


class ServingConstructor(DataConstructor):
    """Asks about serving may be repeated, and are, when the constructor was made anew: it has no server then."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._serving = threading.Lock()
        self._service: Service | None = None

    def serve(self, job: str, instance: str, listen: Listen, generation: int, leave_after_s: float | None) -> str:
        """Serve the ranks of this group, unless it does already. Gives the address."""
        from overlord.service.server import Service

        with self._serving:
            if self._service is None:
                self.generation = generation
                ranks = self._tree.ranks_of(self._group)
                self.expect(ranks)  # it may have been made anew, and does not know who reads
                self._service = Service(
                    job,
                    listen,
                    instance=instance,
                    steps=_OwnSteps(self),
                    serves=self._has_rank,
                    ranks=lambda: ranks,
                    leave_after_s=leave_after_s,
                )
            return self._service.address

    def reading(self) -> dict[int, int]:
        """The ranks that read from here, with the step each takes next."""
        service = self._service
        return {} if service is None else service.ranks.reading()

    def last(self) -> dict[int, int]:
        """The same for every rank that ever read from here."""
        service = self._service
        return {} if service is None else service.ranks.last()

    def late(self) -> frozenset[int]:
        """The ranks of this group that have neither asked for a step nor left."""
        with self._lock:
            return frozenset(self._expected)

    def halt(self) -> int:
        """See `Service.halt`; -1 when nothing was ever served."""
        service = self._service
        return -1 if service is None else service.halt()

    def drain(self, last: int, timeout_s: float) -> bool:
        service = self._service
        return True if service is None else service.drain(last, timeout_s)

    def wait_for_leave(self, ranks: Collection[int], timeout_s: float) -> bool:
        """Wait until each of these ranks has read from here and left again."""
        service = self._service
        return service is not None and service.ranks.wait_for_leave(ranks, timeout_s)

    def stop_serving(self) -> None:
        with self._serving:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    def close(self) -> None:
        self.stop_serving()
        super().close()

    def _has_rank(self, rank: int) -> bool:
        return self._tree.coordinates(rank).dp == self._group


@dataclass(frozen=True, slots=True)
class _OwnSteps:
    constructor: ServingConstructor

    def generation(self) -> int:
        return self.constructor.generation

    def fetch(self, step: int, rank: int, wait_s: float) -> Delivery | Later | None:
        return self.constructor.fetch(step, rank, wait_s)

    def leave(self, rank: int) -> None:
        self.constructor.rank_left(rank)
