"""Logs of Delta tables, against a reading of their lines of JSON."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.formats import Delta
from tests.fuzz.folders import change_number, folder_seed
from tests.fuzz.lake import TableTarget, change_lines, recorded_files
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import RECORDED

_Hook = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def make_seeds() -> Sequence[Seed]:
    return [folder_seed("log", recorded_files("delta", (".json",)))]


def source(folder: Path, files: Mapping[str, bytes]) -> Delta:
    del files
    return Delta(folder)


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    """Where an object has a key twice, either value may count; and where a commit adds and removes one file, either."""
    try:
        hooks = (dict, lambda pairs: dict(reversed(pairs)))
        return [_answer(files, hook, order) for hook in hooks for order in (("add", "remove"), ("remove", "add"))]
    except Exception as error:  # whatever damaged files make of plain Python
        raise OracleFailed(str(error)) from error


def _answer(files: Mapping[str, bytes], hook: _Hook, order: tuple[str, str]) -> Answer:
    paths: set[str] = set()
    for name, data in sorted(files.items()):
        if not re.fullmatch(r"\d{20}\.json", name):
            continue  # no commit
        actions = list(_actions(data.decode(), hook))
        for kind in order:
            found = {action[kind]["path"] for action in actions if action.get(kind) is not None}
            paths = paths | found if kind == "add" else paths - found
    tables = [pq.read_table(RECORDED / "delta" / urllib.parse.unquote(path)) for path in sorted(paths)]
    # Some files have texts as views, and others have other names in the lists: the first one counts.
    schema = pa.schema([("id", pa.int64()), ("tokens", tables[0].schema.field("tokens").type), ("text", pa.string())])
    return answer_of(pa.concat_tables([table.replace_schema_metadata(None).cast(schema) for table in tables]))


def _actions(text: str, hook: _Hook) -> Iterator[Any]:
    """One after the other: lines may have several. Control characters in strings are let pass."""
    decoder, at = json.JSONDecoder(strict=False, object_pairs_hook=hook), 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        action, at = decoder.raw_decode(text, at)
        yield action


def _place(name: str) -> str:
    return f"_delta_log/{name}"


TARGET = TableTarget("delta", make_seeds, source, oracle, (change_number, change_lines(".json")), place=_place)
