"""Images: sizes from headers, damage found before decoding, and pictures that match Pillow's."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, features

from overlord.errors import DataError, SchemaError, SpecError
from overlord.media.images import DecodeImage
from overlord.sources.views import views_into

Pixels = NDArray[np.uint8]


def psnr(a: Pixels, b: Pixels) -> float:
    """Peak signal-to-noise ratio in dB: 35 is hard to tell apart by eye, 50 is rounding."""
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def scene(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture with the statistics of a photograph: amplitudes that fall as 1/f, and some hard edges."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width)
    planes = []
    for _ in range(3):
        spectrum = np.exp(2j * np.pi * rng.random(frequency.shape)) / np.maximum(frequency, 1) ** 1.2
        plane = np.fft.irfft2(spectrum, (height, width))
        planes.append(128 + 45 * plane / plane.std())
    picture = np.clip(np.stack(planes, axis=-1) * [0.6, 0.4, 0.5] + planes[0][..., None] * 0.5 - 30, 0, 255)
    for _ in range(6):
        top, left = rng.integers(0, height), rng.integers(0, width)
        picture[top : top + height // 6, left : left + width // 6] = rng.integers(0, 255, 3)
    return Image.fromarray(picture.astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def by_pillow(data: bytes, size: tuple[int, int], box: tuple[float, float, float, float] | None = None) -> Pixels:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=box))


# The picture


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize(("height", "width"), [(541, 622), (960, 1280), (500, 333), (1411, 700), (340, 2000)])
def test_a_reduced_decode_shows_the_same_picture_as_pillows_full_one(height: int, width: int, subsampling: int) -> None:
    data = encoded(scene(height, width), quality=88, subsampling=subsampling)
    assert psnr(DecodeImage(size=(336, 336)).decode(data), by_pillow(data, (336, 336))) >= 35


@given(st.integers(8, 300), st.integers(8, 300), st.integers(16, 200), st.integers(16, 200))
@settings(max_examples=30)
def test_the_resize_agrees_with_pillows_closer_than_the_eye_can_tell(
    height: int, width: int, out_h: int, out_w: int
) -> None:
    data = encoded(scene(height, width), "PNG")
    assert psnr(DecodeImage(size=(out_h, out_w)).decode(data), by_pillow(data, (out_h, out_w))) >= 38


@given(st.integers(100, 700), st.integers(100, 700), st.integers(0, 3))
@settings(max_examples=20)
def test_no_size_shifts_the_picture(height: int, width: int, seed: int) -> None:
    # A smooth slope shows an offset of a fraction of a pixel that a texture would hide.
    slope = np.add.outer(np.linspace(0, 120, height), np.linspace(0, 120, width))
    data = encoded(Image.fromarray(np.repeat(slope[..., None], 3, axis=2).astype(np.uint8)), quality=95)
    size = (64 + 31 * seed, 120 - 13 * seed)
    made, expected = DecodeImage(size=size).decode(data), by_pillow(data, size)
    assert np.abs(made.astype(int) - expected).max() <= 3


def test_without_a_size_the_picture_is_libjpegs() -> None:
    data = encoded(scene(60, 91))
    made = DecodeImage().decode(data)
    assert made.shape == (60, 91, 3)
    assert psnr(made, np.asarray(Image.open(io.BytesIO(data)))) > 50


def test_crop_keeps_the_aspect_ratio_and_the_middle() -> None:
    data = encoded(scene(300, 500), quality=95)
    made = DecodeImage(size=(100, 100), fit="crop").decode(data)
    assert psnr(made, by_pillow(data, (100, 100), box=(100, 0, 400, 300))) >= 35


def test_a_picture_can_be_written_into_a_batch() -> None:
    batch = np.zeros((2, 32, 48, 3), np.uint8)
    for kind in ("JPEG", "PNG"):
        decode = DecodeImage(size=(32, 48))
        data = encoded(scene(100, 90), kind)
        assert decode.decode(data, out=batch[1]) is not None
        np.testing.assert_array_equal(batch[1], decode.decode(data))
    assert not batch[0].any()


def test_threads_that_decode_together_do_not_mix_their_pictures() -> None:
    decode = DecodeImage(size=(64, 64))
    files = [encoded(scene(100 + 17 * i, 180 - 11 * i, seed=i)) for i in range(8)]
    alone = [decode.decode(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for made, expected in zip(pool.map(decode.decode, files), alone, strict=True):
                np.testing.assert_array_equal(made, expected)


# Kinds of image


@pytest.mark.parametrize(
    ("image", "kind", "expected"),
    [
        (Image.new("L", (9, 7), 80), "JPEG", (80, 80, 80)),
        (Image.new("CMYK", (9, 7), (255, 0, 0, 0)), "JPEG", (0, 255, 255)),
        (Image.new("L", (9, 7), 80), "PNG", (80, 80, 80)),
        (Image.new("1", (9, 7), 1), "PNG", (255, 255, 255)),
        (Image.new("RGBA", (9, 7), (10, 20, 30, 255)), "PNG", (10, 20, 30)),
        (Image.new("RGBA", (9, 7), (10, 20, 30, 0)), "PNG", (255, 255, 255)),
        (Image.fromarray(np.full((7, 9), 0x5012, np.uint16)), "PNG", (0x50, 0x50, 0x50)),
        (Image.new("P", (9, 7), 0), "GIF", (0, 0, 0)),
        (Image.new("RGB", (9, 7), (1, 2, 3)), "BMP", (1, 2, 3)),
    ],
)
@pytest.mark.parametrize("size", [None, (3, 4)])
def test_every_kind_of_image_becomes_8_bit_rgb(
    image: Image.Image, kind: str, expected: tuple[int, ...], size: tuple[int, int] | None
) -> None:
    data = encoded(image, kind)
    made = DecodeImage(size=size).decode(data)
    assert (made.shape, made.dtype) == ((*(size or (7, 9)), 3), np.uint8)
    assert np.abs(made.astype(int) - expected).max() <= 2
    facts, bad = DecodeImage(size=size).facts(pa.array([data]))
    sizes = facts.sizes
    assert not bad
    assert (sizes["image_height"][0], sizes["image_width"][0]) == made.shape[:2]


def test_a_progressive_jpeg_is_read() -> None:
    data = encoded(scene(200, 300), progressive=True, quality=90)
    decode = DecodeImage(size=(50, 60))
    assert decode.facts(pa.array([data]))[1] == []
    assert psnr(decode.decode(data), by_pillow(data, (50, 60))) >= 35


# Facts


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()])
def test_facts_come_from_headers_for_every_kind_of_column(kind: pa.DataType) -> None:
    files = [encoded(scene(20, 30)), None, encoded(scene(40, 50), "PNG")]
    column = pa.chunked_array([pa.array(files[:2], kind), pa.array(files[2:], kind)])
    facts, bad = DecodeImage().facts(column)
    sizes = facts.sizes
    assert bad == []
    assert {name: values.tolist() for name, values in sizes.items()} == {
        "num_images": [1, 0, 1],
        "image_height": [20, 0, 40],
        "image_width": [30, 0, 50],
        "image_pixels": [600, 0, 2000],
    }
    assert [image.shape for image in DecodeImage().decode_row(column, 2)] == [(40, 50, 3)]
    assert DecodeImage().decode_row(column, 1) == []


def test_a_row_may_hold_several_images() -> None:
    column = pa.array([[encoded(scene(20, 30)), encoded(scene(10, 40))], None, []], pa.list_(pa.binary()))
    facts, bad = DecodeImage().facts(column)
    sizes = facts.sizes
    assert bad == []
    assert {name: values.tolist() for name, values in sizes.items()} == {
        "num_images": [2, 0, 0],
        "image_height": [20, 0, 0],
        "image_width": [40, 0, 0],
        "image_pixels": [1000, 0, 0],
    }
    assert [image.shape for image in DecodeImage().decode_row(column, 0)] == [(20, 30, 3), (10, 40, 3)]


def test_images_that_lie_in_a_mapped_file_are_read_in_place() -> None:
    files = [encoded(scene(20, 30)), encoded(scene(40, 50), "PNG")]
    offsets = np.array([100, 100 + len(files[0])])
    data = pa.py_buffer(b"\0" * 100 + b"".join(files))
    column = views_into(data, offsets, np.array([len(file) for file in files]))
    facts, bad = DecodeImage().facts(column)
    sizes = facts.sizes
    assert bad == []
    assert sizes["image_width"].tolist() == [30, 50]


@pytest.mark.strangers
@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_structs_of_bytes_and_path_are_images(kind: pa.DataType) -> None:
    file = pa.struct([("bytes", kind), ("path", pa.string())])
    images = [{"bytes": encoded(scene(20, 30)), "path": "a.jpg"}, {"bytes": encoded(scene(10, 40), "PNG"), "path": None}]
    one = pa.chunked_array([pa.array([images[0], None], file), pa.array([{"bytes": None, "path": None}, images[1]], file)])
    facts, bad = DecodeImage().facts(one)
    assert bad == []
    assert facts.sizes["image_width"].tolist() == [30, 0, 0, 40]
    assert [image.shape for image in DecodeImage().decode_row(one, 3)] == [(10, 40, 3)]
    for lists in (pa.list_(file), pa.large_list(file), pa.list_(file, 2)):
        many = pa.array([images, None, images[::-1]], lists)
        facts, bad = DecodeImage().facts(many)
        assert bad == []
        assert facts.sizes["num_images"].tolist() == [2, 0, 2]
        assert [image.shape for image in DecodeImage().decode_row(many, 2)] == [(10, 40, 3), (20, 30, 3)]
        assert [image.shape for image in DecodeImage().decode_row(many, 0, only=1)] == [(10, 40, 3)]


@pytest.mark.strangers
def test_an_image_of_which_only_the_path_is_there_is_a_bad_row_with_the_way_out() -> None:
    images = [{"bytes": encoded(scene(20, 30)), "path": None}, {"bytes": None, "path": "far/b.jpg"}]
    for column in (pa.array(images), pa.array([[image] for image in images])):
        facts, bad = DecodeImage().facts(column)
        assert facts.sizes["num_images"].tolist() == [1, 0]
        assert [(row, "only its path 'far/b.jpg': write the dataset with" in error) for row, error in bad] == [(1, True)]
        with pytest.raises(DataError, match=r"far/b\.jpg"):
            DecodeImage().decode_row(column, 1)


@pytest.mark.strangers
def test_images_may_be_encoded_by_a_dictionary() -> None:
    column = pa.array([encoded(scene(20, 30)), None, encoded(scene(20, 30))]).dictionary_encode()
    facts, bad = DecodeImage().facts(column)
    assert (bad, facts.sizes["image_height"].tolist()) == ([], [20, 0, 20])
    assert DecodeImage().decode_row(column, 2)[0].shape == (20, 30, 3)


def test_a_size_or_a_crop_decides_the_facts() -> None:
    sizes = DecodeImage(size=(5, 6)).facts(pa.array([encoded(scene(20, 30))]))[0].sizes
    assert (sizes["image_height"][0], sizes["image_width"][0], sizes["image_pixels"][0]) == (5, 6, 30)


# Damage


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the image is empty"),
        (b"hello, this is no image", "not an image that can be read: 23 bytes that begin with b'hello, t'"),
        (b"\xff\xd8\xff\xe0\x00\x10JFIF", "JPEG of 10 bytes is cut short in its header"),
        (b"\xff\xd8\xff\xe0\x00\x02nonsense after", "JPEG header is damaged: no marker at byte 6"),
        (b"\xff\xd8\xff\xda\x00\x02\xff\xd9", "JPEG has no frame before byte 2"),
        (b"\x89PNG\r\n\x1a\n\x00", "PNG of 9 bytes is cut short in its header"),
        (cut(encoded(scene(80, 90))), "is cut short: no end marker"),
        (cut(encoded(scene(80, 90), "PNG")), "is cut short: no end chunk"),
    ],
)
def test_damage_is_found_from_the_header_and_named_in_one_line(data: bytes, message: str) -> None:
    _, bad = DecodeImage().facts(pa.array([encoded(scene(8, 8)), data]))
    assert [row for row, _ in bad] == [1]
    assert message in bad[0][1]
    assert "\n" not in bad[0][1]
    with pytest.raises(DataError, match=r"image|JPEG|PNG"):
        DecodeImage().decode(data)


@given(st.integers(1, 2000))
def test_a_file_cut_anywhere_is_bad(removed: int) -> None:
    for kind in ("JPEG", "PNG"):
        data = encoded(scene(60, 60), kind)
        _, bad = DecodeImage().facts(pa.array([data[: max(0, len(data) - removed)]]))
        assert len(bad) == 1


def test_something_appended_to_a_file_does_no_harm() -> None:
    data = encoded(scene(30, 30)) + b"\0" * 10_000
    assert DecodeImage().facts(pa.array([data]))[1] == []
    assert DecodeImage().decode(data).shape == (30, 30, 3)


def damaged(data: bytes) -> bytes:
    return data[: len(data) // 2] + b"\x12" * 40 + data[len(data) // 2 + 40 :]


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_damage_inside_is_found_when_decoding(kind: str) -> None:
    # A restart marker in the wrong place, a checksum that does not fit: headers cannot show these.
    image = scene(120, 120)
    if kind == "JPEG":  # not with Pillow, which writes no restart markers before 10.2
        data = cv2.imencode(".jpg", np.asarray(image), [cv2.IMWRITE_JPEG_RST_INTERVAL, 2])[1].tobytes()
    else:
        data = encoded(image, kind)
    with pytest.raises(DataError, match=rf"{kind} of {len(data)} bytes cannot be decoded") as caught:
        DecodeImage().decode(damaged(data))
    assert "\n" not in str(caught.value)


def kinds_of_image() -> dict[str, bytes]:
    image = scene(24, 30)
    kinds = ["JPEG", "PNG", "GIF", "TIFF", "WEBP", "BMP", "PPM", "TGA", "ICO", "JPEG2000", "DDS"]
    files = {kind: encoded(image, kind) for kind in [*kinds, *(["AVIF"] if "avif" in features.get_supported() else [])]}
    files["animation"] = encoded(image, "GIF", save_all=True, append_images=[image.rotate(90)])
    files["compressed TIFF"] = encoded(image, "TIFF", compression="jpeg")
    files["SPIDER"] = encoded(image.convert("F"), "SPIDER")
    files["BLP"] = encoded(image.convert("P"), "BLP")
    return files


@pytest.mark.strangers
@pytest.mark.parametrize("kind", sorted(kinds_of_image()))
@pytest.mark.filterwarnings("ignore")
def test_damage_of_any_kind_is_a_bad_row(kind: str) -> None:
    data, chance = kinds_of_image()[kind], random.Random(0)
    num_refused = 0
    for attempt in range(150):
        damaged = bytearray(data)
        if attempt % 3 == 0:
            damaged = damaged[: chance.randrange(len(data))]
        for _ in range(attempt % 3 * 2):
            damaged[chance.randrange(min(len(damaged), 500))] = chance.randrange(256)
        for decode in (DecodeImage(), DecodeImage(size=(7, 8))):
            _, bad = decode.facts(pa.array([bytes(damaged)]))
            assert all("\n" not in error for _, error in bad)
            try:
                decode.decode(bytes(damaged))
            except DataError:
                num_refused += 1
    assert num_refused > 60


@pytest.mark.strangers
@pytest.mark.skipif("avif" not in features.get_supported(), reason="this Pillow reads no AVIF")
def test_a_damaged_avif_is_a_bad_row() -> None:
    data = encoded(scene(24, 30), "AVIF")
    damaged = data.replace(b"iloc", b"free")
    _, bad = DecodeImage().facts(pa.array([data, damaged]))
    assert [row for row, _ in bad] == [1]
    assert "image of" in bad[0][1]


@pytest.mark.strangers
def test_what_is_no_picture_is_a_bad_row() -> None:
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"/>'
    eps = encoded(scene(8, 8), "EPS")
    empty = b"P6 0 5 255 "
    _, bad = DecodeImage().facts(pa.array([svg, eps, empty]))
    assert [row for row, _ in bad] == [0, 1, 2]
    assert "EPS is a program" in bad[1][1]


@pytest.mark.strangers
def test_a_picture_of_another_size_than_planned_is_an_error() -> None:
    with pytest.raises(DataError, match="came out as 9 x 8, but its header says 5 x 4"):
        DecodeImage().decode(encoded(scene(8, 9), "BMP"), out=np.zeros((4, 5, 3), np.uint8))


def test_a_huge_image_is_refused_before_it_takes_memory() -> None:
    data = encoded(Image.new("L", (3000, 2000)), "PNG")
    decode = DecodeImage(max_pixels=1_000_000)
    message = "image of 3000 x 2000 has more than the 1,000,000 pixels allowed"
    assert message in decode.facts(pa.array([data]))[1][0][1]
    with pytest.raises(DataError, match=message):
        decode.decode(data)


def test_a_column_that_holds_no_files_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"images are binary, .* but the column is string; read files that are named by"):
        DecodeImage().facts(pa.array(["a.jpg"]))
    with pytest.raises(SchemaError, match="the column is struct<path: string>"):
        DecodeImage().facts(pa.array([{"path": "a.jpg"}]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DecodeImage(size=(0, 4)), "size is"),
        (lambda: DecodeImage(fit="pad"), "fit must be"),  # type: ignore[arg-type]
        (lambda: DecodeImage(max_pixels=0), "max_pixels"),
    ],
)
def test_a_wrong_declaration_is_refused(make: Callable[[], DecodeImage], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()
