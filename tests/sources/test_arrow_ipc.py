"""Arrow IPC files, streams and Feather."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import BadRowError, BufferTooSmallError, SchemaError, SourceError
from overlord.sources.arrow_ipc import ArrowIpc
from overlord.sources.reading import table_bytes
from tests.sources.damage import rewrite


def documents(num_rows: int) -> pa.Table:
    tokens = [np.arange(i % 7, dtype=np.int32) for i in range(num_rows)]
    return pa.table({"id": range(num_rows), "tokens": tokens, "text": [f"t{i}" for i in range(num_rows)]})


def write(path: Path, table: pa.Table, kind: str, rows: int = 10, compression: Literal["lz4", "zstd"] | None = None) -> str:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


def read_all(source: ArrowIpc) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


@given(
    st.sampled_from(["file", "stream"]),
    st.sampled_from([None, "lz4", "zstd"]),
    st.integers(1, 60),
    st.integers(1, 20),
    st.integers(1, 3000),
    st.sampled_from([None, ("text", "id")]),
)
def test_batches_read_in_order_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    compression: Literal["lz4", "zstd"] | None,
    num_rows: int,
    rows: int,
    unit_bytes: int,
    columns: tuple[str, ...] | None,
) -> None:
    table = documents(num_rows)
    path = write(tmp_path_factory.mktemp("ipc") / "a.arrow", table, kind, rows, compression)
    source = ArrowIpc(path, columns, unit_bytes)
    assert read_all(source).equals(table.select(columns) if columns else table)
    assert sum(unit.num_rows or 0 for unit in source.units()) == num_rows


def test_batches_are_joined_to_units_of_about_the_size_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.arrow", pa.table({"x": pa.array(range(100_000), pa.int64())}), "file", 1000)
    units = ArrowIpc(path, unit_bytes=100_000).units()
    assert [unit.num_rows for unit in units] == [13_000] * 7 + [9_000]


def test_of_the_columns_of_a_local_file_only_the_wanted_ones_are_held(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(range(100_000), pa.int64()), "y": ["text"] * 100_000, "z": [[1, None]] * 100_000})
    for kind in ("file", "stream"):
        for codec in (None, "zstd"):
            path = write(tmp_path / f"{kind}-{codec}", table, kind, 1000, codec)
            for columns in (["x"], ["z", "x"], ["y"]):
                source = ArrowIpc(path, columns)
                result = source.read_rows(source.units()[0])
                assert result.table.equals(table.select(columns))
            assert table_bytes(ArrowIpc(path, ["x"]).read_rows(source.units()[0]).table) < 3_000_000


def test_a_batch_too_large_for_the_buffer_is_mapped_and_not_held(tmp_path: Path) -> None:
    for kind in ("file", "stream"):
        path = write(tmp_path / kind, pa.table({"x": pa.array(range(100_000), pa.int64())}), kind, 1000)
        source = ArrowIpc(path, buffer_bytes=100_000)
        before = pa.total_allocated_bytes()
        result = source.read_rows(source.units()[0])
        assert pa.total_allocated_bytes() == before
        assert table_bytes(result.table, result.mapped) == 0
        assert result.table["x"].to_pylist() == list(range(100_000))


def test_feather_reads_like_any_other_file(tmp_path: Path) -> None:
    pyarrow.feather.write_feather(documents(30), tmp_path / "a.feather")
    assert read_all(ArrowIpc(str(tmp_path / "a.feather"))).equals(documents(30))


def test_a_file_with_dictionaries_is_one_unit(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(["a", "b", "a"] * 10).dictionary_encode()})
    for kind in ("file", "stream"):
        source = ArrowIpc(write(tmp_path / kind, table, kind, 4))
        assert len(source.units()) == 1
        assert read_all(source)["x"].to_pylist() == ["a", "b", "a"] * 10


def test_a_unit_reads_the_same_after_pickling(tmp_path: Path) -> None:
    source = ArrowIpc(write(tmp_path / "a", documents(50), "file"), unit_bytes=500)
    for unit in source.units():
        again, same = pickle.loads(pickle.dumps((source, unit)))
        assert again.read(same).equals(source.read(unit))


def test_a_stream_without_its_end_mark_is_whole(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a", documents(20), "stream"))
    path.write_bytes(path.read_bytes()[:-8])
    assert read_all(ArrowIpc(str(path))).equals(documents(20))


@pytest.mark.strangers
@pytest.mark.parametrize("hole", [False, True])
def test_a_stream_that_goes_on_after_its_end_is_refused(tmp_path: Path, hole: bool) -> None:
    path = Path(write(tmp_path / "a", documents(20), "stream"))
    data = path.read_bytes()
    start = ArrowIpc(str(path)).units()[0].detail.starts[1]
    path.write_bytes(data[:start] + bytes(16) + data[start + 16 :] if hole else data + data)
    message = f"the message at byte {start:,} .* damaged" if hole else rf"end-of-stream mark at byte {len(data) - 8:,}"
    with pytest.raises(SourceError, match=message):
        ArrowIpc(str(path)).units()
    path.write_bytes(data + bytes(100))
    assert read_all(ArrowIpc(str(path))).equals(documents(20))


@pytest.mark.strangers
def test_a_message_of_another_kind_in_a_stream_is_refused_and_not_left_out(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a", documents(20), "stream"))
    data = path.read_bytes()
    first, second = ArrowIpc(str(path)).units()[0].detail.starts
    for broken in (data[:second] + data[:first] + data[second:], data[first:]):
        path.write_bytes(broken)
        with pytest.raises(SourceError, match=r"the message at byte [\d,]+ of [\d,]+ is cut off or damaged|cannot be read"):
            ArrowIpc(str(path)).units()


def test_a_cut_file_is_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.arrow", documents(50), "file"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"a\.arrow begins like an Arrow file but has no footer at its end"):
        ArrowIpc(str(path)).units()


def test_a_file_with_its_middle_missing_is_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.arrow", pa.table({"x": range(10_000)}), "file"))
    data = path.read_bytes()
    footer_bytes = int.from_bytes(data[-10:-6], "little")
    path.write_bytes(data[:1000] + data[-footer_bytes - 10 :])
    with pytest.raises(SourceError, match=r"a\.arrow should have a record batch up to byte .* a part of it is missing"):
        ArrowIpc(str(path)).units()


def test_a_stream_cut_anywhere_but_between_messages_is_refused_when_listed(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a", documents(30), "stream"))
    data = path.read_bytes()
    rows = []
    for size in {*range(0, len(data), 8), *range(1, len(data), 97)}:
        path.write_bytes(data[:size])
        try:
            rows.append(sum(unit.num_rows or 0 for unit in ArrowIpc(str(path)).units()))
        except SourceError as error:
            assert any(word in str(error) for word in ("cut off", "neither", "cannot be read", "not a single row"))  # noqa: PT017
    assert sorted(set(rows)) == [10, 20, 30]
    assert len(rows) < 10


def test_what_is_not_arrow_is_refused_when_listed(tmp_path: Path) -> None:
    for content in (b"", b"FEA1" + bytes(100), b"hello world, this is text"):
        (tmp_path / "a").write_bytes(content)
        with pytest.raises(SourceError, match=r"a is neither an Arrow file nor an Arrow stream"):
            ArrowIpc(str(tmp_path / "a")).units()


def test_damaged_batches_name_the_unit(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a", documents(3000), "file", 1000, "zstd"))
    source = ArrowIpc(str(path), unit_bytes=1)
    units = source.units()
    start = units[1].detail.stops[0] - 1000
    data = path.read_bytes()
    rewrite(path, data[:start] + bytes(1000) + data[start + 1000 :])
    with pytest.raises(SourceError, match=r"the record batch at byte [\d,]+ of .*a#1 cannot be decoded as Arrow IPC"):
        source.read(units[1])


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place + bit // 8] ^= 1 << bit % 8
    rewrite(path, bytes(data))


def place_of(path: Path, values: list[int], kind: str) -> int:
    """Where an array of numbers lies in a file."""
    return path.read_bytes().index(np.array(values, kind).tobytes())


@pytest.mark.strangers
@pytest.mark.parametrize("bit", [4, 20, 31])
def test_damaged_offsets_name_the_record_batch_and_the_column(tmp_path: Path, bit: int) -> None:
    path = Path(write(tmp_path / "a.arrow", documents(60), "file", 20))
    source = ArrowIpc(str(path))
    units = source.units()
    flip(path, place_of(path, [0, 6, 6, 7, 9, 12], "<i4") + 8, bit)  # lengths of 6, 0, 1, 2, 3 begin the second batch
    start = units[0].detail.starts[1]
    with pytest.raises(
        SourceError, match=rf"the record batch at byte {start:,} of .*a\.arrow is damaged in column 'tokens'"
    ):
        source.read(units[0])


@pytest.mark.strangers
def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.arrow", documents(60), "file", 20))
    flip(path, path.read_bytes().index(b"t23t24") + 1, 7)
    source = ArrowIpc(str(path))
    result = source.read_rows(source.units()[0])
    assert [(bad.row, bad.where.split()[-1]) for bad in result.bad] == [(23, str(path))]
    assert result.table["id"].to_pylist() == [i for i in range(60) if i != 23]
    with pytest.raises(BadRowError, match=r"the record batch at byte .*: column 'text' is not UTF-8 text"):
        source.read(source.units()[0])


@pytest.mark.strangers
def test_a_dictionary_index_out_of_range_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(["a", "b", "c", "a"]).dictionary_encode()})
    path = Path(write(tmp_path / "a.arrow", table, "file"))
    flip(path, place_of(path, [0, 1, 2, 0], "<i4"), 6)
    source = ArrowIpc(str(path))
    with pytest.raises(SourceError, match=r"a\.arrow is damaged in column 'x'"):
        source.read(source.units()[0])


@pytest.mark.strangers
def test_a_dictionary_with_text_that_is_not_utf8_is_an_error(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array(["first", "second"]).dictionary_encode()})
    path = Path(write(tmp_path / "a.arrow", table, "file"))
    flip(path, path.read_bytes().index(b"firstsecond"), 7)
    source = ArrowIpc(str(path))
    with pytest.raises(SourceError, match=r"a\.arrow is damaged in column 'x': .*UTF8"):
        source.read_rows(source.units()[0])


FLIP_BITS = """
import os, random, sys
from overlord.sources.arrow_ipc import ArrowIpc
from overlord.errors import OverlordError

