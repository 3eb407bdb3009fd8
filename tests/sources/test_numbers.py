"""Numbers of Arrow arrays without a copy, and without pandas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.sources.numbers import array_of, is_present, numbers_of, text_scalar, texts_of

KINDS = [pa.bool_(), pa.int8(), pa.int32(), pa.int64(), pa.uint16(), pa.uint64(), pa.float32(), pa.float64()]


@st.composite
def slices(draw, with_nulls: bool):
    """Any part of an array of numbers, or of one in chunks."""
    kind = draw(st.sampled_from(KINDS))
    values = st.booleans() if pa.types.is_boolean(kind) else st.integers(0, 100)
    lists = st.lists(st.none() | values if with_nulls else values, max_size=30)
    arrays = [pa.array(each, kind) for each in draw(st.lists(lists, min_size=1, max_size=3))]
    column = arrays[0] if draw(st.booleans()) else pa.chunked_array(arrays, kind)
    return column.slice(draw(st.integers(0, 12)), draw(st.integers(0, 30)))


@given(slices(with_nulls=False))
def test_numbers_are_those_that_arrow_converts(column):
    found = numbers_of(column)
    expected = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    np.testing.assert_array_equal(found, expected)
    if len(column):
        assert found.dtype == expected.dtype


@given(slices(with_nulls=True), st.integers(0, 1))
def test_a_default_stands_for_nulls(column, default):
    values = [default if value is None else value for value in column.to_pylist()]
    assert numbers_of(column, default=default).tolist() == values


@given(slices(with_nulls=True))
def test_entries_that_are_present_are_those_that_are_no_nulls(column):
    for array in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        assert is_present(array).tolist() == [value is not None for value in array.to_pylist()]


@given(slices(with_nulls=False))
def test_an_array_of_numbers_has_their_type_and_values(column):
    numbers = numbers_of(column)
    made = array_of(numbers)
    made.validate(full=True)
    assert made.to_pylist() == numbers.tolist()
    assert not len(column) or made.type == column.type


def test_entries_of_lists_and_of_unknown_types_are_present_or_not():
    assert is_present(pa.nulls(3)).tolist() == [False] * 3
    lists = pa.array([[1], None, []], pa.list_(pa.int8()))
    assert is_present(lists.slice(1)).tolist() == [False, True]


@given(st.lists(st.text(max_size=8), max_size=20))
def test_texts_are_those_that_arrow_makes(texts):
    made = texts_of(texts)
    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string()))


def test_a_text_is_a_scalar_of_the_type_of_its_column():
    for kind in (pa.string(), pa.large_string()):
        assert text_scalar("é", kind) == pa.scalar("é", kind)


TOKENS = 'ol.Parquet("tokens.parquet")'
TEXTS = 'ol.Parquet("texts.parquet", transform=ol.Tokenize("text", encoding=ol.ByteTokenizer()))'


@pytest.mark.parametrize("source", [TOKENS, TEXTS], ids=["tokens", "texts"])
def test_steps_of_text_do_not_import_pandas(tmp_path, source):
    """It is installed nearly everywhere, and every process would take time and memory for it."""
    pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 200}), tmp_path / "tokens.parquet")
    pq.write_table(pa.table({"text": ["some text", None, "more"] * 50}), tmp_path / "texts.parquet")
    (tmp_path / "pandas.py").write_text("open('imported', 'w').close()\nraise ImportError('not this one')\n")
    script = f"""
import sys
import overlord as ol

job = ol.Job(sources={{"a": {source}}}, batch=ol.Batch(tokens=64, sequence_length=16), mesh=ol.Mesh(dp=2))
for engine in (None, ol.Processes(2)):
    with ol.start(job, engine=engine) as loader:
        for rank in range(2):
            next(loader.client(rank))
"""
    (tmp_path / "script.py").write_text(script)
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not Path(tmp_path, "imported").exists()
