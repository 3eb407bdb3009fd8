"""JSON Lines, plain and compressed, against json, gzip and Arrow's zstd."""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import overlord as ol
from tests.fuzz.mutations import edited
from tests.fuzz.targets import Answer, FileTarget, OracleFailed, Seed, Wrong

_BAD = object()
_BLANK = b" \t\r\n\x0b\x0c"


def _texts() -> dict[str, bytes]:
    text = "Zeile \u00e9\u4e16\U0001f600\\n"
    rows: list[Any] = [
        {"text": f"{text}{i}", "n": i, "ratio": i / 3, "ok": i % 2 == 0, "tokens": list(range(i % 4))} for i in range(20)
    ]
    nested = [
        {"meta": {"url": f"u{i}", "tags": ["a"] * (i % 3), "deep": {"x": None if i % 2 else i}}, "id": i} for i in range(15)
    ]
    numbers = [
        {"int": 2**53 + i, "float": 1e300 / (i + 1), "text": str(i), "maybe": None if i % 2 else i} for i in range(12)
    ]
    return {
        "rows": _lines(rows),
        "nested": _lines(nested),
        "numbers": _lines(numbers),
        "crlf": _lines(rows[:5]).replace(b"\n", b"\r\n"),
        "mark": b"\xef\xbb\xbf" + _lines(rows[:4]),
        "blank": b"\n\n  \n" + _lines(rows[:3]) + b"\n\t\n" + _lines(rows[3:5]).rstrip(b"\n"),
        "one": b'{"text": "alone"}',
    }


def _lines(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=i % 2 == 0).encode() + b"\n" for i, row in enumerate(rows))


def _compressed(text: bytes, suffix: str) -> bytes:
    if suffix.endswith(".gz"):
        return gzip.compress(text, mtime=0)
    if suffix.endswith(".zst"):
        return pa.Codec("zstd").compress(text, asbytes=True)
    return text


def _decompressed(data: bytes, suffix: str) -> bytes:
    try:
        if suffix.endswith(".gz"):
            return gzip.decompress(data)
        if suffix.endswith(".zst"):
            with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
                return stream.read()
    except (OSError, EOFError, zlib.error, pa.ArrowException, MemoryError) as error:
        raise OracleFailed(str(error)) from error
    return data


def make_seeds() -> Sequence[Seed]:
    seeds = [Seed(name, text, ".jsonl") for name, text in _texts().items()]
    for name in ("rows", "mark"):
        for suffix in (".jsonl.gz", ".jsonl.zst"):
            seeds.append(Seed(f"{name}{suffix[6:]}", _compressed(_texts()[name], suffix), suffix))
    two = _texts()["rows"].splitlines(keepends=True)
    for suffix in (".jsonl.gz", ".jsonl.zst"):
        parts = [_compressed(b"".join(part), suffix) for part in (two[:8], two[8:])]
        seeds.append(Seed(f"two-parts{suffix[6:]}", b"".join(parts), suffix))
        # Files of many units, which begin in the middle of a member or frame, and between two of them.
        long = _texts()["rows"] * 6
        seeds.append(Seed(f"units{suffix[6:]}", _compressed(long, suffix), suffix))
        pieces = [_compressed(long[start : start + 500], suffix) for start in range(0, len(long), 500)]
        seeds.append(Seed(f"many-parts{suffix[6:]}", b"".join(pieces), suffix))
    with pa.CompressedOutputStream(sink := pa.BufferOutputStream(), "zstd") as stream:
        stream.write(_texts()["rows"] * 6)  # a frame that does not say its size
    skipped = bytes.fromhex("502a4d18") + (3).to_bytes(4, "little") + b"abc"
    seeds.append(Seed("piped.zst", sink.getvalue().to_pybytes(), ".jsonl.zst"))
    seeds.append(Seed("skipped.zst", skipped + seeds[-2].data, ".jsonl.zst"))
    return seeds


