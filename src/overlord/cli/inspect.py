"""`overlord inspect`: what lies at a path, and a job file that reads it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from overlord.cli.options import add_option, at_least
from overlord.cli.output import console, printable, size, table, write_json
from overlord.errors import SpecError
from overlord.jobfile.inspection import inspect_path

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from overlord.jobfile.inspection import Inspection, Lengths

_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists the files of a path, reads some of their rows, and prints their format, rows, columns, lengths, token "
        "counts, duplicates and odd rows, and a job file that reads them."
    )
    parser.add_argument("path", nargs="+", help="a file, a folder, a pattern or a URL; or several, of one format")
    parser.add_argument("--rows", type=at_least(1), default=10_000, metavar="N", help="read up to N rows (default: 10,000)")
    parser.add_argument(
        "--reader", metavar="NAME", help="the reader, as Parquet or Jsonl (default: by ending or first bytes)"
    )
    parser.add_argument(
        "--encoding", metavar="NAME", help="count tokens with this tiktoken encoding or tokenizer.json (default: bytes / 4)"
    )
    add_option(parser, "--write", help="write the proposed job to FILE, which must not be there")


def execute(options: argparse.Namespace) -> int:
    if options.write is not None and options.write.exists():
        raise SpecError(f"{options.write} is there already; name another file for the job")
    path = options.path[0] if len(options.path) == 1 else options.path
    found = inspect_path(path, most_rows=options.rows, reader=options.reader, encoding=options.encoding)
    if options.write is not None:
        options.write.write_text(found.job)
    if options.json:
        write_json(asdict(found))
    else:
        _print(found, options.write)
    return 0


def _print(found: Inspection, written: Path | None) -> None:
    out = console()
    rows = "an unknown number of rows" if found.num_rows is None else _counted(found.num_rows, "row")
    out.print(
        f"{found.path}: {found.reader}, {_counted(found.num_files, 'file')}, {_counted(found.num_units, 'unit')}, {rows}, "
        f"{size(found.num_bytes)} decoded",
        markup=False,
        soft_wrap=True,
    )
    what = "all rows" if found.is_whole else f"a sample of {found.num_read:,} rows"
    out.print(f"read: {what}" + (f" ({found.num_read:,})" if found.is_whole else ""), markup=False)
    columns = [(c.name, c.type, f"{c.num_null:,}", c.example) for c in found.columns]
    out.print(table("column", "<type", "null", "<example", rows=columns))
    if found.lengths is not None:
        _print_lengths(found.lengths)
    if found.num_tokens is not None:
        how = "" if found.tokens_are_counted else " (four bytes of text for a token; --encoding counts them)"
        about = "" if found.is_whole and found.tokens_are_counted else "about "
        out.print(f"tokens: {about}{found.num_tokens:,}{how}", markup=False, soft_wrap=True)
    share = found.num_duplicates / max(found.num_read, 1)
    out.print(f"duplicates: {found.num_duplicates:,} of the rows that were read ({share:.1%})", markup=False)
    for odd in found.odd:
        out.print(
            f"odd: {_counted(odd.count, 'row')}: {odd.what}; {printable('; '.join(odd.examples))}",
            markup=False,
            soft_wrap=True,
        )
    out.print("\nA job that reads it" + (f", in {written}" if written is not None else " (--write job.yaml)"), markup=False)
    out.print(found.job.rstrip(), markup=False, soft_wrap=True)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _print_lengths(lengths: Lengths) -> None:
    out = console()
    out.print(
        f"{lengths.of} of {lengths.column!r}: mean {lengths.mean:,.0f}, median {lengths.median:,}, 99 % up to "
        f"{lengths.p99:,}, longest {lengths.largest:,}",
        markup=False,
        soft_wrap=True,
    )
    most = max(count for _, count in lengths.histogram)
    rows = [(f"{bound:,}", f"{count:,}", "#" * -(-_BAR * count // max(most, 1))) for bound, count in lengths.histogram]
    out.print(table(f"up to ({lengths.of})", "rows", "<", rows=rows))
