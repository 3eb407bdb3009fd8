"""Steps over Arrow Flight, on this machine: how much, how soon, and to how many.

python -m bench.flight [throughput] [latency] [clients] [--quick] [--json]

throughput: four client processes together, batches of 5 to 20 MB. latency: one client, small steps that are ready.
clients: 1,008 clients of one run with 16 constructors, each with a server, and the sockets that this takes.
Server and clients are separate processes and share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import psutil

import overlord as ol
from bench.measure import ROOT
from overlord.messages import Delivery, Later
from overlord.service.auth import Listen
from overlord.service.channel import FlightChannel
from overlord.service.run_api import Channel, RunApi
from overlord.service.server import Service
from overlord.service.serving import ServedGroups, ServerPerGroup
from tests.small_sources import Numbered

MB = 1_000_000
NUM_CLIENTS = 4
GROUPS, RANKS_PER_GROUP = 16, 63


class Prebuilt:
    """Steps of one size that are always ready: what is measured is the way, not the making."""

    def __init__(self, num_bytes: int) -> None:
        places = max(num_bytes // 17, 1)  # int64, two int32 and a bool for each token place, as a real step has
        self._micro = {
            "tokens": np.arange(places, dtype=np.int32),
            "labels": np.arange(places, dtype=np.int64),
            "position_ids": np.arange(places, dtype=np.int32),
            "loss_mask": np.ones(places, np.bool_),
            "cu_seqlens": np.arange(0, places, 1024, dtype=np.int32),
            "num_tokens": places,
        }

    def start(self) -> int:
        return 0

    def generation(self) -> int:
        return 0

    def fetch(
        self,
        step: int,
        rank: int,
        wait_s: float,
        ahead: bool = False,
        generation: int | None = None,
        *,
        most_unbuilt: int = 0,
    ) -> Delivery | Later | None:
        return Delivery(step, 1, (dict(self._micro),))

    is_ahead_useful = has_pipeline = False

    def open_pipeline(self, rank: int) -> None: ...

    def origin(self) -> str:
        return ""

    def take(
        self, step: int, rank: int, waited_s: float = 0.0, generation: int | None = None, origin: str | None = None
    ) -> None: ...

    def leave(self, rank: int, generation: int | None = None) -> None: ...

    def eval_channel(self, name: str, known: Channel | None) -> Channel:
        raise AssertionError("only steps are read")

    def close(self) -> None: ...

    @property
    def run(self) -> RunApi:
        raise AssertionError("only steps are read")


def serve_prebuilt(num_bytes: int) -> None:
    steps = Prebuilt(num_bytes)
    service = Service("bench", Listen(), steps=steps, run=steps)
    _serve_until_told(service.address, lambda: {"cpu_s": time.process_time()})
    service.close()


def serve_many(num_loaders: int) -> None:
    """A real run: 16 data-parallel groups of 63 ranks, each group's constructor with a server of its own."""
    long = Numbered(rows=400, unit_rows=50, longest=1000, loaders=num_loaders)
    sources = {f"s{i}": replace(long, first=1 + 400 * i) for i in range(4)}
    batch = ol.Batch(tokens=16_384, sequence_length=1024)
    job = ol.Job(sources=sources, batch=batch, mesh=ol.Mesh(dp=GROUPS, tp=RANKS_PER_GROUP))
    _raise_limit()
    with ol.start(job) as loader:
        channel = loader.client(0)._channel
        constructors = loader._roles.constructors
        groups = ServedGroups(lambda: loader.tree, constructors, bring_near=lambda _rank, _names: None)
        serving = ServerPerGroup("bench", channel, groups, listen=Listen(), leave_after_s=None)
        _serve_until_told(serving.address, lambda: {"sockets": _sockets(), "threads": threading.active_count()})
        serving.close()


def _serve_until_told(address: str, report: Callable[[], dict[str, Any]]) -> None:
    print(address, flush=True)
    for _ in sys.stdin:
        print(json.dumps(report()), flush=True)


def _sockets() -> int:
    """Connections that this process has accepted."""
    connections = psutil.Process().net_connections("tcp")
    listening = {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return sum(c.status == psutil.CONN_ESTABLISHED and c.laddr.port in listening for c in connections)


def read_for(address: str, rank: int, seconds: float) -> None:
    """Fetch as fast as it goes; prints how much that was, with the time of each fetch."""
    channel = FlightChannel(address, rank, timeout_s=30.0)
    for step in range(3):
        channel.fetch(step, rank, 1.0)
    print("ready", flush=True)
    sys.stdin.readline()
    began, cpu, num_bytes, times = time.perf_counter(), time.process_time(), 0, []
    while time.perf_counter() - began < seconds:
        before = time.perf_counter()
        delivery = channel.fetch(len(times), rank, 1.0)
        times.append(time.perf_counter() - before)
        assert isinstance(delivery, Delivery)
        num_bytes += sum(v.nbytes for m in delivery.microbatches for v in m.values() if isinstance(v, np.ndarray))
    wall = time.perf_counter() - began
    print(json.dumps({"bytes": num_bytes, "wall_s": wall, "cpu_s": time.process_time() - cpu, "times": times}))


def read_as(address: str, ranks: Sequence[int], num_steps: int) -> None:
    """Many ranks in one process, a thread each, all reading the same steps."""
    _raise_limit()
    connected = threading.Barrier(len(ranks) + 1)

    def read(rank: int) -> str | None:
        client = None
        try:
            client = ol.connect(address, rank=rank, timeout_s=120)
            connected.wait(120)
            numbers = [next(client).number for _ in range(num_steps)]
            return None if numbers == list(range(num_steps)) else f"rank {rank} got steps {numbers}"
        except (ol.OverlordError, threading.BrokenBarrierError) as error:
            return f"rank {rank}: {type(error).__name__}: {error}"
        finally:
            done.wait()
            if client is not None:
                client.close()

    done = threading.Event()
    with ThreadPoolExecutor(len(ranks)) as threads:
        futures = [threads.submit(read, rank) for rank in ranks]
        connected.wait(240)
        print("ready", flush=True)
        sys.stdin.readline()
        done.set()
        errors = [error for error in (future.result() for future in futures) if error]
    print(json.dumps({"errors": errors}))


def _raise_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@dataclass
class Part:
    """A process of this file that is told and answers in lines."""

    process: subprocess.Popen[str]

    @staticmethod
    def started(*arguments: object) -> Part:
        command = [sys.executable, "-m", "bench.flight", *map(str, arguments)]
        return Part(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT))

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"a part of the benchmark ended early: {self.process.args}")
        return line

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        self.process.communicate(timeout=60)


