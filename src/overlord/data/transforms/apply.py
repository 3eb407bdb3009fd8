"""Running the transforms of a source over a chunk: lineage kept, schema held, bad rows handed to their policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.data.bad_rows import BadRowLog
from overlord.data.transforms.context import Context
from overlord.data.transforms.in_processes import InProcesses
from overlord.data.transforms.invoke import Invoke
from overlord.data.transforms.origin import lost_origin
from overlord.data.transforms.outcome import Outcome, RowError, listed
from overlord.errors import OverlordError, SchemaError
from overlord.planning.facts import Ints

if TYPE_CHECKING:
    from overlord.data.processes import ProcessPool

Locate = Callable[[int], tuple[str, int]]
"""From a row's origin to (file, row in it)."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Hands the bad rows of one chunk to the log of their source, by file and row."""

    log: BadRowLog
    locate: Locate

    def add(self, origin: int, error: str) -> None:
        self.log.add(*self.locate(origin), error)

    def place(self, origin: int) -> str:
        file, row = self.locate(origin)
        return f"{file}, row {row}" if row >= 0 else file


class Transforms:
    """The transforms of one source. Remembers the schema that each returned first; safe to run from many threads."""

    def __init__(self, transforms: Sequence[Callable[..., pa.Table]], processes: ProcessPool | None = None) -> None:
        self._marks = [fn if isinstance(fn, InProcesses) else None for fn in transforms]
        self._stages = [Invoke(fn.fn if isinstance(fn, InProcesses) else fn) for fn in transforms]
        self._schemas: list[pa.Schema | None] = [None] * len(self._stages)
        self._first_chunk = [-1] * len(self._stages)
        self._processes = processes
        self._lock = threading.Lock()

    def run(self, table: pa.Table, context: Context, origin: Ints, reporter: Reporter) -> tuple[pa.Table, Ints]:
        """The transformed table and, for each of its rows, the origin it came from or -1.

        `origin[i]` is the number of row i of `table` among the rows of the chunk as they were read.
        """
        for index in range(len(self._stages)):
            outcome = self._run_stage(index, table, replace(context, stage=index), origin, reporter)
            table = self._checked(index, outcome.table, context)
            origin = lost_origin(table.num_rows) if outcome.origin is None else outcome.origin
            if len(origin) != table.num_rows:
                raise SchemaError(
                    f"transform {self._stages[index].name} of source {context.source!r} returned {table.num_rows} rows "
                    f"with lineage for {len(origin)}"
                )
        return table, np.maximum(origin, -1)

    def _run_stage(self, index: int, table: pa.Table, context: Context, origin: Ints, reporter: Reporter) -> Outcome:
        stage, mark = self._stages[index], self._marks[index]
        on_bad = None if reporter.log.fails else reporter.add
        try:
            if mark is not None and self._processes is not None:
                return self._processes.run(mark, table, origin, context, reporter.add, on_bad is None)
            return stage.run(table, origin, context, on_bad)
        except RowError as error:
            cause = error.cause
            cause.add_note(f"in {self._where(stage, context)}, {reporter.place(error.origin)}")
            raise cause from cause.__cause__
        except OverlordError as error:
            error.add_note(f"in {self._where(stage, context)}")
            raise
        except Exception as error:
            error.add_note(f"in {self._where(stage, context)}{_span(origin, reporter)}")
            raise

    @staticmethod
    def _where(stage: Invoke, context: Context) -> str:
        return f"transform {stage.name} of source {context.source!r}, chunk {context.chunk}"

    def _checked(self, index: int, table: pa.Table | None, context: Context) -> pa.Table:
        """The table under the schema that this transform returned first; types of all-null columns may be filled in."""
        with self._lock:
            known = self._schemas[index]
            if table is None or (table.num_rows == 0 and known is not None):
                return known.empty_table() if known is not None else pa.table({})
            schema = table.schema.remove_metadata()
            if known is None:
                self._schemas[index], self._first_chunk[index] = schema, context.chunk
                return table
            if schema.equals(known):
                return table
            merged = _merged(known, schema)
            if merged is None:
                raise SchemaError(
                    f"transform {self._stages[index].name} of source {context.source!r} returned {listed(schema)} for "
                    f"chunk {context.chunk}, but {listed(known)} for chunk {self._first_chunk[index]}; it must return "
                    "the same columns and types for every chunk"
                )
            self._schemas[index] = merged
            return table.select(merged.names).cast(merged)


def _merged(known: pa.Schema, new: pa.Schema) -> pa.Schema | None:
    """Both as one when they differ only in the order of columns and in columns that one side has only nulls in."""
    if sorted(known.names) != sorted(new.names):
        return None
    fields = []
    for field in known:
        other = new.field(field.name).type
        if field.type != other and not (pa.types.is_null(field.type) or pa.types.is_null(other)):
            return None
        fields.append(pa.field(field.name, other if pa.types.is_null(field.type) else field.type))
    return pa.schema(fields)


def _span(origin: Ints, reporter: Reporter) -> str:
    known = origin[origin >= 0]
    if not len(known):
        return ""
    return f", somewhere from {reporter.place(int(known.min()))} to {reporter.place(int(known.max()))}"
