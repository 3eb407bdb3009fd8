"""SPDL pipelines: threads in the trainer's process, no copies between processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spdl.pipeline import Pipeline, PipelineBuilder

from bench import corpus
from bench.peers.documents import Document, ParquetSource, mixed, mixed_parquet, mixing_weights
from bench.peers.packing import BATCH_TOKENS, Batch, batches
from bench.peers.pictures import BATCH, TarPairs, collate, decode
from bench.run_one import Work


def text(work: Work, rank: int) -> Iterator[Any]:
    """Settings: `style` and `threads`.

    whole (the best found): every thread reads its share of the row groups, mixes and packs, and only whole batches pass
    through SPDL's queues. staged: what its documentation teaches, one stage a task, so that documents pass through the
    queues one list per batch at a time: the mixing source feeds lists of documents to a packing stage.
    """
    paths = corpus.text_of(work.benchmark, work.sources).paths
    build = {"whole": _whole, "staged": _staged}[work.settings.get("style", "whole")]
    return _forever(build(paths, rank, work.ranks, work.settings.get("threads", 1)))


def _whole(paths: list[str], rank: int, ranks: int, threads: int) -> Pipeline:
    weights = mixing_weights(len(paths))

    def share(index: int) -> Iterator[Batch]:
        yield from batches(mixed_parquet(paths, weights, rank * threads + index, ranks * threads))

    builder = PipelineBuilder().add_source(range(threads)).pipe(share, concurrency=threads)
    return builder.add_sink(4).build(num_threads=threads)


def _staged(paths: list[str], rank: int, ranks: int, threads: int) -> Pipeline:
    sources = [iter(ParquetSource(path, rank, ranks, seed)) for seed, path in enumerate(paths)]
    drawn = mixed(sources, mixing_weights(len(paths)), rank)
    carried: list[Document] = []

    def packed(documents: list[Document]) -> Iterator[Batch]:
        carried.extend(documents)
        while sum(map(len, carried)) > BATCH_TOKENS:
            made, rest = _pack_first(carried)
            carried[:] = rest
            yield made

    builder = PipelineBuilder().add_source(drawn).aggregate(64).pipe(packed)
    return builder.add_sink(4).build(num_threads=threads)


def _pack_first(documents: list[Document]) -> tuple[Batch, list[Document]]:
    """One batch from the front of a list that holds more than one, and what is left of the list."""
    left = BATCH_TOKENS
    for index, document in enumerate(documents):
        if len(document) > left:
            # The packer needs one token more than the batch to know the last label.
            return next(batches(documents[: index + 1])), [document[left:], *documents[index + 1 :]]
        left -= len(document)
    raise ValueError(f"{BATCH_TOKENS - left} tokens do not fill a batch of {BATCH_TOKENS}")


def images(work: Work, rank: int) -> Iterator[Any]:
    """Settings: `threads` that decode, `style`: decode picture by picture (staged) or batch by batch (whole)."""
    pairs = TarPairs(corpus.IMAGES.path)
    threads = work.settings.get("threads", 2)
    if work.settings.get("style", "whole") == "whole":
        numbers = (list(range(b, b + BATCH)) for b in _endless(range(0, len(pairs) - BATCH + 1, BATCH)))
        builder = PipelineBuilder().add_source(numbers)
        builder = builder.pipe(lambda batch: collate([pairs[i] for i in batch]), concurrency=threads)
    else:
        builder = PipelineBuilder().add_source(_endless(range(len(pairs))))
        builder = builder.pipe(lambda i: _decoded(pairs[i]), concurrency=threads).aggregate(BATCH).pipe(_stacked)
    return _forever(builder.add_sink(4).build(num_threads=threads))


def _decoded(pair: tuple[bytes, str]) -> tuple[Any, str]:
    return decode(pair[0]), pair[1]


def _stacked(decoded: list[tuple[Any, str]]) -> dict[str, Any]:
    import numpy as np

    return {"images": np.stack([image for image, _ in decoded]), "captions": [caption for _, caption in decoded]}


def _endless(numbers: range) -> Iterator[int]:
    while True:
        yield from numbers


def _forever(pipeline: Pipeline) -> Iterator[Any]:
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)
