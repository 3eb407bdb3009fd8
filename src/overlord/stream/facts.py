"""Facts about samples: all that planning ever sees of the data. Columns, never objects per sample.

`ImageSizes` says how large the images of samples are: several to a sample, each of its own size. Video frames count as
images.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ONLY_IMAGE = "only_image"
"""Among the `sizes` of planned samples: which images of a sample are wanted. 0: all; k: the k-th, from 1; -1: none."""

LOSS_EXTRA = "loss_extra"
"""Among the `sizes` of samples with loss weights: by how much the sum of the weights of their loss tokens exceeds the number
of these, in units of 2**-WEIGHT_BITS. So samples without weights have none, and sums are exact in any order."""
WEIGHT_BITS = 32


class LossCount(NamedTuple):
    """The loss tokens of a part of a document, and its LOSS_EXTRA."""

    tokens: int
    extra: int = 0


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """What a Source Loader tells of one chunk: a row of every array per sample, in the chunk's order.

    `sizes` holds what else a cost function may want, by name: num_images, image_pixels, image_height, ...
    """

    tokens: Ints
    loss_tokens: Ints
    sizes: Mapping[str, Ints] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    """What the long-document policy and the filters did to make this chunk, by name: split, dropped, empty, ..."""
    images: ImageSizes | None = None
    """The size of every image, where rows have any."""

    @property
    def num_rows(self) -> int:
        return len(self.tokens)


COLUMNS = ("source", "chunk", "row", "start", "stop", "tokens", "loss_tokens")
"""The columns that every table of samples has, in the order in which they lie in it."""

_SOURCE, _CHUNK, _ROW, _START, _STOP, _TOKENS, _LOSS_TOKENS = range(len(COLUMNS))


@record
class Samples:
    """The samples of one step, in the order they were drawn. One entry of each column per sample.

    A sample is the tokens [start, stop) of row `row` of chunk `chunk` of source `source` (an index into
    `source_names`). `tokens` is stop - start, or 0 for sources without text. `table` holds these columns as its rows: a
    step of ordinary size has some dozens of samples, so what counts is how few calls it takes to handle all of them.
    """

    source_names: tuple[str, ...]
    table: Ints
    sizes: Mapping[str, Ints] = field(default_factory=dict)
    images: ImageSizes | None = None
    """The size of every image, where samples have any."""

    def __len__(self) -> int:
        return self.table.shape[1]

    @property
    def source(self) -> Ints:
        return self.table[_SOURCE]

    @property
    def chunk(self) -> Ints:
        return self.table[_CHUNK]

    @property
    def row(self) -> Ints:
        return self.table[_ROW]

    @property
    def start(self) -> Ints:
        return self.table[_START]

    @property
    def stop(self) -> Ints:
        return self.table[_STOP]

    @property
    def tokens(self) -> Ints:
        return self.table[_TOKENS]

    @property
    def loss_tokens(self) -> Ints:
        return self.table[_LOSS_TOKENS]

    @property
    def total_loss(self) -> int | float:
        """The number of loss tokens; where there are loss weights, the sum of these."""
        count, extra = int(self.loss_tokens.sum()), self.sizes.get(LOSS_EXTRA)
        if extra is None:
            return count
        # Whole units and fractions apart, since their sum in the finer unit may be more than int64 holds.
        units, fraction = extra >> WEIGHT_BITS, extra & ((1 << WEIGHT_BITS) - 1)
        return count + int(units.sum()) + int(fraction.sum()) / (1 << WEIGHT_BITS)

    def take(self, index: NDArray[np.integer] | slice) -> Samples:
        """The samples at these places; views where `index` is a slice."""
        return Samples(
            self.source_names,
            self.table[:, index] if isinstance(index, slice) else self.table.take(index, axis=1),
            {name: column[index] for name, column in self.sizes.items()} if self.sizes else {},
            None if self.images is None else self.images.take(index),
        )

    def with_columns(self, **columns: NDArray[np.integer] | int) -> Samples:
        """The same samples with other values in some of COLUMNS."""
        table = self.table.copy()
        for name, values in columns.items():
            table[COLUMNS.index(name)] = values
        return Samples(self.source_names, table, self.sizes, self.images)

    def with_loss(self, tokens: NDArray[np.integer] | int, extra: NDArray[np.integer] | int) -> Samples:
        """The same samples with other counts of loss. `extra` is left out where these samples have no weights."""
        made = self.with_columns(loss_tokens=tokens)
        if LOSS_EXTRA not in self.sizes:
            return made
        return replace(made, sizes={**self.sizes, LOSS_EXTRA: np.zeros(len(self), np.int64) + extra})

    def for_sources(self, names: tuple[str, ...]) -> Samples:
        """The same samples under another list of source names, without those of sources that are not in it."""
        index_of = {name: i for i, name in enumerate(names)}
        renumbered = np.array([index_of.get(name, -1) for name in self.source_names] or [-1], np.int64)
        source = renumbered[self.source]
        kept = np.flatnonzero(source >= 0)
        return replace(self.take(kept).with_columns(source=source[kept]), source_names=names)

    @staticmethod
    def none(source_names: tuple[str, ...]) -> Samples:
        return Samples(source_names, np.zeros((len(COLUMNS), 0), np.int64))

    @staticmethod
    def of_columns(
        source_names: tuple[str, ...],
        *columns: NDArray[np.integer],
        sizes: Mapping[str, Ints] | None = None,
        images: ImageSizes | None = None,
    ) -> Samples:
        """From the columns, in the order of COLUMNS."""
        if len(columns) != len(COLUMNS):
            raise ValueError(f"samples have the columns {', '.join(COLUMNS)}; got {len(columns)}")
        return Samples(source_names, np.array(columns, np.int64), sizes or {}, images)

    @staticmethod
    def concatenated(parts: Sequence[Samples]) -> Samples:
        """The samples of several tables of the same sources, one after the other; sizes that a part lacks are 0."""
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
            images=ImageSizes.concatenated([part.images for part in parts], [len(part) for part in parts]),
        )

    @staticmethod
    def of_lengths(
        tokens: NDArray[np.integer], sizes: Mapping[str, Ints] | None = None, images: ImageSizes | None = None
    ) -> Samples:
        """Samples of one nameless source from lengths alone: for simulation, benchmarks and tests."""
        lengths = np.asarray(tokens, np.int64)
        zeros = np.zeros(len(lengths), np.int64)
        row, loss_tokens = np.arange(len(lengths)), np.maximum(lengths - 1, 0)
        columns = (zeros, zeros, row, zeros, lengths, lengths, loss_tokens)
        return Samples.of_columns(("samples",), *columns, sizes=dict(sizes or {}), images=images)


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """The images of sample i are the entries `first[i]` to `first[i] + count[i]` of `height` and `width`.

    Taking some samples copies nothing of the sizes; joining tables keeps only those in use.
    """

    first: Ints
    count: Ints
    height: Ints
    width: Ints

    @staticmethod
    def of(sizes: Sequence[Sequence[tuple[int, int]]]) -> ImageSizes:
        """From the (height, width) of each image of each sample."""
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
        """The same with the sizes in the order of the samples, and no others."""
        at = self.places()
        return ImageSizes(np.cumsum(self.count) - self.count, self.count, self.height[at], self.width[at])

    def places(self) -> Ints:
        """Where the size of each image lies, sample by sample."""
        begin = np.cumsum(self.count) - self.count
        return np.arange(int(self.count.sum())) + np.repeat(self.first - begin, self.count)

    def to_lists(self) -> list[list[list[int]]]:
        """[height, width] of each image of each sample."""
        height, width = self.height.tolist(), self.width.tolist()
        spans = zip(self.first.tolist(), self.count.tolist(), strict=True)
        return [[[height[i], width[i]] for i in range(first, first + count)] for first, count in spans]

    @staticmethod
    def concatenated(parts: Sequence[ImageSizes | None], lengths: Sequence[int]) -> ImageSizes | None:
        """One table from several; None stands for a part of that many samples without images, and all of them for none."""
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
