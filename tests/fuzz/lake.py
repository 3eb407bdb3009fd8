"""Fuzzing of tables with versions: their logs and manifests are damaged, and the data that these name is whole.

They need the libraries of `make test-formats`. What these wrote is recorded, so that seeds are the same everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.folders import FolderTarget, pack, read_source, unpack
from tests.fuzz.mutations import edited
from tests.fuzz.targets import Answer, Case, Seed
from tests.sources.recording import RECORDED

LIBRARIES = {"iceberg": "pyiceberg", "delta": "deltalake", "lance": "lance"}
"""The library that a target needs."""


def is_installed(target: str) -> bool:
    return target not in LIBRARIES or importlib.util.find_spec(LIBRARIES[target]) is not None


@dataclass
class TableTarget(FolderTarget):
    """`place` is where a damaged file belongs in the folder of the table; files that are not in the seed are copied there as
    they were recorded."""

    place: Callable[[str], str] = str

    def read(self, case: Case, folder: Path) -> Answer:
        files = unpack(case.data)
        recorded, damaged = RECORDED / self.name, {self.place(name) for name in unpack(case.base.data)}
        for path in recorded.rglob("*"):
            if path.is_file() and str(path.relative_to(recorded)) not in damaged:
                to = folder / path.relative_to(recorded)
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(path.read_bytes())
        for name, data in files.items():
            to = folder / self.place(name)
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(data)
        return read_source(self.source(folder, files))


def change_lines(suffix: str) -> Callable[[random.Random, Seed], bytes | None]:
    """A way to damage a line of JSON that leaves it JSON."""

    def change(rng: random.Random, seed: Seed) -> bytes | None:
        files = unpack(seed.data)
        name = rng.choice([each for each in files if each.endswith(suffix)])
        lines = files[name].splitlines()
        at = rng.randrange(len(lines))
        lines[at] = json.dumps(edited(rng, json.loads(lines[at]))).encode()
        files[name] = b"\n".join(lines)
        return pack(files)

    return change


def recorded_files(name: str, suffixes: tuple[str, ...]) -> Mapping[str, bytes]:
    """The recorded files of a table that are damaged."""
    found = sorted(path for path in (RECORDED / name).rglob("*") if path.name.endswith(suffixes))
    return {path.name: path.read_bytes() for path in found}
