"""Fuzzes the readers until the time is up, and tells what broke.

    python -m tests.fuzz                                     every target whose library is installed, ten minutes in all
    python -m tests.fuzz --target parquet --seconds 600 --seed 7
    python -m tests.fuzz --target parquet --seed 7 --case 1234      one case again
    python -m tests.fuzz --target parquet --input FILE              a saved input again

Each finding comes with the command that repeats it, and its input is saved. The exit status is 1 when something was found.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.fuzz.lake import is_installed
from tests.fuzz.runner import LIMIT_S, VERDICTS, Report, Worker, fuzz, save_input
from tests.fuzz.targets import TARGETS


def tell_causes(report: Report, folder: Path, is_whole: bool) -> None:
    for cause, findings in report.causes().items():
        first = findings[0]
        print(f"\n[{report.target}] {cause} ({len(findings)} times)")
        print(f"  again: {first.command}")
        print(f"  input: {save_input(first, folder)}")
        shown = first.detail.splitlines()
        for line in shown if is_whole else shown[-12:]:
            print(f"    {line}")


def tell_summary(reports: Sequence[Report]) -> None:
    print(
        f"\n{'target':<12}{'cases':>9}{'equal':>9}{'bad rows':>10}{'refused':>9}{'findings':>10}{'causes':>8}"
        "  oracle crashed"
    )
    for report in reports:
        equal, bad, refused, found = (report.verdicts[name] for name in VERDICTS)
        print(
            f"{report.target:<12}{report.num_cases:>9,}{equal:>9,}{bad:>10,}{refused:>9,}{found:>10,}"
            f"{len(report.causes()):>8}  {report.num_oracle_crashes}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", metavar="NAME", help=f"one of {', '.join(TARGETS)}; may be repeated")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all targets together")
    parser.add_argument("--cases", type=int, default=None, help="for each target, instead of a time")
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run, to have its cases again")
    parser.add_argument("--case", type=int, default=None, help="only this one")
    parser.add_argument("--input", type=Path, default=None, metavar="FILE", help="only this saved input")
    parser.add_argument("--save", type=Path, default=Path(".fuzz"), metavar="FOLDER", help="where inputs of findings go")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="the longest that a case may take")
    given = parser.parse_args(arguments)
    targets: Sequence[str] = given.target or [name for name in TARGETS if is_installed(name)]
    is_single = given.case is not None or given.input is not None
    if is_single and (len(targets) != 1 or (given.case is not None and given.seed is None)):
        parser.error("one case is told by --target NAME with --seed NUMBER --case NUMBER, or with --input FILE")
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    seconds = None if given.cases is not None or is_single else given.seconds / len(targets)
    print(f"seed {seed}: {', '.join(targets)}", flush=True)
    reports = []
    with Worker(given.limit) as worker:
        for target in targets:
            report = fuzz(worker, target, cases_of(given, seed), seconds)
            tell_causes(report, given.save / target, is_single)
            reports.append(report)
    tell_summary(reports)
    return 1 if any(report.findings for report in reports) else 0


def cases_of(given: argparse.Namespace, seed: int) -> Iterable[str]:
    if given.input is not None:
        return [f"file {given.input.resolve()}"]
    if given.case is not None:
        return [f"{seed} {given.case}"]
    return (f"{seed} {number}" for number in (itertools.count() if given.cases is None else range(given.cases)))


if __name__ == "__main__":
    sys.exit(main())
