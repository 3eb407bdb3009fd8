"""Small roles for tests of engines."""

import ctypes
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from overlord.runtime.engine import Handle, Workplace, WorkplaceSize


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


_loaded: list[tuple[str, int]] = []


def load(what: str) -> None:
    """What a template may be told to load: notes it, with its process."""
    _loaded.append((what, os.getpid()))
    if what == "broken":
        raise ValueError(what)
    if what == "threaded":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    if what == "deadly":
        os._exit(1)


class Probe:
    """Says what the process that it lives in has of memory and modules."""

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def loaded(self) -> list[tuple[str, int]]:
        return _loaded

    def folder(self) -> str:
        return os.getcwd()

    def num_heaps(self, num_threads: int) -> int:
        """The heaps of the C library, after so many threads have allocated memory at once."""
        allocated = threading.Barrier(num_threads + 1)

        def allocate() -> None:
            held = bytearray(1000)
            allocated.wait(20)
            del held

        threads = [threading.Thread(target=allocate) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        allocated.wait(20)
        library = ctypes.CDLL(None)
        library.fopen.restype = ctypes.c_void_p
        with tempfile.NamedTemporaryFile() as file:
            stream = ctypes.c_void_p(library.fopen(file.name.encode(), b"w"))
            library.malloc_info(0, stream)
            library.fclose(stream)
            found = Path(file.name).read_text().count("<heap nr=")
        for thread in threads:
            thread.join()
        return found


def make_counter(start: int, workplace: Workplace) -> Counter:
    return Counter(start)


def make_asker(other: Handle[Counter], workplace: Workplace) -> Asker:
    return Asker(other)


def make_length(value: Any, named: dict[str, Any], workplace: Workplace) -> Counter:
    return Counter(len(value) + sum(len(entry) for entry in named.values()))


def make_nothing(workplace: Workplace) -> Counter:
    raise FileNotFoundError("no such folder")


def make_probe(workplace: Workplace) -> Probe:
    return Probe()


class Neighbour:
    """Says in which process it lives, and how many threads may decode there."""

    def __init__(self, size: WorkplaceSize) -> None:
        self._size = size

    def describe(self, num_groups: int) -> tuple[int, int]:
        return os.getpid(), self._size.num_decoders(num_groups)


def make_neighbour(workplace: Workplace) -> Neighbour:
    return Neighbour(workplace.size)
