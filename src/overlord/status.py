"""How a run stands, as plain values: what roles count, and what `Loader.report` and `Loader.metrics` make of it.

Counters live where the work is done, as plain numbers, and are collected when somebody asks. They count from the start of a
role; `service/metrics.py` adds up roles that were made again. Every value here can be sent over the wire.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlord.runtime.events import Event, EventRing  # noqa: TC001 - msgspec reads the types of fields

if TYPE_CHECKING:
    from overlord.stream.outliers import Delay

WAIT_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""The upper bounds of the histogram of waits; a last bucket has the longer ones."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The weight of a source, and what was drawn of it so far."""

    weight: float
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class BufferUse:
    """How full a loader's buffer is."""

    num_chunks: int
    num_bytes: int
    peak_bytes: int
    limit_bytes: int
    chunks_made: int

    def plus(self, other: BufferUse) -> BufferUse:
        return BufferUse(
            self.num_chunks + other.num_chunks,
            self.num_bytes + other.num_bytes,
            self.peak_bytes + other.peak_bytes,
            self.limit_bytes + other.limit_bytes,
            self.chunks_made + other.chunks_made,
        )


@dataclass(frozen=True, slots=True)
class StoreUse:
    """How full the memory is that roles pass data through."""

    num_bytes: int
    limit_bytes: int | None
    """None for shared memory, which is as large as the steps that are kept ready and those that trainers hold."""
    lent_bytes: int = 0
    """The shared memory that trainers hold, counted for each rank."""
    lent_limit_bytes: int | None = None
    """How much the connected trainers may hold; beyond that they get copies in memory of their own. A few steps may always
    be held, however large they are."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a log is written."""

    segment: str
    num_bytes: int
    """Bytes of this segment that were handed to storage."""
    num_waiting: int
    """Bytes that are still buffered."""
    error: str | None


@dataclass(frozen=True, slots=True)
class PlannerStatus:
    """How far a planner is."""

    start: int
    reached: int
    """The first step that was never drawn."""
    oldest_needed: int
    taken_to: int
    """Every step before this one was taken by all groups that read then, or were expected to; they may have left since."""
    num_kept: int
    """The number of plans that are kept."""
    end: int | None
    """The step that the run ends before; None while that is not known."""
    log: LogPosition | None
    process: int
    """The id of its process."""


@dataclass(frozen=True, slots=True)
class SourceTotal:
    """What the steps of a run hold of a source."""

    samples: int
    tokens: int
    epochs: float


@dataclass(frozen=True, slots=True)
class StepCount:
    """How many steps a run has, from `Loader.count_steps`."""

    steps: int | None
    """The number of steps of the whole run, also where it began later: it ends before the step of this number. None where
    that is not known, or not yet."""
    counted: int
    """The steps before this one are counted."""
    sources: dict[str, SourceTotal]
    """What these steps hold of each source, once all are counted; empty before."""
    num_bytes: int
    """About the data that has to be read to count them, decoded."""
    endless: str
    """Why the run has no number of steps; empty where it has one."""


@dataclass(frozen=True, slots=True)
class Report:
    """How a run stands: the mixture as declared and as drawn, bad rows, buffers and loaders, by source."""

    step: int
    mix: dict[str, Mix]
    documents: dict[str, dict[str, int]]
    bad_rows: dict[str, int]
    buffers: dict[str, BufferUse]
    loaders: dict[str, int]
    """How many loaders read each source now."""
    shadows: dict[str, str]
    """The loader hosts that have a shadow, with the shadow's name."""
    store: StoreUse | None
    """How full Ray's object store is. On other engines the shared memory of batches, which trainers on this host map; None
    where there is none."""

    @property
    def delay(self) -> Delay | None:
        """How much later documents came because of `Batch(outliers=...)`, in the steps planned so far; None without it."""
        from overlord.stream.outliers import Delay

        return Delay.of(self.documents)


