"""Fuzzing of formats that are several files: an input is the files of a folder in one piece.

The first line names the files and their sizes; the content of each follows. Damage is aimed at the contents. Where it hits
the first line, the folder is empty, for the reader and for the oracle.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from overlord.declare.source import Source
from overlord.sources.reading import ReadResult
from tests.fuzz.mutations import Region, set_integer
from tests.fuzz.parquet import checked
from tests.fuzz.targets import Answer, Case, Seed, Wrong, damaged_by


def pack(files: Mapping[str, bytes]) -> bytes:
    head = json.dumps({name: len(data) for name, data in files.items()}).encode()
    return head + b"\n" + b"".join(files.values())


def unpack(data: bytes) -> dict[str, bytes]:
    head, _, rest = data.partition(b"\n")
    files, at = {}, 0
    try:
        sizes = dict(json.loads(head))
        for name, size in sizes.items():
            if "/" in name or "\0" in name or not name or name.startswith("."):
                return {}
            # The last file takes what was inserted or cut off.
            is_last = len(files) == len(sizes) - 1
            files[name], at = rest[at:] if is_last else rest[at : at + int(size)], at + int(size)
    except (ValueError, TypeError, AttributeError):
        return {}
    return files


def folder_seed(name: str, files: Mapping[str, bytes], *, aim: Sequence[str] = ()) -> Seed:
    """`aim` names the files that are damaged most."""
    data = pack(files)
    at = data.index(b"\n") + 1
    regions = []
    for file, content in files.items():
        if content:
            regions += [Region(at, at + len(content))] * (4 if file in aim else 1)
        at += len(content)
    return Seed(name, data, ".folder", tuple(regions))


def change_number(rng: random.Random, seed: Seed) -> bytes:
    """Another integer somewhere in a file."""
    return set_integer(rng, seed.data, rng.choice(seed.regions))


def change_json(name: str, edit: Callable[[random.Random, object], object]) -> Callable[[random.Random, Seed], bytes | None]:
    """A way to damage the JSON file of a folder that leaves it JSON."""

    def change(rng: random.Random, seed: Seed) -> bytes | None:
        files = unpack(seed.data)
        if name not in files:
            return None
        files[name] = json.dumps(edit(rng, json.loads(files[name]))).encode()
        return pack(files)

    return change


@dataclass
class FolderTarget:
    """A target whose inputs are folders. `source` makes the reader for a folder, `oracle` is given the files."""

    name: str
    make_seeds: Callable[[], Sequence[Seed]]
    source: Callable[[Path, Mapping[str, bytes]], Source]
    oracle: Callable[[Mapping[str, bytes]], list[Answer]]
    ways: Sequence[Callable[[random.Random, Seed], bytes | None]] = (change_number,)
    names_its_file: bool = True

    @cached_property
    def seeds(self) -> Sequence[Seed]:
        return self.make_seeds()

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        return damaged_by(rng, base, self.seeds, self.ways)

    def read(self, case: Case, folder: Path) -> Answer:
        files = unpack(case.data)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return read_source(self.source(folder, files))

    def expected(self, case: Case) -> list[Answer]:
        return self.oracle(unpack(case.data))


def read_source(source: Source) -> Answer:
    """All rows of a source, by `read_rows` where it has one."""
    rows: list[object] = []
    bad: set[int] = set()
    about: object = None
    num_rows = 0
    for unit in source.units():
        read_rows = getattr(source, "read_rows", None)
        result = ReadResult(source.read(unit)) if read_rows is None else read_rows(unit)
        num_here = result.table.num_rows + len(result.bad)
        if unit.num_rows is not None and num_here != unit.num_rows:
            raise Wrong("a unit has other rows than it was listed with")
        answer = checked(result.table)
        about = answer.about
        rows += answer.rows
        bad |= {num_rows + row.row for row in result.bad}
        num_rows += num_here
    return Answer(rows, frozenset(bad), about)
