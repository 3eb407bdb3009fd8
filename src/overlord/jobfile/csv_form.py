"""How a CSV file is written, from its first lines: what divides fields, and whether the first line names the columns."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Any

from overlord.sources.text_tables import Csv, line_places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.sources.storage import StoredFile

_DELIMITERS = ",;\t|"
_MOST_LINES = 50


def csv_form(paths: str | Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options of Csv that its files need, and notes about what is odd in the first of them."""
    source = Csv(paths)
    file = next((each for each in source.list_files() if each.num_bytes), None)
    if file is None:
        return {}, ()
    lines = _first_lines(source, file)
    usual = source.parse_options(file.path)["delimiter"]
    try:
        delimiter = _delimiter(lines, usual)
        head, *body = csv.reader(lines, delimiter=delimiter)
    except (
        csv.Error,
        ValueError,
    ):  # fields longer than the standard library reads, or no line: Csv itself says what is wrong
        return {}, ()
    return ({} if delimiter == usual else {"delimiter": delimiter}), _notes(file.path, head, body)


def _first_lines(source: Csv, file: StoredFile) -> list[str]:
    text = source.read_first_text(file)
    starts, stops = line_places(text)
    return [text[start:stop].decode("utf-8", "replace") for start, stop in zip(starts[:_MOST_LINES], stops, strict=False)]


def _delimiter(lines: Sequence[str], usual: str) -> str:
    """The delimiter by which lines have as many fields as the first, if the usual one leaves that whole."""
    counts = {each: [len(row) for row in csv.reader(lines, delimiter=each)] for each in _DELIMITERS}
    if not lines or counts[usual][0] > 1:
        return usual

    def num_alike(delimiter: str) -> int:
        found = counts[delimiter]
        return sum(count == found[0] for count in found) if found[0] > 1 else 0

    best = max(_DELIMITERS, key=num_alike)
    return best if num_alike(best) > len(lines) // 2 else usual


def _notes(path: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Says if the first line looks like a row: a number in it stands above numbers, and it does not count columns."""
    is_count = list(head) == [str(i) for i in range(len(head))]  # as pandas names columns
    numbers = [i for i, name in enumerate(head) if _is_number(name)]
    if is_count or not any(all(i < len(row) and _is_number(row[i]) for row in body) for i in numbers):
        return ()
    named = ", ".join(head)[:80]
    return (f"the first line of {path} names the columns ({named}): if it is a row, write a line of names above it",)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
