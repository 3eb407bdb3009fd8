"""The reader of Parquet: which file it keeps open between row groups, and which decoder it uses. The source is a value."""

import os
import pickle
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
from overlord.sources.reading import ReadResult, TogetherReader
from tests.sources.damage import replace


def open_files(folder) -> int:
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.realpath(link).startswith(str(folder)) for link in links if os.path.exists(link))


def written(path, first: int) -> str:
    rows = [[first + i] * 3 for i in range(6)]
    pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), path, row_group_size=2)
    return str(path)


def tokens(table) -> list[int]:
    return [row[0] for row in table.column("tokens").to_pylist()]


@contextmanager
def reader_of(source: ol.Parquet, release_gil: bool = False):
    reader = source.open_reader(release_gil=release_gil)
    try:
        yield lambda unit: tokens(reader.read_rows(unit).strict())
    finally:
        reader.close()


def test_one_file_stays_open_until_the_reader_is_closed(tmp_path):
    source = ol.Parquet([written(tmp_path / "a.parquet", 0), written(tmp_path / "b.parquet", 100)])
    units = source.units()
    with reader_of(source) as read:
        assert [read(unit) for unit in units] == [[0, 1], [2, 3], [4, 5], [100, 101], [102, 103], [104, 105]]
        assert open_files(tmp_path) == 1
    assert open_files(tmp_path) == 0
    assert read(units[0]) == [0, 1]
    assert open_files(tmp_path) == 0


def test_a_source_keeps_nothing_open(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    attributes = dict(vars(source))
    assert [tokens(source.read(unit)) for unit in source.units()] == [[0, 1], [2, 3], [4, 5]]
    assert open_files(tmp_path) == 0
    assert vars(source) == attributes
    assert pickle.loads(pickle.dumps(source)) == source


def test_two_readers_of_one_source_share_nothing(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    units = source.units()
    with reader_of(source) as read:
        with reader_of(source) as other:
            assert read(units[0]) == other(units[0]) == [0, 1]
            assert open_files(tmp_path) == 2
        assert open_files(tmp_path) == 1
        assert read(units[1]) == [2, 3]


def test_a_subclass_with_a_reading_of_its_own_is_read_by_it(tmp_path):
    @dataclass(frozen=True)
    class Reversed(ol.Parquet):
        def read_rows(self, unit):
            return ReadResult(super().read_rows(unit).table.take([1, 0]))

    source = Reversed(written(tmp_path / "a.parquet", 0))
    with reader_of(source, release_gil=True) as read:
        assert read(source.units()[0]) == [1, 0]


@pytest.mark.parametrize("release_gil", [False, True])
def test_both_decoders_read_the_same(tmp_path, release_gil):
    rows = [[*range(i, i + 500)] for i in range(4)]
    pq.write_table(pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))}), tmp_path / "a.parquet")
    source = ol.Parquet(str(tmp_path / "a.parquet"))
    reader = source.open_reader(release_gil=release_gil)
    assert reader.read_rows(source.units()[0]).strict().column("tokens").to_pylist() == rows
    reader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_host_with_reading_threads_asks_for_the_decoder_that_releases_the_gil(tmp_path, num_workers):
    chosen = []

    @dataclass(frozen=True)
    class Watched(ol.Parquet):
        def open_reader(self, *, release_gil):
            chosen.append(release_gil)
            return super().open_reader(release_gil=release_gil)

    source = Watched(written(tmp_path / "a.parquet", 0))
    job = ol.Job(sources={"a": source}, batch=ol.Batch(tokens=6, sequence_length=6), num_workers=num_workers)
    with ol.start(job) as loader:
        next(loader.client(0))
    assert chosen == [num_workers > 0]


