"""The journey of one batch: which of Overlord's modules and functions a step passes, and how deep their calls go.

    python -m tests.journey

The job is the plainest there is: one Parquet source, a byte tokenizer, one rank, no steering, no log. A few steps are read
first, so that nothing of the start is counted. A step is larger than a chunk, so that each one reads a chunk, tokenizes it,
draws, plans and collates. With `num_workers=0` all of that happens inside the one `next` that is traced. With worker threads
it happens ahead of the step, so several steps are traced, on all threads.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol

_PACKAGE = str(Path(ol.__file__).parent)
_INLINED = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>"})  # Python 3.12 and newer have no frames for these
_STEPS_AHEAD = 4
_TRACED_WITH_THREADS = 8


@dataclass(frozen=True)
class Journey:
    functions: dict[str, list[str]]
    """Module to the functions that were called in it, sorted."""
    deepest: list[str]
    """The longest stack of Overlord's frames on any thread, outermost first; frames of other packages are left out."""


def trace_plain_job(num_workers: int | None) -> Journey:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "documents.parquet"
        documents = pa.table({"text": [f"document {row} " + "word " * (row % 40) for row in range(2000)]})
        pq.write_table(documents, path, row_group_size=20)
        # A chunk of one row group: the traced step makes one.
        source = ol.Parquet(str(path), transform=ol.Tokenize("text", encoding=ol.ByteTokenizer(), eos=0), window=1)
        batch = ol.Batch(tokens=8192, sequence_length=1024)
        tracer = _Tracer()
        with tracer.installed(), ol.start(ol.Job(sources={"web": source}, batch=batch, num_workers=num_workers)) as loader:
            client = loader.client(rank=0, timeout_s=60)
            for _ in range(_STEPS_AHEAD):
                next(client)
            tracer.is_on = True
            for _ in range(1 if num_workers == 0 else _TRACED_WITH_THREADS):
                next(client)
            tracer.is_on = False
    return tracer.journey()


class _Tracer:
    def __init__(self) -> None:
        self.is_on = False
        self._called: set[tuple[str, str]] = set()
        self._deepest: list[tuple[str, str]] = []

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Threads that start inside are traced too."""
        before = sys.getprofile()
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before)

    def journey(self) -> Journey:
        functions: dict[str, list[str]] = defaultdict(list)
        for module, function in sorted(self._called):
            functions[module].append(function)
        return Journey(dict(functions), [f"{module}.{function}" for module, function in self._deepest])

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.is_on or event != "call" or not _is_ours(frame):
            return
        self._called.add(_place(frame))
        stack: list[tuple[str, str]] = []
        outer: FrameType | None = frame
        while outer is not None:
            if _is_ours(outer):
                stack.append(_place(outer))
            outer = outer.f_back
        if len(stack) > len(self._deepest):
            self._deepest = stack[::-1]


def _is_ours(frame: FrameType) -> bool:
    """Whether somebody wrote this function in a file of the package: not a dataclass's own `__init__`."""
    return frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_code.co_name not in _INLINED


def _place(frame: FrameType) -> tuple[str, str]:
    return frame.f_globals["__name__"], frame.f_code.co_qualname


def report(journey: Journey, say: Callable[[str], None]) -> None:
    say(f"{len(journey.functions)} modules")
    for module, functions in journey.functions.items():
        say(f"  {module}: {', '.join(functions)}")
    say(f"{len(journey.deepest)} frames deep")
    for function in journey.deepest:
        say(f"  {function}")


if __name__ == "__main__":
    for name, num_workers in (("num_workers=0", 0), ("worker threads", None)):
        print(f"\n== {name}")
        report(trace_plain_job(num_workers), print)
