"""A target whose reader is broken in every way that the harness must tell apart. Each seed is one of them."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import overlord as ol
from tests.fuzz.targets import Answer, Case, OracleFailed, Seed

WAYS = (
    "right", "bad-row", "refuses", "other-data", "lost-row", "extra-row", "raises", "names-no-file", "hangs", "aborts",
    "exits", "takes-all-memory", "oracle-aborts", "oracle-aborts-undamaged", "oracle-fails", "oracle-fails-undamaged",
)  # fmt: skip
_ROWS = [1, 2, 3]


class BrokenReader:
    name = "tests.fuzz.broken_reader"
    names_its_file = True
    seeds = tuple(Seed(way, way.encode()) for way in WAYS)

    def damage(self, rng: random.Random, base: Seed) -> bytes:
        return base.data

    def read(self, case: Case, folder: Path) -> Answer:  # noqa: C901 - a table of ways to be broken
        match case.base.name:
            case "bad-row":
                return Answer([1, 3], frozenset({1}))
            case "refuses":
                raise ol.errors.SourceError(f"{folder}/file is damaged")
            case "other-data":
                return Answer([1, 2, 4])
            case "lost-row":
                return Answer([1, 2])
            case "extra-row":
                return Answer([1, 2, 3, 3])
            case "raises":
                raise ValueError("not one of ours")
            case "names-no-file":
                raise ol.errors.SourceError("something is damaged")
            case "hangs":
                threading.Event().wait()
            case "aborts":
                os.abort()
            case "exits":
                os._exit(0)
            case "takes-all-memory":
                return Answer([len(bytearray(1 << 40))])
            case "oracle-aborts" | "oracle-fails":
                return Answer([1])
        return Answer(_ROWS)

    def expected(self, case: Case) -> list[Answer]:
        if case.data == b"damaged" and case.base.name.startswith("oracle-aborts"):
            os.abort()
        if case.data == b"damaged" and case.base.name.startswith("oracle-fails"):
            raise OracleFailed("it is damaged")
        return [Answer(_ROWS)]


TARGET = BrokenReader()
