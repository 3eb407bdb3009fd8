"""A made-up mixture of image-text samples in the manner of LLaVA's training data, to plan steps without any data.

Kinds and sizes follow what is published: COYO-700M's images are 622 x 541 pixels on average with an aspect of at most 3,
its captions 17 tokens; OBELICS has 2.5 images and 816 tokens a document; LLaVA-like mixtures add conversations about one
image, a tenth of text alone, and some short videos.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from overlord.planning.facts import ChunkFacts, Ints, Samples
from overlord.planning.images.image_sizes import ImageSizes
from overlord.planning.images.vision import PatchGrid, fused, images_of

_SHARES = (0.10, 0.40, 0.35, 0.10, 0.05)  # text alone, captions, conversations, interleaved documents, videos
_MEAN_TEXT = (900.0, 17.0, 320.0, 816.0, 200.0)
_SPREAD = (1.1, 0.8, 0.7, 0.8, 0.6)  # of the logarithm of the text's length
_FRAMES = (8, 16, 32)
_FRAME = (336, 336)


@dataclass(frozen=True, slots=True)
class LlavaLike:
    """Samples with a place in their text for every token of their images. Images above `max_pixels` count as that large."""

    grid: PatchGrid = field(default_factory=lambda: PatchGrid(patch=14, merge=2))
    max_pixels: int = 1_003_520
    name: str = "llava-like"

    def samples(self, num_samples: int, context: int, seed: int | tuple[int, ...]) -> Samples:
        """So many samples; none is longer than `context`."""
        rng = np.random.default_rng(seed)
        kind = rng.choice(len(_SHARES), num_samples, p=_SHARES)
        spread = np.array(_SPREAD)[kind]
        text = np.exp(np.log(np.array(_MEAN_TEXT)[kind]) - spread**2 / 2 + spread * rng.standard_normal(num_samples))
        count = np.select(
            [kind == 0, kind == 3, kind == 4], [0, 1 + rng.poisson(1.5, num_samples), rng.choice(_FRAMES, num_samples)], 1
        )
        is_frame = np.repeat(kind == 4, count)
        height, width = self._image_sizes(len(is_frame), rng)
        height, width = (np.where(is_frame, side, other) for side, other in zip(_FRAME, (height, width), strict=True))
        images = ImageSizes(np.cumsum(count) - count, count, height, width)
        samples = Samples.of_lengths(np.clip(text, 3, context).astype(np.int64), images=images)
        whole = fused(samples, images_of(samples, self.grid))
        tokens = np.minimum(whole.tokens, context)
        return samples.with_columns(stop=tokens, tokens=tokens, loss_tokens=np.minimum(samples.loss_tokens, tokens))

    def facts(self, num_documents: int, context: int, seed: tuple[int, ...]) -> ChunkFacts:
        """A chunk of such samples, as a Source Loader would describe it."""
        samples = self.samples(num_documents, context, seed)
        return ChunkFacts(samples.tokens, samples.loss_tokens, images=samples.images)

    def _image_sizes(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        width = 540.0 * np.exp(0.53 * rng.standard_normal(count))
        height = width * 541 / 622 * np.clip(np.exp(0.35 * rng.standard_normal(count)), 1 / 3, 3)
        shrink = np.sqrt(np.minimum(1.0, self.max_pixels / (width * height)))
        return tuple(np.maximum(side * shrink, 28).astype(np.int64) for side in (height, width))  # type: ignore[return-value]
