"""SPDL pipelines: threads in the trainer's process without copies, or in processes of their own (`subprocesses`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from spdl.pipeline import Pipeline, PipelineBuilder, SharedMemorySegmentPool, run_pipeline_in_subprocess

from bench import corpus
from bench.peers.documents import Document, Encoding, Read, choices, documents, mixed_parquet, mixing_weights
from bench.peers.packing import BATCH_TOKENS, Batch, batches
from bench.peers.pictures import BATCH, SIZE, PictureBatch, TarPairs, collate
from bench.run_one import Work


def text(work: Work, rank: int) -> Iterator[Batch]:
    """Settings: `threads`, each of which reads its share of the row groups, mixes and packs; `stages`, see `in_stages`.

    Only whole batches pass through the pipeline's queues. Tried with 8 sources: 1 thread, and 2 (more CPU in three
    runs of four); documents passing through the queues one by one into a packing stage took five to nine times the CPU.
    """
    if work.settings.get("stages"):
        return _forever(in_stages(work, rank))
    if work.settings.get("subprocesses"):
        return in_subprocesses(work, rank, partial(_text_share, work, corpus.text_of(work.benchmark, work.sources).paths))
    paths = corpus.text_of(work.benchmark, work.sources).paths
    weights = mixing_weights(len(paths))
    threads = work.settings.get("threads", 1)

    def share(index: int) -> Iterator[Batch]:
        yield from batches(mixed_parquet(paths, weights, rank * threads + index, work.ranks * threads))

    builder = PipelineBuilder().add_source(range(threads)).pipe(share, concurrency=threads)
    return _forever(builder.add_sink(4).build(num_threads=threads))


def bpe(work: Work, rank: int) -> Iterator[Any]:
    texts = corpus.bpe_of(work.settings)
    return in_subprocesses(work, rank, partial(_text_share, work, texts.paths, read=Encoding(texts.tokenizer)))


def _text_share(
    work: Work, paths: list[str], share: int, shares: int, read: Read | None = None
) -> Iterator[Batch | list[Batch]]:
    made = batches(mixed_parquet(paths, mixing_weights(len(paths)), share, shares, read=read))
    while True:
        yield next(made) if work.micros == 1 else list(islice(made, work.micros))


def in_subprocesses(work: Work, rank: int, read_share: Callable[[int, int], Iterator[Any]]) -> Iterator[Any]:
    """Pipelines in the setting's number of `subprocesses`, read in turn. With the setting `arena` each fills segments of
    shared memory that the trainer maps, which the library calls experimental; else batches pass through a queue."""
    subprocesses = work.settings["subprocesses"]
    shares = subprocesses * work.ranks
    running = []
    for index in range(subprocesses):
        builder = PipelineBuilder().add_source([rank * subprocesses + index])
        pipeline = builder.pipe(_Share(read_share, shares)).add_sink(2).get_config()
        arena = SharedMemorySegmentPool(_segment_bytes(work), count=6) if work.settings.get("arena") else None
        running.append(run_pipeline_in_subprocess(pipeline, num_threads=1, buffer_size=3, arena=arena))
    streams = [iter(each) for each in running]
    while True:
        for stream in streams:
            yield next(stream)


class _Share:
    """The stage that makes one share's batches, in a shape that SPDL can send to a process."""

    def __init__(self, read_share: Callable[[int, int], Iterator[Any]], shares: int) -> None:
        self._read_share = read_share
        self._shares = shares

    def __call__(self, share: int) -> Iterator[Any]:
        yield from self._read_share(share, self._shares)


def _segment_bytes(work: Work) -> int:
    if work.kind == "images":
        return BATCH * SIZE * SIZE * 3 + 4096
    return work.micros * (BATCH_TOKENS * 17 + 65536)


def in_stages(work: Work, rank: int) -> Pipeline:
    """A stage that decodes row groups, drawn by the sources' weights, on `threads` threads (2 unless given), and one that
    mixes and packs their documents: what the library is made for, where the other way hides all work in one call."""
    paths = corpus.text_of(work.benchmark, work.sources).paths
    threads = work.settings.get("threads", 2)
    mixing = Mixing(len(paths), rank)
    drawn = _row_groups(paths, mixing_weights(len(paths)), rank, work.ranks)
    builder = PipelineBuilder().add_source(drawn).pipe(_decoded, concurrency=threads).pipe(mixing)
    return builder.add_sink(4).build(num_threads=threads + 1)


def _row_groups(paths: list[str], weights: list[float], rank: int, ranks: int) -> Iterator[tuple[str, int]]:
    sizes = [pq.read_metadata(path).num_row_groups for path in paths]
    rng = np.random.default_rng(rank)
    for source in choices(weights, rng):
        yield paths[source], int(rng.integers(sizes[source]) // ranks * ranks + rank) % sizes[source]


def _decoded(row_group: tuple[str, int]) -> list[Document]:
    path, number = row_group
    with pq.ParquetFile(path) as file:
        return list(documents(file, number, np.random.default_rng(number)))


class Mixing:
    """Documents of the last row groups, one of each source on average, in random order and packed."""

    def __init__(self, num_open: int, seed: int) -> None:
        self._num_open = num_open
        self._rng = np.random.default_rng(seed)
        self._open: list[list[Document]] = []
        self._packed = batches(self._documents())

    def __call__(self, row_group: list[Document]) -> Iterator[Batch]:
        self._open.append(row_group)
        while len(self._open) >= self._num_open:
            yield next(self._packed)

    def _documents(self) -> Iterator[Document]:
        while True:
            # By blocks, because one draw costs as much as a thousand.
            for place in self._rng.integers(len(self._open), size=1024).tolist():
                yield self._open[place].pop()
                if not self._open[place]:
                    del self._open[place]
                    break


def images(work: Work, rank: int) -> Iterator[PictureBatch]:
    """Settings: `threads`, each of which reads, decodes and stacks a whole batch; `draft`, see `pictures.decode`.

    Tried: 1, 2 and 3 threads, twice each. 1 takes the least CPU.
    """
    if work.settings.get("subprocesses"):
        return in_subprocesses(work, rank, partial(_image_share, corpus.IMAGES.paths))
    pairs = TarPairs(corpus.IMAGES.paths)
    threads = work.settings.get("threads", 1)
    draft = work.settings.get("draft", False)

    def batch(begin: int) -> PictureBatch:
        return collate([pairs[i] for i in range(begin, begin + BATCH)], draft=draft)

    builder = PipelineBuilder().add_source(_endless(range(0, len(pairs) - BATCH + 1, BATCH)))
    return _forever(builder.pipe(batch, concurrency=threads).add_sink(4).build(num_threads=threads))


def _image_share(paths: list[str], share: int, shares: int) -> Iterator[PictureBatch]:
    pairs = TarPairs(paths)
    numbers = np.random.default_rng(share)
    while True:
        for index in numbers.permutation(len(pairs) // BATCH).tolist():
            yield collate([pairs[i] for i in range(index * BATCH, (index + 1) * BATCH)])


def _endless(numbers: range) -> Iterator[int]:
    while True:
        yield from numbers


def _forever(pipeline: Pipeline) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)
