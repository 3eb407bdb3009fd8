"""Files that stay open between row groups: the right one, no more than allowed, and none after the end."""

import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import overlord as ol
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


def test_one_file_stays_open_and_goes_with_close(tmp_path):
    source = ol.Parquet([written(tmp_path / "a.parquet", 0), written(tmp_path / "b.parquet", 100)])
    units = source.units()
    assert [tokens(source.read(unit)) for unit in units] == [[0, 1], [2, 3], [4, 5], [100, 101], [102, 103], [104, 105]]
    assert open_files(tmp_path) == 1
    source.close()
    assert open_files(tmp_path) == 0
    assert tokens(source.read(units[0])) == [0, 1]
    source.close()


def test_a_file_that_was_written_anew_and_listed_again_is_opened_again(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    assert tokens(source.read(source.units()[1])) == [2, 3]
    written(tmp_path / "a.parquet", 50)
    assert tokens(source.read(source.units()[1])) == [52, 53]
    source.close()


@pytest.mark.strangers
def test_a_file_that_was_replaced_or_deleted_is_not_read_on_because_it_is_open(tmp_path):
    path = tmp_path / "a.parquet"
    source = ol.Parquet(written(path, 0))
    units = source.units()
    assert tokens(source.read(units[0])) == [0, 1]
    replace(path)
    with pytest.raises(ol.SourceError, match=r"a\.parquet has changed since it was listed"):
        source.read(units[1])
    assert open_files(tmp_path) == 0
    units = source.units()
    assert tokens(source.read(units[0])) == [0, 1]
    path.unlink()
    with pytest.raises(ol.SourceError, match=r"a\.parquet does not exist .* put the file back"):
        source.read(units[1])
    source.close()


def test_a_source_that_keeps_a_file_open_can_be_pickled(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    source.read(source.units()[0])
    again = pickle.loads(pickle.dumps(source))
    assert again == source
    assert tokens(again.read(again.units()[2])) == [4, 5]
    source.close()
    again.close()


def test_a_loader_that_is_closed_leaves_no_file_open(tmp_path):
    source = ol.Parquet(written(tmp_path / "a.parquet", 0))
    job = ol.Job(sources={"a": source}, batch=ol.Batch(tokens=6, sequence_length=6))
    with ol.start(job) as loader:
        next(loader.client(0))
    assert open_files(tmp_path) == 0
