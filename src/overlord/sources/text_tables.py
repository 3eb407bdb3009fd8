"""Text files: lines as they are, and CSV or TSV. `line_source` cuts the files into units.

CSV is parsed by Arrow as text, and only the wanted columns of it are then made numbers, so that a value that does not fit is
one bad row with its place.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from overlord.declare.source import MIB, Unit
from overlord.errors import SchemaError, SourceError, SpecError
from overlord.sources.files import check_columns, codec_of, missing_column
from overlord.sources.line_source import LineSource
from overlord.sources.packed_values import binary_column
from overlord.sources.reading import BadRow, ReadResult, good_rows, validate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from overlord.sources.line_source import LineRange, PackedPart
    from overlord.sources.storage import StoredFile

_NEWLINE, _RETURN = 10, 13
_LONE_RETURN = re.compile(rb"\r(?!\n)")


class QuotedNewlineError(SourceError):
    """A quoted field of CSV has a newline, and the source does not declare that."""


@dataclass(frozen=True)
class TextLines(LineSource):
    """A row is a line of text, without its end: .txt, and .gz or .zst of it. Blank lines are no rows. `column` names the
    column."""

    column: str = "text"
    unit_bytes: int = 8 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit_bytes < 1:
            raise SpecError(f"unit_bytes must be positive, got {self.unit_bytes}")

    @property
    def range_bytes(self) -> int:
        return self.unit_bytes

    def units(self) -> list[Unit]:
        files = [file for file in self.list_files() if file.num_bytes]
        return self.line_units(files, pa.schema([(self.column, pa.string())]), declared=True)

    def collect_rows(self, unit: Unit) -> TextRows:
        return TextRows(unit.path, self.column)

    def identity(self) -> str:
        return f"TextLines({list(self.patterns)!r}, column={self.column!r}, unit_bytes={self.unit_bytes})"


class TextRows:
    """Lines as rows of text; those that are not UTF-8 are bad rows."""

    def __init__(self, path: str, column: str) -> None:
        self._path = path
        self._column = column
        self._arrays: list[Any] = []
        self._offsets: list[NDArray[np.int64]] = []

    def add(self, offset: int, text: bytes) -> None:
        starts, stops = line_places(text)
        stored = binary_column(self._path, pa.py_buffer(text), starts, stops - starts)
        self._arrays.append(pa.Array.from_buffers(pa.string(), len(stored), stored.buffers()))
        self._offsets.append(starts + offset)

    def result(self) -> ReadResult:
        column = pa.chunked_array(self._arrays, pa.string())
        result = validate(pa.table({self._column: column}), self._path)
        if not result.bad:
            return result
        places = np.concatenate(self._offsets)
        bad = tuple(BadRow(each.row, each.error, f"{self._path} at byte {places[each.row]}") for each in result.bad)
        return ReadResult(result.table, result.row_numbers, bad)


def line_places(text: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the lines that are not blank begin and end, without \\n and \\r\\n."""
    content = np.frombuffer(text, np.uint8)
    stops = np.flatnonzero(content == _NEWLINE).astype(np.int64)
    if len(text) and content[-1] != _NEWLINE:
        stops = np.append(stops, len(text))
    starts = np.concatenate([np.zeros(1, np.int64), stops[:-1] + 1]) if len(stops) else stops
    if len(stops):
        stops = stops - ((stops > starts) & (content[np.maximum(stops - 1, 0)] == _RETURN))
    is_blank = stops <= starts
    return starts[~is_blank], stops[~is_blank]


