"""The index of an iterable, and the rows that are kept beside it. Both have checksums: whatever is returned is what the
iterable returned."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from overlord.formats import Iterated
from tests.fuzz.folders import FolderTarget, change_json, change_number, folder_seed, read_source, unpack
from tests.fuzz.mutations import edited
from tests.fuzz.targets import Answer, Seed

_Keep = Literal["rows", "states"]
NUM_ROWS = 50


class Counter:
    """An iterable that can be started at any of its rows."""

    def __init__(self) -> None:
        self._next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._next < NUM_ROWS:
            self._next += 1
            yield {"id": self._next, "text": f"row {self._next}", "tokens": list(range(self._next % 7))}

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next = state["next"]


def make_seeds() -> Sequence[Seed]:
    seeds = []
    for keep in get_args(_Keep):
        with tempfile.TemporaryDirectory() as folder:
            _source(Path(folder), keep).units()
            files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
        seeds.append(folder_seed(keep, files))
    return seeds


def _source(folder: Path, keep: _Keep) -> Iterated:
    return Iterated(Counter, unit_rows=8, keep=keep, folder=folder)


def source(folder: Path, files: Mapping[str, bytes]) -> Iterated:
    return _source(folder, "rows" if any(name.endswith(".arrow") for name in files) else "states")


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    del files  # none of them may change what is returned
    with tempfile.TemporaryDirectory() as folder:
        return [read_source(_source(Path(folder), "rows"))]


def _index_name() -> str:
    (name,) = [name for name in unpack(make_seeds()[-1].data) if name.endswith(".json")]
    return name


TARGET = FolderTarget(
    "iterated",
    make_seeds,
    source,
    oracle,
    (change_number, change_json(_index_name(), edited), change_json(_index_name(), edited)),
)
