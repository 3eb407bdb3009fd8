"""Overlord: its jobs, read by a trainer from a service or in its own process, or all ranks from one process in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from typing import Any

import overlord as ol
from bench.run_one import Work

MIB = 1 << 20


def job_of(work: Work) -> ol.Job:
    """Settings: `workers`, threads of the job; `buffer`, the MiB a source may keep decoded; `engine` of the tokeniser;
    `window` of sources of text. All else, and what is not set, is left to Overlord."""
    # Here and not above: a trainer that connects to a service imports neither Arrow nor Pillow, and nor do users'.
    from bench import corpus
    from bench.peers.documents import mixing_weights
    from bench.peers.packing import BATCH_TOKENS, ROW_TOKENS

    if work.benchmark == "images":
        return _images_job(work)
    options = {"buffer_bytes": work.settings["buffer"] * MIB} if "buffer" in work.settings else {}
    if work.benchmark == "bpe":
        texts = corpus.bpe_of(work.settings)
        paths, options["window"] = texts.paths, work.settings.get("window")
        tokenize = ol.Tokenize("text", encoding=texts.tokenizer, engine=work.settings.get("engine"))
        sources = {_name(i): ol.Parquet(path, transform=tokenize, **options) for i, path in enumerate(paths)}
    else:
        paths = corpus.text_of(work.benchmark, work.sources, work.files).paths_by_source
        sources = {_name(i): ol.Parquet(files, columns=["tokens"], **options) for i, files in enumerate(paths)}
    return ol.Job(
        sources=sources,
        mixture=ol.Mixture({_name(i): weight for i, weight in enumerate(mixing_weights(len(paths)))}),
        batch=ol.Batch(
            tokens=BATCH_TOKENS * work.ranks * work.micros,
            sequence_length=ROW_TOKENS,
            micro_tokens=BATCH_TOKENS,
            cut_documents=True,
        ),
        mesh=ol.Mesh(dp=work.ranks),
        num_workers=work.settings.get("workers"),
    )


def _images_job(work: Work) -> ol.Job:
    from bench import corpus
    from bench.peers.packing import ROW_TOKENS
    from bench.peers.pictures import BATCH, SIZE

    decode = ol.vision.DecodeImage(column="jpg", size=(SIZE, SIZE))
    return ol.Job(
        sources={"pairs": ol.WebDataset(corpus.IMAGES.paths, tokens=None, decode=decode)},
        batch=ol.Batch(samples=BATCH * work.ranks, sequence_length=ROW_TOKENS, layout="padded", columns=("txt",)),
        mesh=ol.Mesh(dp=work.ranks),
        num_workers=work.settings.get("workers"),
    )


def steps(work: Work, rank: int) -> Iterator[Any]:
    """One rank's steps for a trainer: from the service at the setting `address`, or of a job in this process."""
    address = work.settings.get("address")
    if address is None:
        with ol.start(job_of(work)) as loader:
            yield from map(_named_alike, loader.client(rank)) if work.benchmark == "images" else loader.client(rank)
        return
    with ol.connect(address, rank=rank) as client:
        yield from map(_named_alike, client) if work.benchmark == "images" else client


def _named_alike(step: Any) -> list[Mapping[str, Any]]:
    return [{"images": micro["images"], "captions": micro["txt"]} for micro in step]


def text(work: Work, rank: int) -> Iterator[Mapping[str, Any]]:
    """Settings: `workers`, threads of the job; `buffer`, the declared MiB a source may keep decoded."""
    yield from _in_turn(job_of(replace(work, settings={"buffer": 8, **work.settings})), work.ranks)


def images(work: Work, rank: int) -> Iterator[Mapping[str, Any]]:
    """Settings: `workers`, threads of the job."""
    for batch in _in_turn(job_of(work), work.ranks):
        yield {"images": batch["images"], "captions": batch["txt"]}


def _name(index: int) -> str:
    return f"source_{index:03d}"


def _in_turn(job: ol.Job, ranks: int) -> Iterator[Mapping[str, Any]]:
    with ol.start(job) as loader:
        clients = [loader.client(rank) for rank in range(ranks)]
        # In turn and one at a time: no rank holds a batch while another reads, as none does elsewhere.
        for client in cycle(clients):
            yield from next(client)
