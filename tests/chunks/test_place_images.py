"""Room for images in texts: as many places as an image has tokens, where it belongs, and no loss on them."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import overlord as ol
from overlord.chunks.transforms.apply import TransformCall
from overlord.chunks.transforms.outcome import Context

GRID = ol.vision.PatchGrid(patch=10, merge=2)
DECODE = ol.vision.DecodeImage("pictures", size=None)
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
    found = ol.vision.PlaceImages(DECODE, GRID, PLACE)(table)
    places = [sum(int(GRID.tokens(np.array([h]), np.array([w]))[0]) for h, w in of_row) for of_row in sizes]
    assert found["tokens"].to_pylist() == [[PLACE] * n + text for n, text in zip(places, texts, strict=True)]
    assert found["loss_mask"].to_pylist() == [[0] * n + [1] * len(text) for n, text in zip(places, texts, strict=True)]


def test_a_marker_says_where_each_image_goes_and_a_mask_that_is_there_is_kept():
    mask = pa.array([[1, 1, 0, 1, 1]], pa.list_(pa.int8()))
    table = table_of([[7, MARKER, 8, MARKER, 9]], [[(40, 20), (10, 10)]], loss_mask=mask)
    found = ol.vision.PlaceImages(DECODE, GRID, PLACE, marker=MARKER)(table)
    assert found["tokens"].to_pylist() == [[7, PLACE, PLACE, 8, PLACE, 9]]
    assert found["loss_mask"].to_pylist() == [[1, 0, 0, 0, 0, 1]]


@pytest.mark.strangers
def test_markers_and_places_may_be_special_ids_and_weights_stay_weights():
    weights = pa.array([[0.5, 1.0, 0.25]], pa.list_(pa.float32()))
    table = table_of([[7, -200, 8]], [[(40, 20)]], weights=weights)
    found = ol.vision.PlaceImages(DECODE, GRID, -201, marker=-200, loss_mask="weights")(table)
    assert found["tokens"].to_pylist() == [[7, -201, -201, 8]]
    assert found["weights"].to_pylist() == [[0.5, 0.0, 0.0, 0.25]]


@pytest.mark.strangers
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"text": [2**31]}, "token id 2147483648 is not an id that int32 can hold"),
        ({"text": [None]}, "'tokens' has a null inside its list"),
        ({"text": [MARKER]}, "1 markers for 0 images"),
        ({"mask": [1, 1]}, "'loss_mask' must have one entry per token, it has 2 for 1 tokens"),
    ],
)
def test_what_is_wrong_with_one_row_is_put_down_to_that_row(bad, message):
    texts, masks = [[1], bad.get("text", [5]), [2]], [[1], bad.get("mask", [1]), [1]]
    table = pa.table(
        {
            "tokens": pa.array(texts, pa.list_(pa.int64())),
            "pictures": pa.array([[], [], []], pa.list_(pa.binary())),
            "loss_mask": pa.array(masks, pa.list_(pa.int8())),
        }
    )
    place, found = TransformCall(ol.vision.PlaceImages(DECODE, GRID, PLACE, marker=MARKER)), []
    outcome = place.run(table, np.array([10, 11, 12]), Context("web", 0, 0), lambda *row: found.append(row))
    assert outcome.table is not None
    assert outcome.table["tokens"].to_pylist() == [[1], [2]]
    assert [row for row, _ in found] == [11]
    assert message in found[0][1]


@pytest.mark.strangers
def test_a_row_whose_image_is_broken_is_bad_for_its_image_and_not_for_its_markers(tmp_path):
    table = table_of([[MARKER, 1], [MARKER, 2]], [[(10, 10)], [(10, 10)]])
    broken = pa.array([[b"no picture"], [picture(10, 10)]], pa.list_(pa.binary()))
    pq.write_table(table.set_column(1, "pictures", broken), tmp_path / "pictures.parquet")
    source = ol.Parquet(
        str(tmp_path / "pictures.parquet"),
        transform=ol.vision.PlaceImages(DECODE, GRID, PLACE, marker=MARKER),
        decode=DECODE,
        loss_mask="loss_mask",
        repeat=False,
    )
    job = ol.Job(sources={"pairs": source}, batch=ol.Batch(samples=1, sequence_length=8))
    with ol.start(job) as loader, pytest.raises(ol.errors.BadRowError, match=r"row 0: (?!.*markers)"):
        next(loader.client(0))


def test_other_numbers_of_markers_than_images_and_missing_columns_are_refused():
    with pytest.raises(ol.errors.DataError, match="1 markers for 2 images"):
        ol.vision.PlaceImages(DECODE, GRID, PLACE, marker=MARKER)(table_of([[MARKER]], [[(10, 10), (10, 10)]]))
    with pytest.raises(ol.errors.SchemaError, match="keep="):
        ol.vision.PlaceImages(DECODE, GRID, PLACE)(table_of([[1]], [[]]).drop(["pictures"]))
    with pytest.raises(ol.errors.SpecError, match="token"):
        ol.vision.PlaceImages(DECODE, GRID, 2**31)
