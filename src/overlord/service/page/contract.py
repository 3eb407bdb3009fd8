"""What the page gets: a snapshot of named sections, then only those that have changed. docs/page.md has the fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from overlord.runtime.events import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.service.page.history import TimeColumn
    from overlord.service.page.verdict import Verdict
    from overlord.status import Event, RunMetrics

MOST_DECISIONS = 64
_FAULTS = ("restart", "retry", "rank_lost", "log")


def sections_of(
    metrics: RunMetrics,
    before: RunMetrics | None,
    verdict: Verdict,
    *,
    causes: Sequence[str],
    decisions: Sequence[str],
    id: str,
) -> dict[str, bytes]:
    """The run at this moment, each section as JSON. `before` is an earlier look, for shares of time."""
    planner = metrics.planner
    plain: dict[str, Any] = {
        "run": {
            "id": id,
            "at_s": round(metrics.at_s, 2),
            "up_s": round(metrics.up_s),
            "step": metrics.step,
            "generation": metrics.generation,
            "mesh": metrics.mesh,
            "unit": metrics.unit,
            "level": verdict.level,
            "verdict": verdict.text,
            "causes": list(causes),
            "start": None if planner is None else planner.start,
            "reached": None if planner is None else planner.reached,
            "end": None if planner is None else planner.end,
            "log": None if planner is None or planner.log is None else planner.log.error or "written",
            "plan_s": _per(metrics.plan_s, metrics.num_planned),
            "straggler": metrics.straggler,
            "reading": sum(rank.step is not None for rank in metrics.ranks.values()),
            "store": None if metrics.store is None else [metrics.store.num_bytes, metrics.store.limit_bytes],
            "faults": sum(metrics.event_counts.get(kind, 0) for kind in _FAULTS),
        },
        "sources": _sources(metrics),
        "ranks": {
            "group": [rank.group for rank in metrics.ranks.values()],
            "step": [rank.step for rank in metrics.ranks.values()],
            "waiting_s": [round(rank.waiting_s, 1) for rank in metrics.ranks.values()],
        },
        "roles": _roles(metrics, before),
        "processes": {name: [use.process, use.node, use.rss_bytes] for name, use in metrics.processes.items()},
        "storage": {root: [use.num_bytes, use.num_retries] for root, use in metrics.storage.items()},
        "shadows": metrics.shadows,
        "decisions": list(decisions[-MOST_DECISIONS:]),
        "kinds": KINDS,
    }
    return {name: orjson.dumps(value) for name, value in plain.items()}


def _sources(metrics: RunMetrics) -> dict[str, list[Any]]:
    found = metrics.sources.values()
    return {
        "name": list(metrics.sources),
        "weight": [round(source.weight, 6) for source in found],
        "share": [round(source.share, 6) for source in found],
        "tokens": [source.tokens for source in found],
        "samples": [source.samples for source in found],
        "epochs": [round(source.epochs, 3) for source in found],
        "epoch_limit": [source.epoch_limit for source in found],
        "left_s": [None if source.left_s is None else round(source.left_s) for source in found],
        "bad_rows": [source.bad_rows for source in found],
        "waited_s": [round(source.waited_s, 1) for source in found],
        "pending": [source.num_pending for source in found],
        "buffer": [source.buffer.num_bytes for source in found],
        "limit": [source.buffer.limit_bytes for source in found],
        "loaders": [source.loaders for source in found],
    }


def _roles(metrics: RunMetrics, before: RunMetrics | None) -> list[list[Any]]:
    """Name, process, node, restarts, queue, and busy threads (None where that is not known)."""
    found: list[list[Any]] = []
    for name, role in metrics.roles.items():
        old = None if before is None else before.roles.get(name)
        busy = None
        if before is not None and old is not None and old.process == role.process and metrics.up_s > before.up_s:
            busy = round(max(role.busy_s - old.busy_s, 0.0) / (metrics.up_s - before.up_s), 2)
        found.append([name, role.process, role.node, role.restarts, role.queue, busy])
    return found


def changed(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> dict[str, bytes]:
    """The sections of `after` that differ."""
    return {name: value for name, value in after.items() if before.get(name) != value}


def encode(
    sections: Mapping[str, bytes],
    events: Sequence[Event],
    columns: Sequence[TimeColumn],
    *,
    name: str,
    open_column: bool = False,
) -> bytes:
    """A message of the stream. `open_column`: the last column is not full yet, and the next message has it again."""
    more = {
        "events": [[round(event.at_s, 2), event.kind, event.text, event.process] for event in events],
        "columns": [column.to_plain() for column in columns],
        "open": open_column,
    }
    parts = [*sections.items(), *((key, orjson.dumps(value)) for key, value in more.items())]
    body = b",".join(b'"%s":%s' % (key.encode(), value) for key, value in parts)
    return b"event: %s\ndata: {%s}\n\n" % (name.encode(), body)


def _per(total: float, count: int) -> float | None:
    return round(total / count, 6) if count else None
