"""How large the images of samples are: several to a sample, each of its own size. Video frames count as images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


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
