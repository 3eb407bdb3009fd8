"""What handing a step to a trainer in another process costs on both sides, in CPU time.

python -m bench.handover [--steps 300] [--mb 1.1 8] [--json]

The steps are built already: what is measured is the way from the service to the trainer's arrays. Server and client are
processes of this machine. "fetched ahead" is shared memory too, as a `Client` uses it by default: its trainer works for 2 ms
on each step, and `wall_us` is the time in `next`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import numpy as np

from bench.measure import ROOT
from overlord.batches.buffers import Arenas
from overlord.batches.collate import collate
from overlord.messages import Delivery, Later
from overlord.service.auth import Listen
from overlord.service.channel import FlightChannel
from overlord.service.client import Client
from overlord.service.run_api import RunApi
from overlord.service.server import Service
from tests.batches.microbatches import microbatch

ROW = 8192
WAYS = ("shared memory", "fetched ahead", "flight")
WORK_S = 0.002


class Built:
    """Steps of one microbatch each that are always ready, in turn out of a few that were built beforehand."""

    def __init__(self, megabytes: float) -> None:
        num_rows = max(round(megabytes * 1e6 / 17 / ROW), 1)
        self.arenas = arenas = Arenas(8, shared=True)
        made = microbatch(
            [ROW // 4] * 4 * num_rows, rows=np.repeat(np.arange(num_rows), 4), num_rows=num_rows, row_tokens=ROW
        )
        self._steps = [collate(*made, arenas) for _ in range(4)]

    def start(self) -> int:
        return 0

    def generation(self) -> int:
        return 0

    def fetch(
        self, step: int, rank: int, wait_s: float, ahead: bool = False, generation: int | None = None
    ) -> Delivery | Later | None:
        return Delivery(step, 1, (dict(self._steps[step % len(self._steps)]),))

    def take(self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None) -> None: ...

    def leave(self, rank: int, generation: int | None = None) -> None: ...

    @property
    def run(self) -> RunApi:
        raise AssertionError("only steps are read")


def serve(megabytes: float) -> None:
    steps: Any = Built(megabytes)
    service = Service("bench", Listen(), steps=steps, run=steps, arenas=steps.arenas)
    print(service.address, flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    service.close()


def read(address: str, num_steps: int, way: str) -> None:
    """Fetch steps and look at each; prints the CPU time of a step here, and the wall time."""
    channel = FlightChannel(address, 0, timeout_s=30.0, local=way != "flight")
    client = Client(0, channel, timeout_s=30.0)
    worked_s = 0.0

    def fetch(step: int) -> int:
        nonlocal worked_s
        if way == "fetched ahead":
            began = time.perf_counter()
            time.sleep(WORK_S)
            worked_s += time.perf_counter() - began
            return int(next(iter(next(client)))["labels"][-1])
        delivery = channel.fetch(step, 0, 1.0)
        assert isinstance(delivery, Delivery)
        return int(delivery.microbatches[0]["labels"][-1])

    for step in range(20):
        fetch(step)
    print("ready", flush=True)
    sys.stdin.readline()
    worked_s, began, cpu = 0.0, time.perf_counter(), time.process_time()
    for step in range(num_steps):
        fetch(step)
    wall_s = time.perf_counter() - began - worked_s
    print(json.dumps({"cpu_s": time.process_time() - cpu, "wall_s": wall_s}), flush=True)
    sys.stdin.readline()


def measure(megabytes: float, way: str, num_steps: int) -> dict[str, Any]:
    def started(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "bench.handover", *map(str, arguments)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def tell(process: subprocess.Popen[str]) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline()

    server = started("--serve", megabytes)
    assert server.stdout is not None
    client = started("--read", server.stdout.readline().strip(), num_steps, way)
    assert client.stdout is not None
    client.stdout.readline()
    before = float(tell(server))
    found = json.loads(tell(client))
    used = float(tell(server)) - before
    for process in (client, server):
        process.communicate(timeout=30)
    return {
        "way": way,
        "batch_mb": megabytes,
        "client_cpu_us": found["cpu_s"] / num_steps * 1e6,
        "server_cpu_us": used / num_steps * 1e6,
        "wall_us": found["wall_s"] / num_steps * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--mb", type=float, nargs="+", default=[1.1, 8.0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--read", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.serve)
    elif given.read:
        read(given.read[0], int(given.read[1]), given.read[2])
    else:
        found = [measure(megabytes, way, given.steps) for megabytes in given.mb for way in WAYS]
        for line in found:
            shown = "   ".join(f"{key} {value:.0f}" for key, value in line.items() if key.endswith("_us"))
            print(json.dumps(line) if given.json else f"{line['batch_mb']:g} MB, {line['way']:13}   {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
