"""Runs the transforms of a source over a chunk: keeps lineage, checks schemas, and finds and reports bad rows.

A function over a table that raises is run again on halves of the table until the rows that fail stand alone; so it must
treat rows independently of each other. Errors that Overlord raises on purpose (a missing column) are never pinned on rows.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import pyarrow as pa

from overlord.chunks.transforms.outcome import (
    Context,
    OnBadRow,
    Outcome,
    RowError,
    join_outcomes,
    one_line,
    schema_text,
    unknown_origin,
    with_origin,
    without_origin,
)
from overlord.chunks.transforms.per_row import PerRow, num_positional
from overlord.chunks.transforms.pick import Pick
from overlord.errors import OverlordError, SchemaError, SpecError
from overlord.sources.column_types import cast_table, has_null_type, wider_schema

if TYPE_CHECKING:
    from overlord.chunks.bad_rows import BadRowSink
    from overlord.chunks.transforms.tokenize import Tokenize
    from overlord.chunks.workers.pool import ProcessPool
    from overlord.runtime.threads import Executor
    from overlord.stream.facts import Ints


def _is_tokenize(fn: Callable[..., Any]) -> TypeGuard[Tokenize]:
    from overlord.chunks.transforms.tokenize import Tokenize  # with what encodes text: jobs of tokens start without it

    return isinstance(fn, Tokenize)


def engines_used(transforms: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
    """What encodes the texts of each `Tokenize` of these transforms, by `Tokenize.engine_used`. Loads the encodings."""
    inner = [fn.fn if isinstance(fn, InProcesses) else fn for fn in transforms]
    return tuple(fn.engine_used for fn in inner if _is_tokenize(fn))


def tokenizer_files(transforms: Sequence[Callable[..., Any]]) -> list[tuple[str, bool, str | None]]:
    """The arguments of `load_encoding` for each `Tokenize` of these transforms that names a tokenizer.json and runs in the
    process of its loader."""
    found: list[tuple[str, bool, str | None]] = []
    for fn in transforms:
        if _is_tokenize(fn) and isinstance(fn.encoding, (str, Path)):
            found.append((os.fspath(fn.encoding), fn.special_tokens, fn.engine))
    return [each for each in dict.fromkeys(found) if each[0].endswith(".json")]


class TransformCall:
    """A transform with its calling convention resolved."""

    def __init__(self, fn: Callable[..., pa.Table], threads: Executor | None = None) -> None:
        """`threads` encode slices of texts side by side."""
        if not callable(fn):
            raise SpecError(f"a transform is a function over a pyarrow.Table, got {type(fn).__name__}")
        self.fn = fn
        self.name = name_of(fn)
        self._on_table = functools.partial(fn.run_on, threads) if _is_tokenize(fn) else fn
        self._wants_context = num_positional(fn) >= 2

    @property
    def wants_context(self) -> bool:
        return self.fn.wants_rng if isinstance(self.fn, PerRow) else self._wants_context

    def call(self, table: pa.Table, context: Context) -> pa.Table:
        result = self.fn(table, context) if self._wants_context else self._on_table(table)
        if not isinstance(result, pa.Table):
            raise SchemaError(f"transform {self.name} must return a pyarrow.Table, it returned {type(result).__name__}")
        return result

    def run(self, table: pa.Table, origin: Ints, context: Context, on_bad: OnBadRow | None) -> Outcome:
        """Run the transform. Without `on_bad` the function's own exception is raised, as RowError where the row is known."""
        if isinstance(self.fn, PerRow):
            return self.fn.run(table, origin, context, on_bad)
        try:
            result, kept = without_origin(self.call(with_origin(table, origin), context))
        except OverlordError:
            raise
        except Exception as error:
            if on_bad is None:
                raise
            return self._run_halves(table, origin, context, on_bad, error)
        if kept is None and result.num_rows == table.num_rows:
            kept = origin
        return Outcome(result, kept)

    def _run_halves(self, table: pa.Table, origin: Ints, context: Context, on_bad: OnBadRow, error: Exception) -> Outcome:
        if table.num_rows <= 1:
            if table.num_rows == 0:
                raise error  # no row to blame: the function fails on an empty table
            on_bad(int(origin[0]), one_line(error.cause if isinstance(error, RowError) else error))
            return Outcome(None, origin[:0])
        middle = table.num_rows // 2
        halves = ((table.slice(0, middle), origin[:middle]), (table.slice(middle), origin[middle:]))
        return join_outcomes([self.run(half, part, context, on_bad) for half, part in halves], self.name)


