"""webdataset's own pipeline and loader: shards split over workers, members grouped by key, Pillow in the workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import webdataset

from bench import corpus
from bench.peers.pictures import BATCH, Picture, decode
from bench.run_one import Work


def images(work: Work, rank: int) -> Iterator[dict[str, Any]]:
    """Settings: `workers`, `draft`, see `pictures.decode`. Tried: 1, 2 and 3 workers, twice each; 1 takes the
    least CPU."""
    draft = work.settings.get("draft", False)
    samples = webdataset.WebDataset(
        corpus.IMAGES.paths,
        resampled=False,
        shardshuffle=False,
        workersplitter=webdataset.split_by_worker,
        empty_check=False,
    ).repeat()
    pairs = samples.to_tuple("jpg", "txt").map_tuple(lambda jpeg: decode(jpeg, draft=draft), bytes.decode)
    batches = pairs.batched(BATCH, collation_fn=_stacked, partial=False)
    return iter(webdataset.WebLoader(batches, batch_size=None, num_workers=work.settings.get("workers", 1)))


def _stacked(pairs: list[tuple[Picture, str]]) -> dict[str, Any]:
    return {"images": np.stack([image for image, _ in pairs]), "captions": [caption for _, caption in pairs]}
