"""A record of a step that does not depend on the arrangement of its samples, to prove that a resumed stream is the same."""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.mesh_tree import ClientPlaceTree
    from overlord.service.dry_run import StepParts
    from overlord.stream.facts import Samples

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Equal for two steps with the same samples and the same tokens, however they are arranged over ranks."""

    step: int
    members: str
    """Digest of the multiset of (source, chunk, row, start, stop)."""
    content: int
    """Checksum over all ranks of every token with its position and its label, and of every image."""


def step_record(samples: Samples, taken: StepParts, tree: ClientPlaceTree, pad_token: int) -> StepRecord:
    """The record of a step. `taken` must have all ranks of a mesh without tensor and pipeline parallelism, so that no token
    counts twice."""
    content = 0
    for rank, step in taken.parts.items():
        for micro in step:
            content += _tokens_sum(micro["tokens"], micro["position_ids"], micro["labels"], pad_token)
            if tree.coordinates(rank).cp == 0:  # images are whole on every context-parallel rank
                content += sum(zlib.crc32(image.tobytes()) for image in micro.get("images", ()))
    return StepRecord(taken.number, _members(samples), content % (1 << 64))


def first_difference(uncut: Sequence[StepRecord], pieces: Sequence[StepRecord]) -> str | None:
    """A description of the first difference between a run and its replay in pieces; None if there is none."""
    for whole, piece in zip(uncut, pieces, strict=False):
        if whole.step != piece.step:
            return f"step {whole.step} of the uncut run stands where the resumed run has step {piece.step}"
        if whole.members != piece.members:
            return f"step {whole.step} holds other samples"
        if whole.content != piece.content:
            return f"step {whole.step} holds the same samples with other tokens, labels, positions or images"
    if len(uncut) != len(pieces):
        return f"the uncut run has {len(uncut)} steps, the resumed one {len(pieces)}"
    return None


def _members(samples: Samples) -> str:
    columns = np.stack([samples.source, samples.chunk, samples.row, samples.start, samples.stop])
    digest = hashlib.blake2b("\0".join(samples.source_names).encode(), digest_size=16)
    digest.update(columns[:, np.lexsort(columns)].tobytes())
    return digest.hexdigest()


def _tokens_sum(tokens: NDArray[np.int32], positions: NDArray[np.int32], labels: NDArray[np.int64], pad_token: int) -> int:
    """A sum of one hash per token, so that the order of tokens does not matter."""
    mixed = tokens.astype(np.uint64)
    mixed ^= positions.astype(np.uint64) << np.uint64(20)
    mixed ^= labels.view(np.uint64) << np.uint64(44)
    mixed *= _ODD
    mixed ^= mixed >> np.uint64(29)
    mixed *= _ODD
    mixed ^= mixed >> np.uint64(32)
    return int(mixed.sum(where=tokens != pad_token))
