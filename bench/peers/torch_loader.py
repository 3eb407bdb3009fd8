"""torch's DataLoader as a careful user writes it: an IterableDataset that shares row groups over ranks and workers,
mixes and packs inside the workers, and hands over whole batches, so that nothing is collated or copied per sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from bench import corpus
from bench.peers.documents import Encoding, Read, mixed_parquet, mixing_weights
from bench.peers.packing import batches
from bench.peers.pictures import BATCH, TarPairs, collate
from bench.run_one import Work


class PackedText(IterableDataset):
    def __init__(self, paths: Sequence[str | list[str]], work: Work, rank: int, read: Read | None = None) -> None:
        self.paths = paths
        self.rank = rank
        self.ranks = work.ranks
        self.micros = work.micros
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        made = self._batches()
        return made if self.micros == 1 else _steps(made, self.micros)

    def _batches(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        index, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        share, shares = self.rank * workers + index, self.ranks * workers
        weights = mixing_weights(len(self.paths))
        for batch in batches(mixed_parquet(self.paths, weights, share, shares, read=self.read)):
            # Arrays become tensors without a copy; the worker's queue then moves them by shared memory.
            yield {k: v if isinstance(v, int) else torch.from_numpy(v) for k, v in batch.items()}


def _steps(made: Iterator[dict[str, Any]], micros: int) -> Iterator[list[dict[str, Any]]]:
    while True:
        yield list(islice(made, micros))


def text(work: Work, rank: int) -> Iterator[Any]:
    """Settings: `workers` a rank, `prefetch` batches a worker, `sharing` strategy of shared memory.

    Tried with 8 sources on two cores. Workers: at 4 ranks 1 beat 2 in all four pairs of runs, at 1 rank it won three of
    five; 3 did not help. Strategy: file_system took less CPU than the default file_descriptor in most pairs, its helper
    process counted. Prefetch 4 for 2: no clear difference. No workers at all would cost far less CPU, but then loading
    holds up the training step instead of running beside it.
    """
    dataset = PackedText(corpus.text_of(work.benchmark, work.sources, work.files).paths_by_source, work, rank)
    return iter(_loader(dataset, work, workers=1))


def bpe(work: Work, rank: int) -> Iterator[Any]:
    """Settings: as for text. The workers encode."""
    texts = corpus.bpe_of(work.settings)
    return iter(_loader(PackedText(texts.paths, work, rank, Encoding(texts.tokenizer)), work, workers=1))


class EndlessBatches(Sampler):
    """Numbers of whole batches, permuted anew in each epoch and by each rank. Endless, because a loader that begins again
    has nothing prefetched."""

    def __init__(self, num_batches: int, rank: int) -> None:
        self.num_batches = num_batches
        self.rank = rank

    def __iter__(self) -> Iterator[int]:
        shuffled = torch.Generator().manual_seed(self.rank)
        while True:
            yield from torch.randperm(self.num_batches, generator=shuffled).tolist()


class Pictures(Dataset):
    """Map-style over the tars' index; one item is a whole batch, so that a worker stacks it once."""

    def __init__(self, paths: list[str], draft: bool) -> None:
        self.pairs = TarPairs(paths)
        self.draft = draft

    def __len__(self) -> int:
        return len(self.pairs) // BATCH

    def __getitem__(self, index: int) -> dict[str, Any]:
        begin = index * BATCH
        made = collate([self.pairs[i] for i in range(begin, begin + BATCH)], draft=self.draft)
        return {"images": torch.from_numpy(made["images"]), "captions": made["captions"]}


def images(work: Work, rank: int) -> Iterator[dict[str, Any]]:
    """Settings: as for text, and `draft`, see `pictures.decode`. Tried: 1, 2 and 3 workers,
    twice each; 2 take the least CPU."""
    dataset = Pictures(corpus.IMAGES.paths, work.settings.get("draft", False))
    return iter(_loader(dataset, work, workers=2, sampler=EndlessBatches(len(dataset), rank)))


def _loader(dataset: Dataset, work: Work, workers: int, **options: Any) -> DataLoader:
    workers = work.settings.get("workers", workers)
    torch.multiprocessing.set_sharing_strategy(work.settings.get("sharing", "file_system"))
    return DataLoader(
        dataset,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=work.settings.get("prefetch", 2) if workers else None,
        persistent_workers=workers > 0,
        **options,
    )
