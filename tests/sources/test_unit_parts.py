"""Large units in parts: every row in exactly one of them, under its own number, and each unit read once for all."""

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.checkpoint.cache_keys import PlaceText, unit_key
from overlord.declare.source import RowPart, Unit
from overlord.errors import SourceError
from overlord.sources.reading import BadRow, MadeRows, ReadResult
from overlord.sources.unit_parts import PartReader, UnitParts
from overlord.stream.chunk_order import (
    LEAST_PART_BYTES,
    MOST_PARTS,
    RunTurns,
    UnitRuns,
    count_parts,
    default_part_bytes,
    units_of_chunk,
)

COUNTS = st.lists(st.integers(1, 6), min_size=1, max_size=12).filter(lambda counts: max(counts) > 1)


@given(st.integers(0, 200), st.integers(1, 20), st.booleans())
def test_a_row_is_in_one_part_and_which_is_known(num_rows, of, is_strided):
    parts = [RowPart(index, of, is_strided) for index in range(of)]
    assert sorted(row for part in parts for row in part.rows(num_rows)) == list(range(num_rows))
    for part in parts:
        for row in part.rows(num_rows):
            assert RowPart.with_row(row, num_rows, of, is_strided=is_strided) == part.index


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=50), st.integers(1, 1 << 34), st.integers(1, 500))
def test_only_large_units_that_fit_into_the_buffer_are_cut(unit_bytes, buffer_bytes, num_sources):
    part_bytes = default_part_bytes(unit_bytes, buffer_bytes=buffer_bytes, num_sources=num_sources)
    if part_bytes:
        assert LEAST_PART_BYTES <= part_bytes <= 4 << 20
        assert 2 * part_bytes < max(unit_bytes) <= buffer_bytes // 2
        for size in unit_bytes:
            count = count_parts(size, part_bytes)
            assert 1 <= count <= MOST_PARTS
            assert count == 1 or size / count <= part_bytes or count == MOST_PARTS


def test_a_row_group_of_text_is_cut_and_units_of_the_usual_size_are_not():
    def parts(unit_mib: int, num_sources: int = 8, buffer_mib: int = 256) -> int:
        size = unit_mib << 20
        part_bytes = default_part_bytes([size], buffer_bytes=buffer_mib << 20, num_sources=num_sources)
        return count_parts(size, part_bytes) if part_bytes else 1

    assert [parts(size) for size in (1, 8, 9, 16, 63, 128, 129, 1000)] == [1, 1, 3, 4, 16, 32, 1, 1]
    assert [parts(63, num_sources=n) for n in (1, 32, 1000)] == [16, 63, 63]
    assert parts(63, buffer_mib=100) == 1


def units_of(counts: list[int], rows: int = 20, *, is_strided: bool = True) -> UnitParts:
    units = [Unit(f"f{i // 3}", i % 3, rows + i, 1000) for i in range(len(counts))]
    return UnitParts(units, counts, 100, is_strided=is_strided)


@given(COUNTS, st.integers(0, 5), st.booleans())
def test_the_parts_of_a_unit_follow_each_other_and_have_one_turn(counts, seed, shuffle):
    units = pickle.loads(pickle.dumps(units_of(counts)))
    assert len(units) == len(list(units)) == sum(counts)
    assert [unit.num_rows for unit in units.units] == [
        sum(part.num_rows for part in units if (part.path, part.index) == (unit.path, unit.index)) for unit in units.units
    ]
    runs = UnitRuns.of(units)
    turns = pickle.loads(pickle.dumps(RunTurns(seed, "s", runs, shuffle=shuffle)))
    chunks = list(range(3 * len(units)))
    read = [units[units_of_chunk(seed, "s", runs, window=1, shuffle=shuffle, chunk=k)[0]] for k in chunks]
    for epoch in range(3):
        begin = epoch * len(units)
        assert Counter(read[begin : begin + len(units)]) == Counter(units)
    turn = -1
    for k in chunks:
        part = read[k].part
        turn += part is None or part.index == 0
        assert turns.turn(k) == turn
        assert turns.last_chunk(k) == (k if part is None else k + part.of - 1 - part.index)
    assert turns.turns(np.array(chunks)).tolist() == [turns.turn(k) for k in chunks]


