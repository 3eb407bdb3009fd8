"""Reads the lineage that a run has recorded: any step, however late, from one small block."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from overlord.arrange.graph import arrange_step, deal_rows
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.checkpoint.fingerprint import Fingerprint, SavedChunks, differences_of, refuse_differences, saved_chunks
from overlord.declare.mesh import Mesh
from overlord.declare.source import Unit
from overlord.errors import SpecError, StateError
from overlord.planlog.lineage import LineageBlock, RecordedStep, decode_block, describe_block, progress_after
from overlord.planlog.lineage_files import LineageFiles, StoredBlock, lineage_at
from overlord.planlog.lineage_run import RecordedUnits, read_run, read_units
from overlord.steering.learning import Learning

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from overlord.arrange.plan import Plan
    from overlord.declare.job import Job
    from overlord.planlog.lineage_run import SourceUnits
    from overlord.stream.progress import Progress

_BLOCKS_KEPT = 4


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The steps `first` to `end` of a stored block that count: a later planner has drawn those after them again."""

    block: StoredBlock
    first: int
    end: int
    writer: int


class RecordedRun:
    """The recorded lineage of one log. Nothing is read before it is needed."""

    def __init__(self, files: LineageFiles) -> None:
        self._files = files
        self._decode = lru_cache(_BLOCKS_KEPT)(self._decode_block)
        self._run = lru_cache(None)(self._read_run)
        self._units = lru_cache(None)(self._read_units)

    @staticmethod
    def at(location: str | Path, storage_options: Mapping[str, str] | None = None) -> RecordedRun:
        return RecordedRun(lineage_at(location, storage_options))

    @property
    def place(self) -> str:
        return self._files.place

    @cached_property
    def stretches(self) -> list[RecordedSteps]:
        """All steps that are recorded, in order, each once. Of two planners that drew a step, the later one counts, because
        a run that goes back to a state draws from there on anew."""
        found: list[RecordedSteps] = []
        limit: int | None = None
        for writer in reversed(self._files.writers()):
            blocks = self._files.blocks(writer)
            kept = [block for block in blocks if limit is None or block.first < limit]
            found += [
                RecordedSteps(block, block.first, block.end if limit is None else min(block.end, limit), writer)
                for block in kept
            ]
            if kept:
                limit = kept[0].first
        return sorted(found, key=lambda stretch: stretch.first)

    @property
    def is_empty(self) -> bool:
        return not self.stretches

    @property
    def first(self) -> int:
        """The first recorded step."""
        return self.stretches[0].first

    @property
    def end(self) -> int:
        """The step after the last recorded one."""
        return self.stretches[-1].end

    def find(self, step: int) -> RecordedSteps | None:
        """The stretch that has a step; None where it is not recorded."""
        place = bisect_right(self.stretches, step, key=lambda stretch: stretch.first) - 1
        found = self.stretches[place] if place >= 0 else None
        return found if found is not None and step < found.end else None

    def step(self, step: int) -> RecordedStep | None:
        """A step as it was drawn; None where it is not recorded."""
        found = self.find(step)
        return None if found is None else self.block(found).step(step)

    def block(self, stretch: RecordedSteps) -> LineageBlock:
        return self._decode(stretch.block)

    def progress_before(self, step: int) -> Progress | None:
        """The last recorded progress up to a step, from which the step can be drawn; None where there is none."""
        for stretch in reversed([each for each in self.stretches if each.block.has_after and each.block.end <= step]):
            if stretch.end == stretch.block.end:
                return self.after(stretch)
        return None

    def after(self, stretch: RecordedSteps) -> Progress | None:
        """The progress after the block of a stretch, where it has one."""
        return progress_after(describe_block(stretch.block.read(), stretch.block.name))

    def run_of(self, stretch: RecordedSteps) -> Mapping[str, Any]:
        """What is known of the planner that wrote a stretch."""
        return self._run(stretch.writer)

    def units(self, stretch: RecordedSteps, source: str) -> SourceUnits:
        """The units of a source when a stretch was written."""
        return self._units_of_source(self.run_of(stretch)["units"], source)

    def recorded_units(self, stretch: RecordedSteps) -> RecordedUnits:
        return self._units(self.run_of(stretch)["units"])

    def tree(self, stretch: RecordedSteps) -> ClientPlaceTree:
        """The mesh that the steps of a stretch were arranged for."""
        value = self.run_of(stretch)["mesh"]
        sizes = {axis: value[axis] for axis in ("dp", "cp", "tp", "pp")}
        return ClientPlaceTree(Mesh(**sizes, order=tuple(value["order"])))

    def plan(self, job: Job, recorded: RecordedStep, tree: ClientPlaceTree) -> Plan:
        """The arrangement of a step, as the job's strategy makes it."""
        costs = None if recorded.costs is None else Learning(tree, True).in_force(recorded.costs)
        return arrange_step(
            recorded.drawn,
            job.batch,
            tree,
            job.strategy or deal_rows,
            unit=job.mix.unit,
            size_columns=job.size_columns,
            in_force=costs,
        )

    def check_job(self, job: Job) -> Job:
        """Raise StateError unless the newest steps are of this job; returns the job with the windows that it had. No file is
        listed: whether data has changed is seen when documents are read."""
        saved = self.recorded_units(self.stretches[-1]).fingerprint
        missing = [name for name in saved["sources"] if name not in job.sources]
        if missing:
            raise StateError(f"{self.place} is of a job with a source {missing[0]!r}, which this job does not have")
        chunks = {name: saved_chunks(saved, name) or SavedChunks() for name in job.sources}
        sources = {
            name: source if source.window is not None else source.with_window(chunks[name].window)
            for name, source in job.sources.items()
        }
        job = replace(job, sources=sources)
        found = Fingerprint.of(job, {name: (_ANY_UNIT,) for name in job.sources})
        # The units are taken as they were recorded, so only declarations are compared.
        entries = {name: (entry[0], *saved["sources"].get(name, entry)[1:]) for name, entry in found.sources.items()}
        differences = differences_of(replace(found, sources=entries, files={}), saved, f"{self.place} is damaged")
        try:
            refuse_differences(differences, (), f"{self.place} was written by a job that differs from this one", "")
        except StateError as error:
            raise StateError(str(error).partition("\nRestore")[0].replace("\n  - ", " ")) from None
        return job

    def missing_text(self, step: int) -> str:
        """Why a step is not there."""
        if self.is_empty:
            return f"{self.place} has no recorded steps: was the run started with this log, and with Log(lineage=True)?"
        if step < self.first:
            return f"the run recorded in {self.place} begins at step {self.first:,}; it has no step {step:,}"
        if step >= self.end:
            return f"{self.place} has the steps before {self.end:,}, not step {step:,}"
        return f"step {step:,} is missing in {self.place}: its planner was killed before it was written"

    def _decode_block(self, block: StoredBlock) -> LineageBlock:
        return decode_block(block.read(), block.name)

    def _read_run(self, writer: int) -> dict[str, Any]:
        return read_run(self._files, writer)

    def _read_units(self, name: str) -> RecordedUnits:
        return read_units(self._files, name)

    def _units_of_source(self, name: str, source: str) -> SourceUnits:
        return self._sources(name, source)

    @cached_property
    def _sources(self) -> Any:
        return lru_cache(None)(lambda name, source: self._units(name).of(source))


_ANY_UNIT = Unit("")


def check_rank(tree: ClientPlaceTree, rank: int | None) -> None:
    if rank is not None and not 0 <= rank < tree.world_size:
        raise SpecError(f"the mesh had {tree.world_size} ranks at that step; there is no rank {rank}")
