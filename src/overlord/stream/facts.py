"""Facts about samples, which are all that planning sees of the data: columns, never an object per sample.

`Samples` has the samples of a step, `ChunkFacts` those of a chunk, and `ImageSizes` the sizes of their images, of which a
sample may have several. Video frames count as images.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from overlord.declare.source import CHOSEN_TOKENS
from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ONLY_IMAGE = "only_image"
"""A column of `sizes` in planned samples: which images of a sample to build. 0: all; k: only the k-th, from 1; -1: none."""

LOSS_EXTRA = "loss_extra"
"""A column of `sizes` in samples with loss weights: the sum of the weights of their loss tokens minus the number of these,
in units of 2**-WEIGHT_BITS. Samples without weights have no such column, and integer sums are exact in any order."""
WEIGHT_BITS = 32


class LossCount(NamedTuple):
    """The loss tokens of a part of a document, and its LOSS_EXTRA."""

    tokens: int
    extra: int = 0


class Losses(NamedTuple):
    """The `LossCount` of several parts of documents, as columns."""

    tokens: Ints
    extra: Ints


@record
class TokenSpans:
    """Parts of rows: the tokens `start` to `stop` of row `row` in chunk `chunk` of source `source`, one entry of each column
    per part."""

    table: Ints
    """The columns source, chunk, row, start, stop, as rows of one array."""

    def __len__(self) -> int:
        return self.table.shape[1]


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """What a Source Loader reports about one chunk: one entry of each column per sample, in the order of the chunk."""

    tokens: Ints
    loss_tokens: Ints
    sizes: Mapping[str, Ints] = field(default_factory=dict[str, Ints])
    """Further columns for cost functions, by name: num_images, image_pixels, image_height, ..."""
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many rows the long-document policy and the filters split, dropped, found empty, ... while making this chunk."""
    images: ImageSizes | None = None
    """The size of every image; None if no row has one."""
    origins: RowOrigins | None = None
    """Where each row was read; None where that is not known, as for facts that are computed."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class RowOrigins:
    """Where the rows of a chunk were read: row r in row `row[r]` of the unit `units[place[r]]`.

    Small arrays, because they travel with the facts of every chunk.
    """

    units: tuple[int, ...]
    """The units of the chunk, by their number among the units of the source."""
    row: NDArray[np.int32]
    """The row within its unit; -1 where a transform lost the lineage."""
    place: NDArray[np.int32] | None = None
    """Which of `units`; None where there is only one."""
    token: NDArray[np.int32] | None = None
    """The first token of the row within its document; None where every row begins with the first."""

    def unit(self, rows: Ints) -> Ints:
        """The number of the unit of each of these rows."""
        units = np.array(self.units, np.int64)
        return np.full(len(rows), units[0]) if self.place is None else units[self.place[rows]]


COLUMNS = ("source", "chunk", "row", "start", "stop", "tokens", "loss_tokens")
"""The columns of a table of samples, in their order."""


class SampleColumns(TypedDict, total=False):
    """Values for some of COLUMNS: one per sample, or one for all."""

    source: NDArray[np.integer] | int
    chunk: NDArray[np.integer] | int
    row: NDArray[np.integer] | int
    start: NDArray[np.integer] | int
    stop: NDArray[np.integer] | int
    tokens: NDArray[np.integer] | int
    loss_tokens: NDArray[np.integer] | int


_SOURCE, _CHUNK, _ROW, _START, _STOP, _TOKENS, _LOSS_TOKENS = range(len(COLUMNS))


@record
class Samples:
    """Facts about the samples of a step, in the order in which they were drawn: one entry of each column per sample.

    Cost functions and strategies read them. A sample is the tokens [start, stop) of row `row` in chunk `chunk` of a source.
    `tokens` is its length, stop - start, or 0 for sources without text. `loss_tokens` is how many of its tokens have a loss.
    `sizes` has further columns by name (num_images, image_height, ...), `images` the size of every image. `take` selects
    samples, `Samples.of_lengths` makes them from lengths alone, for tests and simulations.
    """

    source_names: tuple[str, ...]
    table: Ints
    """The columns as rows of one array: a step usually has some dozens of samples, where the number of numpy calls decides
    the speed."""
    sizes: Mapping[str, Ints] = field(default_factory=dict[str, Ints])
    images: ImageSizes | None = None
    """The size of every image; None if no sample has one."""

    def __len__(self) -> int:
        return self.table.shape[1]

    @property
    def source(self) -> Ints:
        """The index of each sample's source in `source_names`."""
        return self.table[_SOURCE]

    @property
    def chunk(self) -> Ints:
        """The chunk of the source that each sample is in."""
        return self.table[_CHUNK]

    @property
    def row(self) -> Ints:
        """The row of each sample within its chunk."""
        return self.table[_ROW]

    @property
    def start(self) -> Ints:
        """The first token of each sample within its row."""
        return self.table[_START]

    @property
    def stop(self) -> Ints:
        """The end of each sample within its row, exclusive."""
        return self.table[_STOP]

    @property
    def tokens(self) -> Ints:
        """The number of tokens of each sample."""
        return self.table[_TOKENS]

    @property
    def loss_tokens(self) -> Ints:
        """The number of tokens with a loss of each sample."""
        return self.table[_LOSS_TOKENS]

    @property
    def total_loss(self) -> int | float:
        """The number of loss tokens of all samples; with loss weights, the sum of their weights."""
        count, extra = int(self.loss_tokens.sum()), self.sizes.get(LOSS_EXTRA)
        if extra is None:
            return count
        # Whole units and fractions are summed separately: in the finer unit the sum may overflow int64.
        units, fraction = extra >> WEIGHT_BITS, extra & ((1 << WEIGHT_BITS) - 1)
        return count + int(units.sum()) + int(fraction.sum()) / (1 << WEIGHT_BITS)

    def take(self, index: NDArray[np.integer] | slice) -> Samples:
        """The samples at these indexes; views of the columns if `index` is a slice."""
        return Samples(
            self.source_names,
            self.table[:, index] if isinstance(index, slice) else self.table.take(index, axis=1),
            {name: column[index] for name, column in self.sizes.items()} if self.sizes else {},
            None if self.images is None else self.images.take(index),
        )

    def with_columns(self, **columns: Unpack[SampleColumns]) -> Samples:
        """A copy with other values in some of COLUMNS."""
        if unknown := columns.keys() - COLUMNS:
            raise TypeError(f"samples have the columns {', '.join(COLUMNS)}, not {', '.join(sorted(unknown))}")
        table = self.table.copy()
        for name, values in columns.items():
            table[COLUMNS.index(name)] = cast("NDArray[np.integer] | int", values)
        return Samples(self.source_names, table, self.sizes, self.images)

    def in_sides(self) -> tuple[Samples, Ints]:
        """Each side of a preference pair as a sample of its own, and the index here of every sample. Sizes that count tokens
        of the pair are 0."""
        chosen = self.sizes[CHOSEN_TOKENS]
        owner = np.repeat(np.arange(len(self)), 1 + (chosen > 0))
        is_second = np.append(False, owner[1:] == owner[:-1])
        tokens = np.where(is_second, self.tokens[owner] - chosen[owner], np.where(chosen > 0, chosen, self.tokens)[owner])
        sides = self.take(owner).with_columns(tokens=tokens, stop=tokens, loss_tokens=0)
        return replace(sides, sizes={**sides.sizes, CHOSEN_TOKENS: np.zeros(len(owner), np.int64)}), owner

    def spans(self, index: NDArray[np.integer]) -> TokenSpans:
        """Where the samples at these indexes are."""
        return TokenSpans(self.table[[_SOURCE, _CHUNK, _ROW, _START, _STOP]].take(index, axis=1))

    def with_loss(self, tokens: NDArray[np.integer] | int, extra: NDArray[np.integer] | int) -> Samples:
        """A copy with other loss counts. `extra` is the LOSS_EXTRA column, ignored if these samples have no loss weights."""
        made = self.with_columns(loss_tokens=tokens)
        if LOSS_EXTRA not in self.sizes:
            return made
        return replace(made, sizes={**self.sizes, LOSS_EXTRA: np.zeros(len(self), np.int64) + extra})

    def with_sizes(self, names: Sequence[str]) -> Samples:
        """A copy that has all these columns of `sizes`: 0 where there are none yet."""
        missing = [name for name in names if name not in self.sizes]
        if not missing:
            return self
        return replace(self, sizes={**self.sizes, **{name: np.zeros(len(self), np.int64) for name in missing}})

    def for_sources(self, names: tuple[str, ...]) -> Samples:
        """A copy for another list of source names. Samples of sources that are not in the list are dropped."""
        index_of = {name: i for i, name in enumerate(names)}
        renumbered = np.array([index_of.get(name, -1) for name in self.source_names] or [-1], np.int64)
        source = renumbered[self.source]
        kept = np.flatnonzero(source >= 0)
        return replace(self.take(kept).with_columns(source=source[kept]), source_names=names)

    @staticmethod
    def none(source_names: tuple[str, ...]) -> Samples:
        """No samples."""
        return Samples(source_names, np.zeros((len(COLUMNS), 0), np.int64))

    @staticmethod
    def of_columns(
        source_names: tuple[str, ...],
        *columns: NDArray[np.integer],
        sizes: Mapping[str, Ints] | None = None,
        images: ImageSizes | None = None,
    ) -> Samples:
        """Make samples from their columns, in the order of COLUMNS."""
        if len(columns) != len(COLUMNS):
            raise ValueError(f"samples have the columns {', '.join(COLUMNS)}; got {len(columns)}")
        return Samples(source_names, np.array(columns, np.int64), sizes or {}, images)

    @staticmethod
    def concatenate(parts: Sequence[Samples]) -> Samples:
        """The samples of several tables with the same sources, one table after the other. Sizes that a table lacks are 0."""
        if len(parts) == 1:
            return parts[0]
        table = np.concatenate([part.table for part in parts], axis=1)
        size_names = dict.fromkeys(name for part in parts for name in part.sizes)
        if not size_names and all(part.images is None for part in parts):
            return Samples(parts[0].source_names, table)
        return Samples(
            parts[0].source_names,
            table,
            sizes={
                name: np.concatenate(
                    [part.sizes[name] if name in part.sizes else np.zeros(len(part), np.int64) for part in parts]
                )
                for name in size_names
            },
            images=ImageSizes.concatenate([part.images for part in parts], [len(part) for part in parts]),
        )

    @staticmethod
    def of_lengths(
        tokens: NDArray[np.integer], sizes: Mapping[str, Ints] | None = None, images: ImageSizes | None = None
    ) -> Samples:
        """Make samples of a single source from their lengths in tokens: for simulations, benchmarks and tests."""
        lengths = np.asarray(tokens, np.int64)
        zeros = np.zeros(len(lengths), np.int64)
        row, loss_tokens = np.arange(len(lengths)), np.maximum(lengths - 1, 0)
        columns = (zeros, zeros, row, zeros, lengths, lengths, loss_tokens)
        return Samples.of_columns(("samples",), *columns, sizes=dict(sizes or {}), images=images)


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The sizes of the images of samples, in pixels.

    The images of sample i are the entries `first[i]` to `first[i] + count[i]` of `height` and `width`. `take` copies no
    sizes; `concatenate` keeps only those in use.
    """

    first: Ints
    count: Ints
    height: Ints
    width: Ints

    @staticmethod
    def of(sizes: Sequence[Sequence[tuple[int, int]]]) -> ImageSizes:
        """Make it from the (height, width) of each image of each sample."""
        count = np.array([len(each) for each in sizes], np.int64)
        flat = np.array([size for each in sizes for size in each], np.int64).reshape(-1, 2)
        return ImageSizes(np.cumsum(count) - count, count, flat[:, 0].copy(), flat[:, 1].copy())

    @staticmethod
    def alike(count: Ints, height: Ints, width: Ints) -> ImageSizes:
        """`count[i]` images of one size for sample i."""
        return ImageSizes(np.cumsum(count) - count, count, np.repeat(height, count), np.repeat(width, count))

    @staticmethod
    def none(num_samples: int) -> ImageSizes:
        zeros, nothing = np.zeros(num_samples, np.int64), np.zeros(0, np.int64)
        return ImageSizes(zeros, zeros, nothing, nothing)

    def __len__(self) -> int:
        return len(self.count)

    def take(self, index: NDArray[np.integer] | slice) -> ImageSizes:
        return ImageSizes(self.first[index], self.count[index], self.height, self.width)

    def compact(self) -> ImageSizes:
        """A copy with the sizes in the order of the samples, and no others."""
        at = self.places()
        return ImageSizes(np.cumsum(self.count) - self.count, self.count, self.height[at], self.width[at])

    def places(self) -> Ints:
        """The index of each image's size in `height` and `width`, sample by sample."""
        begin = np.cumsum(self.count) - self.count
        return np.arange(int(self.count.sum())) + np.repeat(self.first - begin, self.count)

    def to_lists(self) -> list[list[list[int]]]:
        """[height, width] of each image of each sample."""
        height, width = self.height.tolist(), self.width.tolist()
        spans = zip(self.first.tolist(), self.count.tolist(), strict=True)
        return [[[height[i], width[i]] for i in range(first, first + count)] for first, count in spans]

    @staticmethod
    def concatenate(parts: Sequence[ImageSizes | None], lengths: Sequence[int]) -> ImageSizes | None:
        """The images of several tables of `lengths` samples each. None is a table without images; the result is None if all
        are."""
        if all(part is None for part in parts):
            return None
        found = [(part or ImageSizes.none(n)).compact() for part, n in zip(parts, lengths, strict=True)]
        before = np.cumsum([0, *(len(part.height) for part in found[:-1])])
        return ImageSizes(
            np.concatenate([part.first + start for part, start in zip(found, before.tolist(), strict=True)]),
            np.concatenate([part.count for part in found]),
            np.concatenate([part.height for part in found]),
            np.concatenate([part.width for part in found]),
        )