def test_a_file_that_was_written_anew_and_listed_again_is_opened_again(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    with reader_of(source) as read:
        assert read(source.units()[1]) == [2, 3]
        written(tmp_path / "a.parquet", 50)
        assert read(source.units()[1]) == [52, 53]


@pytest.mark.strangers
def test_a_file_that_was_replaced_or_deleted_is_not_read_on_because_it_is_open(tmp_path):
    path = tmp_path / "a.parquet"
    source = ol.Parquet(written(path, 0))
    units = source.units()
    with reader_of(source) as read:
        assert read(units[0]) == [0, 1]
        replace(path)
        with pytest.raises(ol.errors.SourceError, match=r"a\.parquet has changed since it was listed"):
            read(units[1])
        assert open_files(tmp_path) == 0
        units = source.units()
        assert read(units[0]) == [0, 1]
        path.unlink()
        with pytest.raises(ol.errors.SourceError, match=r"a\.parquet does not exist .* put the file back"):
            read(units[1])


def test_a_loader_that_is_closed_leaves_no_file_open(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    job = ol.Job(sources={"a": source}, batch=ol.Batch(tokens=6, sequence_length=6))
    with ol.start(job) as loader:
        next(loader.client(0))
    assert open_files(tmp_path) == 0


def long_lists(path, first: int, lengths=(300, 0, 500, None)) -> str:
    """A file of two row groups of long lists, and one of lists without a number."""
    rng = np.random.default_rng(first)
    groups = [[None if n is None else rng.integers(0, 1000, n).astype(np.int32) for n in lengths] for _ in range(2)]
    schema = pa.schema([("tokens", pa.list_(pa.int32()))])
    with pq.ParquetWriter(path, schema, use_dictionary=first == 0) as writer:
        for rows in [*groups, [[], None]]:
            writer.write_table(pa.table({"tokens": rows}, schema=schema))
    return str(path)


@pytest.mark.parametrize("release_gil", [False, True])
def test_units_that_are_read_together_are_read_as_each_of_them(tmp_path, release_gil):
    source = ol.Parquet([long_lists(tmp_path / "a.parquet", 0), long_lists(tmp_path / "b.parquet", 1)])
    units = source.units()
    reader = source.open_reader(release_gil=release_gil)
    assert isinstance(reader, TogetherReader)
    for numbers in [(0, 1), (4, 0, 3, 1), (3,), (2, 0), (0, 1, 2, 3, 4, 5), ()]:
        chosen = [units[i] for i in numbers]
        found = reader.read_together(chosen)
        if len(numbers) > 1 and not {2, 5} & {*numbers}:  # a row group without a number is read alone
            assert found is not None
            assert found == pa.concat_tables([source.read(unit) for unit in chosen])
            assert found.column(0).num_chunks == 1
        else:
            assert found is None
    reader.close()
    assert open_files(tmp_path) == 0


def test_beside_columns_that_are_no_lists_units_are_read_one_by_one(tmp_path):
    tokens = pa.array([list(range(400))] * 6, pa.list_(pa.int32()))
    pq.write_table(pa.table({"tokens": tokens, "id": range(6)}), tmp_path / "a.parquet", row_group_size=2)
    for columns in (None, ["tokens"], ["id"]):
        source = ol.Parquet(str(tmp_path / "a.parquet"), columns=columns)
        reader, units = source.open_reader(release_gil=False), source.units()
        assert isinstance(reader, TogetherReader)
        found = reader.read_together(units)
        assert found == (pa.concat_tables(map(source.read, units)) if columns == ["tokens"] else None)
        reader.close()


@pytest.mark.parametrize("damage", ["a page", "another file", "no file"])
def test_where_one_of_several_units_is_damaged_each_is_read_and_the_error_names_it(tmp_path, damage):
    paths = [long_lists(tmp_path / "a.parquet", 0), long_lists(tmp_path / "b.parquet", 1)]
    source = ol.Parquet(paths)
    units = source.units()
    file = tmp_path / "b.parquet"
    if damage == "a page":
        status, data = file.stat(), bytearray(file.read_bytes())
        start, stop = units[3].detail.chunk(0, 0).extent
        data[start:stop] = bytes(stop - start)
        file.write_bytes(data)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        message = r"row group 0 of .*b\.parquet cannot be decoded"
    elif damage == "another file":
        long_lists(file, 1, lengths=(300, 300))
        message = r"b\.parquet has changed since it was listed"
    else:
        file.unlink()
        message = r"b\.parquet"
    reader = source.open_reader(release_gil=False)
    assert isinstance(reader, TogetherReader)
    chosen = [units[0], units[3], units[1]]
    assert reader.read_together(chosen) is None
    with pytest.raises(ol.errors.SourceError, match=message):
        [reader.read_rows(unit) for unit in chosen]
    reader.close()
