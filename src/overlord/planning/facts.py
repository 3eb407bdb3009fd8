"""Facts about samples: all that planning ever sees of the data. Columns, never objects per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from overlord.planning.images.image_sizes import ImageSizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ONLY_IMAGE = "only_image"
"""Among the `sizes` of planned samples: which images of a sample are wanted. 0: all; k: the k-th, from 1; -1: none."""


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


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one step, in the order they were drawn. One entry of each column per sample.

    A sample is the tokens [start, stop) of row `row` of chunk `chunk` of source `source` (an index into
    `source_names`). `tokens` is stop - start, or 0 for sources without text.
    """

    source_names: tuple[str, ...]
    source: Ints
    chunk: Ints
    row: Ints
    start: Ints
    stop: Ints
    tokens: Ints
    loss_tokens: Ints
    sizes: Mapping[str, Ints] = field(default_factory=dict)
    images: ImageSizes | None = None
    """The size of every image, where samples have any."""

    def __len__(self) -> int:
        return len(self.source)

    def take(self, index: NDArray[np.integer] | slice) -> Samples:
        """The samples at these places; views where `index` is a slice."""
        return Samples(
            self.source_names,
            self.source[index],
            self.chunk[index],
            self.row[index],
            self.start[index],
            self.stop[index],
            self.tokens[index],
            self.loss_tokens[index],
            {name: column[index] for name, column in self.sizes.items()} if self.sizes else {},
            None if self.images is None else self.images.take(index),
        )

    def for_sources(self, names: tuple[str, ...]) -> Samples:
        """The same samples under another list of source names, without those of sources that are not in it."""
        index_of = {name: i for i, name in enumerate(names)}
        renumbered = np.array([index_of.get(name, -1) for name in self.source_names] or [-1], np.int64)
        source = renumbered[self.source]
        kept = np.flatnonzero(source >= 0)
        return replace(self.take(kept), source_names=names, source=source[kept])

    @staticmethod
    def none(source_names: tuple[str, ...]) -> Samples:
        return replace(Samples.of_lengths(np.zeros(0, np.int64)), source_names=source_names)

    @staticmethod
    def concatenated(parts: Sequence[Samples]) -> Samples:
        """The samples of several tables of the same sources, one after the other; sizes that a part lacks are 0."""
        if len(parts) == 1:
            return parts[0]
        size_names = dict.fromkeys(name for part in parts for name in part.sizes)
        return Samples(
            parts[0].source_names,
            *(
                np.concatenate([getattr(part, column) for part in parts])
                for column in ("source", "chunk", "row", "start", "stop", "tokens", "loss_tokens")
            ),
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
        n = len(lengths)
        zeros = np.zeros(n, np.int64)
        return Samples(
            source_names=("samples",),
            source=zeros,
            chunk=zeros,
            row=np.arange(n, dtype=np.int64),
            start=zeros,
            stop=lengths,
            tokens=lengths,
            loss_tokens=np.maximum(lengths - 1, 0),
            sizes=dict(sizes or {}),
            images=images,
        )
