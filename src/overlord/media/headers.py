"""Parses the headers of JPEG and PNG files, and checks that their ends are present.

Planning needs no more than that, so that image files need not be read in full.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from overlord.errors import DataError

JPEG = b"\xff\xd8\xff"
PNG = b"\x89PNG\r\n\x1a\n"
_END_OF_JPEG = b"\xff\xd9"
_END_OF_PNG = b"IEND\xaeB`\x82"
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
TAIL_BYTES = 4096
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a length."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    kind: Literal["jpeg", "png"]
    height: int
    width: int
    channels: int = 3
    bits: int = 8


def parse_header(data: memoryview, tail: memoryview | None = None) -> ImageHeader | None:
    """The header of a JPEG or PNG, None for anything else. A file that is damaged or cut short is a DataError.

    With `tail`, `data` is only the first bytes of the file and `tail` the last ones. An error may then only mean that the
    wanted bytes lie between the two.
    """
    if not data:
        raise DataError("the image is empty (0 bytes)")
    if data[: len(JPEG)] == JPEG:
        return _parse_jpeg(data, tail)
    if data[: len(PNG)] == PNG:
        return _parse_png(data, tail)
    return None


def _parse_jpeg(data: memoryview, tail: memoryview | None) -> ImageHeader:
    place = 2
    while True:
        if place + 4 > len(data):
            raise DataError(f"JPEG of {len(data)} bytes is cut short in its header")
        if data[place] != 0xFF:
            raise DataError(f"JPEG header is damaged: no marker at byte {place}")
        marker = data[place + 1]
        if marker == 0xFF:  # markers may be padded
            place += 1
            continue
        if marker in _ALONE:
            place += 2
            continue
        if marker in _FRAMES:
            break
        if marker in (0xD9, 0xDA):
            raise DataError(f"JPEG has no frame before byte {place}")
        place += 2 + (data[place + 2] << 8 | data[place + 3])
    if place + 10 > len(data):
        raise DataError(f"JPEG of {len(data)} bytes is cut short in its header")
    bits, height, width, channels = struct.unpack_from(">BHHB", data, place + 4)
    if height == 0 or width == 0:
        raise DataError(f"JPEG states a size of {width} x {height}")
    # Scans escape 0xff, so these two bytes can only be the end marker.
    if not _holds(data[place:] if tail is None else tail, _END_OF_JPEG):
        raise DataError(f"JPEG of {len(data)} bytes is cut short: no end marker")
    return ImageHeader("jpeg", height, width, channels, bits)


def _parse_png(data: memoryview, tail: memoryview | None) -> ImageHeader:
    if len(data) < 33 or data[12:16] != b"IHDR":
        raise DataError(f"PNG of {len(data)} bytes is cut short in its header")
    width, height, bits, colour = struct.unpack_from(">IIBB", data, 16)
    if height == 0 or width == 0:
        raise DataError(f"PNG states a size of {width} x {height}")
    if not _holds(data if tail is None else tail, _END_OF_PNG):
        raise DataError(f"PNG of {len(data)} bytes is cut short: no end chunk")
    return ImageHeader("png", height, width, {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 0), bits)


def _holds(data: memoryview, mark: bytes) -> bool:
    """Whether the data contains `mark`. The search begins at the end; files may have bytes appended after the mark."""
    return bytes(data[-TAIL_BYTES:]).rfind(mark) >= 0 or mark in bytes(data)
