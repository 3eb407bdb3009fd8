"""Interleaved runs and what they say: every competitor in a fresh process, A B C A B C ..., ratios within a round.

This machine may be shared and its speed may drift; two runs of one round stand close together in time, so the ratio of
their figures is worth more than the figures. Reported are medians, with the smallest and the largest of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_PATIENCE = 300.0
_GRACE = 15.0


@dataclass(frozen=True, slots=True)
class Competitor:
    """A peer with its settings, under the name that tables show."""

    name: str
    peer: str
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of arguments for `module`, which runs one competitor once."""

    title: str
    benchmark: str
    arguments: tuple[str, ...]
    module: str = "bench.run_one"


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Rounds:
    """What every competitor did in each round of one setting. A run that failed has the last line of its error."""

    setting: Setting
    outcomes: dict[str, list[dict[str, Any] | str]]

    def spread(self, name: str, figure: str) -> Spread | None:
        values = [outcome[figure] for outcome in self.outcomes[name] if isinstance(outcome, dict)]
        return Spread.of(values) if values else None

    def ratio(self, name: str, to: str, figure: str) -> Spread | None:
        """`name` over `to`, both of the same round."""
        pairs = zip(self.outcomes[name], self.outcomes[to], strict=True)
        ratios = [a[figure] / b[figure] for a, b in pairs if isinstance(a, dict) and isinstance(b, dict)]
        return Spread.of(ratios) if ratios else None

    def error(self, name: str) -> str | None:
        return next((outcome for outcome in self.outcomes[name] if isinstance(outcome, str)), None)

    @property
    def failed(self) -> bool:
        return any(self.error(name) for name in self.outcomes)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.setting), "outcomes": self.outcomes}


@dataclass(frozen=True, slots=True)
class Options:
    quick: bool
    json: bool
    rounds: int
    seconds: float
    only: tuple[str, ...]

    def chosen(self, competitors: Iterable[Competitor]) -> list[Competitor]:
        return [competitor for competitor in competitors if not self.only or competitor.name in self.only]


def options(description: str | None, argv: Sequence[str] | None, seconds: float = 2.0, rounds: int = 3) -> Options:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, fewer settings")
    parser.add_argument("--json", action="store_true", help="every figure of every run, for machines")
    parser.add_argument("--rounds", type=int, help=f"rounds of each setting; {rounds} unless given")
    parser.add_argument("--seconds", type=float, default=seconds, help="measured time of a run")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="competitors to run")
    given = parser.parse_args(argv)
    wanted = given.rounds or (1 if given.quick else rounds)
    return Options(given.quick, given.json, wanted, given.seconds, tuple(given.only))


def interleave(setting: Setting, competitors: Sequence[Competitor], rounds: int) -> Rounds:
    outcomes: dict[str, list[dict[str, Any] | str]] = {competitor.name: [] for competitor in competitors}
    for number in range(rounds):
        for competitor in competitors:
            _tell(f"{setting.title}, round {number + 1} of {rounds}: {competitor.name}")
            outcomes[competitor.name].append(run(setting, competitor))
    _tell("")
    return Rounds(setting, outcomes)


def run(setting: Setting, competitor: Competitor) -> dict[str, Any] | str:
    """One run in a fresh process: its figures, or why there are none."""
    command = [sys.executable, "-W", "ignore", "-m", setting.module, setting.benchmark, competitor.peer]
    command += [*setting.arguments, "--set", json.dumps(competitor.settings)]
    paths = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    ) as process:
        try:
            out, errors = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"no result after {_PATIENCE:.0f} s"
        finally:
            _end(process)
    if process.returncode:
        return (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
    return json.loads(out.splitlines()[-1])


def _end(process: subprocess.Popen[str]) -> None:
    """Also after an interrupt: first asked, so that it ends what it started, then made to."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()


@dataclass(frozen=True, slots=True)
class Table:
    """How results are shown: one figure in a unit, and the ratio of every baseline to every competitor."""

    figure: str
    scale: float
    unit: str
    baselines: tuple[str, ...]

    def show(self, result: Rounds) -> None:
        print(f"\n{result.setting.title}")
        ratios = "".join(f"   {name + ' / it':>26}" for name in self.baselines if name in result.outcomes)
        print(f"  {'':<22}{self.unit:>22}{ratios}   first batch s")
        for name in result.outcomes:
            print(f"  {name:<22}{self._line(result, name)}", flush=True)

    def _line(self, result: Rounds, name: str) -> str:
        found, first = result.spread(name, self.figure), result.spread(name, "first_batch_s")
        if found is None or first is None:
            return f"failed: {result.error(name)}"
        shown = Spread(found.median / self.scale, found.low / self.scale, found.high / self.scale)
        ratios = [result.ratio(baseline, name, self.figure) for baseline in self.baselines if baseline in result.outcomes]
        failures = sum(isinstance(outcome, str) for outcome in result.outcomes[name])
        note = f"   {failures} of {len(result.outcomes[name])} runs failed: {result.error(name)}" if failures else ""
        columns = "".join(f"   {ratio!s:>26}" for ratio in ratios)
        return f"{shown!s:>22}{columns}   {first.median:.2f}{note}"


def compare(settings: Iterable[Setting], competitors: Sequence[Competitor], table: Table, given: Options) -> int:
    """Runs and shows setting after setting. Gives the exit status: 1 when a run failed."""
    results = []
    for setting in settings:
        results.append(interleave(setting, competitors, given.rounds))
        if not given.json:
            table.show(results[-1])
    if given.json:
        print(json.dumps([result.to_dict() for result in results], indent=1))
    return int(any(result.failed for result in results))


def _tell(line: str) -> None:
    """Progress, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