@dataclass(frozen=True, slots=True)
class InProcesses:
    """Run `fn` on worker processes, `batch_rows` rows at a time: for functions that hold the GIL.

    `fn` must pickle, and must treat rows independently of each other, because it gets slices. A worker that dies is
    replaced and its slice retried; a row that kills workers twice is a bad row. A slice that takes
    longer than `timeout_s` counts as a death. Columns of views arrive as plain binary or text.
    """

    fn: Callable[..., pa.Table]
    batch_rows: int = 256
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fn, InProcesses):
            raise SpecError("InProcesses is already around this function; wrap it once")
        if not callable(self.fn):
            raise SpecError(f"InProcesses needs a function, got {type(self.fn).__name__}")
        if self.batch_rows < 1:
            raise SpecError(f"batch_rows must be at least 1, got {self.batch_rows}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise SpecError(f"timeout_s must be positive, got {self.timeout_s}")

    def __call__(self, table: pa.Table, context: Context) -> pa.Table:
        """Run the function in this process."""
        return TransformCall(self.fn).call(table, context)

    def __repr__(self) -> str:
        return f"InProcesses({name_of(self.fn)})"


def is_keyed_by_chunk(fn: Any) -> bool:
    """Whether a transform gets its chunk and a random generator, so that its rows are others in every epoch."""
    fn = fn.fn if isinstance(fn, InProcesses) else fn
    return fn.wants_rng if isinstance(fn, PerRow) else num_positional(fn) >= 2


def keeps_rows_apart(transforms: Sequence[Any]) -> bool:
    """Whether all transforms are known to treat rows independently and to tell which row each one was made from."""
    inner = [fn.fn if isinstance(fn, InProcesses) else fn for fn in transforms]
    return all(isinstance(fn, (PerRow, Pick)) or _is_tokenize(fn) for fn in inner)


def name_of(fn: Any) -> str:
    """The name of a user's function in messages."""
    if isinstance(fn, PerRow):
        return f"per_row({name_of(fn.fn)})"
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None)
    return name if isinstance(name, str) else f"{type(fn).__qualname__}"


