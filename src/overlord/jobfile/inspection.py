"""Looks at files: their format, rows and columns, lengths of documents, what repeats and what is odd; and proposes a job."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from overlord.jobfile.proposal import DocumentKind, propose_job
from overlord.jobfile.recognition import recognise, recognise_all
from overlord.jobfile.values import JobPlace, PlainMapping, source_of
from overlord.sources.files import open_reader
from overlord.sources.prepared import Prepared
from overlord.sources.text_tables import QuotedNewlineError
from overlord.sources.views import compact, is_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from overlord.declare.source import Source, Unit
    from overlord.jobfile.recognition import Recognised

pc: Any = compute  # its stubs know few of the types that its functions take
_TOKEN_NAMES = ("tokens", "input_ids", "token_ids", "ids")
_TEXT_NAMES = ("text", "content", "document", "body", "raw_content", "txt")
_IMAGE_NAMES = ("jpg", "jpeg", "png", "webp", "image")
_MOST_EXAMPLES = 3
_LONG = 20  # times the median length


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """A column of the rows that were read."""

    name: str
    type: str
    num_null: int
    example: str


@dataclass(frozen=True, slots=True)
class OddRows:
    """Rows with something odd, and where the first are."""

    what: str
    count: int
    examples: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long documents are, of the rows that were read."""

    of: str
    """What they are counted in: tokens or characters."""
    column: str
    mean: float
    median: int
    largest: int
    p99: int
    histogram: tuple[tuple[int, int], ...]
    """(upper bound, documents up to it and above the bound before)."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What lies at a path."""

    path: str
    reader: str
    num_files: int
    num_units: int
    num_bytes: int
    num_rows: int | None
    """None where files do not tell it."""
    num_read: int
    is_whole: bool
    """All rows were read; otherwise what follows is of a sample."""
    columns: tuple[ColumnFacts, ...]
    lengths: Lengths | None
    num_tokens: int | None
    """In all rows, by the ones that were read; None where no text or tokens were found."""
    tokens_are_counted: bool
    """By a tokenizer or a column of tokens; otherwise one token for four bytes of text."""
    num_duplicates: int
    odd: tuple[OddRows, ...]
    job: str
    """A job file in YAML."""


def inspect_path(
    path: str | Sequence[str], *, most_rows: int = 10_000, reader: str | None = None, encoding: str | None = None
) -> Inspection:
    """Read up to `most_rows` rows of what lies at a path, or at several, and say what they are. `encoding`: count tokens
    with it."""
    found = recognise(path, reader) if isinstance(path, str) else recognise_all(path, reader)
    try:
        source, units, sample = _open(found, most_rows)
    except QuotedNewlineError:
        found = replace(found, options={**found.options, "newlines_in_values": True})
        source, units, sample = _open(found, most_rows)
    shown = path if isinstance(path, str) else found.name
    return _inspect(shown, found, source, units, sample=sample, encoding=encoding)


def _open(found: Recognised, most_rows: int) -> tuple[Source, Sequence[Unit], _Sample]:
    source = source_of(PlainMapping({**found.declaration(), "on_bad_row": "skip"}, {}), JobPlace(found.name))
    units = source.units()
    return source, units, _read(source, units, most_rows)


@dataclass(frozen=True, slots=True)
class _Sample:
    tables: list[tuple[Unit, pa.Table, np.ndarray]]
    """Units with their rows, and the number of each row in its unit."""
    bad: list[str]
    num_bytes: int
    is_whole: bool

    @property
    def num_rows(self) -> int:
        return sum(table.num_rows for _, table, _ in self.tables)


def _read(source: Source, units: Sequence[Unit], most_rows: int) -> _Sample:
    """Units from all over the source, until there are enough rows."""
    reader = open_reader(source, release_gil=False)
    tables: list[tuple[Unit, pa.Table, np.ndarray]] = []
    bad: list[str] = []
    count = num_bytes = 0
    order = _spread(len(units))
    is_whole = True
    try:
        for number in order:
            if count >= most_rows:
                is_whole = False
                break
            result = reader.read_rows(units[number])
            bad += [f"{units[number]}, row {each.row}: {each.error}" for each in result.bad]
            table = _without_large(result.table)
            rows = result.unit_rows
            if count + table.num_rows > most_rows:
                keep = max(most_rows - count, 1)
                num_bytes += source.decoded_bytes(units[number]) * keep // max(table.num_rows, 1)
                table, rows, is_whole = table.slice(0, keep), rows[:keep], False
            else:
                num_bytes += source.decoded_bytes(units[number])
            tables.append((units[number], table, rows))
            count += table.num_rows
    finally:
        reader.close()
    return _Sample(tables, bad, num_bytes, is_whole)


