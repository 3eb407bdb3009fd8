"""What images cost: patches for the encoder, tokens for the backbone. All from the sizes in their headers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.arrange.cost import ATTENTION_SLOWDOWN
from overlord.arrange.plan import PlanStage
from overlord.errors import SpecError
from overlord.stream.facts import Floats, ImageSizes, Ints, Samples

if TYPE_CHECKING:
    from overlord.arrange.graph import DGraph


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """How a model sees an image of h x w pixels: ceil(h / patch) x ceil(w / patch) patches for the encoder, of which merge x
    merge become one token of the backbone.

    `size` is (height, width) where the trainer brings every image to one size first; without it images keep their own
    (native resolution). `more_tokens` are added to each image: a class token, or a mark for its end.
    """

    patch: int = 14
    merge: int = 1
    size: tuple[int, int] | None = None
    more_tokens: int = 0

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1:
            raise SpecError(f"patch and merge are at least 1, got {self.patch} and {self.merge}")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise SpecError(f"size is (height, width) in pixels, got {self.size}")
        if self.more_tokens < 0:
            raise SpecError(f"more_tokens must be at least 0, got {self.more_tokens}")

    def patches(self, height: Ints, width: Ints) -> Ints:
        rows, columns = self._sides(height, width)
        return rows * columns

    def tokens(self, height: Ints, width: Ints) -> Ints:
        rows, columns = self._sides(height, width)
        return -(-rows // self.merge) * -(-columns // self.merge) + self.more_tokens

    def _sides(self, height: Ints, width: Ints) -> tuple[Ints, Ints]:
        if self.size is not None:
            height, width = np.full_like(height, self.size[0]), np.full_like(width, self.size[1])
        return -(-height // self.patch), -(-width // self.patch)


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a step, sample by sample: one entry of each column per image. Frames of a video are images."""

    sample: Ints
    number: Ints
    """Which of its sample's images it is."""
    patches: Ints
    tokens: Ints

    def __len__(self) -> int:
        return len(self.sample)


ImageCost = Callable[[Images], Floats]
"""From a step's images to what it costs to encode each."""


def sizes_of(samples: Samples) -> ImageSizes:
    """The size of every image. Where only the largest of a sample is known, its images count as that large."""
    if samples.images is not None:
        return samples.images
    if "num_images" not in samples.sizes:
        return ImageSizes.none(len(samples))
    sizes = samples.sizes
    return ImageSizes.alike(sizes["num_images"], sizes["image_height"], sizes["image_width"])


def images_of(samples: Samples, grid: PatchGrid) -> Images:
    """Every image of the samples, with its patches and tokens by the grid."""
    sizes = sizes_of(samples).compact()
    number = np.arange(len(sizes.height)) - np.repeat(sizes.first, sizes.count)
    patches, tokens = (measure(sizes.height, sizes.width) for measure in (grid.patches, grid.tokens))
    return Images(np.repeat(np.arange(len(samples)), sizes.count), number, patches, tokens)


def fuse(graph: DGraph, images: Images) -> DGraph:
    """Count the tokens of its images to every sample's length, for texts that have no places for them."""
    extra = np.bincount(images.sample, images.tokens, len(graph.samples)).astype(np.int64)
    return graph.change(PlanStage("fuse", "{} images with {} tokens", (len(images), int(extra.sum()))), extra=extra)


def fused(samples: Samples, images: Images) -> Samples:
    """The samples as long as the backbone sees them, for texts that have no places for their images."""
    places = np.bincount(images.sample, images.tokens, len(samples)).astype(np.int64)
    return samples.with_columns(tokens=samples.tokens + places)


@dataclass(frozen=True, slots=True)
class VisionTransformerCost:
    """per_patch * p + per_patches_squared * p² + constant, for each image of p patches. In the unit of the backbone's cost:
    where one rank runs both, they are added up."""

    per_patch: float
    per_patches_squared: float
    constant: float = 0.0
    """Added once an image."""

    def __post_init__(self) -> None:
        for name in ("per_patch", "per_patches_squared", "constant"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise SpecError(f"the cost coefficient {name} must be a number >= 0, got {value!r}")
        if self.per_patch == self.per_patches_squared == self.constant == 0:
            raise SpecError("a VisionTransformerCost with all coefficients 0 makes every image free; give one above 0")

    @classmethod
    def of(
        cls,
        *,
        hidden: int,
        layers: int,
        ffn: int | None = None,
        attention_slowdown: float = ATTENTION_SLOWDOWN,
        trained: bool = True,
    ) -> VisionTransformerCost:
        """The cost of an encoder with full attention and plain feed-forward layers of width `ffn` (4 x hidden unless given),
        in GFLOP of dense matrix products, as `TransformerCost.of` gives it. An encoder that is not `trained` has no backward
        pass."""
        ffn = 4 * hidden if ffn is None else ffn
        if min(hidden, layers, ffn) < 1:
            raise SpecError(f"the encoder's shape needs sizes >= 1, got hidden={hidden}, layers={layers}, ffn={ffn}")
        weights = layers * (4 * hidden * hidden + 2 * hidden * ffn)
        # Attention that is not causal looks at all pairs of patches: twice what it takes in the backbone.
        attention = layers * 4 * hidden * attention_slowdown
        return cls(weights * (6 if trained else 2) / 1e9, attention * (3.5 if trained else 1.0) / 1e9)

    def __call__(self, images: Images) -> Floats:
        patches = images.patches.astype(np.float64)
        return self.constant + patches * (self.per_patch + self.per_patches_squared * patches)
