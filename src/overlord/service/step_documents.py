"""The documents of a step while its run runs: where each was read, and which ranks train on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from overlord.errors import SpecError
from overlord.lineage.documents import trace_step
from overlord.messages import DocumentOrigin
from overlord.roles.planner import Planner
from overlord.runtime.liveness import ROLE_REPORT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import Plan
    from overlord.declare.job import Job
    from overlord.lineage.recorded import RecordedRun
    from overlord.runtime.engine import Handle


@dataclass(frozen=True, slots=True)
class StepDocument:
    """A document (or a piece of one) of a step: where it was read, and which ranks train on it."""

    source: str
    file: str
    """The file. Where it has several units, # and the number of the unit follow."""
    row: int
    """The row in that unit; -1 where a transform dropped the column `__origin__`."""
    tokens: int
    microbatch: int
    """The number of the microbatch on each of `ranks`."""
    ranks: tuple[int, ...]


class OriginLookup(Protocol):
    """Where rows of a chunk were read: `Routes` asks the loader host of the chunk."""

    def origins(self, source: int, chunk: int, rows: Sequence[int]) -> list[tuple[str, int]]: ...


def find_documents(
    plan: Plan, tree: ClientPlaceTree, origins: OriginLookup, *, microbatch: int | None = None
) -> list[StepDocument]:
    """The documents of a step, by rank and microbatch; with `microbatch`, numbered over all groups, only those in it. Chunks
    that are no longer in a buffer are read again."""
    places = slice(None) if microbatch is None else slice(plan.offsets[microbatch], plan.offsets[microbatch + 1])
    samples = plan.samples.take(plan.order[places])
    sources: list[int] = samples.source.tolist()
    read: dict[int, tuple[str, int]] = {}
    of_chunks: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(sources, samples.chunk.tolist(), strict=True)):
        of_chunks.setdefault(key, []).append(place)
    for (source, chunk), found in of_chunks.items():
        read.update(zip(found, origins.origins(source, chunk, samples.row[found].tolist()), strict=True))
    micro = plan.micro_of_order()[places]
    first = np.cumsum(plan.counts) - plan.counts
    group = np.repeat(np.arange(plan.num_groups), plan.counts)[micro]
    groups: list[int] = group.tolist()
    numbers: list[int] = (micro - first[group]).tolist()
    ranks = {number: tuple(tree.ranks_of_group(plan.axis, number)) for number in set(groups)}
    return [
        StepDocument(samples.source_names[source], *read[place], tokens, number, ranks[of])
        for place, (source, tokens, number, of) in enumerate(
            zip(sources, samples.tokens.tolist(), numbers, groups, strict=True)
        )
    ]


def find_origins(
    documents: Sequence[tuple[int, int, int]], names: Sequence[str], origins: OriginLookup
) -> list[DocumentOrigin]:
    """Where each of the documents (source, chunk, row) was read, in their order. One request for each chunk."""
    of_chunks: dict[tuple[int, int], list[int]] = {}
    for place, (source, chunk, _) in enumerate(documents):
        if source >= len(names):
            raise SpecError(f"the job has sources 0 to {len(names) - 1}; there is no source {source}")
        of_chunks.setdefault((source, chunk), []).append(place)
    found: dict[int, DocumentOrigin] = {}
    for (source, chunk), places in of_chunks.items():
        read = origins.origins(source, chunk, [documents[place][2] for place in places])
        for place, (file, row) in zip(places, read, strict=True):
            found[place] = DocumentOrigin(names[source], file, row)
    return [found[place] for place in range(len(documents))]


@dataclass(frozen=True, slots=True)
class LookedAt:
    """A step that somebody looks at."""

    plan: Plan
    tree: ClientPlaceTree
    """The mesh that it is, or was, arranged for."""
    is_recorded: bool
    """True if it comes from the log of the run."""
    documents: Callable[[int], list[StepDocument]]
    """Those of a microbatch, numbered over all groups."""

    def ranks(self) -> list[list[int]]:
        """The ranks that train on the samples of each group."""
        return [list(self.tree.ranks_of_group(self.plan.axis, group)) for group in range(self.plan.num_groups)]


class StepHistory:
    """Any step of a run that can be told without drawing it: those whose plans the planner keeps now, those that its log has
    recorded, and those that were looked at before. Looking at them holds nobody up. One thread at a time may call it."""

    def __init__(
        self,
        planner: Handle[Planner],
        origins: OriginLookup,
        job: Callable[[], Job],
        tree: Callable[[], ClientPlaceTree],
        recorded: Callable[[], RecordedRun] | None = None,
    ) -> None:
        """`recorded` opens the recorded lineage of the run; None where it has none."""
        self._planner = planner
        self._origins = origins
        self._job = job
        self._tree = tree
        self._open_recorded = recorded
        self._recorded: RecordedRun | None = None
        self._seen: dict[int, LookedAt] = {}  # of `_seen_tree`; a person looks longer than a plan is kept
        self._seen_tree = tree()

    @property
    def is_recorded(self) -> bool:
        """True if the run records its steps."""
        return self._open_recorded is not None

    def look_at(self, step: int) -> LookedAt | None:
        """A step; None where nobody can tell of it now."""
        tree = self._tree()
        if tree is not self._seen_tree:
            self._seen, self._seen_tree = {}, tree
        if step not in self._seen:
            planned = self._planner.call(Planner.kept_plan, step).result(ROLE_REPORT.after_s)
            if planned is not None:
                plan = planned.plan
                found = LookedAt(
                    plan, tree, False, lambda micro: find_documents(plan, tree, self._origins, microbatch=micro)
                )
            else:
                found = self._find_recorded(step)
            if found is None:
                return None
            self._seen[step] = found
            for old in list(self._seen)[:-_MOST_SEEN]:
                del self._seen[old]
        return self._seen[step]

    def newest(self, step: int) -> int:
        """The step, if its plan is kept; else the newest planned one."""
        if self.look_at(step) is not None:
            return step
        return self._planner.call(Planner.status).result(ROLE_REPORT.after_s).reached - 1

    def documents(self, step: int, microbatch: int) -> list[StepDocument] | None:
        """The documents of a microbatch, numbered over all groups; None where nobody can tell of the step."""
        found = self.look_at(step)
        if found is None:
            return None
        num_micro = int(found.plan.counts.sum())
        if not 0 <= microbatch < num_micro:
            raise SpecError(f"step {step:,} has microbatches 0 to {num_micro - 1:,}, got {microbatch:,}")
        return found.documents(microbatch)

    def _find_recorded(self, step: int) -> LookedAt | None:
        if self._open_recorded is None:
            return None
        if self._recorded is None or self._recorded.find(step) is None:
            self._recorded = self._open_recorded()  # blocks may have come since
        run, job = self._recorded, self._job()
        stretch, recorded = run.find(step), run.step(step)
        if stretch is None or recorded is None:
            return None
        tree = run.tree(stretch)
        plan = run.plan(job, recorded, tree)

        def documents(microbatch: int) -> list[StepDocument]:
            units = run.units
            traced = trace_step(recorded, plan, tree, job.batch, units=lambda name: units(stretch, name))
            first = np.cumsum(plan.counts) - plan.counts
            group = int(np.searchsorted(first, microbatch, side="right")) - 1
            ranks, number = tuple(tree.ranks_of_group(plan.axis, group)), microbatch - int(first[group])
            return [
                StepDocument(d.source, d.location, d.row, d.tokens, d.microbatch, d.ranks)
                for d in traced
                if d.microbatch == number and d.ranks == ranks
            ]

        return LookedAt(plan, tree, True, documents)


_MOST_SEEN = 16
