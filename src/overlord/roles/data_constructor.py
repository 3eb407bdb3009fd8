"""A Data Constructor: carries out the plans of one data-parallel group and keeps the next steps ready for its ranks.

What it promises: every rank of the group that requests a step gets its part of the same microbatches, built once. Built
steps are kept until all ranks have taken them, and at most `prefetch` steps beyond the slowest rank are built: a rank that
stops reading stops its group instead of filling memory. A step that is requested again after that is built again. The
constructor decides nothing.

A trainer that has the group to itself may build its steps from chunks in shared memory. It then gets plans and chunks in
place of batches, and a few steps more ahead, of which nothing is kept here, as far as they are planned by then.

A rank that is expected but has not requested a step yet holds nobody back, unless the run waits for all ranks: then it is
where the first of its group began. No step is recorded as taken by all before that rank has requested one or has left.

A rank may fetch steps ahead of its trainer. Such a fetch moves nothing: where a rank stands, what was taken and whether a
rank reads at all is decided by what its trainer takes. A fetch that is not ahead takes its step too. No step is fetched
ahead, or planned, that would not have been built or planned ahead anyway. While all ranks of a group fetch ahead, each step
is built by the thread of the first request for it, and none before it is requested.

While the mesh changes the constructor is frozen: a step that no rank has taken yet cannot be taken, until the constructor
thaws or is replaced.
"""

from __future__ import annotations

import threading
import time
import uuid
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from overlord.batches.collate import collate
from overlord.batches.slices import cp_slices, fields_for, receive_only
from overlord.declare.source import CHOSEN_TOKENS
from overlord.errors import ClosedError, SpecError
from overlord.messages import Delivery, Fields, Later
from overlord.roles.planner import Planner
from overlord.roles.rank_pace import PaceMeter
from overlord.runtime.recorder import SpanBatch, current_recorder
from overlord.runtime.threads import StealingFuture
from overlord.status import ConstructorCounters, process_use

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree, Place
    from overlord.arrange.plan import GroupPlan, RankPart
    from overlord.batches.buffers import Arenas
    from overlord.batches.payload import Payload
    from overlord.batches.unbuilt import PlacedChunk, UnbuiltMicrobatch
    from overlord.declare.batch import Batch
    from overlord.roles.plan_requests import GroupPlans
    from overlord.roles.plan_window import SharedPlans
    from overlord.roles.rank_pace import Pace
    from overlord.runtime.engine import Handle
    from overlord.runtime.threads import Executor
    from overlord.stream.facts import Samples


_UNBUILT_AHEAD = 7
"""Steps. The planner plans further ahead by itself."""
_TOGETHER_TOKENS = 3 << 16
"""Of steps that go to a trainer together before the last of them: what a message costs is little beside building more."""


class _UnbuiltStep(NamedTuple):
    step: int
    loss_tokens: int | float
    unbuilt: tuple[UnbuiltMicrobatch, ...]


@dataclass(frozen=True, slots=True)
class HandedOut:
    """What the ranks of a group have taken."""

    next_of_rank: dict[int, int]
    """For each rank that reads, the first step that it has not taken."""
    untaken: int
    """The first step that no rank has taken, as far as this constructor knows."""


