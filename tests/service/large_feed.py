"""A feed for the page as a run of 1,000 ranks and 300 sources would give it, without that run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.runtime.events import Event
from overlord.status import (
    BufferUse,
    PlannerStatus,
    ProcessUse,
    RankMetrics,
    RoleMetrics,
    RunMetrics,
    SourceMetrics,
)

NUM_RANKS, NUM_SOURCES, NUM_HOSTS = 1000, 300, 64


@dataclass
class LargeRun:
    """What the page asks of a run. Every look finds a second more: other waits, other shares, now and then an event."""

    num_ranks: int = NUM_RANKS
    num_sources: int = NUM_SOURCES
    num_looks: int = 0
    began_s: float = field(default_factory=time.time)
    waited: Any = None

    def metrics(self) -> RunMetrics:
        self.num_looks += 1
        rng = np.random.default_rng(self.num_looks)
        if self.waited is None:
            self.waited = np.zeros(self.num_ranks)
        waits = rng.random(self.num_ranks) ** 8
        waits[rng.integers(0, self.num_ranks, 10)] = 0.9
        self.waited = self.waited + waits
        step = 10 * self.num_looks
        drawn = rng.integers(900, 1100, self.num_sources) * step
        shares = drawn / drawn.sum()
        ranks = {
            rank: RankMetrics(rank // 8, step, step, 8192 * step, float(self.waited[rank]), (step,) + (0,) * 15)
            for rank in range(self.num_ranks)
        }
        sources = {
            f"corpus-{i:03}-of-{self.num_sources}": SourceMetrics(
                weight=1 / self.num_sources,
                share=float(shares[i]),
                samples=int(drawn[i] // 100),
                tokens=int(drawn[i]),
                epochs=step / 1e4,
                bad_rows=int(i % 7 == 0) * self.num_looks,
                num_chunks=step,
                num_bytes=step << 20,
                make_s=step / 10,
                waited_s=float(rng.random()),
                num_pending=int(rng.integers(0, 3)),
                buffer=BufferUse(3, int(rng.integers(1, 256)) << 20, 1 << 28, 1 << 28, step),
                loaders=1,
                left_s=float(86400 * i),
                epoch_limit=4 if i % 3 == 0 else None,
            )
            for i in range(self.num_sources)
        }
        names = ["planner", *(f"loaders/{i}" for i in range(NUM_HOSTS)), *(f"constructor/{i}" for i in range(NUM_HOSTS))]
        roles = {name: RoleMetrics(1000 + i, f"node-{i % 8}", 0, 3, step / 10) for i, name in enumerate(names)}
        processes = {
            name: ProcessUse(1000 + i, f"node-{i % 8}", (300 + i) << 20, step / 10.0) for i, name in enumerate(names)
        }
        events = tuple(
            Event(self.began_s + 7 * i, "restart", f"worker process {i} ended with SIGKILL: another is started", 1, i)
            for i in range(self.num_looks // 7)
        )
        return RunMetrics(
            at_s=self.began_s + self.num_looks,
            up_s=float(self.num_looks),
            step=step,
            generation=0,
            mesh={"dp": self.num_ranks // 8, "tp": 8},
            unit="tokens",
            planner=PlannerStatus(0, step + 8, step, step, 8, None, None, 1000),
            num_planned=step,
            plan_s=step * 0.01,
            facts_s=0.0,
            straggler=1.02,
            sources=sources,
            ranks=ranks,
            roles=roles,
            processes=processes,
            storage={},
            shadows={},
            store=None,
            event_counts={"restart": len(events)},
            events=events,
        )

    def status(self) -> PlannerStatus:
        return PlannerStatus(0, 100, 90, 90, 8, None, None, 1000)

    def status_lines(self) -> list[str]:
        return ["source 'corpus-017-of-300' is making chunk 12 for 3.2 s"]

    def scaling(self) -> list[object]:
        return []
