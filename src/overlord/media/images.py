"""Images that are decoded only once a plan needs their row. Planning uses the sizes in their headers.

Every picture comes out as 8-bit RGB. Grey becomes three equal channels, CMYK is converted, transparency is
laid on white, 16-bit samples keep their upper 8 bits, animations yield their first frame. An EXIF
orientation is not applied, as in Pillow. A JPEG that is to shrink is decoded at a reduced scale that is still
at least the wanted size (libjpeg-turbo does that in the frequency domain), then resized by an antialiasing
filter.
"""

from __future__ import annotations

import io
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from overlord.errors import DataError, OverlordError, SchemaError, SourceError, SpecError
from overlord.media.headers import TAIL_BYTES, ImageHeader, parse_header
from overlord.media.resample import Interval, Pixels, resize, scale_interval
from overlord.sources.storage import StoredFile, open_local, read_at
from overlord.sources.views import StoredValues, is_view, read_value
from overlord.stream.facts import ImageSizes, Ints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from PIL import Image


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """The facts of the images of each row that planning uses."""

    sizes: dict[str, Ints]
    images: ImageSizes

    def take(self, rows: Ints) -> ImageFacts:
        return ImageFacts({name: column[rows] for name, column in self.sizes.items()}, self.images.take(rows))


BadImages = list[tuple[int, str]]
Data = bytes | bytearray | memoryview | pa.Buffer

HEAD_BYTES = 16 << 10
"""Enough to find the size of nearly every image."""
EIGHTHS = (1, 2, 3, 4, 5)
"""Reduced scales worth taking. Decoding at 6/8 and 7/8 costs more than decoding in full."""


