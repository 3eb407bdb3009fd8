"""What a fuzz target is: seeds, a way to damage them, the reader under test, and an oracle."""

from __future__ import annotations

import gzip
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from tests.fuzz.mutations import Region, damaged

TARGETS = (
    *("parquet", "arrow", "jsonl", "tar", "images", "states", "wire", "plan_logs", "megatron", "mds", "litdata", "prepared"),
    *("text", "huggingface", "energon", "iterated", "iceberg", "delta", "lance"),
)
"""Each is a module of this package that defines TARGET. The last three need the libraries of `make test-formats`."""


@dataclass(frozen=True, slots=True)
class Seed:
    """A whole input, as its own library wrote it."""

    name: str
    data: bytes
    suffix: str = ""
    """The end of its file's name, where readers go by that."""
    regions: tuple[Region, ...] = ()
    """Where damage is most interesting: footers, headers, lengths."""


@dataclass(frozen=True, slots=True)
class Case:
    """One input. `base` is the seed that it was made from."""

    base: Seed
    data: bytes

    @property
    def file_name(self) -> str:
        """Names the seed too, so that a saved input is all that is needed to run the case again."""
        return f"{self.base.name}@{hashlib.blake2b(self.data, digest_size=6).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reader returned, as plain values that can be compared."""

    rows: list[Any]
    bad: frozenset[int] = frozenset()
    """The rows, counted with the good ones, that were reported as bad."""
    about: Any = None
    """What else must be equal: the columns and their types, say."""


class OracleFailed(Exception):
    """The oracle refuses the input."""


class Wrong(Exception):
    """The reader under test broke a promise that is not about rows. The text is the cause that findings are grouped by."""


class Target(Protocol):
    name: str
    names_its_file: bool
    """Whether errors must name the file that is read. An image or a message has none."""

    @property
    def seeds(self) -> Sequence[Seed]: ...

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        """A damaged copy of a seed; sometimes a whole one."""
        ...

    def read(self, case: Case, folder: Path) -> Answer:
        """With Overlord. `folder` is empty, and is deleted afterwards."""
        ...

    def expected(self, case: Case) -> list[Answer]:
        """All answers that would be right, by the oracle. OracleFailed when it has none."""
        ...


def equal(found: Answer, expected: Answer) -> bool:
    """The rows are the expected ones, without those that were reported as bad."""
    if found.about != expected.about:
        return False
    if not found.bad:
        return found.rows == expected.rows
    if max(found.bad) >= len(expected.rows):
        return False
    return found.rows == [row for i, row in enumerate(expected.rows) if i not in found.bad]


@dataclass
class FileTarget:
    """A target whose inputs are files. `make_seeds`, `read_file` and `oracle` are plain functions."""

    name: str
    make_seeds: Callable[[], Sequence[Seed]]
    read_file: Callable[[str], Answer]
    oracle: Callable[[bytes, str], list[Answer]]
    """From the content of a file and the end of its name."""
    ways: Sequence[Callable[[random.Random, Seed], bytes | None]] = ()
    """Ways to damage this format; None where a seed does not lend itself to one."""
    names_its_file: bool = True

    @cached_property
    def seeds(self) -> Sequence[Seed]:
        return self.make_seeds()

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        return damaged_by(rng, base, self.seeds, self.ways)

    def read(self, case: Case, folder: Path) -> Answer:
        path = folder / f"case{case.base.suffix}"
        path.write_bytes(case.data)
        return self.read_file(str(path))

    def expected(self, case: Case) -> list[Answer]:
        return self.oracle(case.data, case.base.suffix)


def damaged_by(
    rng: random.Random, base: Seed, seeds: Sequence[Seed], ways: Sequence[Callable[[random.Random, Seed], bytes | None]]
) -> bytes:
    """By one of the ways of the format, or blindly."""
    if rng.random() < 0.01:
        return base.data  # whole inputs must go on being read
    if ways and rng.random() < 0.5:
        changed = rng.choice(ways)(rng, base)
        if changed is not None:
            return changed
    others = [seed.data for seed in seeds if seed.suffix == base.suffix]
    return damaged(rng, base.data, base.regions, others)


def case_of(target: Target, seed: int, number: int) -> Case:
    """Case `number` of a run. Depends on nothing but its arguments (and the versions of the libraries that write seeds)."""
    rng = random.Random(f"{target.name} {seed} {number}")
    base = rng.choice(target.seeds)
    return Case(base, target.damage(rng, base))


def saved_case(target: Target, path: Path) -> Case:
    """A case from a file that `Case.file_name` named; one that ends in .gz is compressed."""
    wanted = path.name.partition("@")[0]
    for seed in target.seeds:
        if seed.name == wanted:
            return Case(seed, gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    raise SystemExit(
        f"{path.name} does not begin with the name of a seed of {target.name}: NAME@..., with NAME one of "
        f"{', '.join(seed.name for seed in target.seeds)}"
    )


def target_named(name: str) -> Target:
    """One of TARGETS, or a module's full name, so that the harness can be tried on targets that are not listed."""
    return import_module(name if "." in name else f"tests.fuzz.{name}").TARGET