@dataclass(slots=True)
class _Built:
    """A built step, shared by the ranks of the group. Context-parallel slices are cut once."""

    loss_tokens: int | float
    whole: tuple[Fields, ...]
    broadcast: frozenset[str]
    arenas: Arenas
    counts: tuple[int, ...] | None = None
    """How many of the microbatches each rank with samples of its own has; None where all have a slice of each."""
    rank_parts: tuple[tuple[RankPart, ...], ...] = ()
    """What features add for each rank, by microbatch."""
    axis: Bucket = "dp"
    """See `GroupPlan.axis`."""
    unbuilt: tuple[UnbuiltMicrobatch, ...] = ()
    """In place of `whole` where the trainer builds the step; then the group has no other rank."""
    following: tuple[Delivery, ...] = ()
    """The next steps, likewise."""
    slices: list[list[Fields]] = field(default_factory=list[list[Fields]])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def microbatches(self, place: Place, tree: ClientPlaceTree) -> tuple[Fields, ...]:
        if self.unbuilt:
            with self.lock:
                self.whole = self.whole or tuple(micro.build(self.arenas) for micro in self.unbuilt)
        cp, pp, own = tree.mesh.cp, tree.mesh.pp, slice(None)
        if self.counts is not None:
            index = tree.ranks_of(place.dp).index(place.rank) if self.axis == "world" else place.cp
            first = sum(self.counts[:index])
            own = slice(first, first + self.counts[index])
        is_cut = self.counts is None and cp > 1 and "cp" in tree.cut
        if is_cut and "cp" in self.broadcast:
            micros = [fields | {"cp_size": cp, "cp_index": place.cp} for fields in self.whole]  # cut by the trainer
        elif is_cut:
            with self.lock:
                if not self.slices:
                    self.slices = [cp_slices(fields, cp, self.arenas) for fields in self.whole]
            micros = [slices[place.cp] for slices in self.slices]
        else:
            micros = list(self.whole[own])
        for i, parts in enumerate(self.rank_parts[own]):
            for part in parts:
                micros[i] = micros[i] | part.fields_for(place, tree)
        if pp > 1 and "pp" in tree.cut and "pp" not in self.broadcast and self.axis != "world":
            micros = [fields_for(fields, place.pp, pp, tree.stage_fields) for fields in micros]
        if self.broadcast and tree.source_of(place.rank, self.broadcast) != place.rank:
            micros = [receive_only(fields) for fields in micros]
        return tuple(dict(fields) for fields in micros)


class RowSource(Protocol):
    """Where the rows of planned samples come from."""

    def fetch_each(self, parts: Sequence[Samples]) -> Iterator[Payload]:
        """Yield the payloads of several microbatches, in their order."""
        ...

    def locate(self, parts: Sequence[Samples], *, waits: bool) -> Mapping[tuple[int, int], PlacedChunk] | None:
        """The chunks in shared memory that the samples of several microbatches are in; None where they are to be fetched, or
        where one is not here yet, unless it is waited for."""
        ...