@dataclass(frozen=True, slots=True)
class DecodeImage:
    """Decode the images in `column` to uint8 (height, width, 3), when and where a plan needs them.

    `column` holds one encoded file a row (JPEG, PNG, or what else Pillow reads), or a list of them; null is
    no image. A file is binary, or a struct with the fields `bytes` and `path`, as Hugging Face datasets have
    it. `size` is (height, width), None leaves images as they are. `fit` "stretch" ignores the aspect
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
        found: list[list[tuple[int, int]]] = [[] for _ in range(len(column))]
        bad: BadImages = []
        # A Python loop: parsing a header takes microseconds and cannot be vectorised. Pixels are not decoded.
        for row, files in enumerate(_peeks_of_rows(column)):
            try:
                found[row] = [self._shape(file) for file in _files_or_raise(files)]
            except SourceError:
                raise  # the source file cannot be read; the row may be fine
            except DataError as error:
                bad.append((row, str(error)))
        images = ImageSizes.of(found)
        return ImageFacts(_sizes_of_rows(images), images), bad

    def decode_row(
        self, column: pa.ChunkedArray | pa.Array, row: int, out: Sequence[Pixels] | None = None, only: int | None = None
    ) -> list[Pixels]:
        """The decoded images of one row, or only image number `only`, written to `out` if given."""
        files = _files_or_raise(next(iter(_files_of_rows(column.slice(row, 1)))))
        files = files if only is None else files[only : only + 1]
        return [self.decode(data, None if out is None else out[i]) for i, data in enumerate(files)]

    def decode(self, data: Data, out: Pixels | None = None) -> Pixels:
        """One image as uint8 (height, width, 3), written to `out` if given. Raises DataError with a message of one line."""
        content = memoryview(data).cast("B")
        header = parse_header(content)
        if header is not None:
            self._check_pixels(header.height, header.width)
        if header is not None and header.kind == "jpeg" and header.channels != 4 and header.bits == 8:
            pixels = self._decode_jpeg_file(content, header, out)
        else:
            pixels = self._decode_other(content, out)
        if out is None or pixels is out:
            return pixels
        if pixels.shape != out.shape:
            raise DataError(
                f"image of {len(content)} bytes came out as {pixels.shape[1]} x {pixels.shape[0]}, but its header says "
                f"{out.shape[1]} x {out.shape[0]}"
            )
        np.copyto(out, pixels)
        return out

    def _shape(self, file: _Peek) -> tuple[int, int]:
        """Height and width of the decoded image."""
        try:
            header = parse_header(file.head, file.tail)
        except DataError:
            if file.whole is None:
                raise
            return self._shape(_Peek(file.whole()))
        if header is None:
            with _open_image(file.head if file.whole is None else file.whole()) as image:
                width, height = image.size
        else:
            height, width = header.height, header.width
        self._check_pixels(height, width)
        return self.size or (height, width)

    def _check_pixels(self, height: int, width: int) -> None:
        if height < 1 or width < 1:
            raise DataError(f"image states a size of {width} x {height}")
        if height * width > self.max_pixels:
            raise DataError(
                f"image of {width} x {height} has more than the {self.max_pixels:,} pixels allowed; raise max_pixels"
            )

    def _decode_jpeg_file(self, content: memoryview, header: ImageHeader, out: Pixels | None) -> Pixels:
        if self.size is None:
            return _decode_jpeg(content, self.strict)
        rows, columns = self._box(header.height, header.width)
        scale = _scale(rows[1] - rows[0], columns[1] - columns[0], self.size)
        # The decoder takes the smallest scale that reaches this size, which is rounded up as the decoder does.
        least = {"min_height": -(-header.height * scale // 8), "min_width": -(-header.width * scale // 8)}
        pixels = _decode_jpeg(content, self.strict, **least)
        return resize(pixels, self.size, scale_interval(rows, scale / 8), scale_interval(columns, scale / 8), out)

    def _decode_other(self, content: memoryview, out: Pixels | None) -> Pixels:
        with _open_image(content) as image:
            self._check_pixels(image.height, image.width)
            kind = image.format
            with _data_errors(f"{kind} of {len(content)} bytes cannot be decoded"):
                image.load()
                picture = _as_rgb(image)
        if self.size is None:
            return np.array(picture)
        self._check_pixels(picture.height, picture.width)
        rows, columns = self._box(picture.height, picture.width)
        return resize(np.asarray(picture), self.size, rows, columns, out)

    def _box(self, height: int, width: int) -> tuple[Interval, Interval]:
        """The rows and columns of the picture that are wanted."""
        assert self.size is not None  # callers check that there is a size
        if self.fit == "stretch":
            return (0.0, float(height)), (0.0, float(width))
        factor = min(height / self.size[0], width / self.size[1])
        top, left = (height - self.size[0] * factor) / 2, (width - self.size[1] * factor) / 2
        return (top, height - top), (left, width - left)


def _sizes_of_rows(images: ImageSizes) -> dict[str, Ints]:
    """What planning may ask of a row of images, which are in the order of their rows."""
    some = np.flatnonzero(images.count)
    first = images.first[some]

    def over_rows(reduce: np.ufunc, values: Ints) -> Ints:
        result = np.zeros(len(images), np.int64)
        if len(some):
            result[some] = reduce.reduceat(values, first)
        return result

    return {
        "num_images": images.count,
        "image_height": over_rows(np.maximum, images.height),
        "image_width": over_rows(np.maximum, images.width),
        "image_pixels": over_rows(np.add, images.height * images.width),
    }


T = TypeVar("T")
_Files = list[memoryview] | DataError
"""The encoded files of a row, or the error of the row."""


def _files_of_rows(column: pa.ChunkedArray | pa.Array) -> Iterator[_Files]:
    """The encoded files of each row, without a copy."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    nested = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    item = kind.value_type if nested else kind
    if _is_struct_of_file(item):
        yield from map(_files_of_structs, column)
        return
    if not _is_binary(item):
        raise SchemaError(
            f"images are binary, structs with binary `bytes`, or lists of these, but the column is {kind}; read files that "
            "are named by a path in a transform, or write the data with the images inside"
        )
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        for row in range(len(chunk)):
            # Read from its file, not through the mapping: see `views`.
            stored = read_value(chunk, row) if is_view(kind) else None
            if stored is not None:
                yield [memoryview(stored).cast("B")]
                continue
            scalar = chunk[row]
            files = (scalar.values or ()) if nested else (scalar,)
            yield [memoryview(file.as_buffer()).cast("B") for file in files if file.is_valid]


@dataclass(frozen=True, slots=True)
class _Peek:
    """An encoded file; or its first and last bytes, and a function that reads it in full."""

    head: memoryview
    tail: memoryview | None = None
    whole: Callable[[], memoryview] | None = None