_ODD = (
    "null", "true", "1", '"text"', "[]", "[{}]", "{}", "{", "}", "nul", "NaN", "", " ", "\x00", "\ufeff", "[" * 500,
    '{"n": NaN}', '{"n": Infinity}', '{"n": -0}', '{"n": 01}', '{"n": 1.0}', '{"n": 1.5}', '{"n": 1e2}', '{"n": 1e999}',
    '{"n": 123456789012345678901234567890}', '{"n": 9223372036854775808}', '{"n": -9223372036854775809}',
    '{"n": 18446744073709551615}', '{"n": 18446744073709551616}', '{"n": 9007199254740993}', '{"ratio": 9007199254740993}',
    '{"ratio": 1}', '{"n": true}', '{"ok": 1}', '{"n": "1"}', '{"n": [1]}', '{"id": 1.0}', '{"": 1}', "{'text': 'a'}",
    '{"text": 5}', '{"text": "\\ud800"}', '{"text": "\\u0000"}', '{"text": "a", "text": "b"}', '{"text": "\\x"}',
    '{"text": "a"} {"text": "b"}', '{"text": "a"},', '{"text": null}', '{"tokens": {}}', '{"tokens": [true]}',
    '{"tokens": [1, null]}', '{"tokens": [1, 2.5]}', '{"tokens": [1, 2.0]}', '{"tokens": [1e19]}', '{"tokens": ["1"]}',
    '{"meta": {"url": 1}}', '{"meta": {"new": 1}}', '{"meta": {"deep": {"x": 1.5}}}', '{"meta": []}',
)  # fmt: skip


def change_lines(rng: random.Random, seed: Seed) -> bytes:
    """Odd lines among the others, and lines moved, joined, cut or repeated; compressed as a whole file would be."""
    lines = _decompressed(seed.data, seed.suffix).split(b"\n")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0 | 1:
                lines.insert(at, rng.choice(_ODD).encode("utf-8", "surrogatepass"))
            case 2:
                lines[at] = lines[at][: rng.randint(0, len(lines[at]))]
            case 3:
                lines.insert(at, rng.choice(lines))
            case 4:
                del lines[at]
                lines = lines or [b""]
            case 5:
                lines[at] += b" " + rng.choice(lines)
            case 6:
                lines[at] = lines[at] + rng.choice((b"\r", b" ", b"\x00", b"\xff", b"\xc3", b"\x0b"))
    return _compressed(b"\n".join(lines), seed.suffix)


def edit_values(rng: random.Random, seed: Seed) -> bytes:
    """Other values in one of the rows."""
    lines = _decompressed(seed.data, seed.suffix).split(b"\n")
    at = rng.randrange(len(lines))
    try:
        row = json.loads(lines[at])
    except ValueError:
        row = {"text": "a", "n": 1}
    lines[at] = json.dumps(edited(rng, row)).encode()
    return _compressed(b"\n".join(lines), seed.suffix)


def read(path: str) -> Answer:
    source = ol.Jsonl(path, unit_bytes=600)
    rows: list[Any] = []
    bad: set[int] = set()
    reader = source.open_reader(release_gil=False)
    for unit in source.units():
        result = reader.read_rows(unit)
        begin, num_rows = len(rows) + len(bad), result.table.num_rows
        numbers = list(range(num_rows)) if result.row_numbers is None else result.row_numbers.tolist()
        bad_here = {row.row for row in result.bad}
        if sorted([*numbers, *bad_here]) != list(range(num_rows + len(bad_here))) or len(numbers) != num_rows:
            raise Wrong("the rows and the bad rows of a unit are not all of its rows")
        bad |= {begin + row for row in bad_here}
        result.table.validate(full=True)
        rows += [_Row(row, result.table.schema) for row in result.table.to_pylist()]
    return Answer(rows, frozenset(bad))


class _Row:
    """A row as it was read; equal to what a line says when all fields that the columns have are."""

    def __init__(self, values: dict[str, Any], schema: pa.Schema) -> None:
        self._values = values
        self._type = pa.struct(list(schema))

    def __eq__(self, said: object) -> bool:
        return isinstance(said, dict) and _is_same(self._values, said, self._type)

    def __repr__(self) -> str:
        return f"{self._values} as {self._type}"


def _is_same(read: Any, said: Any, kind: pa.DataType) -> bool:
    """Fields that no column has are left out on purpose; every other value must be the very one, of its own kind."""
    if read is None or said is None:
        return read is said
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return isinstance(said, dict) and all(_is_same(read[f.name], said.get(f.name), f.type) for f in fields)
    if pa.types.is_list(kind):
        pairs = zip(read, said, strict=False)
        return isinstance(said, list) and len(read) == len(said) and all(_is_same(*pair, kind.value_type) for pair in pairs)
    if isinstance(read, bool) or isinstance(said, bool):
        return read is said
    return isinstance(read, str) == isinstance(said, str) and read == said


def oracle(data: bytes, suffix: str) -> list[Answer]:
    text = _decompressed(data, suffix).removeprefix(b"\xef\xbb\xbf")
    lines = [line for line in text.split(b"\n") if line.strip(_BLANK)]
    return [Answer([_row(line) for line in lines])]


def _row(line: bytes) -> Any:
    try:
        row = json.loads(line.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _BAD
    return row if isinstance(row, dict) else _BAD


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


TARGET = FileTarget("jsonl", make_seeds, read, oracle, (change_lines, change_lines, edit_values))
