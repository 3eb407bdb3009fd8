"""Making chunk k of a source: read its units, transform, apply the policies, shuffle, and state the facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from overlord.data.bad_rows import BadRowLog
from overlord.data.chunk import Chunk, Documents, Lineage, Rows, loss_tokens, rows_of
from overlord.data.column_types import under_schema, wider, wider_schema
from overlord.data.images import ImageFacts
from overlord.data.processes import ProcessPool
from overlord.data.read_result import ReadResult
from overlord.data.transforms.apply import Reporter, Transforms
from overlord.data.transforms.context import Context
from overlord.data.views import joined, take_rows
from overlord.errors import DataError, SchemaError
from overlord.planning.facts import ChunkFacts, Ints
from overlord.planning.order import row_order, units_of_chunk
from overlord.spec import Batch, Source, Unit

_FIRST_OF_ONE = np.zeros(1, np.int64)
_PLAIN = pa.list_(pa.int32())  # as nearly all token columns are: nothing else has to be asked about their type


class ChunkMaker:
    """Makes any chunk of one source. Holds no state but the schema that its first chunk had."""

    def __init__(
        self,
        name: str,
        source: Source,
        units: Sequence[Unit],
        seed: int,
        batch: Batch,
        bad_rows: BadRowLog,
        processes: ProcessPool | None = None,
    ) -> None:
        self._name = name
        self._source = source
        self._units = units
        self._seed = seed
        self._batch = batch
        self._bad_rows = bad_rows
        self._transforms = Transforms(source.transforms, processes) if source.transforms else None

    def make(self, number: int) -> Chunk:
        try:
            return self._make(number)
        except Exception as error:
            units = ", ".join(str(unit) for unit in self._units_of(number))
            error.add_note(f"while making chunk {number} of source {self._name!r} from {units}")
            raise

    def expected_bytes(self, number: int) -> int:
        """What the list of units promises that a chunk will take."""
        return sum(unit.num_bytes for unit in self._units_of(number))

    def _make(self, number: int) -> Chunk:
        table, lineage = self._read(number)
        origin = np.arange(table.num_rows, dtype=np.int64)
        if self._transforms is not None:
            context = Context(self._name, number, self._seed)
            table, origin = self._transforms.run(table, context, origin, Reporter(self._bad_rows, lineage.where))
        return self._chunk(number, table, origin, lineage)

    def bad_decode(self, chunk: Chunk, table_row: int, error: str) -> None:
        """Note a row whose deferred decode failed."""
        file, row = chunk.where(table_row)
        self._bad_rows.add(file, row, error)

    def _units_of(self, number: int) -> list[Unit]:
        source = self._source
        chosen = units_of_chunk(self._seed, self._name, len(self._units), source.window, source.shuffle, number)
        return [self._units[index] for index in chosen.tolist()]

    def _read(self, number: int) -> tuple[pa.Table, Lineage]:
        units = self._units_of(number)
        results = [self._read_unit(unit) for unit in units]
        tables = [result.table for result in results]
        if any(not table.schema.equals(tables[0].schema) for table in tables[1:]):
            tables = self._under_one_schema(units, tables)
        sizes = [table.num_rows for table in tables[:-1]]
        first = np.cumsum([0, *sizes], dtype=np.int64) if sizes else _FIRST_OF_ONE
        mapped = tuple(data for result in results for data in result.mapped)
        lineage = Lineage(tuple(units), first, tuple(result.row_numbers for result in results), mapped)
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables), lineage

    def _under_one_schema(self, units: Sequence[Unit], tables: Sequence[pa.Table]) -> list[pa.Table]:
        """The tables of units whose types differ, each column under the type that holds them all: what is inferred from the
        rows of one unit (nulls, empty lists, whole numbers) may be narrower than what another needs."""
        schema = tables[0].schema.remove_metadata()
        for unit, table in zip(units[1:], tables[1:], strict=True):
            if sorted(table.column_names) != sorted(schema.names):
                raise SchemaError(
                    f"source {self._name!r}: {unit} has the columns {_fields(table)}, but {units[0]} has "
                    f"{_fields(tables[0])}; all units of a source must have the same columns: leave those out that are not "
                    "needed, where the source has an option columns="
                )
            merged = wider_schema(schema, table.schema)
            if merged is None:
                name = next(f.name for f in table.schema if wider(f.type, schema.field(f.name).type) is None)
                raise SchemaError(
                    f"source {self._name!r}: {unit} has the column {name!r} as {table.schema.field(name).type}, but "
                    f"{units[0]} has it as {schema.field(name).type}; give it one type, or leave it out if it is not "
                    "needed, where the source has an option columns="
                )
            schema = merged
        try:
            return [under_schema(table, schema) for table in tables]
        except pa.ArrowInvalid as error:
            raise SchemaError(
                f"source {self._name!r}: {', '.join(map(str, units))} have columns of different types, and not all values "
                f"fit the types that hold both: {error}; give each column one type"
            ) from error

    def _read_unit(self, unit: Unit) -> ReadResult:
        read_rows = getattr(self._source, "read_rows", None)
        result = read_rows(unit) if read_rows is not None else ReadResult(self._source.read(unit))
        if not isinstance(result.table, pa.Table):
            raise SchemaError(
                f"source {self._name!r}: read({unit}) must return a pyarrow.Table, got {type(result.table).__name__}"
            )
        for bad in result.bad:
            self._bad_rows.add(str(unit), bad.row, str(bad))
        return result

    def _chunk(self, number: int, table: pa.Table, origin: Ints, lineage: Lineage) -> Chunk:
        if table.num_rows == 0:  # whatever columns it has, and of whatever types
            return _empty_chunk(table, lineage, has_text=self._source.tokens is not None)
        table, origin, images = self._with_sizes(table, origin, lineage)
        source, batch = self._source, self._batch
        if source.tokens is None:
            order = self._order(number, table.num_rows)
            zeros = np.zeros(table.num_rows, np.int64)
            found = None if images is None else images.take(order)
            facts = ChunkFacts(zeros, zeros) if found is None else ChunkFacts(zeros, zeros, found.sizes, images=found.images)
            return Chunk(facts, table, order, origin, lineage)
        documents = self._documents(table, source.tokens)
        mask = None if source.loss_mask is None else self._mask(table, documents, source.loss_mask)
        if batch.long_documents == "fail":
            self._refuse_long(documents, origin, lineage)
        rows = rows_of(documents, batch.long_documents, batch.sequence_length)
        return self._with_text(number, table, origin, lineage, images, documents, mask, rows)

    def _with_text(
        self,
        number: int,
        table: pa.Table,
        origin: Ints,
        lineage: Lineage,
        images: ImageFacts | None,
        documents: Documents,
        mask: NDArray[np.integer] | None,
        rows: Rows,
    ) -> Chunk:
        order = self._order(number, len(rows.begin))
        document = order if rows.are_documents else rows.document[order]
        begin, end = rows.begin[order], rows.end[order]
        document_end = end if rows.document_end is rows.end else rows.document_end[order]
        counts = {name: count for name, count in rows.counts.items() if count}
        found = None if images is None else images.take(document)
        facts = ChunkFacts(
            tokens=end - begin,
            loss_tokens=loss_tokens(begin, end, document_end, mask),
            sizes={} if found is None else found.sizes,
            counts=counts,
            images=None if found is None else found.images,
        )
        kept = self._kept_columns(table)
        return Chunk(facts, kept, document, origin, lineage, documents.values, begin, end, document_end, mask)

    def _order(self, number: int, num_rows: int) -> Ints:
        if not self._source.shuffle:
            return np.arange(num_rows, dtype=np.int64)
        return row_order(self._seed, self._name, number, num_rows)

    def _kept_columns(self, table: pa.Table) -> pa.Table:
        """Only what may still be asked for: the token column stays (its values are in use), others unless named go."""
        source = self._source
        decode = getattr(source.decode, "column", None)
        wanted = {source.tokens, source.loss_mask, decode, *self._batch.columns}
        kept = [name for name in table.column_names if name in wanted]
        return table if len(kept) == table.num_columns else table.select(kept)

    def _with_sizes(self, table: pa.Table, origin: Ints, lineage: Lineage) -> tuple[pa.Table, Ints, ImageFacts | None]:
        """The facts of deferred columns, without the rows whose header already shows that they are broken."""
        decode: Any = self._source.decode
        if decode is None:
            return table, origin, None
        if decode.column not in table.column_names:
            raise SchemaError(self._missing(decode.column, table, "decode"))
        facts, bad = decode.facts(table.column(decode.column))
        if not bad:
            return table, origin, facts
        for row, error in bad:
            self._bad_rows.add(*lineage.where(int(origin[row])), error)
        keep = np.setdiff1d(np.arange(table.num_rows), [row for row, _ in bad])
        return take_rows(table, keep), origin[keep], facts.take(keep)

    def _documents(self, table: pa.Table, name: str) -> Documents:
        if name not in table.column_names:
            raise SchemaError(self._missing(name, table, "tokens"))
        values, offsets, lengths = self._lists(table, name)
        return Documents(values, offsets, lengths)

    def _mask(self, table: pa.Table, documents: Documents, name: str) -> NDArray[np.integer]:
        if name not in table.column_names:
            raise SchemaError(self._missing(name, table, "loss_mask"))
        values, offsets, lengths = self._lists(table, name)
        if not np.array_equal(lengths, documents.lengths):
            row = int(np.flatnonzero(lengths != documents.lengths)[0])
            raise DataError(
                f"source {self._name!r}: {name!r} must have one entry per token, but row {row} of the chunk has "
                f"{int(documents.lengths[row])} tokens and {int(lengths[row])} mask entries"
            )
        if np.array_equal(offsets, documents.offsets):
            return values
        aligned = np.zeros(len(documents.values), values.dtype)
        for i in np.flatnonzero(lengths):  # only when the two columns were sliced differently
            aligned[documents.offsets[i] : documents.offsets[i] + lengths[i]] = values[offsets[i] : offsets[i] + lengths[i]]
        return aligned

    def _lists(self, table: pa.Table, name: str) -> tuple[NDArray[np.integer], Ints, Ints]:
        """A column of integer lists as (values, offset of each list, length of each list), without a copy."""
        array: Any = joined(table.column(name))  # any kind of list array
        if array.type == _PLAIN:
            return self._list_parts(array, name)
        kind = array.type
        if pa.types.is_null(kind) or (pa.types.is_list(kind) and pa.types.is_null(kind.value_type)):
            # Nothing but nulls or empty lists, of which no type can be told.
            array = array.cast(_PLAIN)
            kind = array.type
        if pa.types.is_fixed_size_list(kind):
            array = array.cast(pa.list_(kind.value_type))
            kind = array.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
            raise SchemaError(
                f"source {self._name!r}: column {name!r} must be a list of integers, it is {kind}; "
                "tokenise text with transform=ol.Tokenize(...)"
            )
        return self._list_parts(array, name)

    def _list_parts(self, array: Any, name: str) -> tuple[NDArray[np.integer], Ints, Ints]:
        offsets = array.offsets.to_numpy().astype(np.int64, copy=False)
        lengths = offsets[1:] - offsets[:-1]
        if array.null_count:
            lengths[~pc.is_valid(array).to_numpy(zero_copy_only=False)] = 0
        values = array.values
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        if values.null_count:
            raise DataError(f"source {self._name!r}: column {name!r} has nulls inside its lists; drop them in a transform")
        return values.to_numpy(), offsets[:-1], lengths

    def _refuse_long(self, documents: Documents, origin: Ints, lineage: Lineage) -> None:
        long = np.flatnonzero(documents.lengths > self._batch.sequence_length)
        if len(long):
            file, row = lineage.where(int(origin[long[0]]))
            tokens = int(documents.lengths[long[0]])
            raise DataError(
                f"source {self._name!r}: {file}, row {row}: a document of {tokens:,} tokens is longer "
                f"than sequence_length {self._batch.sequence_length:,}; set long_documents to 'split', 'truncate' or 'drop'"
            )

    def _missing(self, column: str, table: pa.Table, option: str) -> str:
        hint = (
            "; tokenise text with transform=ol.Tokenize(...), or name the column with tokens=" if option == "tokens" else ""
        )
        return f"source {self._name!r} has no column {column!r} (its option {option}); it has {table.column_names}{hint}"


def _empty_chunk(table: pa.Table, lineage: Lineage, has_text: bool) -> Chunk:
    none = np.zeros(0, np.int64)
    values = np.zeros(0, np.int32) if has_text else None
    return Chunk(ChunkFacts(none, none), table, none, none, lineage, values)


def _fields(table: pa.Table) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)
