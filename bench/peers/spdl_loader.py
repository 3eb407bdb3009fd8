"""SPDL pipelines: threads in the trainer's process, no copies between processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spdl.pipeline import Pipeline, PipelineBuilder

from bench import corpus
from bench.peers.documents import mixed_parquet, mixing_weights
from bench.peers.packing import Batch, batches
from bench.peers.pictures import BATCH, PictureBatch, TarPairs, collate
from bench.run_one import Work


def text(work: Work, rank: int) -> Iterator[Batch]:
    """Settings: `threads`, each of which reads its share of the row groups, mixes and packs.

    Only whole batches pass through the pipeline's queues. Tried with 8 sources: 1 thread, and 2 (more CPU in three
    runs of four); documents passing through the queues one by one into a packing stage took five to nine times the CPU.
    """
    paths = corpus.text_of(work.benchmark, work.sources).paths
    weights = mixing_weights(len(paths))
    threads = work.settings.get("threads", 1)

    def share(index: int) -> Iterator[Batch]:
        yield from batches(mixed_parquet(paths, weights, rank * threads + index, work.ranks * threads))

    builder = PipelineBuilder().add_source(range(threads)).pipe(share, concurrency=threads)
    return _forever(builder.add_sink(4).build(num_threads=threads))


def images(work: Work, rank: int) -> Iterator[PictureBatch]:
    """Settings: `threads`, each of which reads, decodes and stacks a whole batch; `draft`, see `pictures.decode`.

    Tried: 1, 2 and 3 threads, twice each. 1 takes the least CPU.
    """
    pairs = TarPairs(corpus.IMAGES.paths)
    threads = work.settings.get("threads", 1)
    draft = work.settings.get("draft", False)

    def batch(begin: int) -> PictureBatch:
        return collate([pairs[i] for i in range(begin, begin + BATCH)], draft=draft)

    builder = PipelineBuilder().add_source(_endless(range(0, len(pairs) - BATCH + 1, BATCH)))
    return _forever(builder.pipe(batch, concurrency=threads).add_sink(4).build(num_threads=threads))


def _endless(numbers: range) -> Iterator[int]:
    while True:
        yield from numbers


def _forever(pipeline: Pipeline) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)