def _peeks_of_rows(column: pa.ChunkedArray | pa.Array) -> Iterator[list[_Peek] | DataError]:
    """The encoded files of each row. Of values in a local file only both ends are read."""
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        stored = StoredValues.of(chunk) if _is_binary(chunk.type) else None
        if stored is None:
            yield from map(_peeks, _files_of_rows(chunk))
            continue
        with ExitStack() as files:
            descriptors = [files.enter_context(open_local(mapped.file)) for mapped in stored.files]
            for row, number in enumerate(stored.file.tolist()):
                if number >= 0:
                    place = int(stored.offsets[row]), int(stored.lengths[row])
                    yield [_peek(stored.files[number].file, descriptors[number], *place)]
                else:
                    yield _peeks(next(_files_of_rows(chunk.slice(row, 1))))


def _peeks(files: _Files) -> list[_Peek] | DataError:
    return files if isinstance(files, DataError) else [_Peek(content) for content in files]


def _peek(file: StoredFile, descriptor: int, offset: int, num_bytes: int) -> _Peek:
    def read(start: int, stop: int) -> memoryview:
        return memoryview(read_at(file, descriptor, offset + start, offset + stop)).cast("B")

    if num_bytes <= HEAD_BYTES + TAIL_BYTES:
        return _Peek(read(0, num_bytes))
    return _Peek(read(0, HEAD_BYTES), read(num_bytes - TAIL_BYTES, num_bytes), lambda: read(0, num_bytes))


def _files_of_structs(scalar: Any) -> _Files:
    """From one struct of `bytes` and `path`, or a list of them."""
    structs = (scalar,) if pa.types.is_struct(scalar.type) else (scalar.values or ())
    files: list[memoryview] = []
    for struct in structs:
        if not struct.is_valid:
            continue
        data = struct["bytes"]
        if data.is_valid:
            files.append(memoryview(data.as_buffer()).cast("B"))
        elif "path" in struct and struct["path"].is_valid:
            return DataError(
                f"the image is not in the data, which has only its path {struct['path'].as_py()!r}: write the dataset with "
                "the images inside, or read them in a transform"
            )
    return files


def _files_or_raise(files: list[T] | DataError) -> list[T]:
    if isinstance(files, DataError):
        raise files
    return files


def _is_struct_of_file(kind: pa.DataType) -> bool:
    if not pa.types.is_struct(kind):
        return False
    index = kind.get_field_index("bytes")
    return index >= 0 and _is_binary(kind.field(index).type)


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)


def _scale(height: float, width: float, size: tuple[int, int]) -> int:
    """The smallest scale, in eighths, at which the picture is still no smaller than `size`."""
    for scale in EIGHTHS:
        if height * scale >= size[0] * 8 and width * scale >= size[1] * 8:
            return scale
    return 8


def _decode_jpeg(content: memoryview, strict: bool, **least: int) -> Pixels:
    decode = _simplejpeg().decode_jpeg
    try:
        return decode(content, "RGB", strict=strict, **least)
    except Exception as error:
        raise _decoding_error(f"JPEG of {len(content)} bytes cannot be decoded", error) from error


@contextmanager
def _data_errors(failed: str) -> Iterator[None]:
    """Turns any exception of a decoder into a DataError. Damaged images make Pillow's plugins raise RuntimeError,
    AttributeError, struct.error, warnings and types of their own, and no list of them would be complete."""
    try:
        yield
    except OverlordError:
        raise
    except Exception as error:
        raise _decoding_error(failed, error) from error


def _decoding_error(failed: str, error: Exception) -> DataError:
    return DataError(f"{failed}: {' '.join(str(error).split()) or type(error).__name__}")


def _as_rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image.convert("RGB")


def _open_image(content: memoryview) -> Image.Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ModuleNotFoundError:
        raise SpecError("decoding images needs an extra: pip install 'overlord-dataloader[images]'") from None
    with _data_errors(f"image of {len(content)} bytes cannot be opened"):
        try:
            image = Image.open(io.BytesIO(content))
        except UnidentifiedImageError:
            raise DataError(
                f"not an image that can be read: {len(content)} bytes that begin with {bytes(content[:8])!r}"
            ) from None
    if image.format == "EPS":
        image.close()
        raise DataError("EPS is a program and not a picture: Pillow would run it; write the image in another format")
    return image


@lru_cache(maxsize=1)
def _simplejpeg() -> ModuleType:
    try:
        import simplejpeg
    except ModuleNotFoundError:
        raise SpecError("decoding images needs an extra: pip install 'overlord-dataloader[images]'") from None
    return simplejpeg