@dataclass(frozen=True)
class Csv(LineSource):
    """CSV or TSV with a header line: .csv, .tsv, and .gz or .zst of them. `delimiter` is a comma unless given, or a tab for
    .tsv.

    `columns` names the columns to read, with types inferred from the first lines (whole numbers, numbers, true and false,
    text), or gives the types as {"text": pa.string(), ...}. An empty field is null, or "" in a column of text. A row with
    another number of fields, or with a value that does not fit, is a bad row. A quoted field may hold delimiters; with
    `newlines_in_values` it may hold newlines too, and then a file is read whole, as one unit. Without it a newline in a
    quoted field is an error.
    """

    columns: Sequence[str] | Mapping[str, pa.DataType] | None = None
    unit_bytes: int = 8 * MIB
    delimiter: str | None = None
    newlines_in_values: bool = False
    kind = "CSV"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", check_columns(self.columns))
        if self.unit_bytes < 1:
            raise SpecError(f"unit_bytes must be positive, got {self.unit_bytes}")
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise SpecError(f"delimiter is one character, and no quote or newline, not {self.delimiter!r}")

    @property
    def range_bytes(self) -> int:
        return 1 << 50 if self.newlines_in_values else self.unit_bytes

    def units(self) -> list[Unit]:
        files = [file for file in self.list_files() if file.num_bytes]
        if not files:
            return self._check_not_empty([])
        heads = {file.path: self._header(file) for file in files}
        names = list(self.columns or heads[files[0].path])
        for path, header in heads.items():
            for name in names:
                if name not in header:
                    raise missing_column(path, name, header)
                if header.count(name) > 1:
                    times = header.count(name)
                    raise SchemaError(
                        f"{path} has the column {name!r} {times} times; columns need one name each, and the first line of "
                        f"the file names them ({', '.join(header)[:80]}): if it is a row, write a line of names above it"
                    )
        schema = self._find_schema(files[0], heads[files[0].path])
        carried = {path: schema.with_metadata({b"header": _joined(header)}) for path, header in heads.items()}
        return [unit for file in files for unit in self.line_units([file], carried[file.path], declared=True)]

    def collect_rows(self, unit: Unit) -> CsvRows:
        detail: LineRange | PackedPart = unit.detail
        metadata = detail.schema.metadata or {}
        header = metadata[b"header"].decode().split("\n")
        return CsvRows(unit, detail.schema.remove_metadata(), header, self.parse_options(unit.path))

    def identity(self) -> str:
        columns = self.columns
        if isinstance(columns, Mapping):
            columns = {name: str(type_) for name, type_ in columns.items()}
        options = f"delimiter={self.delimiter!r}, newlines_in_values={self.newlines_in_values}"
        return f"Csv({list(self.patterns)!r}, columns={columns!r}, unit_bytes={self.unit_bytes}, {options})"

    def parse_options(self, path: str) -> dict[str, Any]:
        """What Arrow is told of the form of a file."""
        stem = path.lower().rpartition(".")[0] if codec_of(path) else path.lower()
        delimiter = self.delimiter or ("\t" if stem.endswith((".tsv", ".tab")) else ",")
        return {"delimiter": delimiter, "newlines_in_values": self.newlines_in_values}

    def _first_lines(self, file: StoredFile) -> bytes:
        text = self.read_first_text(file)
        if not text.strip():
            raise SourceError(f"{file.path} has no header line: check what wrote it")
        return text

    def _header(self, file: StoredFile) -> list[str]:
        text = self._first_lines(file)
        starts, stops = line_places(text)
        line = text[starts[0] : stops[0]]
        return _parse(file.path, line + b"\n", (), self.parse_options(file.path), header_of=True)

    def _find_schema(self, file: StoredFile, header: list[str]) -> pa.Schema:
        if isinstance(self.columns, Mapping):
            return pa.schema(list(self.columns.items()))
        names = list(self.columns or header)
        text = self._first_lines(file)
        starts, _ = line_places(text)
        body = text[starts[1] :] if len(starts) > 1 else b""
        found, _ = parse_fields(file.path, body, header, names, self.parse_options(file.path))
        return pa.schema([(name, _infer(found.column(name))) for name in names])


class CsvRows:
    """Makes columns of the wanted fields of CSV lines."""

    def __init__(self, unit: Unit, schema: pa.Schema, header: list[str], options: dict[str, Any]) -> None:
        self._path = unit.path
        self._schema = schema
        self._header = header
        self._options = options
        self._tables: list[pa.Table] = []
        self._bad: list[BadRow] = []
        self._num_rows = 0
        self._skip_header = unit.index == 0

    def add(self, offset: int, text: bytes) -> None:
        if self._skip_header:
            starts, _ = line_places(text)
            if not len(starts):
                return
            begin = int(starts[1]) if len(starts) > 1 else len(text)
            offset, text, self._skip_header = offset + begin, text[begin:], False
        fields, invalid = parse_fields(self._path, text, self._header, self._schema.names, self._options)
        num_rows = fields.num_rows + len(invalid)
        good = np.delete(np.arange(num_rows), [row for row, _ in invalid])
        errors = dict(invalid)
        columns = []
        for each in self._schema:
            column, unfit = fit_texts(fields.column(each.name), each.type)
            columns.append(column)
            for row, error in unfit.items():
                errors.setdefault(int(good[row]), f"{each.name!r} does not fit its type {each.type}: {error}")
        table = pa.table(columns, schema=self._schema)
        if errors:
            table = table.filter(pa.array([int(row) not in errors for row in good], pa.bool_()))
            where = f"{self._path}, in the lines from byte {offset} on"
            self._bad += [BadRow(self._num_rows + row, errors[row], f"{where}, line {row + 1}") for row in sorted(errors)]
        self._tables.append(table)
        self._num_rows += num_rows

    def result(self) -> ReadResult:
        table = pa.concat_tables(self._tables or [self._schema.empty_table()]).combine_chunks()
        if not self._bad:
            return ReadResult(table)
        return ReadResult(table, good_rows(self._num_rows, self._bad), tuple(self._bad))


