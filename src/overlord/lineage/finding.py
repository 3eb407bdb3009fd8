"""Finds the steps that had a document: which chunks it is in is arithmetic, and the recorded progress says when each was
drawn. Only a few blocks are read, however long the run was."""

from __future__ import annotations

import sys
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.planlog.lineage_run import skip_value
from overlord.steering.decisions import SKIP
from overlord.stream.chunk_order import UnitRuns, chunk_of_unit, chunks_per_epoch, row_order, units_of_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlord.lineage.documents import TracedDocument
    from overlord.lineage.obtaining import FoundRun
    from overlord.lineage.recorded import RecordedSteps
    from overlord.planlog.lineage_run import RowPlace, SourceUnits

_CARRIED_STEPS = 32  # how much later the rest of a document may come: cut, set aside, or not placed


@dataclass(frozen=True, slots=True)
class Occurrences:
    """Where a document was."""

    documents: list[TracedDocument]
    """Each time, with the step, the ranks and the place."""
    expected: int | None
    """About the step that has it next, if the source is drawn at the pace of the recorded steps; None where that is not
    known, or where it does not come again."""
    left_out_from: int | None = None
    """The step from which on the run leaves it out; None where it does not."""


def find_document(found: FoundRun, source: str, place: RowPlace) -> Occurrences:
    """All recorded steps that had a row of a source, in order."""
    return _Finder(found, source, place).find()