def _spread(count: int) -> Iterator[int]:
    """The numbers below `count`, far from each other first: 0, the middle, the quarters, ..."""
    seen: set[int] = set()
    parts = 1
    while len(seen) < count:
        for part in range(parts):
            number = count * part // parts
            if number not in seen:
                seen.add(number)
                yield number
        parts *= 2


def _without_large(table: pa.Table) -> pa.Table:
    """Views are copied in, since their files are closed soon."""
    return compact(table) if any(is_view(type_) for type_ in table.schema.types) else table


def _inspect(
    path: str, found: Recognised, source: Source, units: Sequence[Unit], *, sample: _Sample, encoding: str | None
) -> Inspection:
    column, kind = _document_column(sample)
    lengths = _lengths(sample, column, kind) if column is not None else None
    tokens, counted = _tokens(source, units, sample, column=column, kind=kind, encoding=encoding)
    return Inspection(
        path=path,
        reader=type(source).__name__,
        num_files=len({unit.path for unit in units}),
        num_units=len(units),
        num_bytes=sum(map(source.decoded_bytes, units)),
        num_rows=_num_rows(source, units, sample),
        num_read=sample.num_rows,
        is_whole=sample.is_whole,
        columns=_columns(sample),
        lengths=lengths,
        num_tokens=tokens,
        tokens_are_counted=counted,
        num_duplicates=_num_duplicates(sample, column),
        odd=tuple(_odd_rows(sample, column, kind)),
        job=propose_job(
            found,
            DocumentKind(column, kind, 0 if lengths is None else lengths.p99, has_bad_rows=bool(sample.bad)),
            next((table for _, table, _ in sample.tables if table.num_rows), None),
            encoding,
        ),
    )


def _num_rows(source: Source, units: Sequence[Unit], sample: _Sample) -> int | None:
    """The rows of all files; None where neither files nor reading all of them tell."""
    if isinstance(source, Prepared):  # its units have the rows of the original
        return source.manifest().num_rows
    if all(unit.num_rows is not None for unit in units):
        return sum(unit.num_rows or 0 for unit in units)
    return sample.num_rows + len(sample.bad) if sample.is_whole else None


def _document_column(sample: _Sample) -> tuple[str | None, str]:
    """The column with the documents, and whether they are tokens, text or images."""
    schema = next((table.schema for _, table, _ in sample.tables if table.num_rows), None)
    if schema is None:
        return None, ""
    tokens = [f.name for f in schema if _is_list(f.type) and pa.types.is_integer(f.type.value_type)]
    texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    images = [f.name for f in schema if f.name.lower() in _IMAGE_NAMES]
    if tokens:
        return next((name for name in _TOKEN_NAMES if name in tokens), tokens[0]), "tokens"
    texts = [name for name in texts if not name.startswith("__")]
    if texts:
        named = next((name for name in _TEXT_NAMES if name in texts), None)
        return named or max(texts, key=lambda name: _mean_length(sample, name)), "text"
    return (images[0], "images") if images else (None, "")


def _is_list(type_: Any) -> bool:
    return pa.types.is_list(type_) or pa.types.is_large_list(type_)


def _mean_length(sample: _Sample, name: str) -> float:
    lengths = [
        pc.mean(pc.utf8_length(table.column(name))).as_py() or 0.0 for _, table, _ in sample.tables[:4] if table.num_rows
    ]
    return float(np.mean(lengths)) if lengths else 0.0


def _row_lengths(table: pa.Table, column: str, kind: str) -> np.ndarray:
    values = table.column(column)
    counted = pc.list_value_length(values) if kind == "tokens" else pc.utf8_length(values)
    return pc.fill_null(counted, 0).to_numpy().astype(np.int64)


def _lengths(sample: _Sample, column: str, kind: str) -> Lengths | None:
    if kind == "images" or not sample.num_rows:
        return None
    found = np.concatenate([_row_lengths(table, column, kind) for _, table, _ in sample.tables])
    bounds = [1 << power for power in range(64) if 1 << power <= 2 * max(int(found.max()), 1)]
    places = np.searchsorted(bounds, found)  # a document of just a bound belongs to it
    counts = np.bincount(places, minlength=len(bounds)).tolist()
    histogram = [(bound, count) for bound, count in zip(bounds, counts, strict=False)]
    while len(histogram) > 1 and not histogram[0][1]:
        histogram = histogram[1:]
    while len(histogram) > 1 and not histogram[-1][1]:
        histogram = histogram[:-1]
    return Lengths(
        of="tokens" if kind == "tokens" else "characters",
        column=column,
        mean=float(found.mean()),
        median=int(np.median(found)),
        largest=int(found.max()),
        p99=int(np.quantile(found, 0.99)),
        histogram=tuple(histogram),
    )


