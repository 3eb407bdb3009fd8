"""Runs cases, in a process of its own that may crash, hang or run out of memory.

Reads lines `TARGET SEED NUMBER` (a drawn case) or `TARGET file PATH` (a saved one). For each it writes a line when the
reader under test is through, and one with the verdict when the oracle is: whoever reads them knows which of the two a crash
belongs to.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from overlord.errors import OverlordError
from tests.fuzz.targets import Answer, Case, OracleFailed, Target, Wrong, case_of, equal, saved_case, target_named

MEMORY_BYTES = 3 << 30
"""Beyond what the process has mapped when it starts: a file that asks for more is a finding, not the end of the machine."""


def run_case(target: Target, case: Case, whole: Callable[[str], Answer | None], tell: Callable[[Any], None]) -> None:
    """`whole` returns the answer for an undamaged seed."""
    folder = Path(tempfile.mkdtemp(prefix="case-"))
    try:
        found = _read(target, case, folder)
        if isinstance(found, Answer):
            undamaged = whole(case.base.name)
            is_whole = undamaged is not None and equal(found, undamaged)
            tell({"read": "answer", "bad_rows": bool(found.bad), "is_whole": is_whole})
            tell(_verdict(found, is_whole, target, case))
        else:
            tell({"read": "raised"})
            tell(found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(target: Target, case: Case, folder: Path) -> Answer | dict[str, str]:
    try:
        return target.read(case, folder)
    except Wrong as error:
        return _finding(str(error).partition("\n")[0][:100], "".join(traceback.format_exception(error)))
    except OverlordError as error:
        told = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if folder.name in told or not target.names_its_file:
            return {"verdict": "refused", "detail": told}
        return _finding(f"{type(error).__name__} does not name the file: {_frame(error)}", told)
    except BaseException as error:  # whatever it is, it is a finding
        if isinstance(error, KeyboardInterrupt):
            raise
        return _finding(f"{type(error).__name__}: {_frame(error)}", "".join(traceback.format_exception(error)))


def _verdict(found: Answer, is_whole: bool, target: Target, case: Case) -> dict[str, str]:
    try:
        expected = target.expected(case)
    except OracleFailed as error:
        if is_whole:
            return {"verdict": _kind(found)}
        return _finding(
            f"answers where the oracle fails: {_cause(error)}, {case.base.name}", f"{error}\nreturned {_short(found)}"
        )
    if any(equal(found, one) for one in expected):
        return {"verdict": _kind(found)}
    if is_whole:
        return {"verdict": _kind(found)}
    what, detail = _difference(found, expected[0])
    return _finding(f"other data than the oracle's: {what}, {case.base.name}", detail)


def _kind(found: Answer) -> str:
    return "bad rows" if found.bad else "equal"


def _finding(cause: str, detail: str) -> dict[str, str]:
    return {"verdict": "finding", "cause": cause, "detail": detail[-6000:]}


def _cause(error: OracleFailed) -> str:
    return type(error.__cause__ or error).__name__


def _short(answer: Answer) -> str:
    rows = [f"  {i}: {repr(row)[:300]}" for i, row in enumerate(answer.rows[:40])]
    return "\n".join([f"{len(answer.rows)} rows, bad {sorted(answer.bad)}, {answer.about}", *rows])


def _difference(found: Answer, expected: Answer) -> tuple[str, str]:
    """What kind of difference it is, and the first place where it shows."""
    if found.about != expected.about:
        return "other columns", f"returned {found.about}\nexpected {expected.about}"
    wanted = [row for i, row in enumerate(expected.rows) if i not in found.bad]
    first = next((i for i, (a, b) in enumerate(zip(found.rows, wanted, strict=False)) if a != b), None)
    if first is None:
        first = min(len(found.rows), len(wanted))
    missing = len(wanted) - len(found.rows)
    what = "other values" if missing == 0 else "rows are missing" if missing > 0 else "too many rows"
    shown = [
        f"{len(found.rows)} rows returned, {len(found.bad)} bad, {len(expected.rows)} expected; good row {first} differs",
        f"  returned {repr(found.rows[first])[:1500] if first < len(found.rows) else 'no such row'}",
        f"  expected {repr(wanted[first])[:1500] if first < len(wanted) else 'no such row'}",
    ]
    return what, "\n".join(shown)


def _frame(error: BaseException) -> str:
    """Where in Overlord it came from: findings are grouped by it."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}overlord{os.sep}" in frame.filename]
    frame = (ours or frames)[-1]
    return f"{frame.filename.rpartition('overlord' + os.sep)[2]} in {frame.name}: {frame.line}"


class Seeds:
    """The answers for undamaged seeds, read once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._answers: dict[str, Answer | None] = {}

    def answer(self, name: str) -> Answer | None:
        """None for a seed that is refused, or cannot be read."""
        if name not in self._answers:
            seed = next(seed for seed in self._target.seeds if seed.name == name)
            with tempfile.TemporaryDirectory() as folder:
                try:
                    (self._answers[name],) = self._target.expected(Case(seed, seed.data))[:1]
                except OracleFailed:
                    found = _read(self._target, Case(seed, seed.data), Path(folder))
                    self._answers[name] = found if isinstance(found, Answer) else None
        return self._answers[name]


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1)  # asked for before a process that hangs is killed
    warnings.simplefilter("ignore")
    limit = _mapped_bytes() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    tell({"is_ready": True})
    targets: dict[str, tuple[Target, Seeds]] = {}
    for line in sys.stdin:
        name, seed, number = line.rstrip("\n").split(" ", 2)
        try:
            if name not in targets:
                target = target_named(name)
                targets[name] = target, Seeds(target)
            target, seeds = targets[name]
            case = saved_case(target, Path(number)) if seed == "file" else case_of(target, int(seed), int(number))
        except BaseException:  # the target itself is broken, which says nothing about the reader
            tell({"broken": traceback.format_exc()})
            raise
        run_case(target, case, seeds.answer, tell)


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