class _Finder:
    def __init__(self, found: FoundRun, source: str, place: RowPlace) -> None:
        self._found = found
        self._run = found.run
        self._source = source
        self._place = place
        self._declared = found.job.sources[source]
        self._is_split = False  # the document was cut into several rows of its chunk
        self._cursors: dict[int, tuple[int, int]] = {}
        self._all = self._run.stretches
        self._marked = [i for i, steps in enumerate(self._all) if steps.block.has_after and steps.end == steps.block.end]

    def find(self) -> Occurrences:
        units = self._run.units(self._all[-1], self._source)
        runs = UnitRuns.of(units.all())
        per_epoch = chunks_per_epoch(runs.num_units, self._declared.units_per_chunk)
        last, expected = self._cursor(len(self._marked) - 1)[0] if self._marked else 0, None
        steps: set[int] = set()
        left_out_from = self._left_out_from(units)
        num_epochs = self._declared.num_epochs
        for epoch in range(min(last // per_epoch + 2, num_epochs or sys.maxsize)):
            chunk = self._chunk(runs, epoch)
            if chunk > last + 1:
                expected = self._expect(chunk)
                break
            steps |= self._steps_of(chunk, units, runs)
        unit = units.unit(self._place.unit)
        where = unit.path, unit.index, self._place.row
        documents = [document for step in sorted(steps) for document in self._found.documents(step)]
        if expected is not None and left_out_from is not None and expected >= left_out_from:
            expected = None
        found = [d for d in documents if d.source == self._source and (d.file, d.unit, d.row) == where]
        return Occurrences(found, expected, left_out_from)

    def _left_out_from(self, units: SourceUnits) -> int | None:
        """The first step that is drawn without the row, by the job's own `skip` or by what was decided during the run."""
        declared = [(s.from_step, skip_value(s, units.all())) for s in self._found.job.skip if s.source == self._source]
        decided = [
            (d.step, d.value) for d in self._found.decisions() if d.name == SKIP and d.value["source"] == self._source
        ]
        return min((step for step, value in (*declared, *decided) if self._is_in(value["rows"])), default=None)

    def _is_in(self, rows: Sequence[tuple[int, Sequence[int] | None]] | None) -> bool:
        unit, row = self._place.unit, self._place.row
        return rows is None or any(number == unit and (kept is None or row in kept) for number, kept in rows)

    def _chunk(self, runs: UnitRuns, epoch: int) -> int:
        source = self._declared
        return chunk_of_unit(
            self._found.job.seed,
            self._source,
            runs,
            window=source.units_per_chunk,
            shuffle=source.shuffle,
            unit=self._place.unit,
            epoch=epoch,
        )

    def _steps_of(self, chunk: int, units: SourceUnits, runs: UnitRuns) -> set[int]:
        """The steps that had the row in this chunk: first where it should be, then wherever the chunk was drawn."""
        guess = self._guess(chunk, units, runs)
        if guess is not None:
            steps = self._search(chunk, self._range((chunk, guess), (chunk, guess + 1)))
            if steps and not self._is_split:
                return steps
        return self._search(chunk, self._range((chunk, 0), (chunk + 1, 0)))

    def _guess(self, chunk: int, units: SourceUnits, runs: UnitRuns) -> int | None:
        """The row of the chunk, if every row that the units list is one row of the chunk."""
        source = self._declared
        numbers: list[int] = units_of_chunk(
            self._found.job.seed,
            self._source,
            runs,
            window=source.units_per_chunk,
            shuffle=source.shuffle,
            chunk=chunk,
        ).tolist()
        rows = [units.num_rows[number] for number in numbers]
        known = [count for count in rows if count is not None]
        if len(known) < len(rows):
            return None
        part, row = units.part(self._place.unit), self._place.row
        if part is not None:
            row = part.rows(units.rows_in_whole(self._place.unit) or 0).index(row)
        number = sum(known[: numbers.index(self._place.unit)]) + row
        if not source.shuffle:
            return number
        return int(np.flatnonzero(row_order(self._found.job.seed, self._source, chunk, sum(known)) == number)[0])

    def _range(self, begin: tuple[int, int], end: tuple[int, int]) -> range:
        """The stretches in which the rows from one cursor to another were drawn."""
        first = bisect_left(range(len(self._marked)), True, key=lambda i: self._cursor(i) > begin)
        last = bisect_left(range(len(self._marked)), True, key=lambda i: self._cursor(i) >= end)
        start = 0 if first == 0 else self._marked[first - 1] + 1
        return range(start, len(self._all) if last == len(self._marked) else self._marked[last] + 1)

    def _cursor(self, marked: int) -> tuple[int, int]:
        """The chunk and row of the source after a block that has a progress."""
        if marked not in self._cursors:
            after = self._run.after(self._all[self._marked[marked]])
            assert after is not None  # such blocks are marked
            number = after.names.index(self._source) if self._source in after.names else None
            self._cursors[marked] = (0, 0) if number is None else (int(after.chunk[number]), int(after.row[number]))
        return self._cursors[marked]

    def _search(self, chunk: int, places: range) -> set[int]:
        steps: set[int] = set()
        for stretch in self._with_followers(places, steps):
            steps |= set(self._in_stretch(chunk, stretch))
        return steps

    def _with_followers(self, places: range, found: set[int]) -> Iterator[RecordedSteps]:
        """These stretches, and those after them that may have the rest of what was found."""
        for i in range(places.start, len(self._all)):
            stretch = self._all[i]
            if i >= places.stop and not (found and stretch.first <= max(found) + _CARRIED_STEPS):
                return
            yield stretch

    def _in_stretch(self, chunk: int, stretch: RecordedSteps) -> Sequence[int]:
        block = self._run.block(stretch)
        if self._source not in block.names:
            return []
        samples = block.samples
        hits = (samples.source == block.names.index(self._source)) & (samples.chunk == chunk)
        hits &= (block.unit == self._place.unit) & (block.unit_row == self._place.row)
        self._is_split |= bool((block.token[hits] > 0).any())
        self._is_split |= bool((samples.stop[hits] >= self._found.job.batch.sequence_length).any())
        steps = [block.step_of(int(i)) for i in np.flatnonzero(hits)]
        return [step for step in steps if step < stretch.end]

    def _expect(self, chunk: int) -> int | None:
        """About when a chunk is drawn that is yet to come."""
        if len(self._marked) < 2:
            return None
        first, last = (self._all[self._marked[i]].end for i in (0, -1))
        (begin, _), (end, _) = self._cursor(0), self._cursor(len(self._marked) - 1)
        return None if end <= begin else last + round((chunk - end) * (last - first) / (end - begin))
