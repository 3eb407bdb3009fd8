"""The documents of a step: where each was read, and where it went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.batches.text_fields import document_places
from overlord.planlog.lineage import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.arrange.plan import MicroPlan, Plan
    from overlord.declare.batch import Batch
    from overlord.planlog.lineage import RecordedStep
    from overlord.planlog.lineage_run import SourceUnits


@dataclass(frozen=True, slots=True)
class TracedDocument:
    """A document, or a piece of one, in a step."""

    step: int
    source: str
    file: str
    """Empty where it is not known."""
    unit: int
    """The number of the unit within its file: a row group, a range of bytes."""
    row: int
    """The row within the unit; -1 where a transform lost the lineage."""
    file_row: int | None
    """The row within the file, where the sizes of the units before it are known."""
    start: int
    """The first of its tokens that this step has."""
    stop: int
    tokens: int
    images: int
    chunk: int
    chunk_row: int
    microbatch: int
    """The number of the microbatch on each of `ranks`."""
    micro_row: int
    place: int
    """Where its first token is in the arrays of the microbatch, before they are cut for context parallelism."""
    ranks: tuple[int, ...]

    @property
    def location(self) -> str:
        """The unit, as messages name it."""
        return "?" if not self.file else f"{self.file}#{self.unit}" if self.unit else self.file


def trace_step(
    recorded: RecordedStep,
    plan: Plan,
    tree: ClientPlaceTree,
    batch: Batch,
    *,
    units: Callable[[str], SourceUnits],
    rank: int | None = None,
) -> list[TracedDocument]:
    """The documents of a step, by rank and microbatch; with `rank` only those that the rank trains on."""
    found: list[TracedDocument] = []
    origins = _Origins(recorded, units)
    for group in range(plan.num_groups):
        ranks = tuple(tree.ranks_of_group(plan.axis, group))
        if rank is None or rank in ranks:
            for number, micro in enumerate(plan.for_group(recorded.drawn.number, group).microbatches):
                found += _of_micro(origins, micro, batch, number, ranks)
    return found


class _Origins:
    """Where the rows of a step were read."""

    def __init__(self, recorded: RecordedStep, units: Callable[[str], SourceUnits]) -> None:
        samples = recorded.drawn.samples
        self.step = recorded.drawn.number
        self._names = samples.source_names
        self._units = units
        self._first_rows: dict[tuple[str, int], int | None] = {}
        keys = zip(samples.source.tolist(), samples.chunk.tolist(), samples.row.tolist(), strict=True)
        read = zip(recorded.unit.tolist(), recorded.unit_row.tolist(), recorded.token.tolist(), strict=True)
        self._read: dict[tuple[int, int, int], tuple[int, int, int]] = dict(zip(keys, read, strict=True))

    def of(self, source: int, chunk: int, row: int) -> tuple[str, int, int, int | None, int]:
        """(file, unit in it, row in the unit, row in the file, first token)."""
        number, unit_row, token = self._read[source, chunk, row]
        if number == UNKNOWN:
            return "", 0, -1, None, token
        name = self._names[source]
        units = self._units(name)
        if (name, number) not in self._first_rows:
            self._first_rows[name, number] = units.first_row(number)
        first = self._first_rows[name, number]
        unit = units.unit(number)
        return unit.path, unit.index, unit_row, None if first is None or unit_row < 0 else first + unit_row, token


def _of_micro(
    origins: _Origins, micro: MicroPlan, batch: Batch, number: int, ranks: tuple[int, ...]
) -> Iterator[TracedDocument]:
    samples = micro.samples
    if len(samples) == 0:
        return
    places: list[int] = document_places(micro, batch).tolist()
    images: list[int] = [0] * len(samples) if samples.images is None else samples.images.count.tolist()
    # An object per document: they are listed for people, one by one.
    for i, (source, chunk, row, start, stop, tokens, _) in enumerate(samples.table.T.tolist()):
        file, unit, unit_row, file_row, token = origins.of(source, chunk, row)
        yield TracedDocument(
            step=origins.step,
            source=samples.source_names[source],
            file=file,
            unit=unit,
            row=unit_row,
            file_row=file_row,
            start=token + start,
            stop=token + stop,
            tokens=tokens,
            images=images[i],
            chunk=chunk,
            chunk_row=row,
            microbatch=number,
            micro_row=int(micro.row[i]),
            place=places[i],
            ranks=ranks,
        )
