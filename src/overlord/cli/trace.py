"""`overlord trace`: list the documents of a step, with the file and row of each and where it went."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from overlord.cli.files import read_state
from overlord.cli.options import add_job_argument, add_option
from overlord.cli.output import console, rank_ranges, table, write_json
from overlord.jobfile.loading import load_job
from overlord.lineage.obtaining import KnownFrom, step_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from overlord.declare.job import Job
    from overlord.lineage.documents import TracedDocument
    from overlord.lineage.reading import DocumentNames, DocumentReader
    from overlord.planlog.lineage_run import RowPlace

T = TypeVar("T")
_TEXT = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    add_option(parser, "--step", required=True, help="the step to trace")
    add_option(parser, "--rank", help="only the documents of rank R")
    add_where(parser)
    add_option(parser, "--text")
    parser.add_argument(
        "--names", action="store_true", help="also read the key of each document, and the names of its images"
    )


def add_where(parser: argparse.ArgumentParser) -> None:
    """The options that say where steps are known from."""
    known = parser.add_mutually_exclusive_group()
    add_option(known, "--log", help="the log of the run (its log=...): any step, without reading data")
    add_option(known, "--state", "--resume", help="a state from before the step; it is drawn from there")
    parser.add_argument(
        "--cache", type=Path, metavar="FOLDER", help="where steps that had to be drawn are kept (default: ~/.cache/overlord)"
    )


def where_of(options: argparse.Namespace) -> KnownFrom:
    state = None if options.state is None else read_state(options.state)
    return KnownFrom(options.log, state, options.cache, lambda line: console(stderr=True).print(line, soft_wrap=True))


def execute(options: argparse.Namespace) -> int:
    job = load_job(options.job)
    with step_of(job, options.step, where_of(options)) as found:
        documents = found.documents(options.step, options.rank)
    texts = read_texts(job, documents) if options.text else None
    names = _read_names(job, documents) if options.names else None
    if options.json:
        listed = documents_json(documents, texts)
        if names is not None:
            listed = [{**one, "key": n.key, "image_names": n.images} for one, n in zip(listed, names, strict=True)]
        write_json({"step": options.step, "documents": listed})
        return 0
    out = console()
    on = "" if options.rank is None else f" on rank {options.rank}"
    tokens = sum(document.tokens for document in documents)
    out.print(f"Step {options.step:,}{on}: {len(documents):,} documents, {tokens:,} tokens")
    out.print(document_table(documents, texts, names))
    if names is None and any(document.images for document in documents):
        console(stderr=True).print("--names reads the names of the images", style="dim")
    return 0


def documents_json(documents: Sequence[TracedDocument], texts: Sequence[str] | None = None) -> list[dict[str, object]]:
    listed = [{**asdict(document), "file": document.location, "path": document.file} for document in documents]
    return listed if texts is None else [{**one, "text": text} for one, text in zip(listed, texts, strict=True)]


def read_texts(job: Job, documents: Sequence[TracedDocument]) -> list[str]:
    """The text of each document, from its file."""
    from overlord.lineage.reading import DocumentReader, text_of

    reader = DocumentReader(job)
    return _read_each(
        documents,
        lambda d: text_of(reader.row(d.source, _place_of(reader, d)), job.sources[d.source].tokens),
        "?",
    )


def _read_names(job: Job, documents: Sequence[TracedDocument]) -> list[DocumentNames]:
    from overlord.lineage.reading import DocumentNames, DocumentReader

    reader = DocumentReader(job)
    return _read_each(documents, lambda d: reader.names(d.source, _place_of(reader, d)), DocumentNames(None, ()))


def _place_of(reader: DocumentReader, document: TracedDocument) -> RowPlace:
    return reader.locate(document.source, f"{document.file}#{document.unit}", document.row)


def _read_each(documents: Sequence[TracedDocument], read: Callable[[TracedDocument], T], unknown: T) -> list[T]:
    """What `read` finds for each document; unit by unit, so that each is read once. `unknown` where the row is not known."""
    found: dict[tuple[str, str, int], T] = {}
    for document in sorted(documents, key=lambda d: (d.source, d.location)):
        key = document.source, document.location, document.row
        if key not in found and document.row >= 0 and document.file:
            found[key] = read(document)
    return [found.get((d.source, d.location, d.row), unknown) for d in documents]


def document_table(
    documents: Sequence[TracedDocument],
    texts: Sequence[str] | None = None,
    names: Sequence[DocumentNames] | None = None,
) -> Table:
    rows = [
        (
            d.source,
            d.location,
            "?" if d.row < 0 else f"{d.row:,}",
            f"{d.start:,}-{d.stop:,}" if d.tokens else "",
            f"{d.images:,}" if d.images else "",
            f"{d.microbatch:,}",
            f"{d.place:,}",
            rank_ranges(d.ranks),
            *(() if names is None else (names[i].key or "", ", ".join(names[i].images))),
            *(() if texts is None else (" ".join(texts[i].split())[:_TEXT],)),
        )
        for i, d in enumerate(documents)
    ]
    columns = "source", "<file", "row", "tokens", "images", "microbatch", "place", "<ranks"
    more = (*(() if names is None else ("<key", "<image names")), *(() if texts is None else ("<text",)))
    return table(*columns, *more, rows=rows)
