"""Output of verbs: a console that is plain unless it is a terminal, tables, JSON, and numbers for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import orjson
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLAIN_WIDTH = 1000  # wide enough for tables with long paths: one row is one line, which other programs can parse
_PREFIXES = ("", "k", "M", "G", "T", "P")


def console(stderr: bool = False) -> Console:
    """On a terminal: colours and its width. To a pipe or file: plain text, and lines that are never wrapped."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def write_json(value: Mapping[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode() + "\n")
    sys.stdout.flush()


def table(*columns: str, rows: Sequence[Sequence[str]] = (), title: str | None = None) -> Table:
    """A table. The first column and those whose name begins with < are aligned left, the others right."""
    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for i, name in enumerate(columns):
        left = i == 0 or name.startswith("<")
        made.add_column(name.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))  # not as markup: a source may be called [red]
    return made


def rank_ranges(ranks: Sequence[int]) -> str:
    """Consecutive ranks as ranges: 0-3, 8-11."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def printable(text: str) -> str:
    """Text of users without control characters, which a terminal would obey."""
    return (
        text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    )


def short(number: float) -> str:
    """1,234 as 1.23 k."""
    power = 0
    while abs(number) >= 1000 and power < len(_PREFIXES) - 1:
        number /= 1000
        power += 1
    return f"{number:.3g} {_PREFIXES[power]}" if power else f"{number:.0f}"


def size(num_bytes: float) -> str:
    return f"{short(num_bytes)}B" if num_bytes >= 1000 else f"{num_bytes:.0f} B"
