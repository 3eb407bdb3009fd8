"""All benchmarks, or those named, one after the other.

python -m bench [NAME ...] [--quick] [--json]

What users run: trainers, scaling, first, trainers_memory. All in one process: text, images, memory. The rest are parts.

With one name, other options are that benchmark's own: python -m bench text --rounds 5
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Benchmark:
    module: str
    quick: tuple[str, ...]
    """The arguments that make it quick."""


BENCHMARKS = {
    "text": Benchmark("bench.text_throughput", ("--quick",)),
    "images": Benchmark("bench.image_throughput", ("--quick",)),
    "memory": Benchmark("bench.many_sources_memory", ("--quick",)),
    "starting": Benchmark("bench.starting", ("--sources", "100", "--engine", "embedded")),
    "trainers": Benchmark("bench.trainers", ("--quick",)),
    "scaling": Benchmark("bench.scaling", ("--rounds", "1")),
    "first": Benchmark("bench.first_batch", ("--rounds", "1")),
    "trainers_memory": Benchmark("bench.trainers_memory", ("--quick",)),
    "formats": Benchmark("bench.formats", ("--quick", "--seconds", "1")),
    "planning": Benchmark("bench.planning", ("--repeats", "3")),
    "planner": Benchmark("bench.planner", ("--dp", "16", "128", "--steps", "8")),
    "ray": Benchmark("bench.ray_vs_embedded", ("--rounds", "2", "--seconds", "1")),
    "ray_data": Benchmark("bench.ray_data", ("--quick", "--seconds", "3")),
    "balance": Benchmark("bench.balance", ("--seeds", "1")),
    "scale": Benchmark("bench.simulated_scale", ("--quick",)),
    "multimodal": Benchmark("bench.multimodal_balance", ("--seeds", "1")),
    "pipeline": Benchmark("bench.pipeline", ("--seeds", "1")),
    "outliers": Benchmark("bench.outlier_delay", ("--steps", "20")),
    "strategies": Benchmark("bench.planning_strategies", ("--repeats", "3")),
    "lineage": Benchmark("bench.lineage", ("--steps", "2000", "--sources", "20")),
    "caching": Benchmark("bench.caching", ("--rounds", "1", "--only", "chunks", "listing")),
    "metrics": Benchmark("bench.metrics", ("--quick",)),
    "flight": Benchmark("bench.flight", ("--quick",)),
    "kills": Benchmark("bench.kills", ("--kills", "1")),
    "cluster": Benchmark("bench.cluster", ("--quick",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; all unless given")
    parser.add_argument("--quick", action="store_true", help="under two minutes in all")
    parser.add_argument("--json", action="store_true")
    given, own = parser.parse_known_args(argv)
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}: choose from {', '.join(BENCHMARKS)}")
    if own and len(given.names) != 1:
        parser.error(f"{' '.join(own)}: options of one benchmark's own, so name that one alone")
    status = 0
    for name in given.names or BENCHMARKS:
        benchmark = BENCHMARKS[name]
        flags = [*(benchmark.quick if given.quick else ()), *(("--json",) if given.json else ()), *own]
        print(f"\n== {name} ==", file=sys.stderr if given.json else sys.stdout, flush=True)
        # Each in a process of its own: what one imports must not weigh on the next.
        status |= subprocess.run([sys.executable, "-m", benchmark.module, *flags], check=False).returncode
    return status


if __name__ == "__main__":
    sys.exit(main())
