"""Overlord on its embedded engine: one process serves all ranks, whose clients are read in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import cycle
from typing import Any

import overlord as ol
from bench import corpus
from bench.peers.documents import mixing_weights
from bench.peers.packing import BATCH_TOKENS, ROW_TOKENS
from bench.peers.pictures import BATCH, SIZE
from bench.run_one import Work

MIB = 1 << 20


def text(work: Work, rank: int) -> Iterator[Mapping[str, Any]]:
    """Settings: `workers`, threads of the job; `buffer`, the declared MiB a source may keep decoded."""
    paths = corpus.text_of(work.benchmark, work.sources).paths
    weights = mixing_weights(work.sources)
    buffer = work.settings.get("buffer", 8) * MIB
    job = ol.Job(
        sources={_name(i): ol.Parquet(path, columns=["tokens"], buffer_bytes=buffer) for i, path in enumerate(paths)},
        mixture=ol.Mixture({_name(i): weight for i, weight in enumerate(weights)}),
        batch=ol.Batch(
            tokens=BATCH_TOKENS * work.ranks,
            sequence_length=ROW_TOKENS,
            micro_tokens=BATCH_TOKENS,
            cut_documents=True,
        ),
        mesh=ol.Mesh(dp=work.ranks),
        num_workers=work.settings.get("workers"),
    )
    yield from _in_turn(job, work.ranks)


def images(work: Work, rank: int) -> Iterator[Mapping[str, Any]]:
    """Settings: `workers`, threads of the job."""
    job = ol.Job(
        sources={
            "pairs": ol.WebDataset(
                corpus.IMAGES.paths,
                tokens=None,
                decode=ol.vision.DecodeImage(column="jpg", size=(SIZE, SIZE)),
            )
        },
        batch=ol.Batch(samples=BATCH * work.ranks, sequence_length=ROW_TOKENS, layout="padded", columns=("txt",)),
        mesh=ol.Mesh(dp=work.ranks),
        num_workers=work.settings.get("workers"),
    )
    for batch in _in_turn(job, work.ranks):
        yield {"images": batch["images"], "captions": batch["txt"]}


def _name(index: int) -> str:
    return f"source_{index:03d}"


def _in_turn(job: ol.Job, ranks: int) -> Iterator[Mapping[str, Any]]:
    with ol.start(job) as loader:
        clients = [loader.client(rank) for rank in range(ranks)]
        # In turn and one at a time: no rank holds a batch while another reads, as none does elsewhere.
        for client in cycle(clients):
            yield from next(client)