def throughput(batch_mb: float, seconds: float) -> dict[str, Any]:
    server = Part.started("--serve", int(batch_mb * MB))
    address = server.line()
    clients = [Part.started("--read", address, rank, seconds) for rank in range(NUM_CLIENTS)]
    for client in clients:
        client.line()
    server.tell()
    before = json.loads(server.line())["cpu_s"]
    for client in clients:
        client.tell()
    found = [json.loads(client.line()) for client in clients]
    server.tell()
    server_cpu = json.loads(server.line())["cpu_s"] - before
    for part in (*clients, server):
        part.stop()
    gigabytes = sum(one["bytes"] for one in found) / 1e9
    return {
        "batch_mb": batch_mb,
        "gb_per_s": gigabytes / max(one["wall_s"] for one in found),
        "cpu_s_per_gb": (server_cpu + sum(one["cpu_s"] for one in found)) / gigabytes,
    }


def latency(seconds: float) -> dict[str, Any]:
    server = Part.started("--serve", 10_000)
    client = Part.started("--read", server.line(), 0, seconds)
    client.line()
    client.tell()
    times = np.array(json.loads(client.line())["times"]) * 1e3
    for part in (client, server):
        part.stop()
    p50, p99, most = np.percentile(times, [50, 99, 100])
    return {"fetches": len(times), "p50_ms": p50, "p99_ms": p99, "max_ms": most}


def many_clients(num_loaders: int, num_steps: int, num_processes: int = 4) -> dict[str, Any]:
    began = time.perf_counter()
    server = Part.started("--serve-many", num_loaders)
    address = server.line()
    ranks = range(GROUPS * RANKS_PER_GROUP)
    readers = [
        Part.started("--read-as", address, num_steps, *ranks[process::num_processes]) for process in range(num_processes)
    ]
    for reader in readers:
        reader.line()
    server.tell()
    use = json.loads(server.line())
    for reader in readers:
        reader.tell()
    errors = [error for reader in readers for error in json.loads(reader.line())["errors"]]
    for part in (*readers, server):
        part.stop()
    return {
        "clients": len(ranks),
        "constructors": GROUPS,
        "loaders": 4 * num_loaders,
        "steps": num_steps,
        "sockets": use["sockets"],
        "num_errors": len(errors),
        "first_errors": errors[:2],
        "wall_s": time.perf_counter() - began,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="throughput, latency, clients; all unless given")
    parser.add_argument("--quick", action="store_true", help="fewer settings, shorter")
    parser.add_argument("--json", action="store_true")
    for part in ("--serve", "--serve-many"):
        parser.add_argument(part, type=int, help=argparse.SUPPRESS)
    for part in ("--read", "--read-as"):
        parser.add_argument(part, nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve_prebuilt(given.serve)
    elif given.serve_many is not None:
        serve_many(given.serve_many)
    elif given.read:
        read_for(given.read[0], int(given.read[1]), float(given.read[2]))
    elif given.read_as:
        read_as(given.read_as[0], [int(rank) for rank in given.read_as[2:]], int(given.read_as[1]))
    else:
        return _report(given.names or ["throughput", "latency", "clients"], given.quick, given.json)
    return 0


def _report(names: Sequence[str], quick: bool, as_json: bool) -> int:
    seconds = 2.0 if quick else 5.0
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        if name == "throughput":
            found[name] = [throughput(batch_mb, seconds) for batch_mb in ((10,) if quick else (5, 10, 20))]
        elif name == "latency":
            found[name] = [latency(seconds)]
        elif name == "clients":
            found[name] = [many_clients(loaders, 3 if quick else 10) for loaders in ((1,) if quick else (1, 4))]
        else:
            print(f"no part is called {name}: choose from throughput, latency, clients", file=sys.stderr)
            return 2
        if not as_json:
            print(f"\n{name}")
            for line in found[name]:
                print("  " + "   ".join(f"{key} {_shown(value)}" for key, value in line.items()), flush=True)
    if as_json:
        print(json.dumps(found, indent=1))
    return int(any(line["num_errors"] for line in found.get("clients", [])))


def _shown(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