class CountingReader:
    """Reads units of numbered rows, of which every third is bad where `bad` says so."""

    def __init__(self, *, bad: bool = False, made: bool = False, error: bool = False) -> None:
        self.bad, self.made, self.error = bad, made, error
        self.read: list[str] = []

    def read_rows(self, unit: Unit) -> ReadResult:
        self.read.append(str(unit))
        assert unit.part is None
        if self.error:
            raise SourceError("gone")
        rows = np.arange(unit.num_rows or 0)
        good = rows[rows % 3 != 1] if self.bad else rows
        bad = tuple(BadRow(row, "bad", "here") for row in rows[rows % 3 == 1].tolist()) if self.bad else ()
        table, made = pa.table({"row": good, "text": [f"{unit}: {row}" for row in good]}), None
        if self.made:  # two rows of each good one but the first, which a transform dropped
            origin = np.repeat(np.arange(1, len(good)), 2)
            table, made = table.take(origin), MadeRows(len(good), origin, 1)
        return ReadResult(table, good if self.bad else None, bad, made=made)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("is_strided", [True, False])
@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("bad", [True, False])
def test_parts_have_the_rows_of_their_unit_under_their_own_numbers(is_strided, made, bad):
    inner = CountingReader(bad=bad, made=made)
    units = units_of([4, 1, 6], is_strided=is_strided)
    reader = PartReader(inner, 1 << 20)
    whole = {str(unit): CountingReader(bad=bad, made=made).read_rows(unit) for unit in units.units}
    found: dict[str, list[tuple[int, Any]]] = {name: [] for name in whole}
    reported: dict[str, list[int]] = {name: [] for name in whole}
    for unit in units:
        result = reader.read_rows(unit)
        rows = result.unit_rows.tolist()
        assert rows == result.table.column("row").to_pylist()
        if unit.part is not None and unit.whole is not None:
            assert {*rows, *(each.row for each in result.bad)} <= {*unit.part.rows(unit.whole.num_rows or 0)}
        found[str(unit)].extend(zip(rows, result.table.column("text").to_pylist(), strict=True))
        reported[str(unit)] += [each.row for each in result.bad]
    for name, result in whole.items():
        texts = result.table.column("text").to_pylist()
        assert sorted(found[name]) == sorted(zip(result.unit_rows.tolist(), texts, strict=True))
        assert sorted(reported[name]) == [each.row for each in result.bad]
    assert inner.read == [str(unit) for unit in units.units]
    assert reader.held_bytes == 0


def test_rows_that_a_transform_lost_are_in_one_part():
    class Lost(CountingReader):
        def read_rows(self, unit: Unit) -> ReadResult:
            return replace(super().read_rows(unit), made=MadeRows(unit.num_rows or 0, np.full(unit.num_rows or 0, -1), 1))

    reader = PartReader(Lost(), 1 << 20)
    sizes = [reader.read_rows(unit).table.num_rows for unit in units_of([3])]
    assert sizes == [20, 0, 0]


def test_threads_that_need_parts_of_one_unit_read_it_once():
    inner = CountingReader()
    units = units_of([6] * 4)
    reader = PartReader(inner, 1 << 20)
    with ThreadPoolExecutor(8) as threads:
        rows = [result.table.num_rows for result in threads.map(reader.read_rows, units)]
    assert sum(rows) == sum(unit.num_rows or 0 for unit in units.units)
    assert Counter(inner.read) == Counter(str(unit) for unit in units.units)


def test_what_is_kept_is_bounded_and_a_part_that_is_needed_again_is_read_again():
    inner = CountingReader()
    units = units_of([2] * 5, rows=100)
    reader = PartReader(inner, 1)
    for unit in [*units[::2], *units[::2]]:  # the first parts: no unit is done
        reader.read_rows(unit)
        assert 0 < reader.held_bytes < 2 * 100 * 40
    assert len(inner.read) == 10
    reader.close()
    assert reader.held_bytes == 0
    assert reader.read_rows(units[0]).table.num_rows == 50
    assert reader.held_bytes == 0


def test_each_part_has_a_key_of_its_own_in_a_cache():
    versioned = [replace(unit, version="1") for unit in units_of([3, 2, 1]).units]
    limited = [replace(unit, num_rows=10, whole=unit) for unit in versioned]
    listings = [UnitParts(versioned, [3, 2, 1], 100, is_strided=strided) for strided in (True, False)]
    listings += [UnitParts(limited, [3, 2, 1], 100, is_strided=True), UnitParts(versioned, [4, 1, 1], 100, is_strided=True)]
    keys = {unit_key("", unit, PlaceText()) for listed in listings for unit in listed}
    # A unit that is not cut is the same in all listings, but for the limited one; unit 1 is cut in the last listing no more.
    assert len(keys) == (5 + 1) + 5 + (5 + 1) + (4 + 1)
    assert None not in keys


def test_a_unit_that_cannot_be_read_is_tried_again():
    inner = CountingReader(error=True)
    reader = PartReader(inner, 1 << 20)
    for unit in units_of([2]):
        with pytest.raises(SourceError, match="gone"):
            reader.read_rows(unit)
    inner.error = False
    assert [reader.read_rows(unit).table.num_rows for unit in units_of([2])] == [10, 10]