path = sys.argv[1]
data = open(path, "rb").read()
chance = random.Random(0)
threads = os.listdir("/proc/self/task")
refused = 0
for _ in range(800):
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 4])):
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    with open(path, "wb") as file:
        file.write(changed)
    source = ArrowIpc(path)
    try:
        for unit in source.units():
            source.read(unit).to_pylist()
    except OverlordError:
        refused += 1
# A thread of Arrow that still holds a Python object when the interpreter shuts down would abort the process now and then.
assert os.listdir("/proc/self/task") == threads
print(refused)
"""


@pytest.mark.strangers
@pytest.mark.parametrize("kind", ["file", "stream"])
def test_no_flipped_bit_ends_the_process_or_shows_up_in_somebody_elses_code(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a.arrow", documents(12), kind, 6)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", FLIP_BITS, path], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 150


def test_columns_are_checked_over_all_files(tmp_path: Path) -> None:
    write(tmp_path / "a", documents(5), "file")
    write(tmp_path / "b", documents(5).drop_columns(["text"]), "stream")
    with pytest.raises(SchemaError, match=r"b has no column 'text'; it has \('id', 'tokens'\)"):
        ArrowIpc(f"{tmp_path}/*").units()


@pytest.mark.strangers
@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_a_small_compressed_batch_that_would_take_far_more_than_the_buffer_is_refused_before_it_is_read(
    tmp_path: Path, kind: str, codec: Literal["lz4", "zstd"]
) -> None:
    path = tmp_path / "a.arrow"

    def written(count: int) -> tuple[ArrowIpc, pa.Table]:
        table = pa.table({"n": np.zeros(count, np.int64), "m": np.ones(count, np.int64)})
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with make(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_table(table)
        return ArrowIpc(str(path), buffer_bytes=1 << 20), table

    source, _ = written(1 << 23)
    assert path.stat().st_size < 4 << 20
    with pytest.raises(BufferTooSmallError, match=r"a\.arrow takes 134,217,728 bytes decompressed.*buffer_bytes"):
        source.read(source.units()[0])
    source, table = written(1 << 10)
    assert source.read(source.units()[0]).equals(table)