def parse_fields(
    path: str, text: bytes, header: Sequence[str], names: Sequence[str], options: Mapping[str, Any]
) -> tuple[pa.Table, list[tuple[int, str]]]:
    """The wanted fields of each line as bytes, and (row, error) of lines with another number of fields."""
    invalid: list[tuple[int, str]] = []
    if not text.strip():
        return pa.table({name: pa.array([], pa.binary()) for name in names}), invalid
    found = _parse(path, text, header, options, names=names, invalid=invalid)
    if not options["newlines_in_values"] and b'"' in text:
        _check_lines(path, text, found.num_rows + len(invalid), header, options)
    return found, invalid


def _check_lines(path: str, text: bytes, num_rows: int, header: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuses quoted newlines: units and buffers are cut at newlines, and would cut such a row in two."""

    def count(lines: bytes) -> int:
        invalid: list[tuple[int, str]] = []
        return _parse(path, lines, header, options, names=header[:1], invalid=invalid).num_rows + len(invalid)

    starts, stops = line_places(text)
    if num_rows != len(starts) and _LONE_RETURN.search(text):  # these end lines too, where they are not quoted
        num_rows = count(_LONE_RETURN.sub(b" ", text))
    last = text[starts[-1] : stops[-1]]
    is_open = last.count(b'"') % 2 == 1 and count(last + b"\nx\n") == 1
    if num_rows != len(starts) or is_open:
        raise QuotedNewlineError(
            f"{path} has quoted fields with newlines in them ({len(starts):,} lines are {num_rows:,} rows), by which it "
            "would be cut in the middle of rows: declare it with newlines_in_values=True, which reads a file as one unit"
        )


def _parse(
    path: str,
    text: bytes,
    header: Sequence[str],
    options: Mapping[str, Any],
    *,
    names: Sequence[str] = (),
    invalid: list[tuple[int, str]] | None = None,
    header_of: bool = False,
) -> Any:
    csv: Any = import_module("pyarrow.csv")  # its stubs know no buffers

    def skip(row: Any) -> str:
        if invalid is not None:
            invalid.append(
                (row.number - 1, f"it has {row.actual_columns} fields, and the header has {row.expected_columns}")
            )
        return "skip"

    positions = [f"f{i}" for i in range(len(header))]
    wanted = [positions[header.index(name)] for name in names]
    try:
        table = csv.read_csv(
            pa.BufferReader(text),
            csv.ReadOptions(
                use_threads=False, block_size=len(text) + 64, column_names=None if header_of else positions,
                autogenerate_column_names=header_of,
            ),
            csv.ParseOptions(invalid_row_handler=None if header_of else skip, **options),
            csv.ConvertOptions(
                column_types=None if header_of else dict.fromkeys(wanted, pa.binary()),
                include_columns=None if header_of else wanted, check_utf8=header_of, strings_can_be_null=False,
                null_values=[], true_values=["\0"], false_values=["\0\0"],
            ),
        )  # fmt: skip
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise SourceError(f"{path} cannot be parsed as CSV: {' '.join(str(error).split())[:300]}") from error
    if header_of:
        return [str(column[0].as_py()) for column in table.columns]
    return table.rename_columns(list(names))


def _infer(column: pa.ChunkedArray) -> pa.DataType:
    """Whole numbers, numbers, true and false, or text: the narrowest that all fields fit."""
    for type_ in (pa.int64(), pa.float64(), pa.bool_()):
        found, unfit = fit_texts(column, type_)
        if not unfit and found.null_count < len(found):
            return type_
    return pa.string()


def fit_texts(column: Any, type_: pa.DataType) -> tuple[Any, dict[int, str]]:
    """The fields as a type. An empty one is null where the type is no text; errors of fields that do not fit."""
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return column.cast(type_), {}
    try:
        texts = column.cast(pa.string())
    except pa.ArrowInvalid:
        return _fit_one_by_one(column, type_)
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return texts.cast(type_), {}
    try:
        return _cast(texts, type_), {}
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return _fit_one_by_one(column, type_)


def _cast(texts: Any, type_: pa.DataType) -> Any:
    trimmed: Any = pc.utf8_trim_whitespace(texts)
    is_empty = pc.equal(trimmed, pa.scalar(""))
    return pc.if_else(is_empty, pa.scalar(None, pa.string()), trimmed).cast(type_)


def _fit_one_by_one(column: Any, type_: pa.DataType) -> tuple[Any, dict[int, str]]:
    values, unfit = [], {}
    for row, value in enumerate(column.to_pylist()):  # only where a column is known to have a misfit
        try:
            text = pa.array([value.decode()])
            fitted = text.cast(type_) if pa.types.is_string(type_) or pa.types.is_large_string(type_) else _cast(text, type_)
            values.append(fitted[0].as_py())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError) as error:
            unfit[row] = " ".join(str(error).split())[:200]
            values.append(None)
    return pa.array(values, type_), unfit


def _joined(header: Sequence[str]) -> bytes:
    return "\n".join(header).encode()