# What roles count


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a process did with one kind of entries of caches: "chunks" are transformed rows, "files" bytes of remote
    storage."""

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    evicted_bytes: int = 0
    damaged: int = 0
    """Entries whose checksum was wrong: they were made again."""
    failures: int = 0
    """Times that nothing could be written for a while."""

    def plus(self, other: CacheUse) -> CacheUse:
        return CacheUse(
            self.hits + other.hits,
            self.misses + other.misses,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
            self.evicted_bytes + other.evicted_bytes,
            self.damaged + other.damaged,
            self.failures + other.failures,
        )


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What a process uses, and what it noted. Roles of one process tell the same."""

    process: int
    node: str
    rss_bytes: int
    cpu_s: float
    storage: dict[str, StorageUse] = field(default_factory=dict)
    """By the root of the storage; "local" for files of the machine."""
    events: tuple[Event, ...] = ()
    caches: dict[str, CacheUse] = field(default_factory=dict)
    """By kind of entry."""


@dataclass(frozen=True, slots=True)
class StorageUse:
    """What a process has read from storage."""

    num_bytes: int
    num_retries: int


@dataclass(frozen=True, slots=True)
class LoadedSource:
    """What a loader host has done for a source since it was made, and how full its buffer is."""

    num_chunks: int
    rows: int
    tokens: int
    num_bytes: int
    """Of the chunks, decoded."""
    make_s: float
    """The time to make chunks: reading, waiting for storage and transforming, summed over threads."""
    waited_s: float
    """How long requests waited for a chunk."""
    num_pending: int
    buffer: BufferUse


@dataclass(frozen=True, slots=True)
class HostCounters:
    """A loader host."""

    instance: str
    """Changes when the role is made again."""
    use: ProcessUse
    sources: dict[str, LoadedSource]


@dataclass(frozen=True, slots=True)
class RankCounters:
    """A rank since the constructor of its group was made."""

    num_steps: int = 0
    tokens: int = 0
    """Token positions in the batches that were handed to the rank."""
    waited_s: float = 0.0
    """From requesting a step to receiving it."""
    waits: tuple[int, ...] = (0,) * (len(WAIT_BOUNDS_S) + 1)
    """How many of the waits were up to each of `WAIT_BOUNDS_S` and above the bound before, and at last the longer ones."""

    def plus(self, other: RankCounters) -> RankCounters:
        waits = tuple(a + b for a, b in zip(self.waits, other.waits, strict=True))
        return RankCounters(
            self.num_steps + other.num_steps, self.tokens + other.tokens, self.waited_s + other.waited_s, waits
        )


@dataclass(frozen=True, slots=True)
class ConstructorCounters:
    """A Data Constructor."""

    instance: str
    use: ProcessUse
    ranks: dict[int, RankCounters]
    reading: dict[int, int]
    """The ranks that read, with the next step of each."""
    waiting: dict[int, float]
    """The ranks that wait for a step now, with the seconds since they requested it. A rank that fetches ahead tells of a
    wait only when it is over."""
    num_ready: int
    """Steps that are built or being built."""
    num_building: int
    busy_s: float
    """The time to build steps, waits for plans and rows included."""
    shared_bytes: int
    """Shared memory of the batches of its process."""


@dataclass(frozen=True, slots=True)
class PlannerCounters:
    """A planner."""

    instance: str
    use: ProcessUse
    status: PlannerStatus
    step: int
    """The step before which `mix` holds."""
    mix: dict[str, Mix]
    epochs: dict[str, float]
    """How often each source was read, up to the chunk that is drawn from next."""
    left_s: dict[str, float]
    """See `SourceMetrics.left_s`; without sources of which no chunk was used up yet."""
    documents: dict[str, dict[str, int]]
    num_planned: int
    plan_s: float
    """The time to draw and arrange steps, without waits for facts."""
    facts_s: float
    """The time that drawing has waited for the facts of chunks."""
    straggler: float | None
    """The costliest group of the newest plan over the mean group; None where the strategy knows no cost."""


# What a run makes of it


