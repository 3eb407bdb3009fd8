"""Small roles for tests of engines."""

import os
import threading
from typing import Any

from overlord.runtime.engine import Handle, Workplace


class Counter:
    """Says which process it lives in, counts what it was asked, and fails as it is told."""

    def __init__(self, start: int = 0) -> None:
        self._count = start

    def add(self, amount: int) -> int:
        self._count += amount
        return self._count

    def pid(self) -> int:
        return os.getpid()

    def fail(self, error: Exception) -> None:
        raise error

    def die(self) -> None:
        os._exit(1)

    def hang(self) -> None:
        threading.Event().wait(60)


class Asker:
    """Asks another role from where it lives."""

    def __init__(self, other: Handle[Counter]) -> None:
        self._other = other

    def add(self, amount: int) -> int:
        return self._other.call(Counter.add, amount).result()

    def fail(self, error: Exception) -> None:
        self._other.call(Counter.fail, error).result()


def make_counter(start: int, workplace: Workplace) -> Counter:
    return Counter(start)


def make_asker(other: Handle[Counter], workplace: Workplace) -> Asker:
    return Asker(other)


def make_length(value: Any, named: dict[str, Any], workplace: Workplace) -> Counter:
    return Counter(len(value) + sum(len(entry) for entry in named.values()))


def make_nothing(workplace: Workplace) -> Counter:
    raise FileNotFoundError("no such folder")
