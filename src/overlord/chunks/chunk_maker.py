"""Makes chunk k of a source: reads its units, transforms, applies the policies, shuffles, and computes the facts."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.batches.buffers import Arenas
from overlord.chunks.bad_rows import RecordedBadRows
from overlord.chunks.chunk import (
    Chunk,
    Documents,
    Lineage,
    is_weights,
    loss_extra,
    loss_tokens,
    rows_of,
)
from overlord.chunks.lists import NumberLists, combine_lists, list_parts, note_bad_ids, note_bad_weights
from overlord.chunks.row_cache import NextNeeds, RowCache, TransformedRows, UnitOrder
from overlord.chunks.size_columns import declared_sizes
from overlord.chunks.transforms.apply import Reporter, Transforms
from overlord.chunks.transforms.outcome import Context
from overlord.declare.source import CHOSEN_TOKENS
from overlord.errors import DataError, SchemaError
from overlord.runtime.recorder import current_recorder
from overlord.sources.column_types import cast_table, wider_schema, wider_type
from overlord.sources.files import FileSource, open_reader
from overlord.sources.numbers import array_of, numbers_of
from overlord.sources.range_cache import FetchAhead, needed_again
from overlord.sources.reading import TogetherReader
from overlord.sources.storage import is_remote
from overlord.sources.unit_parts import PartReader, UnitParts
from overlord.sources.views import take_rows
from overlord.stream.chunk_order import RunTurns, UnitRuns, chunks_per_epoch, row_order, units_of_chunk
from overlord.stream.facts import LOSS_EXTRA, ChunkFacts, Ints

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.chunks.bad_rows import BadRowLog, BadRowSink
    from overlord.chunks.row_cache import EntryStore
    from overlord.declare.batch import Batch
    from overlord.declare.source import Source, Unit
    from overlord.media.images import ImageFacts
    from overlord.sources.range_cache import RangeOfFile
    from overlord.sources.reading import ReadResult

_FIRST_OF_ONE = np.zeros(1, np.int64)
_PLAIN = pa.list_(pa.int32())  # nearly all token columns: a fast path that skips the checks of other types


class ChunkMaker:
    """Makes any chunk of one source, in any thread. A chunk is a function of its number."""

    def __init__(  # noqa: PLR0913 - all but three by name
        self,
        name: str,
        source: Source,
        units: Sequence[Unit],
        *,
        seed: int,
        batch: Batch,
        bad_rows: BadRowLog,
        transforms: Transforms | None = None,
        release_gil: bool = False,
        arenas: Arenas | None = None,
        kept: tuple[EntryStore, str] | None = None,
        has_peers: bool = False,
    ) -> None:
        """`transforms`: those of the source; they run in the calling thread alone unless given. `release_gil`: other threads
        contend for the GIL while this one makes chunks. `arenas`: memory for chunks of several units. `kept`: the cache of
        transformed rows, and what these depend on beside their unit. `has_peers`: other makers make some of the chunks."""
        self._name = name
        self._source = source
        self._units = units
        self._runs = UnitRuns.of(units)
        self._seed = seed
        self._batch = batch
        self._long_policy = source.long_policy(batch.long_documents)
        self._bad_rows = bad_rows
        self._spans = current_recorder().spans
        self._arenas = arenas or Arenas()
        self._reader = open_reader(source, release_gil=release_gil)
        if isinstance(units, UnitParts):
            self._reader = PartReader(self._reader, source.buffer_bytes // 2)
        self._transforms = (transforms or Transforms(source.transforms)) if source.transforms else None
        self._needs = NextNeeds(UnitOrder(name, seed, units, self._runs, source.units_per_chunk, source.shuffle))
        self._kept = None if kept is None else self._open_cache(*kept)
        # Of cut units a maker with peers gets those of its turns, which it makes far ahead anyway.
        self._ahead = None if has_peers and isinstance(units, UnitParts) else self._open_ahead()

    def _open_ahead(self) -> FetchAhead | None:
        """What fetches the bytes of the next chunks from remote storage; None where there is nowhere to keep them."""
        source = self._source
        if not isinstance(source, FileSource) or source.cache is None or not source.storage.keeps_data:
            return None
        if not is_remote(self._units[0].path) or not source.byte_ranges(self._units[0]):
            return None
        return FetchAhead(source.storage, self._ranges_of, source.cache.max_bytes)

    def _ranges_of(self, number: int) -> list[RangeOfFile] | None:
        source = self._source
        assert isinstance(source, FileSource)  # only these have ranges
        per_epoch = chunks_per_epoch(len(self._units), source.units_per_chunk)
        if source.num_epochs is not None and number >= source.num_epochs * per_epoch:
            return None
        units = self.units_of(number)
        # All parts of a unit are read at once, with the first of them.
        ranges = [each for unit in units if unit.part is None or unit.part.index == 0 for each in source.byte_ranges(unit)]
        return ranges if ranges or any(unit.part is not None for unit in units) else None

    def _open_cache(self, store: EntryStore, key: str) -> RowCache:
        source = self._source
        return RowCache(
            store,
            key,
            source,
            self._needs,
            transforms=self._transforms,
            bad_rows=self._bad_rows,
        )

    def make(self, number: int) -> Chunk:
        try:
            chosen = self.unit_numbers(number)
            if self._ahead is not None:
                self._ahead.note(number)
            rows = (
                self._make_rows(number, chosen) if self._kept is None else self._kept.obtain(number, chosen, self._make_rows)
            )
            return self._chunk(number, rows.table, rows.origin, rows.lineage)
        except Exception as error:
            units = ", ".join(str(unit) for unit in self.units_of(number))
            error.add_note(f"while making chunk {number} of source {self._name!r} from {units}")
            raise

    def close(self) -> None:
        """Close files that reading left open. A chunk that is being made is made to its end."""
        self._reader.close()
        if self._ahead is not None:
            self._ahead.close()

    @property
    def held_bytes(self) -> int:
        """The memory of rows that were read and are not yet in a chunk."""
        return self._reader.held_bytes if isinstance(self._reader, PartReader) else 0

    def turns(self) -> RunTurns | None:
        """Which chunks are parts of one unit; None where units are not cut."""
        if not isinstance(self._units, UnitParts):
            return None
        return RunTurns(self._seed, self._name, self._runs, shuffle=self._source.shuffle)

    def expected_bytes(self, number: int) -> int:
        """The bytes of a chunk by the list of units."""
        return sum(unit.num_bytes for unit in self.units_of(number))

    def _make_rows(self, number: int, chosen: Sequence[int]) -> TransformedRows:
        """Read and transform units of a chunk."""
        bad_rows = self._bad_rows if self._kept is None else RecordedBadRows(self._bad_rows)
        rows, num_stages = self._read(number, chosen, bad_rows)
        table, origin = rows.table, rows.origin
        if self._transforms is not None:
            context, began = Context(self._name, number, self._seed, num_stages), time.perf_counter()
            table, origin = self._transforms.run(table, context, origin, Reporter(bad_rows, rows.lineage.where))
            if self._spans.is_on:
                self._spans.add(f"transform chunk {number} of {self._name}", began)
        bad = tuple(bad_rows.rows) if isinstance(bad_rows, RecordedBadRows) else ()
        return TransformedRows(table, origin, rows.lineage, rows.num_read, bad, rows.is_uniform)

    def report_bad_decode(self, chunk: Chunk, table_row: int, error: str) -> None:
        """Report a row whose deferred decode failed."""
        file, row = chunk.where(table_row)
        self._bad_rows.add(file, row, error)

    def units_of(self, number: int) -> list[Unit]:
        """The units that a chunk is read from, in their order."""
        return [self._units[index] for index in self.unit_numbers(number)]

    def unit_numbers(self, number: int) -> list[int]:
        """The numbers of these units among those of the source."""
        source = self._source
        return units_of_chunk(
            self._seed, self._name, self._runs, window=source.units_per_chunk, shuffle=source.shuffle, chunk=number
        ).tolist()

    def _read(self, number: int, chosen: Sequence[int], bad_rows: BadRowSink) -> tuple[TransformedRows, int]:
        """The rows of units of a chunk, and how many transforms have run on them already."""
        units = [self._units[index] for index in chosen]
        if len(chosen) > 1 and self._source.cache is None and isinstance(self._reader, TogetherReader):
            rows = self._read_together(self._reader, units, chosen)
            if rows is not None:
                return rows, 0
        results = [self._read_unit(index, number) for index in chosen]
        for unit, result in zip(units, results, strict=True):
            self._check_read(unit, result, bad_rows)
        tables = [result.table for result in results]
        is_uniform = all(table.schema.equals(tables[0].schema) for table in tables[1:])
        if not is_uniform:
            tables = self._merge_schemas(units, tables)
        sizes = [_num_read(result) for result in results]
        first = _first_rows(sizes)
        mapped = tuple(data for result in results for data in result.mapped)
        row_numbers = tuple(result.row_numbers for result in results)
        lineage = Lineage(tuple(units), first, row_numbers, mapped, tuple(chosen))
        table = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
        made = results[0].made
        rows = TransformedRows(table, _origin(results, first), lineage, sum(sizes), is_uniform=is_uniform)
        return rows, 0 if made is None else made.num_stages

    def _merge_schemas(self, units: Sequence[Unit], tables: Sequence[pa.Table]) -> list[pa.Table]:
        """The tables cast to one schema, each column to the type that holds the values of all units. Types inferred from one
        unit (nulls, empty lists, whole numbers) may be narrower than another unit needs."""
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
                name = next(f.name for f in table.schema if wider_type(f.type, schema.field(f.name).type) is None)
                raise SchemaError(
                    f"source {self._name!r}: {unit} has the column {name!r} as {table.schema.field(name).type}, but "
                    f"{units[0]} has it as {schema.field(name).type}; give it one type, or leave it out if it is not "
                    "needed, where the source has an option columns="
                )
            schema = merged
        try:
            return [cast_table(table, schema) for table in tables]
        except pa.ArrowInvalid as error:
            raise SchemaError(
                f"source {self._name!r}: {', '.join(map(str, units))} have columns of different types, and not all values "
                f"fit the types that hold both: {error}; give each column one type"
            ) from error

    def _read_together(self, reader: TogetherReader, units: Sequence[Unit], chosen: Sequence[int]) -> TransformedRows | None:
        began = time.perf_counter()
        table = reader.read_together(units)
        if table is None:
            return None
        if self._spans.is_on:
            self._spans.add(f"read {', '.join(map(str, units))}", began, source=self._name)
        first = _first_rows([unit.num_rows or 0 for unit in units])
        lineage = Lineage(tuple(units), first, (None,) * len(units), unit_numbers=tuple(chosen))
        return TransformedRows(table, np.arange(table.num_rows), lineage, table.num_rows, is_uniform=True)

    def _read_unit(self, index: int, number: int) -> ReadResult:
        unit, began = self._units[index], time.perf_counter()
        if self._source.cache is None:
            result = self._reader.read_rows(unit)
        else:
            with needed_again(self._needs.in_s(index, number)):
                result = self._reader.read_rows(unit)
        if self._spans.is_on:
            self._spans.add(f"read {unit}", began, source=self._name)
        return result

    def _check_read(self, unit: Unit, result: ReadResult, bad_rows: BadRowSink) -> None:
        if not isinstance(result.table, pa.Table):
            raise SchemaError(
                f"source {self._name!r}: read({unit}) must return a pyarrow.Table, got {type(result.table).__name__}"
            )
        for bad in result.bad:
            bad_rows.add(str(unit), bad.row, str(bad))

    def _chunk(self, number: int, table: pa.Table, origin: Ints, lineage: Lineage) -> Chunk:
        if table.num_rows == 0:  # its columns and types mean nothing
            return _empty_chunk(table, lineage, has_text=self._source.tokens is not None)
        self._check_columns(table)
        table = self._combine(table)
        table, origin, images = self._add_image_facts(table, origin, lineage)
        source = self._source
        if source.tokens is None:
            order = self._order(number, table.num_rows)
            zeros = np.zeros(table.num_rows, np.int64)
            found = None if images is None else images.take(order)
            sizes = ({} if found is None else found.sizes) | self._declared_sizes(table, order)
            of_images = None if found is None else found.images
            facts = ChunkFacts(zeros, zeros, sizes, images=of_images, origins=lineage.origins(origin[order]))
            return Chunk(facts, table, order, origin, lineage)
        text = self._text(table, origin, lineage)
        if text.bad:
            table, origin, images = self._drop_bad(text.bad, table, origin, lineage, images)
            table = self._combine(table)
            text = self._text(table, origin, lineage)
        if text.chosen is not None and self._batch.document_multiple > 1:
            table, text = self._pad_pairs(table, text)
        if self._long_policy == "fail":
            self._check_lengths(text.documents, origin, lineage)
        return self._text_chunk(number, table, text, origin=origin, lineage=lineage, images=images)

    def _text_chunk(
        self, number: int, table: pa.Table, text: _Text, *, origin: Ints, lineage: Lineage, images: ImageFacts | None
    ) -> Chunk:
        documents, mask = text.documents, text.mask
        rows = rows_of(documents, self._long_policy, self._batch.sequence_length)
        order = self._order(number, len(rows.begin))
        document = order if rows.are_documents else rows.document[order]
        begin, end = rows.begin[order], rows.end[order]
        document_end = end if rows.document_end is rows.end else rows.document_end[order]
        counts = {name: count for name, count in rows.counts.items() if count}
        found = None if images is None else images.take(document)
        sizes = ({} if found is None else found.sizes) | self._declared_sizes(table, document)
        if text.chosen is not None:
            sizes = {**sizes, CHOSEN_TOKENS: text.chosen[document]}
        if mask is not None and is_weights(mask):
            sizes = {**sizes, LOSS_EXTRA: loss_extra(begin, end, document_end, mask)}
        facts = ChunkFacts(
            tokens=end - begin,
            loss_tokens=loss_tokens(begin, end, document_end, mask),
            sizes=sizes,
            counts=counts,
            images=None if found is None else found.images,
            origins=lineage.origins(origin[document], begin - documents.offsets[document] if "split" in counts else None),
        )
        kept = self._select_columns(table)
        return Chunk(facts, kept, document, origin, lineage, documents.values, begin, document_end, mask)

    def _combine(self, table: pa.Table) -> pa.Table:
        """The table with its columns of lists in one piece each, as rows are delivered from them."""
        source = self._source
        for name in (source.tokens, source.loss_mask, source.loss_weights):
            if name in table.column_names and table.column(name).num_chunks != 1:
                combined = combine_lists(table.column(name), self._arenas)
                table = table.set_column(table.column_names.index(name), table.schema.field(name), combined)
        return table

    def _declared_sizes(self, table: pa.Table, rows: Ints) -> dict[str, Ints]:
        if not self._source.size_columns:
            return {}
        found = declared_sizes(self._name, table, self._source.size_columns)
        return {name: column[rows] for name, column in found.items()}

    def _order(self, number: int, num_rows: int) -> Ints:
        if not self._source.shuffle:
            return np.arange(num_rows, dtype=np.int64)
        return row_order(self._seed, self._name, number, num_rows)

    def _select_columns(self, table: pa.Table) -> pa.Table:
        """The table with the columns that batches may need. The token column stays, because its values are in use."""
        source = self._source
        decode = getattr(source.decode, "column", None)
        wanted = {source.tokens, source.loss_mask, source.loss_weights, decode, *self._batch.columns}
        kept = [name for name in table.column_names if name in wanted]
        return table if len(kept) == table.num_columns else table.select(kept)

    def _add_image_facts(self, table: pa.Table, origin: Ints, lineage: Lineage) -> tuple[pa.Table, Ints, ImageFacts | None]:
        """The facts of images that are decoded later, without the rows whose image headers are broken."""
        decode: Any = self._source.decode
        if decode is None:
            return table, origin, None
        if decode.column not in table.column_names:
            raise SchemaError(self._missing_text(decode.column, table, "decode"))
        facts, bad = decode.facts(table.column(decode.column))
        return self._drop_bad(bad, table, origin, lineage, facts) if bad else (table, origin, facts)

    def _drop_bad(
        self,
        bad: Sequence[tuple[int, str]],
        table: pa.Table,
        origin: Ints,
        lineage: Lineage,
        images: ImageFacts | None,
    ) -> tuple[pa.Table, Ints, ImageFacts | None]:
        """Report bad rows, given as (row, error), and return the others."""
        for row, error in bad:
            self._bad_rows.add(*lineage.where(int(origin[row])), error)
        keep = np.setdiff1d(np.arange(table.num_rows), [row for row, _ in bad])
        return take_rows(table, keep), origin[keep], None if images is None else images.take(keep)

    def _check_columns(self, table: pa.Table) -> None:
        """Raise where a column of Batch.columns is missing: filling it with nulls would hide the mistake."""
        present = table.column_names
        missing = [name for name in self._batch.columns if name not in present and name not in self._source.null_columns]
        if missing and present:  # a chunk without rows may have no columns
            names = ", ".join(map(repr, missing))
            raise SchemaError(
                f"source {self._name!r} has no column {names}, which Batch(columns=...) names; after its transforms it "
                f"has {present}. Correct the name, keep the column in the transforms (as ol.Tokenize(keep=...) does), or, "
                f"if the source has no such column, give it null_columns={tuple(missing)!r}"
            )

    def _text(self, table: pa.Table, origin: Ints, lineage: Lineage) -> _Text:
        """The token column and its loss mask or weights, checked by minimum and maximum. Rows are checked one by one only
        where these are out of range."""
        source = self._source
        assert source.tokens is not None  # only sources with text come here
        tokens = self._lists(table, source.tokens, "tokens")
        bad = dict(tokens.null_rows())
        note_bad_ids(tokens, self._batch.special_ids, bad)
        documents = Documents(tokens.values, tokens.offsets, tokens.lengths)
        mask = None
        column = source.loss_mask or source.loss_weights
        if column is not None:
            option = "loss_mask" if source.loss_mask is not None else "loss_weights"
            given = self._lists(table, column, option)
            bad |= given.null_rows()
            for row in np.flatnonzero(given.lengths != tokens.lengths).tolist():
                n, m = int(tokens.lengths[row]), int(given.lengths[row])
                bad[row] = f"{column!r} must have one entry per token, it has {m} for {n} tokens"
            if source.loss_mask is not None:
                self._check_mask(given, origin, lineage)
                given = given.with_values(given.values if given.values.dtype.kind != "f" else given.values.astype(np.int8))
            else:
                note_bad_weights(given, bad)
                given = given.with_values(given.values.astype(np.float32, copy=False))
            mask = None if bad else given.align_with(tokens)
        if not bad and self._batch.special_ids and tokens.smallest < 0:
            # An id below 0 is never a label; labels, loss mask and loss tokens must agree.
            is_label = tokens.values >= 0
            mask = is_label.astype(np.int8) if mask is None else np.where(is_label, mask, mask.dtype.type(0))
        if source.pairs is None:
            return _Text(documents, mask, sorted(bad.items()))
        chosen = self._chosen(table, source.pairs, tokens.lengths, bad)
        if not bad:
            # Nothing predicts the first token of the rejected side, though another comes before it.
            mask = np.ones(len(tokens.values), np.int8) if mask is None else mask.copy()
            mask[tokens.offsets + chosen] = 0
        return _Text(documents, mask, sorted(bad.items()), chosen)

    def _chosen(self, table: pa.Table, name: str, lengths: Ints, bad: dict[int, str]) -> Ints:
        """The number of tokens of the chosen side of each pair; a pair without one of its sides is a bad row."""
        if name not in table.column_names:
            raise SchemaError(self._missing_text(name, table, "pairs"))
        column = table.column(name)
        if not pa.types.is_integer(column.type):
            raise SchemaError(f"source {self._name!r}: pairs={name!r} is a column of numbers of tokens, it is {column.type}")
        chosen = column.fill_null(pa.scalar(0, column.type)).to_numpy().astype(np.int64)
        for row in np.flatnonzero((chosen < 1) | (chosen >= lengths)).tolist():
            side = "chosen" if chosen[row] < 1 else "rejected"
            bad.setdefault(row, f"the pair has no {side} side: {name!r} is {chosen[row]} of {lengths[row]} tokens")
        return chosen

    def _pad_pairs(self, table: pa.Table, text: _Text) -> tuple[pa.Table, _Text]:
        """The pairs with chosen sides padded to `document_multiple`, so that rejected ones begin where a document may."""
        documents, mask, chosen = text.documents, text.mask, text.chosen
        assert chosen is not None
        assert mask is not None
        multiple = self._batch.document_multiple
        gaps = -chosen % multiple
        where = np.repeat(documents.offsets + chosen, gaps)
        # Documents lie one after the other, so that the gaps before each one shift it.
        values = np.insert(documents.values.astype(np.int32), where, self._batch.pad_token)
        offsets = documents.offsets + np.cumsum(gaps) - gaps
        padded = Documents(values, offsets, documents.lengths + gaps)
        column = pa.ListArray.from_arrays(pa.array(np.append(offsets, len(values)), pa.int32()), pa.array(values))
        place = table.column_names.index(str(self._source.tokens))
        table = table.set_column(place, str(self._source.tokens), column)
        return table, _Text(padded, np.insert(mask, where, 0), [], chosen)

    def _check_mask(self, given: NumberLists, origin: Ints, lineage: Lineage) -> None:
        if given.smallest >= 0 and given.largest <= 1 and given.values.dtype.kind != "f":
            return
        wrong = given.rows_where((given.values != 0) & (given.values != 1))
        if wrong:
            row, value = next(iter(wrong.items()))
            file, number = lineage.where(int(origin[row]))
            raise DataError(
                f"source {self._name!r}: {file}, row {number}: loss_mask={given.name!r} is a column of 0 and 1, it has "
                f"{value}; for weights of tokens in the loss use loss_weights={given.name!r} instead"
            )

    def _lists(self, table: pa.Table, name: str, option: str) -> NumberLists:
        """A column of lists of numbers, without a copy: integers for tokens; integers, booleans or floats for masks."""
        if name not in table.column_names:
            raise SchemaError(self._missing_text(name, table, option))
        column = table.column(name)
        array: Any = column.chunk(0)  # any kind of list array
        if array.type == _PLAIN:
            return list_parts(array, name)
        kind = array.type
        if pa.types.is_dictionary(kind):
            array = array.dictionary_decode()
            kind = array.type
        if pa.types.is_fixed_size_list(kind):
            array = array.cast(pa.list_(kind.value_type))
        elif pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):  # Arrow's own cast returns broken lists
            lengths = numbers_of(array.value_lengths(), default=0)
            offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
            array = pa.LargeListArray.from_arrays(array_of(offsets), array.flatten())
        kind = array.type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if pa.types.is_null(kind) or (is_list and pa.types.is_null(kind.value_type)):
            # Nothing but nulls or empty lists: the type is unknown.
            array, kind, is_list = array.cast(_PLAIN), _PLAIN, True
        value = kind.value_type if is_list else kind
        if pa.types.is_dictionary(value):
            value = value.value_type
        is_number = pa.types.is_integer(value) or (
            option != "tokens" and (pa.types.is_floating(value) or pa.types.is_boolean(value))
        )
        if not is_list or not is_number:
            wanted, hint = "a list of numbers", ""
            if option == "tokens":
                wanted, hint = "a list of integers", "; tokenise text with transform=ol.Tokenize(...)"
            raise SchemaError(f"source {self._name!r}: column {name!r} must be {wanted}, it is {kind}{hint}")
        return list_parts(array, name)

    def _check_lengths(self, documents: Documents, origin: Ints, lineage: Lineage) -> None:
        long = np.flatnonzero(documents.lengths > self._batch.sequence_length)
        if len(long):
            file, row = lineage.where(int(origin[long[0]]))
            tokens = int(documents.lengths[long[0]])
            source = self._source
            ways = (
                "'drop'" if source.pairs else "'truncate' or 'drop'" if source.is_whole else "'split', 'truncate' or 'drop'"
            )
            raise DataError(
                f"source {self._name!r}: {file}, row {row}: a document of {tokens:,} tokens is longer "
                f"than sequence_length {self._batch.sequence_length:,}; set long_documents to {ways}"
            )

    def _missing_text(self, column: str, table: pa.Table, option: str) -> str:
        hint = (
            "; tokenise text with transform=ol.Tokenize(...), or name the column with tokens=" if option == "tokens" else ""
        )
        return f"source {self._name!r} has no column {column!r} (its option {option}); it has {table.column_names}{hint}"


def _first_rows(sizes: Sequence[int]) -> Ints:
    """The number of each unit's first row."""
    return np.cumsum([0, *sizes[:-1]], dtype=np.int64) if len(sizes) > 1 else _FIRST_OF_ONE


