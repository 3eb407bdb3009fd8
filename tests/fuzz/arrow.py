"""Arrow IPC files, streams and Feather, against pyarrow's own readers."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.feather
from pyarrow import ipc

import overlord as ol
from tests.fuzz.mutations import Region, set_integer
from tests.fuzz.parquet import checked
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, FileTarget, OracleFailed, Seed, Wrong

_MAGIC = b"ARROW1"


def _table() -> pa.Table:
    n = 40
    return pa.table(
        {
            "number": pa.array([None if i % 5 == 0 else i for i in range(n)], pa.int32()),
            "text": pa.array([None if i % 9 == 0 else f"row {i}" for i in range(n)], pa.string()),
            "view": pa.array([f"a longer text in row {i}" for i in range(n)], pa.string_view()),
            "tokens": pa.array([list(range(i % 5)) for i in range(n)], pa.list_(pa.int32())),
            "deep": pa.array([[{"a": i, "b": [f"{i}"]}] * (i % 2) for i in range(n)]),
            "fixed": pa.array([[i, i] for i in range(n)], pa.list_(pa.int16(), 2)),
            "flag": pa.array([i % 3 == 0 for i in range(n)]),
            "raw": pa.array([bytes(i) for i in range(n)], pa.large_binary()),
            "nothing": pa.nulls(n),
        }
    )


def make_seeds() -> Sequence[Seed]:
    table = _table()
    words = pa.array([f"word {i % 4}" for i in range(40)]).dictionary_encode()
    shared = pa.table({"word": words, "n": pa.array(range(40))})
    seeds = []
    for name, content in (("plain", table), ("words", shared), ("no-rows", table.slice(0, 0))):
        for codec in (None, "lz4", "zstd"):
            options = ipc.IpcWriteOptions(compression=codec)
            for kind, new in (("file", ipc.new_file), ("stream", ipc.new_stream)):
                sink = io.BytesIO()
                with new(sink, content.schema, options=options) as writer:
                    writer.write_table(content, max_chunksize=15)
                seeds.append(_seed(f"{name}-{kind}-{codec or 'raw'}", sink.getvalue()))
    sink = io.BytesIO()
    pyarrow.feather.write_feather(table.drop_columns(["view"]), sink, compression="lz4")
    seeds.append(_seed("feather", sink.getvalue()))
    return seeds


def _seed(name: str, data: bytes) -> Seed:
    """Regions: the footer of a file, and the headers of all messages."""
    regions = []
    if data.startswith(_MAGIC):
        footer_bytes = int.from_bytes(data[-10:-6], "little")
        regions += [Region(len(data) - 10 - footer_bytes, len(data))] * 2
    place = data.find(b"\xff\xff\xff\xff")
    while 0 <= place < len(data) - 8:
        length = int.from_bytes(data[place + 4 : place + 8], "little")
        if 0 < length < len(data) - place:
            regions.append(Region(place, place + 8 + length))
        place = data.find(b"\xff\xff\xff\xff", place + 8)
    return Seed(name, data, ".arrow", tuple(regions))


def change_header(rng: random.Random, seed: Seed) -> bytes:
    """Other integers in the footer or in a message's header."""
    data = seed.data
    for _ in range(rng.choice((1, 1, 2))):
        data = set_integer(rng, data, rng.choice(seed.regions))
    return data


def read(path: str) -> Answer:
    source = ol.ArrowIpc(path, unit_bytes=1 << 10)
    tables = []
    bad: set[int] = set()
    num_rows = 0
    for unit in source.units():
        result = source.read_rows(unit)
        num_here = result.table.num_rows + len(result.bad)
        if unit.num_rows is not None and num_here != unit.num_rows:
            raise Wrong("a unit has other rows than it was listed with")
        bad |= {num_rows + row.row for row in result.bad}
        num_rows += num_here
        tables.append(result.table)
    answers = [checked(table) for table in tables]  # before they are joined, which would believe them
    return Answer([row for answer in answers for row in answer.rows], frozenset(bad), answers[0].about)


def oracle(data: bytes, suffix: str) -> list[Answer]:
    is_file = data.startswith(_MAGIC)
    try:
        with (ipc.open_file if is_file else ipc.open_stream)(pa.BufferReader(data)) as reader:
            table = reader.read_all()
        return [answer_of(table)]
    except (pa.ArrowException, OSError, ValueError, MemoryError, KeyError) as error:
        raise OracleFailed(str(error)) from error


TARGET = FileTarget("arrow", make_seeds, read, oracle, (change_header,))
