"""Grain datasets: one IterDataset per source, mixed by Grain, packed by a transformation, prefetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain

from bench import corpus
from bench.peers.documents import Document, ParquetSource, mixing_weights
from bench.peers.packing import Batch, batches
from bench.run_one import Work


class Rows(grain.IterDataset):
    """A source's documents straight from pyarrow. Grain's own Parquet dataset gives a dictionary of object arrays a
    row, cannot divide a file over workers and ends with the file; this reads as the other peers do."""

    def __init__(self, path: str, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        self._path = path
        self._share, self._shares = rank, ranks
        self._seed = seed

    def __iter__(self) -> Elements:
        return Elements(iter(ParquetSource(self._path, self._share, self._shares, self._seed)))

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Called in each worker process with its part of the whole."""
        self._share += self._shares * (sl.start or 0)
        self._shares *= sl.step or 1


class Packed(grain.IterDataset):
    """Grain's own concat-then-split packs one row at a time and makes segment ids, not labels and cu_seqlens."""

    def __iter__(self) -> Elements:
        parent = iter(self._parent)
        return Elements(batches(parent), parent)


class Elements(grain.DatasetIterator):
    """An iterator in Grain's clothes. Checkpoints take no part in the benchmark, so it keeps no state."""

    def __init__(self, elements: Iterator[Any], parent: grain.DatasetIterator | None = None) -> None:
        super().__init__(() if parent is None else (parent,))
        self._elements = elements

    def __next__(self) -> Document | Batch:
        return next(self._elements)

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        del state


def text(work: Work, rank: int) -> Iterator[Any]:
    """Settings: `workers`, processes a rank; 0 prefetches on a thread of the trainer instead.

    Tried with 8 sources, twice each: 0, 1 and 2 workers. A thread takes a third to a quarter of the CPU that processes
    take, but competes with the trainer's own Python. Grain's own Parquet dataset in place of `Rows` took a quarter to a
    half more CPU at one rank, and between 7 % less and a third more at four.
    """
    paths = corpus.text_of(work.benchmark, work.sources).paths
    sources = [Rows(path, rank, work.ranks, seed) for seed, path in enumerate(paths)]
    packed = Packed(grain.IterDataset.mix(sources, mixing_weights(len(paths))))
    workers = work.settings.get("workers", 0)
    if workers:
        return iter(packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)))
    return iter(grain.experimental.ThreadPrefetchIterDataset(packed, prefetch_buffer_size=4))
