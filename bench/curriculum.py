"""A curriculum that moves all weight from a light source to a heavy one and back: how long trainers wait, with the
autoscaler and without, and whether memory returns.

    python -m bench.curriculum [--json] [--engine embedded|ray]

A trainer takes a step every 0.1 s. From step 100 to step 250 all samples come from a source whose chunks take 2.4 s each, as
from slow storage, and last for 6 steps: one loader cannot keep up, five can.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import psutil
import pyarrow as pa

import overlord as ol
from bench.telling import parser_of

STEP_S = 0.1
HEAVY_FROM, LIGHT_FROM, END = 100, 250, 400
SAMPLES, ROWS, TOKENS = 16, 96, 4096  # of a step, of a chunk, of a sample
HEAVY_S = 2.4
MIB = 1 << 20


@dataclass(frozen=True)
class Stored(ol.Source):
    """Rows of tokens from storage that takes `unit_s` for a unit."""

    unit_s: float = 0.0
    num_units: int = 1000

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("stored", index, ROWS, 4 * ROWS * TOKENS) for index in range(self.num_units)]

    def read(self, unit: ol.Unit) -> pa.Table:
        time.sleep(self.unit_s)
        values = np.full(ROWS * TOKENS, unit.index, np.int32)
        return pa.table({"tokens": pa.array(list(values.reshape(ROWS, TOKENS)), pa.list_(pa.int32()))})


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    steps: int
    seconds: float
    waited_s: float
    most_loaders: int
    buffer_mib: float
    """At its end, of all loaders."""
    resident_mib: float
    """Likewise, of all processes."""

    @property
    def waiting(self) -> float:
        return self.waited_s / self.seconds


def job() -> ol.Job:
    sources = {"light": Stored(unit_s=0.005), "heavy": Stored(unit_s=HEAVY_S)}
    mixture = ol.Mixture({0: {"light": 1}, HEAVY_FROM: {"heavy": 1}, LIGHT_FROM: {"light": 1}})
    return ol.Job(sources=sources, mixture=mixture, batch=ol.Batch(samples=SAMPLES, sequence_length=TOKENS))


def run(autoscale: bool, engine: str) -> tuple[list[Phase], list[str]]:
    # Loaders are given back sooner than in real life, where nobody waits for it.
    policy = ol.scaling.ScalingPolicy(calm_s=4.0, settle_s=2.0)
    scale = ol.scaling.Autoscale(budget=ol.scaling.Budget(cpus=4, memory_bytes=2 << 30, workers_per_host=2), policy=policy)
    where = None if engine == "embedded" else ol.Ray(num_cpus=8, object_store_bytes=300 << 20, loader_hosts=1)
    with ol.start(job(), engine=where, autoscale=scale if autoscale else None) as loader:
        client = loader.client(0, timeout_s=120)
        next(client)
        phases = [
            _phase(loader, client, name, last)
            for name, last in (("light", HEAVY_FROM), ("heavy", LIGHT_FROM), ("light again", END))
        ]
        return phases, list(map(str, loader.scaling()))


def _phase(loader: ol.Loader, client: ol.Client, name: str, last: int) -> Phase:
    first, began, waited, loaders = client.step, time.perf_counter(), 0.0, 1
    while client.step < last:
        asked = time.perf_counter()
        next(client)
        waited += time.perf_counter() - asked
        loaders = max(loaders, *(len(found[-1].hosts) for found in loader._roles.fleet.table.stretches.values()))
        time.sleep(STEP_S)
    seconds = time.perf_counter() - began
    buffers = sum(use.num_bytes for use in loader.report().buffers.values())
    return Phase(name, last - first, seconds, waited, loaders, buffers / MIB, _resident_mib())


def _resident_mib() -> float:
    here = psutil.Process()
    return sum(process.memory_full_info().pss for process in (here, *here.children(recursive=True))) / MIB


def show(title: str, phases: list[Phase], history: list[str]) -> None:
    print(f"\n{title}")
    print(f"  {'phase':<14}{'steps':>6}{'seconds':>9}{'waiting':>9}{'loaders':>9}{'buffers':>10}{'processes':>11}")
    for phase in phases:
        print(
            f"  {phase.name:<14}{phase.steps:>6}{phase.seconds:>9.1f}{phase.waiting:>9.1%}{phase.most_loaders:>9}"
            f"{phase.buffer_mib:>6.0f} MiB{phase.resident_mib:>7.0f} MiB"
        )
    total, waited = sum(phase.seconds for phase in phases), sum(phase.waited_s for phase in phases)
    print(f"  {'all':<14}{sum(phase.steps for phase in phases):>6}{total:>9.1f}{waited / total:>9.1%}")
    for line in history:
        print(f"    {line}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--engine", choices=["embedded", "ray"], default="embedded")
    given = parser.parse_args(argv)
    results = {title: run(title == "autoscaler", given.engine) for title in ("autoscaler", "one loader each")}
    if given.json:
        plain = {title: {"phases": [asdict(p) for p in phases], "history": h} for title, (phases, h) in results.items()}
        print(json.dumps(plain, indent=1))
    else:
        for title, (phases, history) in results.items():
            show(f"{given.engine}, {title}", phases, history)
    return 0


if __name__ == "__main__":
    sys.exit(main())
