"""`overlord show`: print the text of a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.cli.find import add_document_arguments, name_file, split_where
from overlord.cli.options import add_job_argument, add_option
from overlord.cli.output import console, write_json
from overlord.errors import SpecError
from overlord.jobfile.loading import load_job
from overlord.lineage.reading import DocumentReader, text_of

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    add_document_arguments(parser)
    add_option(parser, "--log", help="with --chunk: the log of the run, where it had chunks of another size")


def execute(options: argparse.Namespace) -> int:
    job = load_job(options.job)
    reader = DocumentReader(job)
    if options.where is not None:
        places = list(reader.search(options.source, *split_where(options.where)))
        if not places:
            raise SpecError(f"source {options.source!r} has no row with {options.where}")
    else:
        name_file(options, job, options.log)
        places = [reader.locate(options.source, options.file, options.row)]
    out = console()
    for place in places:
        row, unit = reader.row(options.source, place), reader.units(options.source)[place.unit]
        if options.json:
            plain = {name: f"{len(v):,} bytes" if isinstance(v, bytes) else v for name, v in row.items()}
            write_json({"source": options.source, "file": str(unit), "row": place.row, "columns": plain})
            continue
        out.print(f"{options.source}: {unit}, row {place.row:,}", soft_wrap=True, markup=False)
        out.print(text_of(row, job.sources[options.source].tokens), soft_wrap=True, markup=False)
    return 0