@dataclass(frozen=True, slots=True)
class SourceMetrics:
    """A source of a run."""

    weight: float
    """The asked share, in the mixture's unit."""
    share: float
    """The realised share over all steps so far, in the mixture's unit."""
    samples: int
    tokens: int
    epochs: float
    bad_rows: int
    num_chunks: int
    num_bytes: int
    make_s: float
    waited_s: float
    num_pending: int
    buffer: BufferUse
    loaders: int
    dropped: int = 0
    """Documents longer than sequence_length that were left out."""
    left_s: float | None = None
    """Seconds until the source has been read to its end, at the rate since the run began: a finite one to the last of its
    epochs, an endless one to the end of the epoch that it is in. None while that cannot be told."""
    epoch_limit: int | None = None
    """The epochs after which the source ends; None where it repeats for ever."""


@dataclass(frozen=True, slots=True)
class RankMetrics:
    """A rank of a run, since the run was started."""

    group: int
    step: int | None
    """The next step of the rank; None while it does not read."""
    num_steps: int
    tokens: int
    waited_s: float
    waits: tuple[int, ...]
    waiting_s: float = 0.0
    """How long the rank waits already for a step that it has not received; `waited_s` does not have it yet."""


@dataclass(frozen=True, slots=True)
class RoleMetrics:
    """A role of a run."""

    process: int | None
    """None when it did not answer in time."""
    node: str
    restarts: int
    """How often another instance was found under its name."""
    queue: int
    """Planner: plans that are kept; loader host: chunks in the making; constructor: steps that are built or being built."""
    busy_s: float


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """A run at one moment, as plain values: from `Loader.metrics`, `client.run.metrics()` or `overlord status --json`."""

    at_s: float
    """Seconds since 1970."""
    up_s: float
    """Seconds since the run was started."""
    step: int
    """The first step that not every reading rank has taken."""
    generation: int
    """How often the run was moved to another state or mesh."""
    mesh: dict[str, int]
    """The sizes of its axes, outermost first."""
    unit: str
    """What shares are of: "samples" or "tokens"."""
    planner: PlannerStatus | None
    """None when the planner did not answer in time; then sources lack what it counts."""
    num_planned: int
    plan_s: float
    facts_s: float
    straggler: float | None
    sources: dict[str, SourceMetrics]
    ranks: dict[int, RankMetrics]
    roles: dict[str, RoleMetrics]
    processes: dict[str, ProcessUse]
    """By the name of one of its roles."""
    storage: dict[str, StorageUse]
    shadows: dict[str, str]
    store: StoreUse | None
    event_counts: dict[str, int]
    events: tuple[Event, ...]
    """The newest events, in the order of time."""
    caches: dict[str, CacheUse] = field(default_factory=dict)
    """By kind of entry: "chunks" are transformed rows, "files" bytes of remote storage."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The plan of one step in numbers. Microbatches are numbered over all groups, group by group."""

    step: int
    axis: str
    """What the groups are along: dp, cp or world."""
    loss_tokens: float
    samples: dict[str, int]
    """By source."""
    tokens: dict[str, int]
    num_microbatches: list[int]
    """Of each group."""
    micro_samples: list[int]
    micro_tokens: list[int]
    micro_costs: list[float] | None
    """In the unit of the strategy's cost; None where it knows none."""
    group_costs: list[float] | None
    stages: list[tuple[str, str]]
    """The primitives that the strategy called, and what each did."""


def process_use(
    events: EventRing, storage: dict[str, StorageUse] | None = None, caches: dict[str, CacheUse] | None = None
) -> ProcessUse:
    """This process, with what a run has noted in it."""
    from overlord.runtime.memory import rss_bytes  # trainers, which import this module, do not need it

    node, cpu_s = os.uname().nodename, time.process_time()
    return ProcessUse(os.getpid(), node, rss_bytes(), cpu_s, storage or {}, events.recent(), caches or {})


def to_plain(value: Any) -> Any:
    """A value of this module as dicts, lists and numbers, for JSON."""
    import msgspec

    return msgspec.to_builtins(value, str_keys=True)
