"""Lines of text and CSV, against a reading line by line. CSV without quotes: of broken quotes there is no right reading."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence

import pyarrow as pa

from overlord.errors import SourceError
from overlord.formats import Csv, TextLines
from tests.fuzz.folders import read_source
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, FileTarget, OracleFailed, Seed

_TYPES = {"number": pa.int64(), "text": pa.string()}


def make_seeds() -> Sequence[Seed]:
    lines = b"".join(f"line {i} é\n".encode() * (i % 3) + b"\r\n" * (i % 2) for i in range(40))
    rows = b"text,number,other\n" + b"".join(f"row {i} ü,{i - 20},x\n".encode() for i in range(40))
    return [
        Seed("lines", lines, ".txt"),
        Seed("lines-gz", gzip.compress(lines, mtime=0), ".txt.gz"),
        Seed("rows", rows, ".csv"),
        Seed("rows-tsv", rows.replace(b",", b"\t"), ".tsv"),
    ]


def read(path: str) -> Answer:
    if path.endswith((".csv", ".tsv")):
        with open(path, "rb") as file:
            content = file.read()
        if b'"' in content or b"\0" in content or b"\r" in content:
            raise SourceError(f"{path} has quotes, which are not judged")
        return read_source(Csv(path, _TYPES, unit_bytes=1 << 30))
    return read_source(TextLines(path, unit_bytes=100))


def oracle(data: bytes, suffix: str) -> list[Answer]:
    if suffix == ".txt.gz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError) as error:
            raise OracleFailed(str(error)) from error
    lines = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line]
    return [_rows(lines, b"," if suffix == ".csv" else b"\t")] if suffix in (".csv", ".tsv") else [_texts(lines)]


def _texts(lines: list[bytes]) -> Answer:
    stripped = [line.removesuffix(b"\r") for line in lines]
    return _answer([_text(line) for line in stripped if line], pa.schema([("text", pa.string())]))


def _rows(lines: list[bytes], delimiter: bytes) -> Answer:
    header = lines[0].split(delimiter) if lines else []
    if header.count(b"text") != 1 or header.count(b"number") != 1:
        raise OracleFailed("another header")
    found: list[tuple[object, ...] | None] = []
    for line in lines[1:]:
        fields = line.split(delimiter)
        row = dict(zip(header, fields, strict=False))
        try:
            text = row.get(b"number", b"").decode().strip()
            number = int(text) if text else None
            is_plain = len(fields) == len(header) and not set(text) - set("-0123456789")
            fits = number is None or -(2**63) <= number < 2**63
            found.append((number, row[b"text"].decode()) if is_plain and fits else None)
        except (ValueError, KeyError):
            found.append(None)
    return _answer(found, pa.schema(list(_TYPES.items())))


def _text(line: bytes) -> tuple[str] | None:
    try:
        return (line.decode(),)
    except UnicodeDecodeError:
        return None


def _answer(rows: Sequence[tuple[object, ...] | None], schema: pa.Schema) -> Answer:
    """None for a bad row."""
    good = [row for row in rows if row is not None]
    table = pa.table([pa.array([row[i] for row in good], each.type) for i, each in enumerate(schema)], schema=schema)
    kept = iter(answer_of(table).rows)
    return Answer(["bad" if row is None else next(kept) for row in rows], about=answer_of(table).about)


def break_line(rng: random.Random, seed: Seed) -> bytes | None:
    """Another delimiter, newline or number in a file that is not compressed."""
    if seed.suffix.endswith(".gz"):
        return None
    at = rng.randrange(len(seed.data))
    piece = rng.choice((b",", b"\t", b"\n", b"\n\n", b"\r\n", b"-", b"9" * 20, b"\xff", b" ", b"1.5", b""))
    return seed.data[:at] + piece + seed.data[at + rng.randint(0, 3) :]


TARGET = FileTarget("text", make_seeds, read, oracle, (break_line,))
