"""Sends cases to a worker process, watches it, and collects what it found."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.targets import case_of, target_named

ROOT = Path(__file__).parents[2]
LIMIT_S = 30.0
"""The longest that a case may take, on a machine that does ten other things."""
START_S = 120.0
BATCH = 64
VERDICTS = ("equal", "bad rows", "refused", "finding")


@dataclass(frozen=True, slots=True)
class Finding:
    target: str
    case: str
    """`SEED NUMBER`, or `file PATH`."""
    cause: str
    """Findings of one cause are counted together."""
    detail: str

    @property
    def command(self) -> str:
        """What runs the case again, and shows all of it."""
        kind, _, which = self.case.partition(" ")
        of = f"--input {shlex.quote(which)}" if kind == "file" else f"--seed {kind} --case {which}"
        return f"python -m tests.fuzz --target {self.target} {of}"


@dataclass(slots=True)
class Report:
    """What came of the cases of one target."""

    target: str
    verdicts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    num_oracle_crashes: int = 0

    @property
    def num_cases(self) -> int:
        return sum(self.verdicts.values())

    def causes(self) -> dict[str, list[Finding]]:
        found: dict[str, list[Finding]] = {}
        for finding in self.findings:
            found.setdefault(finding.cause, []).append(finding)
        return dict(sorted(found.items(), key=lambda item: -len(item[1])))


class Worker:
    """A process that runs cases, started again when it is lost."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = b""

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def run(self, target: str, cases: Sequence[str], report: Report) -> None:
        """Runs the cases, in batches: a crash costs the worker, and the rest of the batch goes to a new one."""
        for begin in range(0, len(cases), BATCH):
            left = list(cases[begin : begin + BATCH])
            while left:
                left = left[self._run_batch(target, left, report) :]

    def _run_batch(self, target: str, cases: Sequence[str], report: Report) -> int:
        """Returns the number of cases that were dealt with: all of them, or those up to one that ended the worker."""
        self._send(target, cases)
        for number, case in enumerate(cases, 1):
            read: dict[str, Any] | None = None
            try:
                read = self._line()
                verdict = self._line()
            except _Lost as lost:
                if read is not None and read["read"] == "answer":
                    report.num_oracle_crashes += 1
                    verdict = _without_oracle(read, lost)
                else:
                    verdict = self._lost_case(target, case, cases[: number - 1], lost)
                _note(report, target, case, verdict)
                return number
            _note(report, target, case, verdict)
        return len(cases)

    def _lost_case(self, target: str, case: str, before: Sequence[str], lost: _Lost) -> dict[str, str]:
        """A crash may have been prepared by an earlier case of the batch: the case is run again alone."""
        if lost.is_hang:
            return {"verdict": "finding", "cause": str(lost), "detail": lost.stack}
        self._send(target, [case])
        try:
            self._line()
            verdict = self._line()
        except _Lost as again:
            return {"verdict": "finding", "cause": str(again), "detail": again.stack}
        if verdict["verdict"] == "finding":
            return verdict
        earlier = f"not when it runs alone; before it ran the cases {', '.join(before)}"
        return {"verdict": "finding", "cause": f"{lost} (after other cases)", "detail": f"{earlier}\n{lost.stack}"}

    def _send(self, target: str, cases: Iterable[str]) -> None:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{target} {case}\n" for case in cases).encode())
        self._process.stdin.flush()

    def _line(self, limit_s: float | None = None) -> dict[str, Any]:
        deadline = time.monotonic() + (limit_s or self._limit_s)
        while b"\n" not in self._lines:
            if not select.select([self._results], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._hung()
            more = os.read(self._results, 1 << 16)
            if not more:
                raise self._crashed()
            self._lines += more
        line, _, self._lines = self._lines.partition(b"\n")
        told = json.loads(line)
        if "broken" in told:
            raise BrokenTargetError(told["broken"])
        return told

    def _hung(self) -> _Lost:
        assert self._process is not None
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # for the stack to be written; nobody tells when it is
        stack = self._stop()
        return _Lost(f"no answer within {self._limit_s:g} s: {_top(stack)}", stack, is_hang=True)

    def _crashed(self) -> _Lost:
        assert self._process is not None
        code = self._process.wait()
        stack = self._stop()
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return _Lost(f"the process ended with {name}: {_top(stack)}", stack)

    def _start(self) -> None:
        self._results, write = os.pipe()
        self._lines = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process is
        self._folder = tempfile.TemporaryDirectory(prefix="overlord-fuzz-")
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
        # No thread pools, whose stacks and heaps would count against the limit on memory; no files of cases in a crowd.
        env = {
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "2",
            "TMPDIR": self._folder.name,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[write],
            cwd=ROOT,
            env=env,
        )
        os.close(write)
        self._line(START_S)

    def _stop(self) -> str:
        """Ends the process, and returns what it wrote to stderr."""
        if self._process is None:
            return ""
        process, self._process = self._process, None
        process.kill()
        process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it did not read all of its cases
            process.stdin.close()
        os.close(self._results)
        self._errors.seek(0)
        stack = self._errors.read()[-6000:].decode(errors="replace")
        self._errors.close()
        self._folder.cleanup()
        return stack


class BrokenTargetError(Exception):
    """A target could not make its input: the fault is in the fuzzing, not in what is fuzzed."""


class _Lost(Exception):
    """The worker crashed or hung."""

    def __init__(self, what: str, stack: str, *, is_hang: bool = False) -> None:
        super().__init__(what)
        self.stack = stack
        self.is_hang = is_hang


def _top(stack: str) -> str:
    """The innermost frame of Overlord in a stack that faulthandler wrote."""
    frames = [line.strip() for line in stack.splitlines() if line.strip().startswith("File ")]
    ours = [frame for frame in frames if f"{os.sep}src{os.sep}overlord{os.sep}" in frame]
    return (ours or frames or ["no stack"])[0].replace(f"{ROOT}{os.sep}", "")


def _without_oracle(read: dict[str, Any], lost: _Lost) -> dict[str, str]:
    if read["is_whole"]:
        return {"verdict": "bad rows" if read["bad_rows"] else "equal"}
    return {"verdict": "finding", "cause": "answers where the oracle crashes", "detail": f"{lost}\n{lost.stack}"}


def _note(report: Report, target: str, case: str, verdict: dict[str, str]) -> None:
    report.verdicts[verdict["verdict"]] += 1
    if verdict["verdict"] == "finding":
        report.findings.append(Finding(target, case, verdict["cause"], verdict["detail"]))


def fuzz(worker: Worker, target: str, cases: Iterable[str], seconds: float | None = None) -> Report:
    """Runs cases until they end or the time is up."""
    report = Report(target)
    began = time.monotonic()
    for batch in _batches(cases):
        worker.run(target, batch, report)
        if seconds is not None and time.monotonic() - began >= seconds:
            break
    return report


def _batches(cases: Iterable[str]) -> Iterator[list[str]]:
    batch = []
    for case in cases:
        batch.append(case)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def save_input(finding: Finding, folder: Path) -> Path:
    """Writes the input of a finding to a file that `--input` takes."""
    kind, _, which = finding.case.partition(" ")
    if kind == "file":
        return Path(which)
    case = case_of(target_named(finding.target), int(kind), int(which))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / case.file_name
    path.write_bytes(case.data)
    return path
