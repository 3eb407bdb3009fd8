"""A run at one moment for people: what `overlord status` prints once, and `overlord top` again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from overlord.cli.output import printable, short, size, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from overlord.status import RankMetrics, RunMetrics

_MOST_SOURCES = 40
_MOST_RANKS = 16
_MOST_EVENTS = 8


def view_of(now: RunMetrics, before: RunMetrics | None, waits: Sequence[str]) -> Group:
    """The run as tables; with an earlier snapshot also what it does in a second. `waits`: what it is busy with."""
    parts: list[RenderableType] = [
        Text(headline(now, before), "bold"),
        _sources(now, before),
        _ranks(now, before),
        _roles(now),
    ]
    parts += [Text(f"waits for: {printable(line)}") for line in waits]
    if now.events:
        parts.append(Text("Events", "bold"))
        parts += [
            Text(f"  {now.at_s - e.at_s:7.0f} s ago  {e.kind:<9} {printable(e.text)}") for e in now.events[-_MOST_EVENTS:]
        ]
    return Group(*parts)


def headline(now: RunMetrics, before: RunMetrics | None = None) -> str:
    """The run in a line."""
    reading = sum(rank.step is not None for rank in now.ranks.values())
    mesh = " ".join(f"{axis}={count}" for axis, count in now.mesh.items() if count > 1 or axis == "dp")
    planned = "the planner does not answer" if now.planner is None else f"planned to {now.planner.reached:,}"
    rates = ""
    if before is not None and now.at_s > before.at_s:
        seconds = now.at_s - before.at_s
        steps = max(_steps(now) - _steps(before), 0) / seconds
        rates = f"   {steps:.3g} steps/s   {short(max(_tokens(now) - _tokens(before), 0) / seconds)} tokens/s"
    ended = "" if now.planner is None or now.planner.end is None else f", ends before {now.planner.end:,}"
    up = f"{now.up_s:.0f} s" if now.up_s < 120 else f"{now.up_s / 60:.0f} min"
    return f"step {now.step:,} ({planned}{ended})   {reading} of {len(now.ranks):,} ranks read   {mesh}   up {up}{rates}"


def summary_line(metrics: RunMetrics) -> str:
    """What a run did, when it ends: steps, tokens, and what was waited for."""
    ranks = metrics.ranks.values()
    waited, steps = sum(rank.waited_s for rank in ranks), sum(rank.num_steps for rank in ranks)
    slowest = max(metrics.sources, key=lambda name: metrics.sources[name].waited_s, default=None)
    memory = sum(use.rss_bytes for use in metrics.processes.values())
    parts = [
        f"{_steps(metrics):,} steps in {metrics.up_s:.1f} s",
        f"{short(_tokens(metrics))} tokens",
        f"ranks waited {waited / steps * 1e3 if steps else 0.0:.1f} ms a step",
    ]
    if slowest is not None and metrics.sources[slowest].waited_s > _LEAST_WAITED_S:
        parts.append(f"most for source {printable(slowest)!r} ({metrics.sources[slowest].waited_s:.1f} s)")
    bad = sum(source.bad_rows for source in metrics.sources.values())
    parts += [f"{bad:,} bad rows"] if bad else []
    events = {kind: count for kind, count in metrics.event_counts.items() if kind not in _ORDINARY}
    parts += [", ".join(f"{count} {kind}" for kind, count in events.items())] if events else []
    return "; ".join([*parts, f"memory {size(memory)}"])


_LEAST_WAITED_S = 0.1
_ORDINARY = ("serving", "draining")


def _steps(metrics: RunMetrics) -> int:
    return max((rank.num_steps for rank in metrics.ranks.values()), default=0)


def _tokens(metrics: RunMetrics) -> int:
    return sum(rank.tokens for rank in metrics.ranks.values())


def _sources(now: RunMetrics, before: RunMetrics | None) -> RenderableType:
    """The sources that requests wait for first."""
    earlier = {} if before is None else before.sources
    seconds = 0.0 if before is None else max(now.at_s - before.at_s, 1e-9)
    rows: list[tuple[str, ...]] = []
    for name, source in sorted(now.sources.items(), key=lambda item: -item[1].waited_s)[:_MOST_SOURCES]:
        old = earlier.get(name)
        rate = "" if old is None else f"{short(max(source.tokens - old.tokens, 0) / seconds)}"
        limit = source.buffer.limit_bytes
        rows.append(
            (
                name,
                f"{source.weight:.2%}",
                f"{source.share:.2%}",
                f"{short(source.tokens)}",
                rate,
                f"{source.epochs:.2f}" + ("" if source.epoch_limit is None else f" of {source.epoch_limit}"),
                "" if source.left_s is None else _long(source.left_s),
                f"{source.bad_rows:,}",
                f"{size(source.buffer.num_bytes)} ({source.buffer.num_bytes / limit if limit else 0:.0%})",
                f"{source.waited_s:.1f}",
                f"{source.loaders:,}",
            )
        )
    unit = now.unit
    columns = ("source", f"{unit} asked", f"{unit} drawn", "tokens", "tokens/s", "epochs", "lasts")
    columns = (*columns, "bad rows", "buffer", "waited s")
    left = len(now.sources) - len(rows)
    return table(*columns, "loaders", rows=rows, title=f"and {left:,} sources more" if left > 0 else None)


def _long(seconds: float) -> str:
    """A time that may be weeks."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.1f} d"


def _ranks(now: RunMetrics, before: RunMetrics | None) -> RenderableType:
    """The ranks that wait longest, first."""
    earlier = {} if before is None else before.ranks

    def waited(rank: int, entry: RankMetrics) -> float:
        """Seconds a step, lately where that is known."""
        old = earlier.get(rank)
        steps = entry.num_steps - (0 if old is None else old.num_steps)
        seconds = entry.waited_s - (0.0 if old is None else old.waited_s)
        return max(seconds, 0.0) / steps if steps > 0 else 0.0

    found = sorted(
        ((waited(rank, entry), rank, entry) for rank, entry in now.ranks.items()), key=lambda one: (-one[0], one[1])
    )
    rows = [
        (f"{rank}", f"{entry.group}", _step_text(entry), f"{entry.num_steps:,}", short(entry.tokens), f"{wait_s * 1e3:.1f}")
        for wait_s, rank, entry in found[:_MOST_RANKS]
    ]
    left = len(now.ranks) - len(rows)
    title = f"and {left:,} ranks more, which wait less" if left > 0 else None
    return table("rank", "group", "next step", "steps", "tokens", "waits ms/step", rows=rows, title=title)


def _step_text(entry: RankMetrics) -> str:
    return "does not read" if entry.step is None else f"{entry.step:,}"


def _roles(now: RunMetrics) -> RenderableType:
    memory = {(use.node, use.process): use.rss_bytes for use in now.processes.values()}
    rows = [
        (
            name,
            "silent" if role.process is None else f"{role.process}",
            f"{role.queue:,}",
            f"{role.busy_s:.1f}",
            f"{role.restarts:,}",
            "" if role.process is None else size(memory.get((role.node, role.process), 0)),
        )
        for name, role in list(now.roles.items())[:_MOST_SOURCES]
    ]
    return table("role", "process", "queue", "busy s", "restarts", "memory of its process", rows=rows)
