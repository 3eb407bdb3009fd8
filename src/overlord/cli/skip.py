"""`overlord skip`: leave documents out of a served run from a step on, or list what it leaves out."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from overlord.cli.options import add_option
from overlord.cli.output import console, printable, table, write_json
from overlord.cli.served import add_service_arguments, open_control
from overlord.errors import SpecError
from overlord.steering.decisions import SKIP

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from overlord.messages import Decision

_ROWS = re.compile(r"(\d+)(?:-(\d+))?")
_MOST_ROWS = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_service_arguments(parser)
    add_option(parser, "--source", help="the source of the documents (default: list what is left out)")
    add_option(parser, "--file", help="their file, or the end of its path; FILE#3 is unit 3 of it")
    parser.add_argument("--rows", metavar="R,R-R", help="their rows in the file, such as 17 or 3,40-59 (default: all)")
    parser.add_argument("--whole-source", action="store_true", help="leave out all of the source")
    add_option(parser, "--from-step", help="leave them out from step N on (default: the first not yet drawn)")


def execute(options: argparse.Namespace) -> int:
    rows = None if options.rows is None else parse_rows(options.rows)
    if options.source is None:
        if not (options.file is rows is options.from_step is None and not options.whole_source):
            raise SpecError("--source names the source of what is left out: give it too")
    elif options.whole_source == (options.file is not None):
        raise SpecError("give --file with the file to leave out, or --whole-source to leave out all of the source")
    with open_control(options) as control:
        if options.source is None:
            return _show([d for d in control.decisions() if d.name == SKIP], options.json)
        step = control.skip(options.source, options.file, rows, from_step=options.from_step)
    if options.json:
        write_json({"from_step": step, "source": options.source, "file": options.file, "rows": rows})
        return 0
    what = "all of it" if options.file is None else options.file
    count = "" if rows is None else f"{_num_rows(len(rows))} of "
    console().print(printable(f"From step {step:,} on source {options.source} is read without {count}{what}."), markup=False)
    return 0


def parse_rows(text: str) -> list[int]:
    """Parse `3,40-59`."""
    rows: set[int] = set()
    for part in text.split(","):
        found = _ROWS.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if last < first:
            raise SpecError(f"rows are numbers and ranges from 0 on, such as 17 or 3,40-59, got {part.strip()!r}")
        if last - first >= _MOST_ROWS or len(rows) > _MOST_ROWS:
            raise SpecError(
                f"at most {_MOST_ROWS:,} rows are left out at once, got {text!r}; leave rows out to skip the file"
            )
        rows.update(range(first, last + 1))
    return sorted(rows)


def _show(decisions: list[Decision], as_json: bool) -> int:
    if as_json:
        write_json({"decisions": [{"step": d.step, **d.value} for d in decisions]})
        return 0
    out = console()
    if not decisions:
        out.print("Nothing was left out while the run ran.")
        return 0
    out.print(table("from step", "<source", "<left out", rows=[_row(d.step, d.value) for d in decisions]))
    return 0


def _row(step: int, value: Mapping[str, Any]) -> tuple[str, str, str]:
    rows = value["rows"]
    if rows is None:
        return f"{step:,}", value["source"], "all of it"
    listed = [unit_rows for _, unit_rows in rows]
    count = "" if None in listed else f"{_num_rows(sum(map(len, listed)))} of "
    return f"{step:,}", value["source"], f"{count}{value.get('file', '')}"


def _num_rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"
