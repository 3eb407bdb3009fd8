"""Columns of views into a shared buffer."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.sources import views
from overlord.sources.reading import table_bytes
from overlord.sources.storage import MappedFile, Storage
from overlord.sources.views import (
    combine_chunks,
    compact,
    materialize,
    read_value,
    take_rows,
    views_into,
    views_into_file,
)

DATA = bytes(np.random.default_rng(0).integers(0, 256, 3000, dtype=np.uint8))
places = st.lists(st.tuples(st.integers(0, 2900), st.integers(-1, 100)), max_size=30)


def expected(rows: list[tuple[int, int]]) -> list[bytes | None]:
    return [None if length < 0 else DATA[offset : offset + length] for offset, length in rows]


def column(rows: list[tuple[int, int]]) -> pa.Array:
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    return views_into(pa.py_buffer(DATA), pairs[:, 0], pairs[:, 1])


@given(places)
def test_views_are_valid_arrow_and_show_what_they_point_to(rows: list[tuple[int, int]]) -> None:
    array = column(rows)
    array.validate(full=True)
    assert array.to_pylist() == expected(rows)


@given(places, st.data())
def test_taking_slicing_and_joining_rows_agree_with_lists(rows: list[tuple[int, int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(rows)))
    combine_chunks = pa.concat_tables([pa.table({"v": column(rows), "n": range(len(rows))})] * 2).slice(start)
    want = [*expected(rows), *expected(rows)][start:]
    order = data.draw(st.lists(st.integers(0, len(want) - 1), max_size=10) if want else st.just([]))
    taken = take_rows(combine_chunks, np.array(order, np.int64))
    taken.validate(full=True)
    assert taken["v"].to_pylist() == [want[i] for i in order]
    assert taken["n"].to_pylist() == [combine_chunks["n"][i].as_py() for i in order]


@given(places)
def test_a_compact_table_has_the_values_and_nothing_else(rows: list[tuple[int, int]]) -> None:
    table = compact(pa.table({"v": column(rows)}))
    assert table["v"].to_pylist() == expected(rows)
    assert len(pickle.dumps(table)) < 1500 + 16 * len(rows) + sum(max(length, 0) for _, length in rows)


def test_files_beyond_the_reach_of_an_offset_are_seen_in_overlapping_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "PIECE_BYTES", 100)
    monkeypatch.setattr(views, "MOST_BYTES", 200)
    rows = [(i * 37, 60) for i in range(70)]
    array = column(rows)
    array.validate(full=True)
    assert array.to_pylist() == expected(rows)


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> MappedFile:
    path = tmp_path_factory.mktemp("views") / "data"
    path.write_bytes(DATA)
    return MappedFile(Storage().list_files([str(path)])[0])


def test_mapped_pages_are_not_held_memory(mapped: MappedFile) -> None:
    array = views_into_file(mapped, np.array([0, 100]), np.array([50, 50]), [DATA[:12], DATA[100:112]])
    table = pa.table({"a": array, "b": array, "n": pa.array([1, 2], pa.int64())})
    assert table_bytes(table, [mapped]) == 2 * 16 + 16
    assert table_bytes(table) == 2 * 16 + 16 + len(DATA)


@given(places, st.data())
def test_values_in_a_file_are_copied_out_as_those_in_memory(
    mapped: MappedFile, rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    pairs = np.array(rows, np.int64).reshape(-1, 2)
    first = [DATA[offset : offset + min(max(length, 0), 12)] for offset, length in rows]
    array = views_into_file(mapped, pairs[:, 0], pairs[:, 1], first)
    array.validate(full=True)
    both = combine_chunks(pa.chunked_array([array, column(rows)], pa.binary_view()))
    start = data.draw(st.integers(0, len(both)))
    copied = materialize(both.slice(start))
    copied.validate(full=True)
    want = [*expected(rows), *expected(rows)]
    assert copied.to_pylist() == want[start:]
    for row, value in enumerate(want):
        found = read_value(both, row)
        assert (found is not None) == (row < len(rows) and value is not None and len(value) > 12)
        assert found is None or found.to_pybytes() == value
