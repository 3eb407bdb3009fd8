"""The metrics that Prometheus gets, one row each: name, kind, labels, meaning, and where the value is in a snapshot.

Names and units follow Prometheus' conventions: base units (seconds, bytes), totals end in `_total`. docs/metrics.md has the
same rows, and a test compares them. A released name does not change its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from overlord.runtime.events import KINDS
from overlord.status import WAIT_BOUNDS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from overlord.status import CacheUse, ProcessUse, RankMetrics, RoleMetrics, RunMetrics, SourceMetrics

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """The waits of one rank."""

    counts: tuple[int, ...]
    total: float

    def cumulative(self) -> list[tuple[str, float]]:
        bounds = [*(format(bound, "g") for bound in WAIT_BOUNDS_S), "+Inf"]
        return list(zip(bounds, accumulate(map(float, self.counts)), strict=True))


@dataclass(frozen=True, slots=True)
class Family:
    """A metric, and how its values are read from a snapshot of a run."""

    name: str
    """Without `_total`, which Prometheus' library adds to counters."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: Labels
    help: str
    values: Callable[[RunMetrics], Iterable[tuple[Labels, float | Histogram]]]

    @property
    def full_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _run(name: str, kind: Literal["counter", "gauge"], text: str, value: Callable[[RunMetrics], float | None]) -> Family:
    def values(metrics: RunMetrics) -> Iterator[tuple[Labels, float]]:
        found = value(metrics)
        if found is not None:
            yield (), found

    return Family(f"overlord_{name}", kind, (), text, values)


def _source(
    name: str, kind: Literal["counter", "gauge"], text: str, value: Callable[[SourceMetrics], float | None]
) -> Family:
    def values(metrics: RunMetrics) -> Iterator[tuple[Labels, float]]:
        for source, entry in metrics.sources.items():
            found = value(entry)
            if found is not None:
                yield (source,), found

    return Family(f"overlord_source_{name}", kind, ("source",), text, values)


def _rank(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    text: str,
    value: Callable[[RankMetrics], float | Histogram | None],
) -> Family:
    def values(metrics: RunMetrics) -> Iterator[tuple[Labels, float | Histogram]]:
        for rank, entry in metrics.ranks.items():
            found = value(entry)
            if found is not None:
                yield (str(rank),), found

    return Family(f"overlord_rank_{name}", kind, ("rank",), text, values)


def _role(name: str, kind: Literal["counter", "gauge"], text: str, value: Callable[[RoleMetrics], float]) -> Family:
    return Family(
        f"overlord_role_{name}",
        kind,
        ("role",),
        text,
        lambda metrics: (((role,), value(entry)) for role, entry in metrics.roles.items()),
    )


def _process(name: str, kind: Literal["counter", "gauge"], text: str, value: Callable[[ProcessUse], float]) -> Family:
    return Family(
        f"overlord_process_{name}",
        kind,
        ("process", "node"),
        text,
        lambda metrics: (((role, use.node), value(use)) for role, use in metrics.processes.items()),
    )


def _cache(name: str, kind: Literal["counter", "gauge"], text: str, value: Callable[[CacheUse], float]) -> Family:
    return Family(
        f"overlord_cache_{name}",
        kind,
        ("entries",),
        text,
        lambda metrics: (((entries,), value(use)) for entries, use in metrics.caches.items()),
    )


