"""Two versions of Overlord side by side: the same benchmarks in two checkouts, A B A B ..., and the ratios of their figures.

    git worktree add ../before REVISION
    python -m bench.versions ../before [text] [images] [memory] [planning] [--rounds N] [--json]

Each checkout runs its own benchmarks and its own sources, quickly and without peers; the data are made once and shared. A
ratio above 1 means that this version is better: more tokens or images per CPU-second, less memory, fewer milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measure import ROOT, Spread

_THROUGHPUT = ("--quick", "--json", "--only", "overlord", "overlord, no threads")
COMMANDS: dict[str, tuple[str, ...]] = {
    "text": ("bench.text_throughput", *_THROUGHPUT),
    "images": ("bench.image_throughput", *_THROUGHPUT),
    "memory": ("bench.many_sources_memory", "--quick", "--json", "--only", "overlord"),
    "planning": ("bench.planning", "--json", "--repeats", "5"),
}
Figures = dict[str, float]
"""What was measured, in words, to a figure of which more is better."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout of the other version")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(COMMANDS)}; all unless given")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    unknown = [name for name in given.names if name not in COMMANDS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}: choose from {', '.join(COMMANDS)}")
    data = given.before / "bench" / ".data"
    if not data.exists():
        (ROOT / "bench" / ".data").mkdir(exist_ok=True)
        data.symlink_to(ROOT / "bench" / ".data")
    ratios: dict[str, Spread] = {}
    for name in given.names or COMMANDS:
        rounds = [(_run(given.before, name), _run(ROOT, name)) for _ in range(given.rounds)]
        for figure in rounds[0][1]:
            ratios[f"{name}: {figure}"] = Spread.of(
                [now[figure] / before[figure] for before, now in rounds if figure in before]
            )
    if given.json:
        print(json.dumps({figure: [r.median, r.low, r.high] for figure, r in ratios.items()}, indent=1))
    else:
        for figure, ratio in ratios.items():
            print(f"{figure:<70} {ratio}")
    return 0


def _run(checkout: Path, name: str) -> Figures:
    checkout = checkout.resolve()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "src")))}
    done = subprocess.run(
        [sys.executable, "-m", *COMMANDS[name]], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name} in {checkout} failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return _figures(json.loads(done.stdout))


def _figures(results: Sequence[Mapping[str, Any]]) -> Figures:
    found: Figures = {}
    for result in results:
        if "outcomes" not in result:
            title = " ".join(f"{result[key]}" for key in ("lengths", "context", "samples") if key in result)
            found |= {f"{title}, {stage}": 1 / result[stage] for stage in ("total", "drawing") if result.get(stage)}
            continue
        for competitor, outcomes in result["outcomes"].items():
            for outcome in outcomes:
                if not isinstance(outcome, dict):
                    raise SystemExit(f"{competitor} in {result['title']} failed: {outcome}")
                at = f"{result['title']}, {competitor}"
                if outcome.get("peak_pss"):
                    found[f"{at}, peak memory"] = 1 / outcome["peak_pss"]
                else:
                    found[f"{at}, per CPU-second"] = outcome["units_per_cpu_s"]
                    found[f"{at}, per second"] = outcome["units"] / outcome["wall_s"]
    return found


if __name__ == "__main__":
    sys.exit(main())
