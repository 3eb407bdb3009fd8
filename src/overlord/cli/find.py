"""`overlord find`: the steps and ranks that had a document, or will have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.cli.options import add_job_argument, add_option, at_least
from overlord.cli.output import console, rank_ranges, table, write_json
from overlord.cli.trace import add_where, documents_json, where_of
from overlord.errors import SpecError
from overlord.jobfile.loading import load_job
from overlord.lineage.finding import Occurrences, find_document
from overlord.lineage.locating import locate
from overlord.lineage.obtaining import FoundRun, first_steps
from overlord.lineage.reading import DocumentReader
from overlord.planlog.lineage_run import RowPlace, locate_row

if TYPE_CHECKING:
    import argparse

    from overlord.declare.job import Job


_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    add_document_arguments(parser)
    add_where(parser)
    add_option(
        parser,
        "--steps",
        type=at_least(1),
        default=_STEPS,
        help=f"without a log: how many steps are drawn and searched, from the beginning or from the state on ({_STEPS:,})",
    )


def add_document_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a document."""
    add_option(parser, "--source", required=True, help="the source of the document")
    add_option(parser, "--file", help="its file, or the end of its path; FILE#3 is unit 3 of it")
    parser.add_argument(
        "--chunk",
        type=at_least(0),
        metavar="C",
        help="instead of a file: its chunk, as document_chunks of a batch has it; the row is then that of document_rows",
    )
    parser.add_argument("--row", type=at_least(0), metavar="R", help="its row in the file, or in the unit that FILE#3 names")
    parser.add_argument(
        "--where", metavar="COLUMN=VALUE", help="instead: the rows whose column has this value, which reads the source"
    )


def execute(options: argparse.Namespace) -> int:
    job = load_job(options.job)
    if options.source not in job.sources:
        DocumentReader(job).source(options.source)  # raises, with the names that there are
    with first_steps(job, options.steps, where_of(options)) as found:
        return _find(options, job, found)


def _find(options: argparse.Namespace, job: Job, found: FoundRun) -> int:
    places = _places(options, job, found)
    results = {place: find_document(found, options.source, place) for place in places}
    if options.json:
        entries = [{"unit": p.unit, "row": p.row, **_entry(o)} for p, o in results.items()]
        write_json({"source": options.source, "found": entries})
        return 0
    out = console()
    units = found.run.units(found.run.stretches[-1], options.source)
    for place, occurrences in results.items():
        name = f"{options.source}: {units.unit(place.unit)}, row {place.row:,}"
        expected = occurrences.expected
        coming = "" if expected is None else f"; it comes {'next ' if occurrences.documents else ''}about step {expected:,}"
        if occurrences.left_out_from is not None:
            coming += f"; it is left out from step {occurrences.left_out_from:,} on"
        out.print(f"{name}: {_count(occurrences)} before step {found.run.end:,}{coming}", soft_wrap=True)
        if occurrences.documents:
            rows = [
                (f"{d.step:,}", rank_ranges(d.ranks), f"{d.microbatch:,}", f"{d.place:,}", f"{d.start:,}-{d.stop:,}")
                for d in occurrences.documents
            ]
            out.print(table("step", "<ranks", "microbatch", "place", "tokens", rows=rows))
    return 0


def _count(occurrences: Occurrences) -> str:
    steps = {d.step for d in occurrences.documents}
    return "in no step" if not steps else f"in {len(steps)} step{'s' if len(steps) > 1 else ''}"


def _entry(occurrences: Occurrences) -> dict[str, object]:
    return {
        "documents": documents_json(occurrences.documents),
        "expected_step": occurrences.expected,
        "left_out_from": occurrences.left_out_from,
    }


def _places(options: argparse.Namespace, job: Job, found: FoundRun) -> list[RowPlace]:
    units = found.run.units(found.run.stretches[-1], options.source)
    if options.where is not None:
        reader, (column, value) = DocumentReader(job), split_where(options.where)
        listed = reader.units(options.source)
        places = [
            RowPlace(units.with_row(unit, place.row), place.row)
            for place in reader.search(options.source, column, value)
            for unit in units.of_file(listed[place.unit].path)
            if units.index[unit] == listed[place.unit].index
        ]
        if not places:
            raise SpecError(f"source {options.source!r} has no row with {column}={value}")
        return list(dict.fromkeys(places))
    name_file(options, job, options.log)
    return [locate_row(units, options.source, options.file, options.row)]


def split_where(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not column or not equals:
        raise SpecError(f"--where is COLUMN=VALUE, got {text!r}")
    return column, value


def name_file(options: argparse.Namespace, job: Job, log: str | None = None) -> None:
    """Check that a file and a row are given; where a chunk is given instead, put its file and row there."""
    if options.row is None or (options.file is None) == (options.chunk is None):
        raise SpecError("name the document: --file FILE --row R, --chunk C --row R, or --where COLUMN=VALUE")
    if options.chunk is None:
        return
    source = DocumentReader(job).number(options.source)
    found = locate(job, [(source, options.chunk, options.row)], log=log)[0]
    if found.row < 0:
        raise SpecError(
            f"row {options.row:,} of chunk {options.chunk:,} of source {options.source!r}: a transform dropped the "
            "column __origin__, so its row in a file is not known"
        )
    options.file = found.file if "#" in found.file else f"{found.file}#0"
    options.row = found.row
