"""Presets of document lengths and image sizes, so that steps can be planned without any data.

`BYTED` and `GITHUB` are the length distributions of two production corpora, reconstructed from the figures of the ByteScale
paper (arXiv 2502.21231), which give the share of samples ("Byted") or of tokens ("GitHub") per length bucket. A length is
log-uniform within its bucket.

`LlavaLike` is a made-up mixture of image-text samples in the manner of LLaVA's training data.
Kinds and sizes follow what is published: COYO-700M's images are 622 x 541 pixels on average with an aspect of at most 3,
its captions 17 tokens; OBELICS has 2.5 images and 816 tokens a document; LLaVA-like mixtures add conversations about one
image, a tenth of text-only samples, and some short videos.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from overlord.arrange.vision.images import PatchGrid, images_of, with_image_tokens
from overlord.stream.facts import ChunkFacts, ImageSizes, Ints, Samples

K = 1024


@dataclass(frozen=True, slots=True)
class LengthTable:
    """A distribution of document lengths: the share `sample_shares[i]` of documents has from edges[i] to edges[i + 1]
    tokens."""

    name: str
    edges: tuple[int, ...]
    sample_shares: tuple[float, ...]

    @staticmethod
    def of_token_shares(name: str, edges: tuple[int, ...], token_shares: tuple[float, ...]) -> LengthTable:
        """Make it from the share of tokens, rather than of documents, in each bucket."""
        low, high = np.array(edges[:-1], float), np.array(edges[1:], float)
        shares = np.array(token_shares) * np.log(high / low) / (high - low)  # the mean of a log-uniform bucket
        return LengthTable(name, edges, tuple((shares / shares.sum()).tolist()))

    def documents(self, num_tokens: int, context: int, seed: int) -> Ints:
        """Draw as many lengths as fit in `num_tokens` together. Documents longer than `context` are split."""
        rng = np.random.default_rng(seed)
        parts: list[Ints] = []
        total = 0
        while total < num_tokens:
            parts.append(self.draw(4096, context, rng))
            total += int(parts[-1].sum())
        lengths = np.concatenate(parts)
        return lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens, side="right"))]

    def first_documents(self, num_documents: int, context: int, seed: int) -> Ints:
        """Draw `num_documents` lengths. Documents longer than `context` are split."""
        return self.draw(num_documents, context, np.random.default_rng(seed))[:num_documents]

    def draw(self, num_documents: int, context: int, rng: np.random.Generator) -> Ints:
        """Draw the lengths of `num_documents` documents; more lengths where some are split at `context`."""
        shares = np.array(self.sample_shares) / sum(self.sample_shares)
        low, high = np.log(self.edges[:-1]), np.log(self.edges[1:])
        bucket = rng.choice(len(shares), num_documents, p=shares)
        return _split(np.exp(rng.uniform(low[bucket], high[bucket])).astype(np.int64), context)

    def facts(self, num_documents: int, context: int, seed: tuple[int, ...]) -> ChunkFacts:
        """The facts that a Source Loader would report about a chunk of such documents."""
        tokens = self.draw(num_documents, context, np.random.default_rng(seed))
        return ChunkFacts(tokens, np.maximum(tokens - 1, 0))


def _split(lengths: Ints, context: int) -> Ints:
    pieces = -(-lengths // context)
    out = np.full(int(pieces.sum()), context, np.int64)
    out[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * context
    return out


# The first edge is chosen so that the mean length of the first bucket agrees with its shares of samples and of tokens.
BYTED = LengthTable(
    "byted",
    (512, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K, 256 * K, 512 * K, 1024 * K, 2048 * K),
    (56.6, 21.5, 10.7, 5.4, 2.7, 1.35, 0.90, 0.33, 0.32, 0.12, 0.05),
)
GITHUB = LengthTable.of_token_shares(
    "github",
    (128, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 128 * K, 256 * K, 512 * K, 1024 * K),
    (34.0, 11.4, 10.4, 9.7, 9.5, 8.8, 6.4, 4.5, 5.3),
)
TABLES = (BYTED, GITHUB)

_SHARES = (0.10, 0.40, 0.35, 0.10, 0.05)  # text alone, captions, conversations, interleaved documents, videos
_MEAN_TEXT = (900.0, 17.0, 320.0, 816.0, 200.0)
_SPREAD = (1.1, 0.8, 0.7, 0.8, 0.6)  # of the logarithm of the text's length
_FRAMES = (8, 16, 32)
_FRAME = (336, 336)


@dataclass(frozen=True, slots=True)
class LlavaLike:
    """A mixture of text, captions, conversations about images, interleaved documents and videos, in the manner of LLaVA.

    Texts have a place for every token of their images. Images larger than `max_pixels` are scaled down to it.
    """

    grid: PatchGrid = field(default_factory=lambda: PatchGrid(patch=14, merge=2))
    max_pixels: int = 1_003_520
    name: str = "llava-like"

    def samples(self, num_samples: int, context: int, seed: int | tuple[int, ...]) -> Samples:
        """Draw `num_samples` samples, none longer than `context`."""
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
        whole = with_image_tokens(samples, images_of(samples, self.grid))
        tokens = np.minimum(whole.tokens, context)
        return samples.with_columns(stop=tokens, tokens=tokens, loss_tokens=np.minimum(samples.loss_tokens, tokens))

    def facts(self, num_documents: int, context: int, seed: tuple[int, ...]) -> ChunkFacts:
        """The facts that a Source Loader would report about a chunk of such samples."""
        samples = self.samples(num_documents, context, seed)
        return ChunkFacts(samples.tokens, samples.loss_tokens, images=samples.images)

    def _image_sizes(self, count: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        width = 540.0 * np.exp(0.53 * rng.standard_normal(count))
        height = width * 541 / 622 * np.clip(np.exp(0.35 * rng.standard_normal(count)), 1 / 3, 3)
        shrink = np.sqrt(np.minimum(1.0, self.max_pixels / (width * height)))
        return tuple(np.maximum(side * shrink, 28).astype(np.int64) for side in (height, width))  # type: ignore[return-value]
