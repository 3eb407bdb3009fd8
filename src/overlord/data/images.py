"""Images whose decoding waits until a plan asks for their row; planning works with the sizes in their headers.

Every picture comes out as 8-bit RGB. Grey becomes three equal channels, CMYK is converted, transparency is
laid on white, 16-bit samples keep their upper 8 bits, animations give their first frame. An orientation
noted in EXIF is not applied, as in Pillow. A JPEG that is to be made smaller is decoded at a reduced scale
that is still at least the size asked for (libjpeg-turbo does that in the frequency domain), then resized by
an antialiasing filter.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa

from overlord.data.image_headers import Header, header_of
from overlord.data.resample import Pixels, Span, resized
from overlord.errors import DataError, SchemaError, SpecError
from overlord.planning.facts import Ints
from overlord.planning.images.image_sizes import ImageSizes

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """What planning is told of the images of each row."""

    sizes: dict[str, Ints]
    images: ImageSizes

    def take(self, rows: Ints) -> ImageFacts:
        return ImageFacts({name: column[rows] for name, column in self.sizes.items()}, self.images.take(rows))


BadImages = list[tuple[int, str]]
Data = bytes | bytearray | memoryview | pa.Buffer

EIGHTHS = (1, 2, 3, 4, 5)
"""Reduced scales worth taking. Decoding at 6/8 and 7/8 costs more than decoding in full."""


@dataclass(frozen=True, slots=True)
class DecodeImage:
    """Decode the images in `column` to uint8 (height, width, 3), when and where a plan needs them.

    `column` holds one encoded file a row (JPEG, PNG, or what else Pillow reads), or a list of them; null is
    no image. `size` is (height, width), None leaves images as they are. `fit` "stretch" ignores the aspect
    ratio, "crop" keeps it and cuts equal margins off the longer side. Images of more than `max_pixels` are
    bad rows, so that no file can claim the whole memory. `strict` refuses JPEGs that the decoder can only
    patch up.
    """

    column: str = "jpg"
    size: tuple[int, int] | None = None
    fit: Literal["stretch", "crop"] = "stretch"
    max_pixels: int = 1 << 26
    strict: bool = True

    def __post_init__(self) -> None:
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise SpecError(f"size is (height, width) in pixels, got {self.size}")
        if self.fit not in ("stretch", "crop"):
            raise SpecError(f"fit must be stretch or crop, not {self.fit!r}")
        if self.max_pixels < 1:
            raise SpecError(f"max_pixels must be positive, got {self.max_pixels}")

    def facts(self, column: pa.ChunkedArray | pa.Array) -> tuple[ImageFacts, BadImages]:
        """Sizes of the decoded images of each row, and the (row, error) of rows whose images cannot be decoded.

        `image_pixels` is the sum over a row's images, `image_height` and `image_width` the largest of them.
        """
        names = ("num_images", "image_height", "image_width", "image_pixels")
        sizes = {name: np.zeros(len(column), np.int64) for name in names}
        found: list[list[tuple[int, int]]] = [[] for _ in range(len(column))]
        bad: BadImages = []
        # One look at a header is some microseconds and cannot be vectorised; pixels are not touched.
        for row, files in enumerate(_files_of_rows(column)):
            try:
                shapes = [self._shape(data) for data in files]
            except DataError as error:
                bad.append((row, str(error)))
                continue
            if shapes:
                found[row] = shapes
                sizes["num_images"][row] = len(shapes)
                sizes["image_height"][row] = max(height for height, _ in shapes)
                sizes["image_width"][row] = max(width for _, width in shapes)
                sizes["image_pixels"][row] = sum(height * width for height, width in shapes)
        return ImageFacts(sizes, ImageSizes.of(found)), bad

    def decode_row(
        self, column: pa.ChunkedArray | pa.Array, row: int, out: Sequence[Pixels] | None = None, only: int | None = None
    ) -> list[Pixels]:
        """The decoded images of one row, or the one with number `only`, written to `out` where given."""
        files = next(iter(_files_of_rows(column.slice(row, 1))))
        files = files if only is None else files[only : only + 1]
        return [self.decode(data, None if out is None else out[i]) for i, data in enumerate(files)]

    def decode(self, data: Data, out: Pixels | None = None) -> Pixels:
        """One image as uint8 (height, width, 3), written to `out` where given. Raises DataError in one line."""
        content = memoryview(data).cast("B")
        header = header_of(content)
        if header is not None:
            self._check_pixels(header.height, header.width)
        if header is not None and header.kind == "jpeg" and header.channels != 4 and header.bits == 8:
            pixels = self._jpeg(content, header, out)
        else:
            pixels = self._other(content, out)
        if out is None or pixels is out:
            return pixels
        np.copyto(out, pixels)
        return out

    def _shape(self, content: memoryview) -> tuple[int, int]:
        """Height and width of the decoded image."""
        header = header_of(content)
        if header is None:
            with _opened(content) as image:
                width, height = image.size
        else:
            height, width = header.height, header.width
        self._check_pixels(height, width)
        return self.size or (height, width)

    def _check_pixels(self, height: int, width: int) -> None:
        if height * width > self.max_pixels:
            raise DataError(
                f"image of {width} x {height} has more than the {self.max_pixels:,} pixels allowed; raise max_pixels"
            )

    def _jpeg(self, content: memoryview, header: Header, out: Pixels | None) -> Pixels:
        simplejpeg = _simplejpeg()
        if self.size is None:
            return _decoded(simplejpeg, content, "RGB", self.strict)
        rows, columns = self._box(header.height, header.width)
        scale = _scale(rows[1] - rows[0], columns[1] - columns[0], self.size)
        # The decoder takes the smallest scale that gives this size, rounded up as it rounds.
        least = {"min_height": -(-header.height * scale // 8), "min_width": -(-header.width * scale // 8)}
        pixels = _decoded(simplejpeg, content, "RGB", self.strict, **least)
        return resized(pixels, self.size, _scaled(rows, scale), _scaled(columns, scale), out)

    def _other(self, content: memoryview, out: Pixels | None) -> Pixels:
        with _opened(content) as image:
            self._check_pixels(image.height, image.width)
            try:
                image.load()
            except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
                raise DataError(f"{image.format} of {len(content)} bytes cannot be decoded: {error}") from error
            picture = _as_rgb(image)
        if self.size is None:
            return np.array(picture)
        rows, columns = self._box(picture.height, picture.width)
        return resized(np.asarray(picture), self.size, rows, columns, out)

    def _box(self, height: int, width: int) -> tuple[Span, Span]:
        """The rows and columns of the picture that are wanted."""
        assert self.size is not None  # asked for only when there is a size
        if self.fit == "stretch":
            return (0.0, float(height)), (0.0, float(width))
        factor = min(height / self.size[0], width / self.size[1])
        top, left = (height - self.size[0] * factor) / 2, (width - self.size[1] * factor) / 2
        return (top, height - top), (left, width - left)


def _files_of_rows(column: pa.ChunkedArray | pa.Array) -> Iterator[list[memoryview]]:
    """The encoded files of each row, without a copy."""
    kind = column.type
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not _is_binary(kind.value_type if nested else kind):
        raise SchemaError(f"images are binary, or lists of binary, but the column is {kind}")
    for scalar in column:
        files = (scalar.values or ()) if nested else (scalar,)
        yield [memoryview(file.as_buffer()).cast("B") for file in files if file.is_valid]


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _scale(height: float, width: float, size: tuple[int, int]) -> int:
    """The smallest scale, in eighths, at which the picture is still no smaller than `size`."""
    for scale in EIGHTHS:
        if height * scale >= size[0] * 8 and width * scale >= size[1] * 8:
            return scale
    return 8


def _scaled(span: Span, eighths: int) -> Span:
    return span[0] * eighths / 8, span[1] * eighths / 8


def _decoded(simplejpeg: ModuleType, content: memoryview, colours: str, strict: bool, **least: int) -> Pixels:
    try:
        return simplejpeg.decode_jpeg(content, colours, strict=strict, **least)
    except ValueError as error:
        raise DataError(f"JPEG of {len(content)} bytes cannot be decoded: {error}") from error


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _opened(content: memoryview) -> Image.Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise SpecError("decoding images needs an extra: pip install 'overlord-dataloader[images]'") from None
    try:
        return Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise DataError(
            f"not an image that can be read: {len(content)} bytes that begin with {bytes(content[:8])!r}"
        ) from None
    except (Image.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"image of {len(content)} bytes cannot be opened: {error}") from error


def _simplejpeg() -> ModuleType:
    try:
        import simplejpeg
    except ModuleNotFoundError:
        raise SpecError("decoding images needs an extra: pip install 'overlord-dataloader[images]'") from None
    return simplejpeg
