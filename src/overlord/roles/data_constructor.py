"""A Data Constructor: carries out the plans of one data-parallel group and keeps the next steps ready for its ranks.

What it promises: every rank of the group that asks for a step gets its part of the same microbatches, built once. Built
steps are kept until the slowest open rank has taken them, and never more than `prefetch` beyond it are built, so a rank
that stops reading stops the group, not the memory. It decides nothing.
"""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from typing import Any

from overlord.data.arenas import Arenas
from overlord.data.collate import collate
from overlord.data.delivery import cp_slices, fields_for, receive_only
from overlord.engine import Handle
from overlord.errors import ClosedError
from overlord.planning.place_tree import ClientPlaceTree, Place
from overlord.roles.planner import Later, Planner
from overlord.roles.routes import Routes
from overlord.spec import Batch

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One rank's part of a step."""

    step: int
    loss_tokens: int
    microbatches: tuple[Fields, ...]


@dataclass(slots=True)
class _Built:
    """A step as the group's ranks share it; context-parallel slices are cut once."""

    loss_tokens: int
    whole: tuple[Fields, ...]
    broadcast: frozenset[str]
    slices: list[list[Fields]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def microbatches(self, place: Place, tree: ClientPlaceTree) -> tuple[Fields, ...]:
        cp = tree.mesh.cp
        if cp > 1:
            with self.lock:
                if not self.slices:
                    self.slices = [cp_slices(fields, cp) for fields in self.whole]
            parts = [slices[place.cp] for slices in self.slices]
        else:
            parts = list(self.whole)
        parts = [fields_for(fields, place.pp, tree.mesh.pp) for fields in parts]
        if tree.source_of(place.rank, self.broadcast) != place.rank:
            parts = [receive_only(fields) for fields in parts]
        return tuple(dict(fields) for fields in parts)


class DataConstructor:
    """See the module's docstring."""

    def __init__(
        self,
        group: int,
        batch: Batch,
        tree: ClientPlaceTree,
        planner: Handle[Planner],
        routes: Routes,
        prefetch: int,
        threads: Executor,
    ) -> None:
        self._group = group
        self._batch = batch
        self._tree = tree
        self._planner = planner
        self._routes = routes
        self._prefetch = prefetch
        self._threads = threads
        self._arenas = Arenas(prefetch + 2)
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}  # rank to the step it asks for next
        self._steps: dict[int, Future[_Built | Later | None]] = {}
        self._doing: dict[int, str] = {}
        self._closed = False

    def fetch(self, step: int, rank: int, wait_s: float) -> Delivery | Later | None:
        """A rank's part of a step; None when the run ends before it; Later when it is not ready within `wait_s`."""
        with self._lock:
            if self._closed:
                raise ClosedError(f"the constructor of data-parallel group {self._group} is closed")
            self._at[rank] = step
            slowest = min(self._at, key=lambda r: self._at[r])
            oldest = self._at[slowest]
            for number in [n for n in self._steps if n < oldest]:
                self._steps.pop(number).cancel()
            if step > oldest + self._prefetch:
                return Later(f"rank {slowest} of the same data-parallel group has not taken step {oldest} yet")
            self._planner.ask(Planner.needs, self._group, oldest).result()
            for number in range(step, oldest + self._prefetch + 1):
                if number not in self._steps:
                    self._steps[number] = self._threads.submit(self._build, number)
            future = self._steps[step]
        try:
            built = future.result(timeout=wait_s)
        except NotYet:
            return Later(self._doing.get(step, f"step {step} waits for a thread to build it"))
        except CancelledError:
            return Later(f"step {step} was dropped and is built again")
        except BaseException:
            self._forget(step, future)
            raise
        if built is None:
            return None
        if isinstance(built, Later):
            self._forget(step, future)
            return built
        return Delivery(step, built.loss_tokens, built.microbatches(self._tree.coordinates(rank), self._tree))

    def leaves(self, rank: int) -> None:
        """Note that a rank reads no more, so that it holds nobody back."""
        with self._lock:
            self._at.pop(rank, None)
            if not self._at:
                self._drop_all()
                self._planner.ask(Planner.leaves, self._group).result()

    def restart(self) -> None:
        """Forget everything: the run goes on from another state."""
        with self._lock:
            self._at.clear()
            self._drop_all()

    def num_ready(self) -> int:
        """How many steps are built or being built."""
        return len(self._steps)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._drop_all()

    def _drop_all(self) -> None:
        for future in self._steps.values():
            future.cancel()
        self._steps.clear()

    def _forget(self, step: int, future: Future) -> None:
        with self._lock:
            if self._steps.get(step) is future:
                del self._steps[step]

    def _build(self, step: int) -> _Built | Later | None:
        try:
            self._doing[step] = f"step {step} waits for its plan"
            plan = self._planner.ask(Planner.plan, step, self._group).result()
            if plan is None or isinstance(plan, Later):
                return plan
            self._doing[step] = f"step {step} waits for its rows"
            whole = tuple(collate(micro, self._routes.give(micro.samples), self._batch) for micro in plan.microbatches)
            return _Built(plan.loss_tokens, whole, plan.broadcast)
        except Exception as error:
            error.add_note(f"while data-parallel group {self._group} built step {step}")
            raise
        finally:
            self._doing.pop(step, None)
