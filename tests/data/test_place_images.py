"""Room for images in texts: as many places as an image has tokens, where it belongs, and no loss on them."""

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import overlord as ol

GRID = ol.PatchGrid(patch=10, merge=2)
DECODE = ol.DecodeImage("pictures", size=None)
PLACE, MARKER = 900, 901


def picture(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


def table_of(texts: list[list[int]], sizes: list[list[tuple[int, int]]], **columns: pa.Array) -> pa.Table:
    files = [[picture(*size) for size in of_row] for of_row in sizes]
    return pa.table({"tokens": pa.array(texts, pa.list_(pa.int32())), "pictures": pa.array(files), **columns})


rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 50), max_size=6),
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@given(rows)
@settings(max_examples=40)
def test_without_a_marker_images_come_before_the_text_and_take_no_loss(rows):
    texts, sizes = [text for text, _ in rows], [of_row for _, of_row in rows]
    files = pa.array([[picture(*size) for size in of_row] for of_row in sizes], pa.list_(pa.binary()))
    table = pa.table({"tokens": pa.array(texts, pa.list_(pa.int32())), "pictures": files})
    found = ol.PlaceImages(DECODE, GRID, PLACE)(table)
    places = [sum(int(GRID.tokens(np.array([h]), np.array([w]))[0]) for h, w in of_row) for of_row in sizes]
    assert found["tokens"].to_pylist() == [[PLACE] * n + text for n, text in zip(places, texts, strict=True)]
    assert found["loss_mask"].to_pylist() == [[0] * n + [1] * len(text) for n, text in zip(places, texts, strict=True)]


def test_a_marker_says_where_each_image_goes_and_a_mask_that_is_there_is_kept():
    mask = pa.array([[1, 1, 0, 1, 1]], pa.list_(pa.int8()))
    table = table_of([[7, MARKER, 8, MARKER, 9]], [[(40, 20), (10, 10)]], loss_mask=mask)
    found = ol.PlaceImages(DECODE, GRID, PLACE, marker=MARKER)(table)
    assert found["tokens"].to_pylist() == [[7, PLACE, PLACE, 8, PLACE, 9]]
    assert found["loss_mask"].to_pylist() == [[1, 0, 0, 0, 0, 1]]


def test_other_numbers_of_markers_than_images_and_missing_columns_are_refused():
    with pytest.raises(ol.DataError, match="1 markers for 2 images"):
        ol.PlaceImages(DECODE, GRID, PLACE, marker=MARKER)(table_of([[MARKER]], [[(10, 10), (10, 10)]]))
    with pytest.raises(ol.SchemaError, match="keep="):
        ol.PlaceImages(DECODE, GRID, PLACE)(table_of([[1]], [[]]).drop(["pictures"]))
    with pytest.raises(ol.SpecError, match="token"):
        ol.PlaceImages(DECODE, GRID, 2**31)
