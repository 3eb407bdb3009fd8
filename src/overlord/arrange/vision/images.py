"""The images of a step, from the sizes in their headers: patches for the encoder, tokens for the backbone, and their
cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, cast

import numpy as np

from overlord.arrange.cost import ATTENTION_SLOWDOWN
from overlord.arrange.learned_cost import ENCODER, LearnedCost, LinearCost, is_linear
from overlord.arrange.plan import PlanStage
from overlord.errors import SpecError
from overlord.stream.facts import Floats, ImageSizes, Ints, Samples

if TYPE_CHECKING:
    from overlord.arrange.graph import DGraph


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """How a vision-language model divides an image: into patches for the encoder and tokens for the backbone.

    An image of h x w pixels has ceil(h / patch) x ceil(w / patch) patches, and every merge x merge of them become one token.
    """

    patch: int = 14
    """The side of a patch in pixels."""
    merge: int = 1
    """merge x merge patches become one token of the backbone."""
    size: tuple[int, int] | None = None
    """(height, width) that the trainer resizes every image to; None for native resolution."""
    more_tokens: int = 0
    """Further tokens of each image, such as a class token or an end mark."""

    def __post_init__(self) -> None:
        if self.patch < 1 or self.merge < 1:
            raise SpecError(f"patch and merge are at least 1, got {self.patch} and {self.merge}")
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise SpecError(f"size is (height, width) in pixels, got {self.size}")
        if self.more_tokens < 0:
            raise SpecError(f"more_tokens must be at least 0, got {self.more_tokens}")

    def patches(self, height: Ints, width: Ints) -> Ints:
        """The number of patches of images of these sizes in pixels."""
        rows, columns = self._sides(height, width)
        return rows * columns

    def tokens(self, height: Ints, width: Ints) -> Ints:
        """The number of backbone tokens of images of these sizes in pixels."""
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
    """The index of the image's sample."""
    number: Ints
    """The number of the image within its sample, from 0."""
    patches: Ints
    tokens: Ints

    def __len__(self) -> int:
        return len(self.sample)


ImageCost = Callable[[Images], Floats]
"""A function from `Images` to the cost of encoding each."""


def sizes_of(samples: Samples) -> ImageSizes:
    """The size of every image. Where only the largest image of a sample is known, all of its images count as that large."""
    if samples.images is not None:
        return samples.images
    if "num_images" not in samples.sizes:
        return ImageSizes.none(len(samples))
    sizes = samples.sizes
    return ImageSizes.alike(sizes["num_images"], sizes["image_height"], sizes["image_width"])


def images_of(samples: Samples, grid: PatchGrid) -> Images:
    """List the images of samples, with their patches and tokens by the model's `PatchGrid`."""
    sizes = sizes_of(samples).compact()
    number = np.arange(len(sizes.height)) - np.repeat(sizes.first, sizes.count)
    patches, tokens = (measure(sizes.height, sizes.width) for measure in (grid.patches, grid.tokens))
    return Images(np.repeat(np.arange(len(samples)), sizes.count), number, patches, tokens)


def fuse(graph: DGraph, images: Images) -> DGraph:
    """Add the tokens of its images to the length of each sample, for texts that have no place for them."""
    extra = np.bincount(images.sample, images.tokens, len(graph.samples)).astype(np.int64)
    return graph.with_stage(PlanStage("fuse", "{} images with {} tokens", (len(images), int(extra.sum()))), extra=extra)


def with_image_tokens(samples: Samples, images: Images) -> Samples:
    """The samples with the tokens of their images added to their lengths, for texts that have no place for them."""
    places = np.bincount(images.sample, images.tokens, len(samples)).astype(np.int64)
    return samples.with_columns(tokens=samples.tokens + places)