def _tokens(
    source: Source, units: Sequence[Unit], sample: _Sample, *, column: str | None, kind: str, encoding: str | None
) -> tuple[int | None, bool]:
    """Tokens of all rows, and whether they were counted."""
    if isinstance(source, Prepared) and source.manifest().num_tokens is not None:
        return source.manifest().num_tokens, True
    if column is None or kind == "images" or not sample.num_rows:
        return None, False
    if kind == "tokens":
        read = sum(int(_row_lengths(table, column, kind).sum()) for _, table, _ in sample.tables)
    elif encoding is not None:
        from overlord.chunks.transforms.tokenize import Tokenize

        tokenize = Tokenize(column=column, encoding=encoding)
        tables = [table.select([column]).filter(pc.is_valid(table.column(column))) for _, table, _ in sample.tables]
        read = sum(
            int(pc.sum(pc.list_value_length(tokenize(t).column("tokens"))).as_py() or 0) for t in tables if t.num_rows
        )
    else:
        num_bytes = sum(pc.sum(pc.binary_length(table.column(column))).as_py() or 0 for _, table, _ in sample.tables)
        read = num_bytes // 4
    total, seen = sum(map(source.decoded_bytes, units)), sample.num_bytes
    scale = 1.0 if sample.is_whole else total / seen if total and seen else len(units) / max(len(sample.tables), 1)
    return round(read * scale), kind == "tokens" or encoding is not None


def _columns(sample: _Sample) -> tuple[ColumnFacts, ...]:
    found: dict[str, ColumnFacts] = {}
    for _, table, _ in sample.tables:
        for name in table.column_names:
            column = table.column(name)
            before = found.get(name)
            example = before.example if before is not None and before.example else _example(column)
            nulls = column.null_count + (before.num_null if before is not None else 0)
            found[name] = ColumnFacts(name, str(column.type), nulls, example)
    return tuple(found.values())


def _example(column: pa.ChunkedArray[Any]) -> str:
    value = next((column[i].as_py() for i in range(min(len(column), 16)) if column[i].is_valid), None)
    if value is None:
        return ""
    text = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value[:8] if isinstance(value, list) else value)
    return text if len(text) <= 48 else f"{text[:45]}..."


def _num_duplicates(sample: _Sample, column: str | None) -> int:
    """Documents that are the same as one before them, of those that were read."""
    if column is None:
        return 0
    seen: set[bytes] = set()
    count = 0
    for _, table, _ in sample.tables:
        for value in table.column(column):  # row by row, because values of any length are compared
            if value.is_valid:
                plain = value.as_py()
                data = plain if isinstance(plain, bytes) else repr(plain).encode("utf-8", "surrogatepass")
                digest = hashlib.blake2b(data, digest_size=12).digest()
                count += digest in seen
                seen.add(digest)
    return count


def _odd_rows(sample: _Sample, column: str | None, kind: str) -> Iterator[OddRows]:
    if sample.bad:
        yield OddRows("cannot be read", len(sample.bad), tuple(sample.bad[:_MOST_EXAMPLES]))
    if column is None:
        return
    checks: dict[str, list[str]] = {}
    median = 0
    if kind != "images" and sample.num_rows:
        median = int(np.median(np.concatenate([_row_lengths(table, column, kind) for _, table, _ in sample.tables])))
    for unit, table, rows in sample.tables:
        values = table.column(column)
        masks: dict[str, Any] = {f"{column!r} is null": pc.is_null(values)}
        lengths = np.zeros(table.num_rows, np.int64) if kind == "images" else _row_lengths(table, column, kind)
        if kind != "images":
            masks[f"{column!r} is empty"] = (lengths == 0) & np.asarray(pc.is_valid(values))
            masks[f"more than {_LONG} times as long as the median"] = lengths > _LONG * max(median, 1)
        if kind == "text":
            masks["has U+FFFD or NUL: it was decoded wrongly once"] = pc.fill_null(
                pc.match_substring_regex(values, "\ufffd|\\x00"), False
            )
            masks["has no letter or digit"] = pc.and_(
                pc.invert(pc.fill_null(pc.match_substring_regex(values, r"[\p{L}\p{N}]"), True)), pa.array(lengths > 0)
            )
        if kind == "tokens":
            masks["has an id below 0"] = _has_negative(values)
        for what, mask in masks.items():
            for at in np.flatnonzero(np.asarray(mask)):
                checks.setdefault(what, []).append(f"{unit}, row {int(rows[at])}")
    for what, places in checks.items():
        yield OddRows(what, len(places), tuple(places[:_MOST_EXAMPLES]))


def _has_negative(values: pa.ChunkedArray[Any]) -> np.ndarray:
    found = np.zeros(len(values), bool)
    parents = pc.list_parent_indices(values).to_numpy()
    found[parents[np.asarray(pc.fill_null(pc.less(pc.list_flatten(values), 0), False))]] = True
    return found