Locate = Callable[[int], tuple[str, int]]
"""Maps the origin of a row to (file, row in the file)."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """Reports the bad rows of one chunk to the log of their source, by file and row."""

    log: BadRowSink
    locate: Locate

    def add(self, origin: int, error: str) -> None:
        self.log.add(*self.locate(origin), error)

    def place(self, origin: int) -> str:
        file, row = self.locate(origin)
        return f"{file}, row {row}" if row >= 0 else file


class Transforms:
    """The transforms of one source. Checks that each returns one schema for all chunks. Thread-safe."""

    def __init__(
        self,
        transforms: Sequence[Callable[..., pa.Table]],
        processes: ProcessPool | None = None,
        threads: Executor | None = None,
    ) -> None:
        """`processes` run what is marked `InProcesses`; `threads` run slices of other transforms side by side."""
        self._marks = [fn if isinstance(fn, InProcesses) else None for fn in transforms]
        self._stages = [TransformCall(fn.fn if isinstance(fn, InProcesses) else fn, threads) for fn in transforms]
        self._schemas: list[pa.Schema | None] = [None] * len(self._stages)
        self._first_chunk = [-1] * len(self._stages)
        self._processes = processes
        self._lock = threading.Lock()

    @property
    def wants_context(self) -> bool:
        """Whether rows depend on their chunk: a transform takes its number, or draws random numbers."""
        return any(stage.wants_context for stage in self._stages)

    @property
    def has_per_row(self) -> bool:
        return any(isinstance(stage.fn, PerRow) for stage in self._stages)

    @property
    def slices_freely(self) -> bool:
        """Whether all transforms are known to treat rows independently: they are ours, or get slices of chunks anyway."""
        return all(
            mark is not None or isinstance(stage.fn, (PerRow, Pick)) or _is_tokenize(stage.fn)
            for mark, stage in zip(self._marks, self._stages, strict=True)
        )

    def run(self, table: pa.Table, context: Context, origin: Ints, reporter: Reporter) -> tuple[pa.Table, Ints]:
        """The transformed table and, for each of its rows, its origin or -1.

        `origin[i]` is the number of row i of `table` among the rows of the chunk as they were read.
        """
        for index in range(len(self._stages)):
            if table.num_rows == 0:
                break  # functions need not handle empty tables, whose types mean nothing
            outcome = self._run_stage(index, table, replace(context, stage=context.stage + index), origin, reporter)
            table = self._check_schema(index, outcome.table, context)
            origin = unknown_origin(table.num_rows) if outcome.origin is None else outcome.origin
            if len(origin) != table.num_rows:
                raise SchemaError(
                    f"transform {self._stages[index].name} of source {context.source!r} returned {table.num_rows} rows "
                    f"with lineage for {len(origin)}"
                )
        return (table if table.num_rows else self._empty_table()), np.maximum(origin, -1)

    def _empty_table(self) -> pa.Table:
        """No rows, with the columns of other chunks as far as they are known."""
        known = self._schemas[-1]
        return pa.table({}) if known is None else known.empty_table()

    def _run_stage(self, index: int, table: pa.Table, context: Context, origin: Ints, reporter: Reporter) -> Outcome:
        stage, mark = self._stages[index], self._marks[index]
        on_bad = None if reporter.log.fails else reporter.add
        try:
            if mark is not None and self._processes is not None:
                return self._processes.run(mark, table, origin, context, on_bad=reporter.add, stop_at_error=on_bad is None)
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
    def _where(stage: TransformCall, context: Context) -> str:
        return f"transform {stage.name} of source {context.source!r}, chunk {context.chunk}"

    def _check_schema(self, index: int, table: pa.Table | None, context: Context) -> pa.Table:
        """The table, if its types are compatible with those of other chunks; otherwise SchemaError.

        A chunk keeps its own types, so that they do not depend on which chunks were made before. Only types that its rows do
        not show (all nulls, or empty lists) are taken from other chunks.
        """
        if table is None or table.num_rows == 0:
            return pa.table({})
        schema = table.schema.remove_metadata()
        with self._lock:
            known = self._schemas[index]
            if known is None:
                self._schemas[index], self._first_chunk[index] = schema, context.chunk
                return table
            if schema.equals(known):
                return table
            is_per_row = isinstance(self._stages[index].fn, PerRow)
            is_whole = is_per_row or sorted(known.names) == sorted(schema.names)
            merged = wider_schema(known, schema) if is_whole else None
            if merged is None:
                raise SchemaError(
                    f"transform {self._stages[index].name} of source {context.source!r} returned {schema_text(schema)} for "
                    f"chunk {context.chunk}, but {schema_text(known)} for chunk {self._first_chunk[index]}; it must return "
                    f"the same columns and types for every chunk: {_REMEDY[is_per_row]}"
                )
            self._schemas[index] = merged
        return cast_table(table, _fill_null_types(schema, merged))


_REMEDY = {
    True: "declare its types with per_row(..., types={...})",
    False: "give pa.array and pa.table the types rather than let them infer",
}


def _fill_null_types(schema: pa.Schema, known: pa.Schema) -> pa.Schema:
    """The schema with missing columns and unknown types replaced by the known ones."""
    own = dict(zip(schema.names, schema.types, strict=True))
    fields = [(field.name, own.get(field.name, pa.null()), field.type) for field in known]
    return pa.schema([(name, wide if has_null_type(type_) else type_) for name, type_, wide in fields])


def _span(origin: Ints, reporter: Reporter) -> str:
    known = origin[origin >= 0]
    if not len(known):
        return ""
    return f", somewhere from {reporter.place(int(known.min()))} to {reporter.place(int(known.max()))}"
