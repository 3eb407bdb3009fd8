"""Hundreds of random faults in one run, and the whole stream compared with an undisturbed one.

    python -m tests.faults.chaos [--seed S] [--faults 200] [--json FILE] [--only ray|kept|service|processes]

Two fifths of the faults meet a run on a Ray cluster of three nodes, and a fifth each: a run that `overlord serve --ray`
keeps in such a cluster, with its driver; `overlord serve` in one process; and the same with worker processes. Trainers are
processes that read over the network or shared memory. The seed decides which faults happen in which order; when they hit is
a matter of the machine too. Leaves with 1 when a single step of a single rank differs, or when a run does not come back.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.faults.as_service import WEIGHTS as ON_SERVICE
from tests.faults.as_service import WITH_PROCESSES, AsService
from tests.faults.comparison import Compared, compared
from tests.faults.disturbance import Met, NotRecoveredError, met_faults
from tests.faults.jobs import disturbed_job, write_files
from tests.faults.schedule import drawn_faults
from tests.faults.store import Store
from tests.faults.trainers import TrainerFailedError

PACE_S = 0.03
_SHARES = {"ray": 2 / 5, "kept": 1 / 5, "service": 1 / 5, "processes": 1 / 5}
_NUM_PROCESSES = 2
_WIDTH = 150
_OUT = sys.stdout


@dataclass(frozen=True, slots=True)
class Episode:
    name: str
    took_s: float
    met: list[Met]
    stream: Compared
    num_thrown_out: int
    failure: str | None

    @property
    def is_good(self) -> bool:
        return self.failure is None and self.stream.is_same


@contextmanager
def run_on_ray(folder: Path, store: Store) -> Iterator:
    from tests.faults.nodes import Nodes
    from tests.faults.on_ray import NUM_OTHER_NODES, SHADOWS, OnRay

    # Ray tells of every process that died, and hundreds will.
    with (folder / "ray.txt").open("w") as told, redirect_stdout(told), redirect_stderr(told):
        nodes = Nodes(NUM_OTHER_NODES)
        try:
            run = OnRay(folder, store, PACE_S, nodes=nodes, shadows=SHADOWS)
            try:
                yield run
            finally:
                run.close()
        finally:
            nodes.close()


@contextmanager
def run_kept(folder: Path, store: Store) -> Iterator:
    from tests.faults.kept_on_ray import KeptOnRay
    from tests.faults.nodes import Nodes
    from tests.faults.on_ray import NUM_OTHER_NODES

    with (folder / "ray.txt").open("w") as told, redirect_stdout(told), redirect_stderr(told):
        nodes = Nodes(NUM_OTHER_NODES)
        try:
            run = KeptOnRay(folder, store, PACE_S)
            try:
                yield run
            finally:
                run.close()
        finally:
            nodes.close()


@contextmanager
def run_as_service(folder: Path, store: Store, num_processes: int = 0) -> Iterator[AsService]:
    run = AsService(folder, store, PACE_S, num_processes)
    try:
        yield run
    finally:
        run.close()


def run_in_processes(folder: Path, store: Store) -> AbstractContextManager[AsService]:
    return run_as_service(folder, store, _NUM_PROCESSES)


class Told(list[Met]):
    """Faults, each printed as it is added."""

    def append(self, met: Met) -> None:
        super().append(met)
        where = f"{met.episode:<8}{len(self):>4}  {met.at_s:7.1f} s  step {met.step:<6,}"
        line = f"{where} {met.kind:<36} stall {met.stall_s:5.2f} s  {met.detail}"
        print(line[:_WIDTH], file=_OUT, flush=True)


def episode(name: str, seed: int, num_faults: int) -> Episode:
    """Disturb one run, and compare what its trainers got."""
    from tests.faults.kept_on_ray import WEIGHTS as KEPT
    from tests.faults.on_ray import WEIGHTS as ON_RAY

    began = time.monotonic()
    weights = {"ray": ON_RAY, "kept": KEPT, "service": ON_SERVICE, "processes": WITH_PROCESSES}[name]
    ways = {"ray": run_on_ray, "kept": run_kept, "service": run_as_service, "processes": run_in_processes}
    opened = ways[name]
    faults = drawn_faults(seed, weights, num_faults)
    failure = None
    met = Told()
    with tempfile.TemporaryDirectory(prefix="overlord-chaos-") as made:
        folder, files = Path(made), Path(made) / "files"
        files.mkdir()
        write_files(files)
        store = Store(files)
        try:
            with opened(folder, store) as run:
                try:
                    met_faults(run, faults, met)
                except (NotRecoveredError, TrainerFailedError) as error:
                    failure = str(error)
                trainers = run.trainers
            store.end()
            stream = compared(disturbed_job(store.url), trainers.lives)
        finally:
            store.close()
    return Episode(name, time.monotonic() - began, met, stream, trainers.num_thrown_out, failure)


def tell_summary(episodes: Sequence[Episode]) -> None:
    met = [fault for episode in episodes for fault in episode.met]
    print(f"\n{'kind':<38}{'faults':>7}{'median stall':>14}{'longest':>10}")
    for kind in sorted({fault.kind for fault in met}):
        stalls = [fault.stall_s for fault in met if fault.kind == kind]
        print(f"{kind:<38}{len(stalls):>7}{statistics.median(stalls):>12.2f} s{max(stalls):>8.2f} s")
    print()
    for one in episodes:
        stream = one.stream
        print(
            f"{one.name}: {len(one.met)} faults in {one.took_s:.0f} s; {stream.num_steps:,} steps, {stream.num_taken:,} "
            f"taken by ranks ({stream.num_taken_again:,} again, by trainers that were started again; ranks were thrown out "
            f"{one.num_thrown_out} times)"
        )
        print(
            f"  steps lost {stream.num_missing}, out of order or repeated {stream.num_out_of_order}, "
            f"different {stream.num_different}" + (f"; first: {stream.first}" if stream.first else "")
        )
        if one.failure is not None:
            print(f"  FAILED: {one.failure}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run, to have its faults again")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the report here")
    parser.add_argument("--only", choices=list(_SHARES), default=None)
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(1_000_000) if given.seed is None else given.seed
    logging.basicConfig(level=logging.ERROR)
    print(
        f"seed {seed}: to have the same faults again, python -m tests.faults.chaos --seed {seed} --faults {given.faults}\n"
    )
    shares = {name: round(given.faults * share) for name, share in _SHARES.items()}
    numbers = shares if given.only is None else {given.only: given.faults}
    episodes = [episode(name, seed, number) for name, number in numbers.items()]
    tell_summary(episodes)
    is_good = all(one.is_good for one in episodes)
    if given.json is not None:
        report = {"seed": seed, "is_good": is_good, "episodes": [asdict(one) for one in episodes]}
        given.json.write_text(json.dumps(report, indent=1))
    print(f"\n{'nothing was lost, repeated, reordered or changed' if is_good else 'FAILED'} (seed {seed})")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