def _num_read(result: ReadResult) -> int:
    return result.table.num_rows if result.made is None else result.made.num_read


def _origin(results: Sequence[ReadResult], first: Ints) -> Ints:
    """The number, in reading order, of the row that each row of the results was read from; -1 where that is lost."""
    if all(result.made is None or result.made.origin is None for result in results):
        return np.arange(sum(result.table.num_rows for result in results), dtype=np.int64)
    origins: list[Ints] = []
    for result, begin in zip(results, first.tolist(), strict=True):
        origin = None if result.made is None else result.made.origin
        origins.append(
            begin + np.arange(result.table.num_rows) if origin is None else np.where(origin < 0, -1, origin + begin)
        )
    return np.concatenate(origins)


def _empty_chunk(table: pa.Table, lineage: Lineage, has_text: bool) -> Chunk:
    none = np.zeros(0, np.int64)
    values = np.zeros(0, np.int32) if has_text else None
    return Chunk(ChunkFacts(none, none), table, none, none, lineage, values)


@dataclass(frozen=True, slots=True)
class _Text:
    documents: Documents
    mask: NDArray[np.generic] | None
    bad: list[tuple[int, str]]
    """(row, error). The mask is only valid where this is empty."""
    chosen: Ints | None = None
    """The number of tokens of the chosen side of each row, for a source of preference pairs."""


def _fields(table: pa.Table) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in table.schema)