FAMILIES: tuple[Family, ...] = (
    _run("up_seconds", "gauge", "Time since the run was started.", lambda m: m.up_s),
    _run("step", "gauge", "First step that not every reading rank has taken.", lambda m: m.step),
    _run("moves", "counter", "Moves of the run to another state or mesh.", lambda m: m.generation),
    _run("ranks_reading", "gauge", "Ranks that read now.", lambda m: sum(r.step is not None for r in m.ranks.values())),
    # Sources
    _source("samples", "counter", "Samples drawn, over all steps of the stream.", lambda s: s.samples),
    _source("tokens", "counter", "Tokens drawn, over all steps of the stream.", lambda s: s.tokens),
    _source("weight_ratio", "gauge", "Asked share of the mixture, in its unit.", lambda s: s.weight),
    _source("share_ratio", "gauge", "Realised share of the mixture, in its unit.", lambda s: s.share),
    _source("epochs", "gauge", "How often the source was read.", lambda s: s.epochs),
    _source(
        "epoch_limit",
        "gauge",
        "Epochs after which the source ends; absent where it repeats for ever.",
        lambda s: s.epoch_limit,
    ),
    _source(
        "left_seconds",
        "gauge",
        "Time until the source, or its epoch where it repeats for ever, ends; absent while it is not known.",
        lambda s: s.left_s,
    ),
    _source("bad_rows", "counter", "Rows dropped as bad.", lambda s: s.bad_rows),
    _source("dropped", "counter", "Documents left out because they are too long.", lambda s: s.dropped),
    _source("chunks", "counter", "Chunks made.", lambda s: s.num_chunks),
    _source("read_bytes", "counter", "Bytes of the chunks made, decoded.", lambda s: s.num_bytes),
    _source(
        "refill_seconds",
        "counter",
        "Time to make chunks (read, wait for storage, transform), over threads.",
        lambda s: s.make_s,
    ),
    _source("wait_seconds", "counter", "Time that requests have waited for a chunk.", lambda s: s.waited_s),
    _source("chunks_pending", "gauge", "Chunks in the making.", lambda s: s.num_pending),
    _source("buffer_bytes", "gauge", "Bytes of the buffered chunks.", lambda s: s.buffer.num_bytes),
    _source("buffer_limit_bytes", "gauge", "Bytes that the buffers may hold.", lambda s: s.buffer.limit_bytes),
    _source("loaders", "gauge", "Loaders that read the source.", lambda s: s.loaders),
    # Ranks
    _rank("steps", "counter", "Steps taken by the rank.", lambda r: r.num_steps),
    _rank("tokens", "counter", "Token positions in the batches handed to the rank.", lambda r: r.tokens),
    _rank("next_step", "gauge", "Next step of the rank; absent while it does not read.", lambda r: r.step),
    _rank(
        "wait_seconds",
        "histogram",
        "Time from requesting a step to receiving it.",
        lambda r: Histogram(r.waits, r.waited_s),
    ),
    # Roles
    _role("up", "gauge", "1 if the role answered this scrape in time.", lambda r: float(r.process is not None)),
    _role("restarts", "counter", "Times that another instance of the role was found.", lambda r: r.restarts),
    _role(
        "queue_length",
        "gauge",
        "Planner: plans kept; loader host: chunks in the making; constructor: steps ready or being built.",
        lambda r: r.queue,
    ),
    _role("busy_seconds", "counter", "Time the role's threads spent on its work, waits included.", lambda r: r.busy_s),
    _process("resident_memory_bytes", "gauge", "Resident memory of a process of the run.", lambda p: p.rss_bytes),
    _process("cpu_seconds", "counter", "CPU time of a process of the run.", lambda p: p.cpu_s),
    # The planner
    _run(
        "planner_lead_steps",
        "gauge",
        "Steps drawn beyond the first that not every reading rank has taken.",
        lambda m: None if m.planner is None else max(m.planner.reached - m.step, 0),
    ),
    _run("planner_plans", "counter", "Steps planned.", lambda m: m.num_planned),
    _run("planner_plan_seconds", "counter", "Time to draw and arrange steps, without waits for facts.", lambda m: m.plan_s),
    _run("planner_facts_wait_seconds", "counter", "Time that drawing has waited for facts of chunks.", lambda m: m.facts_s),
    _run(
        "planner_straggler_ratio",
        "gauge",
        "Cost of the costliest group of the newest plan over the mean group; absent without a cost.",
        lambda m: m.straggler,
    ),
    # Storage and memory
    Family(
        "overlord_storage_read_bytes",
        "counter",
        ("root",),
        "Bytes read from storage.",
        lambda m: (((root,), use.num_bytes) for root, use in m.storage.items()),
    ),
    Family(
        "overlord_storage_retries",
        "counter",
        ("root",),
        "Requests to storage that failed and were repeated.",
        lambda m: (((root,), use.num_retries) for root, use in m.storage.items()),
    ),
    _cache("hits", "counter", "Entries that were found in a cache.", lambda c: c.hits),
    _cache("misses", "counter", "Entries that were not in a cache and had to be made or read.", lambda c: c.misses),
    _cache("read_bytes", "counter", "Bytes of the entries found.", lambda c: c.read_bytes),
    _cache("written_bytes", "counter", "Bytes written to caches.", lambda c: c.written_bytes),
    _cache("evicted_bytes", "counter", "Bytes deleted from caches to make room.", lambda c: c.evicted_bytes),
    _cache("damaged", "counter", "Entries whose checksum was wrong; they were made again.", lambda c: c.damaged),
    _cache("failures", "counter", "Times that a cache could not be written, or not be reached.", lambda c: c.failures),
    _run(
        "store_bytes",
        "gauge",
        "Bytes used of Ray's object store; on other engines shared memory of batches.",
        lambda m: None if m.store is None else m.store.num_bytes,
    ),
    _run(
        "store_limit_bytes",
        "gauge",
        "Bytes that Ray's object store has; absent on other engines.",
        lambda m: None if m.store is None else m.store.limit_bytes,
    ),
    _run(
        "store_lent_bytes",
        "gauge",
        "Bytes of shared memory that trainers of the service's host hold.",
        lambda m: None if m.store is None or m.store.lent_limit_bytes is None else m.store.lent_bytes,
    ),
    _run(
        "store_lent_limit_bytes",
        "gauge",
        "Bytes of shared memory that connected trainers may hold; beyond that they get copies.",
        lambda m: None if m.store is None else m.store.lent_limit_bytes,
    ),
    # Scaling, faults
    _run("shadows", "gauge", "Loader hosts that have a shadow.", lambda m: len(m.shadows)),
    Family(
        "overlord_events",
        "counter",
        ("kind",),
        "Events by kind; docs/metrics.md lists the kinds.",
        lambda m: (((kind,), m.event_counts.get(kind, 0)) for kind in KINDS),
    ),
)
"""Every metric, in the order of the page."""
