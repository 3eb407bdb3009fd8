"""Resizing pictures with an antialiasing filter, by OpenCV.

OpenCV has no antialiasing bilinear filter, so one is composed of its operations on integers. A picture that is more than
four times too large is first averaged over boxes. Then it is blurred just enough that blur and linear interpolation together
are as wide as the triangle filter that Pillow calls BILINEAR. The results agree with Pillow's to 40 dB and more, at a third
of its cost.

Pictures are the same on all x86 processors, with OpenCV 4.10 to 5.0: with and without AVX2, AVX-512 and Intel's primitives.
Interpolation from a fraction of a pixel on is an exception: OpenCV 5 computes it in floats, and about one value in ten
thousand differs by one on processors without AVX2. Crops, JPEGs decoded at a reduced scale and some pictures that were
averaged over boxes need it. ARM was not tried.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlord.errors import SpecError

if TYPE_CHECKING:
    from types import ModuleType

Pixels = NDArray[np.uint8]
Interval = tuple[float, float]


class Blur(NamedTuple):
    """A Gaussian over `taps` pixels; 1 means no blur."""

    taps: int = 1
    sigma: float = 1.0


def resize(picture: Pixels, size: tuple[int, int], rows: Interval, columns: Interval, out: Pixels | None = None) -> Pixels:
    """The part `rows` x `columns` of an RGB picture (height, width, 3), as RGB of `size` (height, width, 3)."""
    cv2 = _opencv()
    (top, height), (left, width) = _within(rows, picture.shape[0]), _within(columns, picture.shape[1])
    picture = picture[top : top + height, left : left + width]
    rows, columns = (rows[0] - top, rows[1] - top), (columns[0] - left, columns[1] - left)
    down, across = (rows[1] - rows[0]) / size[0], (columns[1] - columns[0]) / size[1]
    boxes = max(1, int(down / 2)), max(1, int(across / 2))
    if max(boxes) > 1:
        reduced = -(-height // boxes[0]), -(-width // boxes[1])
        picture = cv2.resize(picture, reduced[::-1], interpolation=cv2.INTER_AREA)
        rows, columns = scale_interval(rows, reduced[0] / height), scale_interval(columns, reduced[1] / width)
    vertical, horizontal = _blur(down, boxes[0]), _blur(across, boxes[1])
    if max(vertical.taps, horizontal.taps) > 1:
        taps = (horizontal.taps, vertical.taps)
        picture = cv2.GaussianBlur(picture, taps, horizontal.sigma, sigmaY=vertical.sigma, borderType=cv2.BORDER_REFLECT)
    if rows == (0, picture.shape[0]) and columns == (0, picture.shape[1]):
        return cv2.resize(picture, size[::-1], dst=out, interpolation=cv2.INTER_LINEAR)
    steps = [(end - start) / length for (start, end), length in zip((columns, rows), size[::-1], strict=True)]
    starts = [start + step / 2 - 0.5 for (start, _), step in zip((columns, rows), steps, strict=True)]
    moved = np.array([[steps[0], 0, starts[0]], [0, steps[1], starts[1]]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return cv2.warpAffine(picture, moved, size[::-1], dst=out, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def _within(interval: Interval, length: int) -> tuple[int, int]:
    """The first pixel that an interval touches, and the number of pixels."""
    start = min(int(interval[0]), length - 1)
    return start, max(1, min(math.ceil(interval[1]), length) - start)


def scale_interval(interval: Interval, factor: float) -> Interval:
    return interval[0] * factor, interval[1] * factor


@lru_cache(maxsize=4096)
def _blur(scale: float, box: int) -> Blur:
    """The blur that makes box averaging and linear interpolation as wide as a triangle filter for shrinking by `scale`."""
    # Widths are variances, in pixels after the boxes: the triangle has scale²/6, a box (box² - 1)/12, the interpolation 1/6.
    missing = (scale**2 / 6 - (box**2 - 1) / 12) / box**2 - 1 / 6
    if scale <= 1 or missing < 1e-3:
        return Blur()
    radius = max(1, math.ceil(scale / box) - 1)
    low, high = 0.05, 10.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _width(middle, radius) < missing else (low, middle)
    return Blur(2 * radius + 1, high)


def _width(sigma: float, radius: int) -> float:
    """The variance of a Gaussian over the pixels up to `radius` from the middle. Of few pixels: numpy would take longer."""
    squares = [place**2 for place in range(1, radius + 1)]
    weights = [math.exp(-square / (2 * sigma**2)) for square in squares]
    return 2 * sum(map(mul, weights, squares)) / (1 + 2 * sum(weights))


@lru_cache(maxsize=1)
def _opencv() -> ModuleType:
    is_ours = "cv2" not in sys.modules
    try:
        import cv2
    except ModuleNotFoundError:
        raise SpecError("resizing images needs an extra: pip install 'overlord-dataloader[images]'") from None
    if is_ours:  # images are resized in parallel already; OpenCV's own threads would oversubscribe the cores
        cv2.setNumThreads(1)
    return cv2