@dataclass(frozen=True, slots=True)
class VisionTransformerCost:
    """The cost of encoding an image of p patches: per_patch * p + per_patches_squared * p² + constant.

    `cost(images)` returns one number per image. Use the unit of the backbone's cost: the two are added up where one rank
    runs both. `VisionTransformerCost.of` estimates the coefficients from the shape of an encoder.
    """

    per_patch: float
    per_patches_squared: float
    constant: float = 0.0
    """Added once per image."""

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
        """Estimate the cost of an encoder with full attention, in GFLOP of dense matrix products as `TransformerCost.of`.

        `ffn` is the width of its plain feed-forward layers, 4 x hidden by default. With `trained=False` the encoder is
        frozen and has no backward pass.
        """
        ffn = 4 * hidden if ffn is None else ffn
        if min(hidden, layers, ffn) < 1:
            raise SpecError(f"the encoder's shape needs sizes >= 1, got hidden={hidden}, layers={layers}, ffn={ffn}")
        weights = layers * (4 * hidden * hidden + 2 * hidden * ffn)
        # Attention that is not causal covers all pairs of patches: twice the work of causal attention in the backbone.
        attention = layers * 4 * hidden * attention_slowdown
        return cls(weights * (6 if trained else 2) / 1e9, attention * (3.5 if trained else 1.0) / 1e9)

    @property
    def coefficients(self) -> tuple[float, float, float]:
        """(per_patch, per_patches_squared, constant)."""
        return self.per_patch, self.per_patches_squared, self.constant

    def with_coefficients(self, coefficients: tuple[float, ...]) -> VisionTransformerCost:
        """The cost with these coefficients, in the order of `coefficients`. Where all are 0, encoding is nearly free."""
        return VisionTransformerCost(*coefficients) if any(coefficients) else VisionTransformerCost(1e-300, 0.0)

    def features(self, images: Images) -> Floats:
        """The factor of each coefficient: a row per image, a column per coefficient."""
        patches = images.patches.astype(np.float64)
        return np.column_stack([patches, patches * patches, np.ones(len(patches))])

    def __call__(self, images: Images) -> Floats:
        patches = images.patches.astype(np.float64)
        return self.constant + patches * (self.per_patch + self.per_patches_squared * patches)


class LinearImageCost(Protocol):
    """A cost of images that is linear in its coefficients, such as `VisionTransformerCost`."""

    @property
    def coefficients(self) -> tuple[float, ...]: ...

    def features(self, images: Images) -> Floats:
        """The factor of each coefficient: a row per image, a column per coefficient."""
        ...

    def with_coefficients(self, coefficients: tuple[float, ...]) -> Self: ...

    def __call__(self, images: Images) -> Floats: ...


@dataclass(frozen=True, slots=True)
class EncodedSamples:
    """The cost of encoding the images of samples, as a module of a `LearnedCost`."""

    of_images: LinearImageCost
    grid: PatchGrid

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self.of_images.coefficients

    def with_coefficients(self, coefficients: tuple[float, ...]) -> EncodedSamples:
        return EncodedSamples(self.of_images.with_coefficients(coefficients), self.grid)

    def features(self, samples: Samples) -> Floats:
        images = images_of(samples, self.grid)
        columns = self.of_images.features(images).T
        sums = [np.bincount(images.sample, column, len(samples)) for column in columns]
        return np.column_stack(sums).astype(np.float64, copy=False)

    def __call__(self, samples: Samples) -> Floats:
        images = images_of(samples, self.grid)
        return np.bincount(images.sample, self.of_images(images), len(samples)).astype(np.float64)


@dataclass(frozen=True, slots=True)
class SamplesWithImageTokens:
    """A cost of samples whose texts have no place for the tokens of their images, as a module of a `LearnedCost`."""

    cost: LinearCost
    grid: PatchGrid

    @property
    def coefficients(self) -> tuple[float, ...]:
        return self.cost.coefficients

    def with_coefficients(self, coefficients: tuple[float, ...]) -> SamplesWithImageTokens:
        return SamplesWithImageTokens(self.cost.with_coefficients(coefficients), self.grid)

    def features(self, samples: Samples) -> Floats:
        return self.cost.features(with_image_tokens(samples, images_of(samples, self.grid)))

    def __call__(self, samples: Samples) -> Floats:
        return self.cost(with_image_tokens(samples, images_of(samples, self.grid)))


def learned_with_encoder(backbone: LearnedCost, encoder: ImageCost, grid: PatchGrid, places_in_text: bool) -> LearnedCost:
    """The learned cost of a backbone and its encoder together. Trainers report the time of both as one, so neither can be
    learned without the other."""
    if not is_linear(encoder):
        raise SpecError(
            "a LearnedCost of the backbone learns the cost of the encoder too, so the encoder's is a VisionTransformerCost, "
            f"not a {type(encoder).__name__}; or give the backbone a fixed cost"
        )
    if ENCODER in backbone.modules:
        raise SpecError(f"{ENCODER!r} is the module of the image encoder; give that of the backbone another name")
    modules = dict(backbone.modules)
    if not places_in_text:
        modules = {name: SamplesWithImageTokens(cost, grid) for name, cost in modules.items()}
    encoded = EncodedSamples(cast("LinearImageCost", encoder), grid)
    return LearnedCost({**modules, ENCODER: encoded}, backbone.every, backbone.speeds)
