"""The floor: pyarrow decode, weighted mix, pack, in one loop on one thread. No roles, no prefetch, no state."""

from __future__ import annotations

from collections.abc import Iterator

from bench import corpus
from bench.peers.documents import mixed_parquet, mixing_weights
from bench.peers.packing import Batch, batches
from bench.run_one import Work


def text(work: Work, rank: int) -> Iterator[Batch]:
    """All ranks' batches come from the same loop: dealing them out costs it nothing."""
    paths = corpus.text_of(work.benchmark, work.sources).paths
    return batches(mixed_parquet(paths, mixing_weights(work.sources)))
