"""A served run whose mesh follows its trainers: groups with a lost rank leave it, and groups that come back join it again.

What it promises: the contents of steps stay what they are, for every mesh. The mesh begins at a step that no trainer has
finished and then given up: the first that some of those who go on may not have finished. A trainer says itself which step
that is when it asks for a seat; of one that does not ask, it is the step that it took last.

Trainers are known by their rank in the mesh that the run was served with. `Seat` says which rank that is now. The mesh
changes when

- a rank was silent for `leave_after_s`: its data-parallel group leaves, and the others go on without it;
- all ranks of a group that is not in the mesh ask for a seat: the group joins, at a step that no rank has taken;
- all ranks of the mesh ask for another seat, or one of them needs a step that the mesh does not have: it begins there again.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.errors import ClosedError, OverlordError, WaitTimeoutError
from overlord.messages import Seat
from overlord.runtime.liveness import RANK_SILENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from overlord.arrange.mesh_tree import Place
    from overlord.declare.mesh import Mesh
    from overlord.messages import SeatRequest
    from overlord.service.server import RankCalls

_LOOK_S = (0.05, 1.0)  # how often silence is looked for, at least and at most
_CATCH_UP_S = 5.0  # for ranks that are a step behind when a group joins
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ElasticMesh:
    """The mesh that a run was served with, and those of its data-parallel groups that are in the present one."""

    full: Mesh
    groups: tuple[int, ...]

    @staticmethod
    def whole(mesh: Mesh) -> ElasticMesh:
        return ElasticMesh(mesh, tuple(range(mesh.dp)))

    @property
    def present(self) -> Mesh:
        return replace(self.full, dp=len(self.groups))


@dataclass(frozen=True, slots=True)
class Seats:
    """Who has which seat, for a process that takes the run over."""

    generation: int
    sessions: Mapping[int, str]
    """By rank in the mesh that was served."""


class ElasticRun(Protocol):
    """The run whose mesh is changed."""

    @property
    def generation(self) -> int: ...

    @property
    def start_step(self) -> int: ...

    def reshape(self, wanted: ElasticMesh, at: int | None, timeout_s: float) -> int:
        """Go on for another mesh; returns its first step."""
        ...


class RankServer(Protocol):
    """What serves the ranks of the present mesh."""

    def rank_calls(self) -> RankCalls: ...


@dataclass(frozen=True, slots=True)
class SeatWait:
    """A trainer that asks for a seat."""

    session: str
    unfinished: int | None
    """The first step that it has not finished; None where it has no model yet."""
    heard: float


@dataclass(frozen=True, slots=True)
class Reshaping:
    """Another mesh for a run: its groups, by their number in the mesh that was served, and its first step."""

    groups: tuple[int, ...]
    at: int | None
    """None: the first step that no rank has taken."""
    reason: str


@dataclass(frozen=True, slots=True)
class MeshView:
    """A run at one moment. Ranks and groups are those of the mesh that was served."""

    full: ClientPlaceTree
    groups: tuple[int, ...]
    """Those in the mesh now."""
    start: int
    lost: frozenset[int]
    waiting: Mapping[int, SeatWait]
    """The ranks that ask for a seat which the present mesh does not give them."""
    next_of_rank: Mapping[int, int]
    """The next step of each rank that has read in the present mesh."""

    def decide(self) -> Reshaping | None:
        """Which mesh there should be, and why; None if this one is right."""
        ranks_of = self.full.ranks_of
        alive = [group for group in self.groups if not self.lost.intersection(ranks_of(group))]
        back = [
            group
            for group in range(self.full.mesh.dp)
            if group not in self.groups and all(rank in self.waiting for rank in ranks_of(group))
        ]
        groups, own = tuple(sorted(alive + back)), [rank for group in alive for rank in ranks_of(group)]
        if not groups:
            return None  # nobody is left: trainers that come back find the run where it was
        if len(alive) < len(self.groups):
            lost = ", ".join(str(rank) for rank in sorted(self.lost))
            return Reshaping(groups, self._unfinished(own), f"rank {lost} was silent")
        asking = [rank for rank in own if rank in self.waiting]
        if len(asking) == len(own):
            return Reshaping(groups, self._unfinished(own), "every rank asked for another seat")
        if any(self._need(rank) < self.start for rank in asking):
            return Reshaping(groups, self._unfinished(own), "a rank needs a step from before this mesh")
        if back and not asking:  # else trainers are in trouble: whether all of them are there is seen first
            return Reshaping(groups, None, f"data-parallel group {', '.join(map(str, back))} is back")
        return None

    def _need(self, rank: int) -> int:
        """The first step that a rank may not have finished."""
        found = self.waiting.get(rank)
        if found is not None and found.unfinished is not None:
            return found.unfinished
        return max(self.next_of_rank.get(rank, self.start) - 1, self.start)

    def _unfinished(self, ranks: Sequence[int]) -> int | None:
        """The first step that one of these ranks may not have finished. Those that have no model yet need none."""
        has_model = [rank for rank in ranks if rank not in self.waiting or self.waiting[rank].unfinished is not None]
        return min((self._need(rank) for rank in has_model), default=None)


class Elastic:
    """Changes the mesh of a run as its trainers come and go, in a thread of its own. The module's docstring has the
    promises."""

    def __init__(
        self,
        run: ElasticRun,
        server: RankServer,
        mesh: ElasticMesh,
        *,
        instance: str,
        leave_after_s: float,
        seats: Seats | None = None,
        keep_seats: Callable[[Seats], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seats`: those that another process has given, if it had the run. `keep_seats` is called before each is given."""
        self._run = run
        self._server = server
        self._instance = instance
        self._leave_after_s = leave_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._full, self._tree = ClientPlaceTree(mesh.full), ClientPlaceTree(mesh.present)
        self._groups = mesh.groups
        self._generation = run.generation
        # Rank to the session that has its seat in the present mesh.
        self._seated = dict(seats.sessions) if seats is not None and seats.generation == run.generation else {}
        self._keep_seats = keep_seats
        self._asked: dict[int, SeatWait] = {}
        self._outside: set[int] = set()  # ranks that asked while their group was not in the mesh: their models are old
        self._is_moving = False
        self._first_call: float | None = None  # of any rank in the present mesh
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._watch, name="overlord-elastic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def seat_of(self, request: SeatRequest) -> Seat | None:
        """The seat of a trainer; None while there is none, and the trainer asks again. Asking again changes nothing."""
        place = self._full.coordinates(request.rank)  # raises for a rank that the mesh does not have
        with self._lock:
            if place.dp not in self._groups and not self._is_moving:
                self._outside.add(request.rank)
            unfinished = None if request.rank in self._outside else request.unfinished
            seat = None if self._is_moving else self._find_seat(request, place, unfinished)
            if seat is not None:
                self._seat(request)
                self._asked.pop(request.rank, None)
                self._outside.discard(request.rank)
                return seat
            self._asked[request.rank] = SeatWait(request.session, unfinished, self._clock())
        self._wake.set()
        return None

    def _seat(self, request: SeatRequest) -> None:
        if self._seated.get(request.rank) != request.session:
            seated = {**self._seated, request.rank: request.session}
            if self._keep_seats is not None:
                self._keep_seats(Seats(self._generation, seated))
            self._seated = seated

    def _find_seat(self, request: SeatRequest, place: Place, unfinished: int | None) -> Seat | None:
        self._follow(self._run.generation)
        start = self._run.start_step
        number = f"{self._instance}/{self._generation}"
        is_taken = self._seated.get(request.rank, request.session) != request.session
        is_behind = unfinished is not None and unfinished < start
        if place.dp not in self._groups or request.after == number or is_taken or is_behind:
            return None
        mesh = self._tree.mesh
        rank = self._tree.rank_of(pp=place.pp, dp=self._groups.index(place.dp), cp=place.cp, tp=place.tp)
        return Seat(
            rank, mesh.world_size, {axis: getattr(mesh, axis) for axis in mesh.order}, start, self._generation, number
        )

    def reset(self, mesh: Mesh) -> None:
        """Begin again with a mesh that somebody else has given the run."""
        with self._lock:
            self._full = self._tree = ClientPlaceTree(mesh)
            self._groups = tuple(range(mesh.dp))
            self._asked.clear()
            self._follow(self._run.generation)

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CATCH_UP_S)

    def reconcile(self) -> Reshaping | None:
        """Look once at who is there, and change the mesh accordingly. Returns what was done."""
        view = self._look()
        found = view.decide()
        if found is None:
            return None
        wanted, groups = ElasticMesh(self._full.mesh, found.groups), self._groups
        with self._lock:
            self._is_moving = True  # no seat is given while ranks have two numbers
        try:
            step = self._run.reshape(wanted, found.at, _CATCH_UP_S)
            groups = found.groups
        finally:
            with self._lock:
                self._is_moving = False
                self._groups, self._tree = groups, ClientPlaceTree(replace(self._full.mesh, dp=len(groups)))
                self._follow(self._run.generation)
        _log.warning("%s: from step %d on the mesh has dp=%d", found.reason, step, wanted.present.dp)
        return found

    def _look(self) -> MeshView:
        lost_now, called, last = self._server.rank_calls()
        with self._lock:
            self._follow(self._run.generation)
            now = self._clock()
            declared = {self._declared(rank): rank for rank in range(self._tree.world_size)}
            asked = {rank: w for rank, w in self._asked.items() if now - w.heard <= self._leave_after_s}
            if self._first_call is None and (called or last or asked):
                self._first_call = now
            is_due = self._first_call is not None and now - self._first_call > self._leave_after_s
            lost = {
                rank
                for rank, own in declared.items()
                if rank not in asked and (own in lost_now or (is_due and own not in called and own not in last))
            }
            return MeshView(
                self._full,
                self._groups,
                self._run.start_step,
                frozenset(lost),
                asked,
                {rank: last[own] for rank, own in declared.items() if own in last},
            )

    def _declared(self, rank: int) -> int:
        """A rank of the present mesh as it was numbered in the mesh that was served."""
        place = self._tree.coordinates(rank)
        return self._full.rank_of(pp=place.pp, dp=self._groups[place.dp], cp=place.cp, tp=place.tp)

    def _follow(self, generation: int) -> None:
        """Forget who was where before the run was moved."""
        if generation != self._generation:
            self._generation = generation
            self._seated = {}
            self._first_call = None

    def _watch(self) -> None:
        every_s = min(max(self._leave_after_s / RANK_SILENT.checks, _LOOK_S[0]), _LOOK_S[1])
        while not self._closed.is_set():
            self._wake.wait(every_s)
            self._wake.clear()
            try:
                self.reconcile()
                self._said = ""
            except (ClosedError, WaitTimeoutError) as error:
                if not self._closed.is_set() and self._said != str(error):
                    self._said = str(error)
                    _log.info("the mesh stays as it is for now: %s", error)
            except OverlordError as error:
                if self._said != str(error):
                    self._said = str(error)
                    _log.warning("the mesh cannot follow its trainers: %s", error)
            self._closed.wait(_LOOK_S[0])
