"""Encoded images, against Pillow."""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image, features

import overlord as ol
from overlord.errors import DataError
from tests.fuzz.mutations import NUMBERS, Region
from tests.fuzz.targets import Answer, Case, OracleFailed, Seed, Wrong, damaged_by

_MOST_PIXELS = 1 << 20
_SMALL = (7, 5)
_NEAR = 6.0
"""How far the mean of a JPEG's pixels may be off: decoders differ in rounding and in how they enlarge colours."""


def _picture(mode: str, size: tuple[int, int] = (37, 29)) -> Image.Image:
    width, height = size
    y, x = np.mgrid[:height, :width]
    rgba = np.stack([x * 6 % 256, y * 8 % 256, (x + y) * 3 % 256, 255 - x * 3 % 256], -1).astype(np.uint8)
    return Image.fromarray(rgba).convert("RGBA").convert(mode)


def _saved(image: Image.Image, format_: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def make_seeds() -> Sequence[Seed]:
    rgb = _picture("RGB")
    deep = Image.fromarray(np.arange(30 * 20, dtype=np.uint16).reshape(20, 30) * 100)
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [_picture("P", (20, 16)), _picture("P", (20, 16)).rotate(90)]
    made = {
        "jpeg": _saved(rgb, "JPEG", quality=90),
        "jpeg-progressive": _saved(rgb, "JPEG", progressive=True, quality=60),
        "jpeg-grey": _saved(_picture("L"), "JPEG"),
        "jpeg-cmyk": _saved(rgb.convert("CMYK"), "JPEG"),
        "jpeg-444-exif": _saved(rgb, "JPEG", subsampling=0, exif=exif, comment=b"made here"),
        "jpeg-restart": _saved(rgb, "JPEG", restart_marker_blocks=2),
        "png": _saved(rgb, "PNG"),
        "png-alpha": _saved(_picture("RGBA"), "PNG"),
        "png-palette": _saved(rgb.quantize(16), "PNG", transparency=3),
        "png-grey-alpha": _saved(_picture("LA"), "PNG"),
        "png-16": _saved(deep, "PNG"),
        "png-1": _saved(_picture("1"), "PNG"),
        "webp": _saved(rgb, "WEBP", quality=80),
        "webp-lossless": _saved(_picture("RGBA"), "WEBP", lossless=True),
        "webp-animated": _saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": _saved(rgb.quantize(32), "GIF", transparency=1),
        "gif-animated": _saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "bmp": _saved(rgb, "BMP"),
        "tiff": _saved(rgb, "TIFF", compression="tiff_lzw"),
    }
    if "avif" in features.get_supported():
        made["avif"] = _saved(rgb, "AVIF", quality=60, speed=10)
    return [Seed(name, data, regions=(Region(0, min(len(data), 200)),)) for name, data in made.items()]


def change_png(rng: random.Random, seed: Seed) -> bytes | None:
    """A chunk of a PNG changed, dropped or repeated, with the right checksum."""
    if not seed.name.startswith("png"):
        return None
    chunks, at = [], 8
    while at < len(seed.data):
        length = int.from_bytes(seed.data[at : at + 4], "big")
        chunks.append((seed.data[at + 4 : at + 8], seed.data[at + 8 : at + 8 + length]))
        at += 12 + length
    which = rng.randrange(len(chunks))
    kind, body = chunks[which]
    match rng.randrange(4):
        case 0:
            del chunks[which]
        case 1:
            chunks.insert(rng.randrange(len(chunks)), (kind, body))
        case _ if len(body) >= 4:
            place, width = rng.randrange(len(body) - 3), rng.choice((1, 4))
            number = rng.choice(NUMBERS) % (1 << 8 * width)
            chunks[which] = kind, body[:place] + number.to_bytes(width, "big") + body[place + width :]
    parts = [len(b).to_bytes(4, "big") + k + b + zlib.crc32(k + b).to_bytes(4, "big") for k, b in chunks]
    return seed.data[:8] + b"".join(parts)


def change_size(rng: random.Random, seed: Seed) -> bytes | None:
    """Another height or width in the frame header of a JPEG."""
    frame = next((at for mark in (b"\xff\xc0", b"\xff\xc2") if (at := seed.data.find(mark)) > 0), None)
    if frame is None or not seed.name.startswith("jpeg"):
        return None
    place = frame + 5 + 2 * rng.randrange(2)
    return seed.data[:place] + (rng.choice(NUMBERS) % 65536).to_bytes(2, "big") + seed.data[place + 2 :]


class Images:
    name = "images"
    names_its_file = False  # an image has none: whoever reads the row adds its place

    def __init__(self) -> None:
        self.seeds = make_seeds()

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        return damaged_by(rng, base, self.seeds, (change_png, change_size))

    def read(self, case: Case, folder: Path) -> Answer:
        column = pa.array([case.data], pa.binary())
        whole = ol.vision.DecodeImage("image", max_pixels=_MOST_PIXELS)
        facts, bad = whole.facts(column)
        small = ol.vision.DecodeImage("image", size=_SMALL, max_pixels=_MOST_PIXELS)
        try:
            (pixels,) = whole.decode_row(column, 0)
        except DataError:
            if not bad:
                self._check_same_refusal(small, column)
            raise
        if bad:
            raise Wrong("an image that can be decoded is called bad by its header")
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise Wrong("not 8-bit RGB")
        if pixels.shape[:2] != (facts.sizes["image_height"][0], facts.sizes["image_width"][0]):
            raise Wrong("an image has another size than planning was told")
        (shrunk,) = small.decode_row(column, 0)
        if shrunk.shape != (*_SMALL, 3):
            raise Wrong("a resized image has another size than was asked for")
        return Answer([_Pixels(pixels)])

    @staticmethod
    def _check_same_refusal(small: ol.vision.DecodeImage, column: pa.Array) -> None:
        try:
            small.decode_row(column, 0)
        except DataError:
            return
        raise Wrong("an image is decoded when it is made smaller, and refused when it is not")

    def expected(self, case: Case) -> list[Answer]:
        try:
            with Image.open(io.BytesIO(case.data)) as image:
                if image.width * image.height > _MOST_PIXELS:
                    raise OracleFailed("too many pixels")
                image.load()
                return [Answer([_Pixels(np.asarray(_as_rgb(image)))])]
        except OracleFailed:
            raise
        except Exception as error:  # Pillow's decoders raise what they like
            raise OracleFailed(str(error)) from error


class _Pixels:
    """Equal when they look the same."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Pixels) or self._values.shape != other._values.shape:
            return False
        return float(np.abs(self._values.astype(int) - other._values.astype(int)).mean()) <= _NEAR

    def __repr__(self) -> str:
        return f"{self._values.shape} of mean {self._values.mean():.2f}, first {self._values[0, 0].tolist()}"


def _as_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image) // 256).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGB", image.size, (255, 255, 255))
        rgba = image.convert("RGBA")
        white.paste(rgba, mask=rgba.getchannel("A"))
        return white
    return image.convert("RGB")


TARGET = Images()