class DataConstructor:
    """Builds the steps of a data-parallel group and delivers them to its ranks. The module's docstring has the promises."""

    def __init__(  # noqa: PLR0913 - a run is put together here, by name
        self,
        group: int,
        batch: Batch,
        tree: ClientPlaceTree,
        *,
        planner: Handle[Planner],
        plans: GroupPlans,
        rows: RowSource,
        prefetch: int,
        threads: Executor,
        arenas: Arenas,
        weighted: bool = False,
    ) -> None:
        """`arenas` may be shared with other groups; `weighted`: batches have loss weights."""
        self.generation = 0
        """How often the run was moved to another state."""
        self._group = group
        self._batch = batch
        self._tree = tree
        self._planner = planner
        self._plans = plans
        self._rows = rows
        self._prefetch = prefetch
        self._threads = threads
        self._arenas = arenas
        self._weighted = weighted
        self._most_idle = prefetch + 2
        arenas.keep_more(self._most_idle)
        self._places = {rank: tree.coordinates(rank) for rank in tree.ranks_of(group)}
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}  # rank to the step that its trainer requested or took last
        self._expected: set[int] = set()  # ranks that have not requested a step yet
        self._awaited: set[int] = set()  # those of them that hold the others back all the same
        self._first: int | None = None  # the first step that was requested while some rank was awaited
        self._taken: dict[int, int] = {}  # rank to the first step that it has not taken
        self._held: dict[int, int] = {}  # rank to the first step that it has neither taken nor fetched ahead
        self._untaken = 0
        self._ahead_by_themselves: set[int] = set()  # ranks whose last request was ahead of their trainer
        self._unfetched = 0  # the first step that was delivered to nobody
        self._frozen_from: int | None = None
        self._steps: dict[int, StealingFuture[_Built | Later | None]] = {}
        self._doing: dict[int, str] = {}
        self._leaves_unbuilt = False  # as the last request asked
        self._was_unbuilt = False  # the last step
        self._recorder = current_recorder()
        self._paces = PaceMeter(spans=self._recorder.spans)
        self._instance = uuid.uuid4().hex
        self._built_s = 0.0
        self._closed = False

    def fetch(
        self,
        step: int,
        rank: int,
        wait_s: float,
        ahead: bool = False,
        generation: int | None = None,
        *,
        most_unbuilt: int = 0,
    ) -> Delivery | Later | None:
        """Return a rank's part of a step; None when the run ends before it; Later when it is not ready within `wait_s`. The
        rank takes the step, unless it is fetched `ahead`. Later, and nothing changes, for a client that knows the run as of
        another generation. With `most_unbuilt` the step may come unbuilt; if it is fetched ahead, so many steps may."""
        if rank not in self._places:
            return self._not_here(rank)
        with self._lock:
            if (later := self._find_move(generation)) is not None:
                return later
        built = self._wait_for(step, rank, wait_s, ahead, most_unbuilt if ahead else min(most_unbuilt, 1))
        if built is None or isinstance(built, Later):
            return built
        unbuilt, following = (built.unbuilt, built.following) if most_unbuilt else ((), ())
        microbatches = () if unbuilt else built.microbatches(self._places[rank], self._tree)
        with self._lock:
            if (later := self._find_move(generation) or self._find_freeze(step)) is not None:
                return later
            following = tuple(each for each in following if ahead and self._find_freeze(each.step) is None)
            if ahead:
                if self._held.get(rank) == step:
                    self._held[rank] = step + 1 + len(following)
            else:
                if self._at.get(rank) == step:  # it may have left meanwhile
                    self._taken[rank] = self._held[rank] = step + 1
                self._untaken = max(self._untaken, step + 1)
                self._paces.note_delivery(rank, step)
            num_tokens = sum([each.num_tokens for each in unbuilt]) + sum(
                [each.get("num_tokens", 0) for each in microbatches]
            )
            self._paces.note_tokens(rank, step, num_tokens)
            for each in following:
                self._paces.note_tokens(rank, each.step, sum([micro.num_tokens for micro in each.unbuilt]))
            self._unfetched = max(self._unfetched, step + 1 + len(following))
            self._drop_held()
        return Delivery(step, built.loss_tokens, microbatches, unbuilt, following)

    def take(self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None) -> Later | None:
        """Note that a rank takes a step that it has fetched ahead, after its trainer waited for it. Later, and nothing
        changes, if the step cannot be taken now."""
        if rank not in self._places:
            return self._not_here(rank)
        with self._lock:
            self._check_open()
            if (later := self._find_move(generation) or self._find_freeze(step)) is not None:
                return later
            self._at[rank], self._taken[rank] = step, step + 1
            self._held[rank] = max(self._held.get(rank, 0), step + 1)
            self._note_came(rank, step)
            self._untaken = max(self._untaken, step + 1)
            self._unfetched = max(self._unfetched, step + 1)
            self._paces.note_take(rank, step, waited_s)
            oldest = self._drop_old()
            self._drop_held()
            self._build_ahead(min(self._held.values()), oldest)
        return None

    def _wait_for(self, step: int, rank: int, wait_s: float, is_ahead: bool, most_unbuilt: int) -> _Built | Later | None:
        with self._lock:
            self._check_open()
            self._leaves_unbuilt = most_unbuilt > 0
            before = self._at.get(rank), self._taken.get(rank), rank in self._expected
            later = self._find_room_ahead(step, rank, most_unbuilt) if is_ahead else self._move(step, rank)
            if later is not None:
                return later
            future = self._future_of(step)
            if is_ahead:
                self._ahead_by_themselves.add(rank)
                # Built by this thread: nobody waits yet.
                future = future or StealingFuture(partial(self._build, step, most_unbuilt))
            else:
                self._ahead_by_themselves.discard(rank)
                future = future or self._threads.submit(self._build, step, most_unbuilt)
            self._steps[step] = future
            self._build_ahead(step + 1, min(self._at.values()))
        try:
            return future.result(timeout=wait_s)
        except NotYet as error:
            if future.done() and not future.cancelled() and future.exception() is error:  # raised by a source or a transform
                self._forget(step, future)
                raise
            return Later(self._doing.get(step, f"step {step} waits for a thread to build it"))
        except CancelledError:
            return Later(f"step {step} was dropped and is built again")
        except SpecError:  # there is no such step: the rank is where it was
            self._forget(step, future)
            if not is_ahead:
                self._set_back(rank, step, *before)
            raise
        except BaseException:
            self._forget(step, future)
            raise

    def _move(self, step: int, rank: int) -> Later | None:
        """Note that a rank is at a step, and needs it; returns why it cannot be built yet."""
        self._at[rank] = self._taken[rank] = self._held[rank] = step
        self._note_came(rank, step)
        self._paces.note_request(rank, step)
        self._drop_old()
        slowest = min(self._taken, key=lambda r: self._taken[r])
        if step > self._taken[slowest] + self._prefetch:
            return Later(f"rank {slowest} of the same data-parallel group has not taken step {self._taken[slowest]} yet")
        if self._awaited and self._first is not None and step > self._first + self._prefetch:
            return Later(
                f"rank {min(self._awaited)} of the same data-parallel group has not read a step yet, and all ranks are "
                "expected to; close the client of a rank that is not to read"
            )
        return None

    def _note_came(self, rank: int, step: int) -> None:
        """Note that a rank that was expected has come, at a step."""
        if self._awaited:
            self._first = step if self._first is None else min(self._first, step)
            self._awaited.discard(rank)
        self._expected.discard(rank)

    def _find_room_ahead(self, step: int, rank: int, most_unbuilt: int) -> Later | None:
        """Returns why a step cannot be fetched ahead now."""
        if rank not in self._at:
            return Later(f"rank {rank} reads nothing here now: its trainer requests the first step itself")
        slowest = min(self._at, key=lambda r: self._at[r])
        oldest = self._at[slowest] if not self._awaited or self._first is None else self._first
        most = self._most_ahead(self._was_unbuilt and most_unbuilt > 1)
        if step > oldest + most:
            return Later(f"step {step} is more than {most} steps ahead of rank {slowest}")
        return None

    def receive_plans(self, plans: SharedPlans) -> None:
        """Keep plans that the planner sent to this process before they were requested."""
        self._plans.receive(plans)

    def expect(self, ranks: Collection[int], holds: bool = False) -> None:
        """Note that these ranks will come: late is not gone. If it `holds`, they hold others back before they have come."""
        with self._lock:
            self._expected |= set(ranks) - self._at.keys()
            self._awaited |= self._expected if holds else set()
            self._first = min(self._at.values(), default=None)
            is_late = bool(self._expected)
        if is_late:
            self._planner.call(Planner.expect, self._group, holds).result()

    def late(self) -> frozenset[int]:
        """The ranks that are expected and have neither requested a step nor left."""
        with self._lock:
            return frozenset(self._expected)

    def rank_left(self, rank: int) -> None:
        """Note that a rank reads no more, so that it holds nobody back."""
        with self._lock:
            self._at.pop(rank, None)
            self._taken.pop(rank, None)
            self._held.pop(rank, None)
            self._ahead_by_themselves.discard(rank)
            self._expected.discard(rank)
            self._awaited.discard(rank)
            self._paces.rank_left(rank)
            nobody_reads, is_late = not self._at, bool(self._expected)
            if nobody_reads:
                self._drop_all()
        if nobody_reads:
            self._plans.reset()
            self._planner.call(Planner.group_left, self._group, is_late).result()

    def freeze(self) -> HandedOut:
        """Let no rank take a step that no rank has taken yet."""
        with self._lock:
            self._frozen_from = self._untaken
            return HandedOut(dict(self._taken), self._untaken)

    def thaw(self, to: int | None = None) -> HandedOut:
        """Let steps be taken again, those before `to` if given."""
        with self._lock:
            self._frozen_from = to
            return HandedOut(dict(self._taken), self._untaken)

    def restart(self, generation: int, keep_from: int | None = None) -> None:
        """Forget everything: the run goes on from another state. With `keep_from` it is the same run, which hands out steps
        from there on again: what was built or planned of them is kept."""
        with self._lock:
            self.generation = generation
            self._expected.clear()
            self._awaited.clear()
            self._at.clear()
            self._taken.clear()
            self._held.clear()
            self._ahead_by_themselves.clear()
            self._untaken = self._unfetched = 0
            self._frozen_from = None
            if keep_from is None:
                self._drop_all()
                self._plans.reset()
            else:
                for number in [n for n in self._steps if n < keep_from]:
                    self._steps.pop(number).cancel()
            self._paces.restart()

    def status_lines(self) -> list[str]:
        """What it is busy with. Returns at once."""
        with self._lock:
            return [f"data-parallel group {self._group}: {line}" for _, line in sorted(dict(self._doing).items())]

    def pace(self) -> Pace:
        """How fast the ranks of this group go through their steps."""
        with self._lock:
            return self._paces.pace

    def counters(self) -> ConstructorCounters:
        """What it and its ranks have done. Returns at once."""
        with self._lock:
            ranks, reading = self._paces.ranks, {rank: self._taken.get(rank, step) for rank, step in self._at.items()}
            num_ready, num_building, built_s = len(self._steps), len(self._doing), self._built_s
            waiting = self._paces.waiting()
        return ConstructorCounters(
            instance=self._instance,
            use=process_use(self._recorder.events),
            ranks=ranks,
            reading=reading,
            waiting=waiting,
            num_ready=num_ready,
            num_building=num_building,
            busy_s=built_s,
            shared_bytes=self._arenas.shared_bytes,
        )

    def take_spans(self) -> SpanBatch:
        """As `Planner.take_spans`."""
        return self._recorder.spans.take()

    def reached(self) -> int:
        """The first step that this constructor has requested no plan for."""
        with self._lock:
            following = [_num_following(future) for future in self._steps.values()]
            return max([self._unfetched, *(number + 1 + n for number, n in zip(self._steps, following, strict=True))])

    def num_ready(self) -> int:
        """How many steps are built or being built."""
        return len(self._steps)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._arenas.keep_more(-self._most_idle)
            self._closed = True
            self._at.clear()
            self._drop_all()
        self._plans.reset()

    def _future_of(self, step: int) -> StealingFuture[_Built | Later | None] | None:
        """The step if it is built or on its way; None too when it could not be planned yet, so that it is tried again."""
        future = self._steps.get(step)
        return None if future is None or _was_postponed(future) else future

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the constructor of data-parallel group {self._group} is closed")

    def _not_here(self, rank: int) -> Later:
        """The answer to a client of the old mesh, before it has noticed a resize."""
        return Later(f"rank {rank} is not in data-parallel group {self._group} any more")

    def _find_move(self, generation: int | None) -> Later | None:
        """Returns why a request of a client that knows the run as of a generation has no effect."""
        if generation is None or generation == self.generation:
            return None
        if generation > self.generation:  # this constructor was made again, as it had been made first
            self.generation = generation
            return None
        return Later("the run was moved to another state or mesh")

    def _find_freeze(self, step: int) -> Later | None:
        if self._frozen_from is None or step < self._frozen_from:
            return None
        return Later(f"step {step} waits for the mesh to change")

    def _build_ahead(self, first: int, oldest: int) -> None:
        """Build the steps from `first` on that the oldest step of any rank leaves room for. Not while all ranks fetch ahead:
        their requests come early enough, and building in the threads of these saves handing steps over to them."""
        if self._ahead_by_themselves.issuperset(self._at):
            return
        for number in range(first, oldest + self._prefetch + 1):
            ahead = self._future_of(number) or self._threads.submit_ahead(self._build, number, int(self._leaves_unbuilt))
            if ahead is not None:
                self._steps[number] = ahead

    def _drop_old(self) -> int:
        """Drop the steps that no rank may request again; returns the first that one may."""
        oldest = min(self._at.values())
        for number in [n for n in self._steps if n < oldest]:
            self._steps.pop(number).cancel()
        return oldest

    def _drop_held(self) -> None:
        """Drop the steps that all ranks have. One that is requested again is built again."""
        if len(self._held) == len(self._places):
            slowest = min(self._held.values())
            for number in [n for n in self._steps if n < slowest]:
                del self._steps[number]

    def _drop_all(self) -> None:
        for future in self._steps.values():
            future.cancel()
        self._steps.clear()

    def _forget(self, step: int, future: StealingFuture[_Built | Later | None]) -> None:
        with self._lock:
            if self._steps.get(step) is future:
                del self._steps[step]

    def _set_back(self, rank: int, refused: int, at: int | None, taken: int | None, was_expected: bool) -> None:
        with self._lock:
            if self._at.get(rank) != refused:
                return
            del self._at[rank], self._taken[rank], self._held[rank]
            if at is not None and taken is not None:
                self._at[rank], self._taken[rank], self._held[rank] = at, taken, taken
            if was_expected:
                self._expected.add(rank)

    def _build(self, step: int, most_unbuilt: int) -> _Built | Later | None:
        began, spans = time.perf_counter(), self._recorder.spans
        try:
            self._doing[step] = f"step {step} waits for its plan"
            plan = self._plan(step)
            if spans.is_on:
                spans.add(f"wait for the plan of step {step}", began)
            if plan is None or isinstance(plan, Later):
                return plan
            self._doing[step] = f"step {step} waits for its rows"
            found = self._leave_unbuilt(plan, most_unbuilt)
            self._was_unbuilt = bool(found)
            if found:
                first, *following = found
                return _Built(
                    plan.loss_tokens,
                    (),
                    plan.broadcast,
                    self._arenas,
                    unbuilt=first.unbuilt,
                    following=tuple(
                        Delivery(number, loss_tokens, (), unbuilt) for number, loss_tokens, unbuilt in following
                    ),
                )
            payloads = self._rows.fetch_each(plan.all_samples())
            if spans.is_on:
                payloads = spans.around_each(f"rows of step {step}", payloads)
            whole = [
                collate(micro, payload, self._batch, self._arenas, self._weighted)
                for micro, payload in zip(plan.microbatches, payloads, strict=False)  # those of features come after
            ]
            rank_parts = _add_parts(plan, whole, payloads) if any(micro.parts for micro in plan.microbatches) else ()
            self._keep_buffers(len(whole) * (2 if plan.counts is None and self._tree.mesh.cp > 1 else 1))
            return _Built(plan.loss_tokens, tuple(whole), plan.broadcast, self._arenas, plan.counts, rank_parts, plan.axis)
        except Exception as error:
            error.add_note(f"while data-parallel group {self._group} built step {step}")
            raise
        finally:
            self._doing.pop(step, None)
            if spans.is_on:
                spans.add(f"build step {step} of group {self._group}", began)
            self._built_s += time.perf_counter() - began  # an update lost to another thread is no matter

    def _leave_unbuilt(self, plan: GroupPlan, most: int) -> list[_UnbuiltStep]:
        """The step of a plan for a trainer that builds it, and the next ones, `most` in all, if their plans and chunks are
        here: nothing is planned, waited for or raised for them. Empty where a trainer cannot build the step."""
        located = self._locate(plan, waits=True) if most else None
        if located is None:
            return []
        with self._lock:
            last = min(self._at.values(), default=0) + self._most_ahead(is_unbuilt=True)
        chunks = dict(located)
        plans, left = [plan], _TOGETHER_TOKENS - _num_tokens(plan)
        for number in range(plan.step + 1, min(plan.step + most, last + 1)):
            following = self._plans.find(number) if left >= 0 else None
            located = None if following is None else self._locate(following, waits=False)
            if following is None or located is None:
                break
            chunks |= located
            plans.append(following)
            left -= _num_tokens(following)
        from overlord.batches.unbuilt import UnbuiltMicrobatch  # here: most processes do not need it

        return [
            _UnbuiltStep(
                each.step,
                each.loss_tokens,
                tuple(
                    UnbuiltMicrobatch(
                        micro.samples, micro.row, micro.num_rows, micro.row_tokens, chunks, self._batch, self._weighted
                    )
                    for micro in each.microbatches
                ),
            )
            for each in plans
        ]

    def _locate(self, plan: GroupPlan, *, waits: bool) -> Mapping[tuple[int, int], PlacedChunk] | None:
        """The chunks of a step that a trainer can build; None for any other."""
        if len(self._places) > 1 or plan.counts is not None:  # what several ranks read is built once, for all of them
            return None
        if any(micro.parts or CHOSEN_TOKENS in micro.samples.sizes for micro in plan.microbatches):
            return None
        return self._rows.locate([micro.samples for micro in plan.microbatches], waits=waits)

    def _most_ahead(self, is_unbuilt: bool) -> int:
        """How many steps beyond the slowest rank may be fetched ahead: more of those that take no memory here."""
        return max(self._prefetch, _UNBUILT_AHEAD) if is_unbuilt and self._prefetch else self._prefetch

    def _keep_buffers(self, per_step: int) -> None:
        """Let the pool keep the buffers of as many steps as there are at once. `per_step` is how many a step takes."""
        with self._lock:
            more = (self._prefetch + 2) * per_step - self._most_idle
            if more > 0 and not self._closed:
                self._most_idle += more
                self._arenas.keep_more(more)

    def _plan(self, step: int) -> GroupPlan | Later | None:
        with self._lock:
            oldest, is_late = min(self._at.values(), default=None), bool(self._expected)
        if oldest is None:
            return Later(f"nobody reads data-parallel group {self._group}")
        plan = self._plans.plan(step, oldest, is_late)
        with self._lock:
            nobody_reads, is_late = not self._at, bool(self._expected)
        if nobody_reads:  # the last rank left meanwhile: the planner must not wait for this group again
            self._plans.reset()
            self._planner.call(Planner.group_left, self._group, is_late).result()
        return plan


def _add_parts(plan: GroupPlan, whole: list[Fields], payloads: Iterator[Payload]) -> tuple[tuple[RankPart, ...], ...]:
    """Let every feature of a plan add its fields to the collated microbatches; returns the parts that differ by rank."""
    rank_parts: list[tuple[RankPart, ...]] = []
    for i, micro in enumerate(plan.microbatches):
        of_micro: list[RankPart] = []
        for part in micro.parts:
            images = () if part.more_samples is None else next(payloads).images or ()
            whole[i], of_rank = part.build(whole[i], [image for of_sample in images for image in of_sample])
            of_micro.append(of_rank)
        rank_parts.append(tuple(of_micro))
    return tuple(rank_parts)


def _num_tokens(plan: GroupPlan) -> int:
    return sum([int(micro.samples.tokens.sum()) for micro in plan.microbatches])


def _num_following(future: StealingFuture[_Built | Later | None]) -> int:
    if not future.done() or future.cancelled() or future.exception() is not None:
        return 0
    built = future.result()
    return len(built.following) if isinstance(built, _Built) else 0


def _was_postponed(future: StealingFuture[_Built | Later | None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None and isinstance(future.result(), Later)
