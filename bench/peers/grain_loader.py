"""Grain datasets: one IterDataset per source, mixed by Grain, packed by a transformation, prefetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from bench import corpus
from bench.peers.documents import Document, ParquetSource, mixing_weights
from bench.peers.packing import BATCH_TOKENS, IGNORED, ROW_TOKENS, ROWS, Batch, batches
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
    """The packing that all peers share, which makes whole batches; `own_packing` is Grain's."""

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


def own_packing(documents: grain.IterDataset) -> grain.IterDataset:
    """Packed by Grain itself, as its users do: inputs and targets of each document, concatenated and split into rows, rows
    batched, and from its segment ids what the others deliver too."""
    pairs = documents.map(_with_labels)
    lengths = {"tokens": ROW_TOKENS, "labels": ROW_TOKENS}
    rows = grain.experimental.ConcatThenSplitIterDataset(pairs, length_struct=lengths)
    return rows.batch(ROWS, drop_remainder=True).map(_as_batch)


def _with_labels(document: Document) -> dict[str, NDArray[Any]]:
    labels = np.full(len(document), IGNORED, np.int64)
    labels[:-1] = document[1:]
    return {"tokens": document, "labels": labels}


def _as_batch(rows: dict[str, NDArray[Any]]) -> Batch:
    segments, labels = rows["tokens_segment_ids"], rows["labels"].reshape(-1)
    begins = np.ones(segments.shape, np.bool_)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    cuts = np.append(np.flatnonzero(begins), BATCH_TOKENS).astype(np.int32)
    return {
        "tokens": rows["tokens"].reshape(-1),
        "labels": labels,
        "position_ids": rows["tokens_positions"].reshape(-1),
        "cu_seqlens": cuts,
        "max_seqlen": int(np.diff(cuts).max()),
        "loss_mask": labels != IGNORED,
    }


def text(work: Work, rank: int) -> Iterator[Any]:
    """Settings: `workers`, processes a rank; 0 prefetches on a thread of the trainer instead. `packing`: "grain" for its own
    in place of the one that all share.

    Tried with 8 sources, twice each: 0, 1 and 2 workers. A thread takes a third to a quarter of the CPU that processes
    take, but competes with the trainer's own Python. Grain's own Parquet dataset in place of `Rows` took a quarter to a
    half more CPU at one rank, and between 7 % less and a third more at four.
    """
    paths = corpus.text_of(work.benchmark, work.sources).paths
    sources = [Rows(path, rank, work.ranks, seed) for seed, path in enumerate(paths)]
    mixed = grain.IterDataset.mix(sources, mixing_weights(len(paths)))
    packed = own_packing(mixed) if work.settings.get("packing") == "grain" else Packed(mixed)
    workers = work.settings.get("workers", 0)
    if workers:
        return iter(packed.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)))
    return iter(grain.experimental.ThreadPrefetchIterDataset(packed, prefetch_buffer_size=4))
