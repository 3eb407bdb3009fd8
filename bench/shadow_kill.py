"""How long a trainer waits when a loader is killed, with a shadow behind it and without.

    python -m bench.shadow_kill [--json] [--kills N] [--step-s S] [--chunk-s S]

One trainer takes a step every half second from the Ray engine, with the look-ahead of a job that says nothing about it. Its
source takes two seconds for a chunk (slow storage), a chunk lasts for eight steps. Loaders are killed with SIGKILL, each at
another moment between two steps. Shown is the longest wait for one step, for each kill.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

import overlord as ol
from bench.telling import parser_of, tell
from overlord.roles.loader_host import HostStatus, LoaderHost
from overlord.runtime.engine import Handle

ROWS = 64  # of a chunk
SAMPLES = 8  # of a step
TOKENS = 256
SETTLE_STEPS = 6  # after which a run goes on as if nothing had happened
WARM_S = 60.0


@dataclass(frozen=True)
class Slow(ol.Source):
    """Rows of tokens from storage that takes `chunk_s` for a unit."""

    chunk_s: float = 2.0
    num_units: int = 1000

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("slow", index, ROWS, 4 * ROWS * TOKENS) for index in range(self.num_units)]

    def read(self, unit: ol.Unit) -> pa.Table:
        time.sleep(self.chunk_s)
        tokens = np.full((ROWS, TOKENS), unit.index, np.int32)
        return pa.table({"tokens": pa.array(list(tokens), pa.list_(pa.int32()))})


@dataclass(frozen=True, slots=True)
class Kill:
    step: int
    before_next_step_s: float
    longest_wait_s: float
    """Of the step after the kill and those that follow."""


@dataclass(frozen=True, slots=True)
class Killed:
    shadow: bool
    kills: tuple[Kill, ...]
    other_waits_s: float
    """The longest wait for a step that no kill was near."""
    history: tuple[str, ...]


def run(shadow: bool, kills: int, step_s: float, chunk_s: float) -> Killed:
    job = ol.Job(
        sources={"slow": Slow(chunk_s=chunk_s, window=1)},
        batch=ol.Batch(samples=SAMPLES, sequence_length=TOKENS),
        num_workers=2,
    )
    budget = ol.scaling.Budget(cpus=2, memory_bytes=1 << 30) if shadow else None
    engine = ol.Ray(num_cpus=4, object_store_bytes=100 << 20, loader_hosts=1)
    with ol.start(job, engine=engine, shadows=budget) as loader:
        trainer = _Trainer(loader.client(0, timeout_s=120), step_s)
        trainer.steps(SETTLE_STEPS)
        trainer.waits.clear()
        found = []
        for number in range(kills):
            while shadow and not (
                sum("took over" in str(change) for change in loader.scaling()) == number and is_warm(loader)
            ):
                trainer.steps(1)
            quiet = len(trainer.waits)
            part = step_s * (number + 0.5) / kills
            found.append(trainer.steps_after_kill(loader, part))
            trainer.steps(SETTLE_STEPS)
            kill = found[-1]
            found[-1] = Kill(kill.step, kill.before_next_step_s, max(trainer.waits[quiet:]))
            del trainer.waits[quiet:]
        other = max(trainer.waits, default=0.0)
        return Killed(shadow, tuple(found), other, tuple(map(str, loader.scaling())))


class _Trainer:
    def __init__(self, client: ol.Client, step_s: float) -> None:
        self._client = client
        self._step_s = step_s
        self.waits: list[float] = []

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._take()
            time.sleep(self._step_s)

    def steps_after_kill(self, loader: ol.Loader, after_s: float) -> Kill:
        """One step, in the middle of which a loader is killed."""
        self._take()
        time.sleep(after_s)
        os.kill(status_of(loader, loader._roles.fleet.names[0]).process, signal.SIGKILL)
        time.sleep(self._step_s - after_s)
        return Kill(self._client.step - 1, self._step_s - after_s, 0.0)

    def _take(self) -> None:
        began = time.perf_counter()
        next(self._client)
        self.waits.append(time.perf_counter() - began)


def status_of(loader: ol.Loader, host: str) -> HostStatus:
    return Handle[LoaderHost](loader._roles.engine, host).call(LoaderHost.status).result(WARM_S)


def is_warm(loader: ol.Loader) -> bool:
    """Whether a shadow holds what its host holds, and makes nothing."""
    for host, shadow in loader.report().shadows.items():
        held, mirrored = (status_of(loader, name).holding.get("slow", []) for name in (host, shadow))
        use = Handle[LoaderHost](loader._roles.engine, shadow).call(LoaderHost.buffer_use, ("slow",)).result(WARM_S)["slow"]
        return bool(held) and set(held) <= set(mirrored) and use.num_chunks == len(mirrored)
    return False


def show(result: Killed) -> None:
    print(f"\n{'with a shadow' if result.shadow else 'without'}: longest wait for a step")
    for kill in result.kills:
        print(f"  killed {kill.before_next_step_s:.2f} s before step {kill.step + 1}: {kill.longest_wait_s * 1e3:8.0f} ms")
    print(f"  no kill near:{result.other_waits_s * 1e3:8.0f} ms")
    for line in result.history:
        print(f"    {line}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--chunk-s", type=float, default=2.0)
    given = parser.parse_args(argv)
    results = [run(shadow, given.kills, given.step_s, given.chunk_s) for shadow in (True, False)]
    tell(results, show, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
