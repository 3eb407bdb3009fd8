"""How a run grows with a Ray cluster: throughput with 1 to 8 nodes, and what thousands of trainers' connections cost.

    python -m bench cluster [nodes] [small] [connections] [--quick] [--json] [--seconds S]

The nodes are Ray nodes on this machine's loopback. They share no memory with each other as far as Overlord is concerned:
between them calls are actor calls, and payload goes through object stores.

nodes: two loaders and a trainer on each node. Loaders wait for their storage, which takes 0.5 s for a unit of 65,536 tokens
whatever the machine does, so the cores of one machine do not limit the cluster. A trainer is an actor that takes its steps
and nothing else. Each node adds a data-parallel group, so a step grows with the cluster.

small: steps of 8,192 tokens for a trainer whose loaders are all on another node, from storage that does not wait: what a
request between nodes costs shows in the time of a step.

connections: 64 trainers for each constructor, on a cluster of four nodes. A simulated trainer is the connection of one
(`FlightChannel`: its greeting, its sockets and its requests, over unix sockets or, with --flight, over TCP) without a
process, a thread or tensors of its own: four processes hold a quarter of them each, and let them take steps one after the
other. Sockets are those that a process holds; memory is the growth of the constructors' proportional set size.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import overlord as ol
from bench.process_tree import adopt_orphans, cpu_seconds_below, die_with_parent, pss_bytes
from bench.telling import parser_of

ROOT = Path(__file__).parent.parent
UNIT_ROWS, ROW_TOKENS = 64, 1024
WAIT_S = 0.5
LOADERS_A_NODE = 2
RANK_TOKENS = 2 * UNIT_ROWS * ROW_TOKENS
SMALL_TOKENS = 8192
RANKS_A_GROUP = 64
NUM_READERS = 4
NUM_NODES = 4
_PATIENCE = 240.0


@dataclass(frozen=True)
class SlowStorage(ol.Source):
    """Documents of 1,024 tokens from storage that answers after `WAIT_S`."""

    first: int = 0
    num_units: int = 512
    wait_s: float = WAIT_S

    def units(self) -> list[ol.Unit]:
        num_bytes = 4 * UNIT_ROWS * ROW_TOKENS
        return [ol.Unit("slow", index, UNIT_ROWS, num_bytes) for index in range(self.num_units)]

    def read(self, unit: ol.Unit) -> pa.Table:
        time.sleep(self.wait_s)
        start = (self.first + unit.index * UNIT_ROWS) % (1 << 20)
        values = np.repeat(np.arange(start, start + UNIT_ROWS, dtype=np.int32), ROW_TOKENS)
        offsets = np.arange(0, len(values) + 1, ROW_TOKENS, dtype=np.int32)
        return pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int32()))})

    def identity(self) -> str:
        return f"SlowStorage({self.first}, {self.num_units})"


@dataclass(frozen=True, slots=True)
class NodesOutcome:
    nodes: int
    loaders: int
    tokens_per_s: float
    storage_tokens_per_s: float
    """What the storage of all loaders delivers, whoever reads it."""
    cores_used: float
    constructors_beside_trainers: int


@dataclass(frozen=True, slots=True)
class SmallOutcome:
    step_tokens: int
    steps_per_s: float
    cpu_ms_a_step: float
    """Of all processes."""


@dataclass(frozen=True, slots=True)
class ConnectionsOutcome:
    trainers: int
    constructors: int
    constructor_processes: int
    over: str
    sockets_a_constructor: float
    """That trainers add, on average."""
    planner_sockets: tuple[int, int]
    """Before and after the trainers came."""
    loader_sockets: tuple[int, int]
    """Of the loader host with the most."""
    kib_a_connection: float
    connect_s: float
    step_s: float
    errors: int


class TakingTrainer:
    """A trainer in a process of the cluster."""

    def __init__(self, address: str, rank: int) -> None:
        self._client = ol.connect(address, rank=rank, timeout_s=_PATIENCE)

    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def take_until(self, end: float) -> tuple[list[float], list[int]]:
        """Takes steps until a moment; returns when each came, and the tokens until then."""
        times, totals = [], [0]
        while not times or times[-1] < end:
            tokens = sum(len(micro["tokens"]) for micro in next(self._client))
            times.append(time.monotonic())
            totals.append(totals[-1] + tokens)
        return times, totals[1:]


@contextmanager
def running_cluster(num_nodes: int) -> Iterator[None]:
    """A warm cluster that this process is connected to."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-m", "bench.ray_cluster", "--nodes", str(num_nodes)]
    options = ["--cpus", str(LOADERS_A_NODE), "--store", str(150 << 20)]
    cluster = subprocess.Popen(
        [*command, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=die_with_parent, cwd=ROOT
    )
    import ray

    try:
        assert cluster.stdout is not None
        address = cluster.stdout.readline().decode().strip()
        if not address:
            raise SystemExit("the cluster did not start")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.communicate(timeout=60)


def measure_nodes(num_nodes: int, seconds: float) -> NodesOutcome:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    num_loaders = LOADERS_A_NODE * num_nodes
    sources = {f"s{i}": SlowStorage(first=i * 100_000, window=1) for i in range(num_loaders)}
    batch = ol.Batch(tokens=RANK_TOKENS * num_nodes, sequence_length=8 * ROW_TOKENS, micro_tokens=RANK_TOKENS)
    job = ol.Job(sources=sources, batch=batch, mesh=ol.Mesh(dp=num_nodes), num_workers=1, prefetch=4)
    adopt_orphans()
    with running_cluster(num_nodes):
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        engine = ol.Ray("auto", loader_hosts=num_loaders, patience_s=_PATIENCE)
        with ol.start(job, engine=engine) as loader:
            address = loader.serve()
            remote: Any = ray.remote(num_cpus=0)(TakingTrainer)
            placed = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
            trainers = [
                remote.options(scheduling_strategy=strategy).remote(address, rank) for rank, strategy in enumerate(placed)
            ]
            homes = ray.get([trainer.node.remote() for trainer in trainers], timeout=_PATIENCE)
            beside = sum(_node_of(engine, f"constructor/{rank}") == home for rank, home in enumerate(homes))
            # The buffers that were filled before the trainers came are taken by then.
            begin = time.monotonic() + seconds / 2
            taking = [trainer.take_until.remote(begin + seconds) for trainer in trainers]
            time.sleep(max(begin - time.monotonic(), 0.0))
            cpu_s = cpu_seconds_below(os.getpid())
            time.sleep(seconds)
            cpu_s = cpu_seconds_below(os.getpid()) - cpu_s
            tokens = 0.0
            for times, totals in ray.get(taking, timeout=_PATIENCE):
                until_begin, until_end = np.interp([begin, begin + seconds], times, totals)
                tokens += float(until_end - until_begin)
    stored = num_loaders * UNIT_ROWS * ROW_TOKENS / WAIT_S
    return NodesOutcome(num_nodes, num_loaders, tokens / seconds, stored, cpu_s / seconds, beside)


def measure_small(seconds: float) -> SmallOutcome:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    sources = {f"s{i}": SlowStorage(first=i * 100_000, window=1, wait_s=0.0) for i in range(4)}
    job = ol.Job(sources=sources, batch=ol.Batch(tokens=SMALL_TOKENS, sequence_length=SMALL_TOKENS), num_workers=1)
    adopt_orphans()
    with running_cluster(2):
        here = ray.get_runtime_context().get_node_id()
        (there,) = (node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here)
        loaders = ol.scaling.ActorOptions(placement="here")
        engine = ol.Ray("auto", loader_hosts=2, loaders=loaders, near=[there], patience_s=_PATIENCE)
        with ol.start(job, engine=engine) as loader:
            remote: Any = ray.remote(num_cpus=0)(TakingTrainer)
            strategy = NodeAffinitySchedulingStrategy(there, soft=False)
            trainer = remote.options(scheduling_strategy=strategy).remote(loader.serve(), 0)
            ray.get(trainer.take_until.remote(time.monotonic() + seconds / 2), timeout=_PATIENCE)
            cpu_s, begin = cpu_seconds_below(os.getpid()), time.monotonic()
            times, _ = ray.get(trainer.take_until.remote(begin + seconds), timeout=_PATIENCE)
            cpu_s, lasted = cpu_seconds_below(os.getpid()) - cpu_s, time.monotonic() - begin
    return SmallOutcome(SMALL_TOKENS, len(times) / lasted, 1e3 * cpu_s / len(times))


def measure_connections(num_trainers: int, num_steps: int, is_flight: bool) -> ConnectionsOutcome:
    import ray

    num_groups = num_trainers // RANKS_A_GROUP
    sources = {f"s{i}": SlowStorage(first=i * 100_000, window=1, wait_s=0.0) for i in range(8)}
    batch = ol.Batch(tokens=4 * ROW_TOKENS * num_groups, sequence_length=4 * ROW_TOKENS)
    mesh = ol.Mesh(dp=num_groups, tp=RANKS_A_GROUP)
    job = ol.Job(sources=sources, batch=batch, mesh=mesh, num_workers=1)
    with running_cluster(NUM_NODES):
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        near = [nodes[group % len(nodes)] for group in range(num_groups)]
        engine = ol.Ray("auto", loader_hosts=4, near=near, patience_s=_PATIENCE)
        with ol.start(job, engine=engine) as loader:
            address = loader.serve(leave_after_s=None)  # without heartbeats, for which a client has a thread
            pids = _pids(engine)
            constructors = {pids[f"constructor/{group}"] for group in range(num_groups)}
            loaders = {pid for name, pid in pids.items() if name.startswith("loaders/")}
            warm = _reader(address, [0], is_flight)  # the first connection imports and starts what all of them use
            warm.communicate(b"1\n", timeout=_PATIENCE)
            before = _use(constructors), _num_sockets(pids["planner"]), max(map(_num_sockets, loaders))
            begun = time.monotonic()
            readers = [_reader(address, range(index, num_trainers, NUM_READERS), is_flight) for index in range(NUM_READERS)]
            errors = sum(json.loads(_line(reader))["errors"] for reader in readers)
            connect_s = time.monotonic() - begun
            after = _use(constructors), _num_sockets(pids["planner"]), max(map(_num_sockets, loaders))
            begun = time.monotonic()
            for reader in readers:
                _tell(reader, num_steps)
            errors += sum(json.loads(_line(reader))["errors"] for reader in readers)
            step_s = (time.monotonic() - begun) / num_steps
            for reader in readers:
                reader.communicate(timeout=_PATIENCE)
    (sockets_before, bytes_before), (sockets_after, bytes_after) = before[0], after[0]
    return ConnectionsOutcome(
        trainers=num_trainers,
        constructors=num_groups,
        constructor_processes=len(constructors),
        over="TCP" if is_flight else "unix sockets",
        sockets_a_constructor=(sockets_after - sockets_before) / num_groups,
        planner_sockets=(before[1], after[1]),
        loader_sockets=(before[2], after[2]),
        kib_a_connection=(bytes_after - bytes_before) / num_trainers / 1024,
        connect_s=connect_s,
        step_s=step_s,
        errors=errors,
    )


def read_as(address: str, ranks: Sequence[int], is_flight: bool) -> None:
    """Connect as many ranks, and let each take the steps that standard input says; prints how often that failed."""
    from overlord.messages import Delivery
    from overlord.service.channel import FlightChannel

    die_with_parent()
    _raise_limit()
    channels: dict[int, FlightChannel] = {}
    errors = 0
    for rank in ranks:
        try:
            channels[rank] = FlightChannel(address, rank, timeout_s=60.0, local=not is_flight)
        except ol.OverlordError as error:
            print(f"rank {rank}: {error}", file=sys.stderr)
            errors += 1
    print(json.dumps({"errors": errors}), flush=True)
    errors = 0
    for step in range(int(sys.stdin.readline())):
        for rank, channel in channels.items():
            deadline = time.monotonic() + 60.0
            while not isinstance(channel.fetch(step, rank, 2.0), Delivery):  # another rank of the group is behind
                if time.monotonic() > deadline:
                    errors += 1
                    break
    print(json.dumps({"errors": errors}), flush=True)
    sys.stdin.read()
    os._exit(0)  # closing thousands of connections one by one is not measured


def _reader(address: str, ranks: Sequence[int], is_flight: bool) -> subprocess.Popen[bytes]:
    given = json.dumps([address, list(ranks), is_flight])
    command = [sys.executable, "-W", "ignore", "-m", "bench.cluster", "--read-as", given]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)


def _line(reader: subprocess.Popen[bytes]) -> bytes:
    assert reader.stdout is not None
    line = reader.stdout.readline()
    if not line:
        raise SystemExit("a process of simulated trainers ended early")
    return line


def _tell(reader: subprocess.Popen[bytes], number: int) -> None:
    assert reader.stdin is not None
    reader.stdin.write(f"{number}\n".encode())
    reader.stdin.flush()


def _pids(engine: ol.Ray) -> dict[str, int]:
    """The process of each role."""
    return {name: report.process for name, report in _reports(engine).items()}


def _node_of(engine: ol.Ray, role: str) -> str:
    return _reports(engine)[role].node


def _reports(engine: ol.Ray) -> dict[str, Any]:
    import ray

    roles = engine._running_roles()
    found = ray.get([actor.check_health.remote() for _, actor in roles.values()], timeout=60)
    return dict(zip(roles, found, strict=True))


def _use(pids: set[int]) -> tuple[int, int]:
    """The sockets and the bytes of processes."""
    return sum(map(_num_sockets, pids)), sum(pss_bytes(pid) for pid in pids)


def _num_sockets(pid: int) -> int:
    found = 0
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            found += os.readlink(entry.path).startswith("socket:")
        except OSError:  # closed meanwhile
            continue
    return found


def _raise_limit() -> None:
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _measure(part: str, *arguments: object) -> dict[str, Any]:
    """One setting in a process of its own: a process is connected to one cluster only."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.cluster", "--measure", json.dumps([part, *arguments])]
    done = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{part} {arguments} failed with status {done.returncode}")
    print(done.stdout.splitlines()[-1].decode(), file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


def _show_nodes(found: Sequence[dict[str, Any]]) -> None:
    print("\nloaders that wait for storage, a trainer on each node, one run each")
    print(f"  {'nodes':>6}{'loaders':>9}{'k tokens/s':>12}{'of storage':>12}{'against one node':>18}{'cores used':>12}")
    for each in found:
        share = each["tokens_per_s"] / each["storage_tokens_per_s"]
        grown = each["tokens_per_s"] / found[0]["tokens_per_s"]
        line = f"  {each['nodes']:>6}{each['loaders']:>9}{each['tokens_per_s'] / 1e3:>12,.0f}{share:>12.2f}{grown:>17.2f}x"
        print(f"{line}{each['cores_used']:>12.2f}")
        if each["constructors_beside_trainers"] != each["nodes"]:
            print(f"  ! only {each['constructors_beside_trainers']} constructors are beside their trainers")


def _show_small(found: Sequence[dict[str, Any]]) -> None:
    print("\na trainer whose loaders are on another node")
    for each in found:
        line = f"{each['steps_per_s']:,.0f} steps/s, {each['cpu_ms_a_step']:.2f} ms of CPU time each"
        print(f"  steps of {each['step_tokens']:,} tokens: {line}")


def _show_connections(found: Sequence[dict[str, Any]]) -> None:
    print("\nsimulated trainers, 64 for each constructor, four nodes")
    heads = f"{'sockets of a':>15}{'of the':>16}{'of a':>16}{'KiB a':>12}{'connected':>11}{'a step':>9}"
    print(f"  {'trainers':>9} {'over':<13}{'constructors':>13}{heads}")
    print(f"  {'':>9} {'':<13}{'':>13}{'constructor':>15}{'planner':>16}{'loader':>16}{'connection':>12}{'s':>11}{'s':>9}")
    for each in found:
        planner, loader = ("{} to {}".format(*each[f"{role}_sockets"]) for role in ("planner", "loader"))
        print(
            f"  {each['trainers']:>9,} {each['over']:<13}{each['constructors']:>13}{each['sockets_a_constructor']:>15.1f}"
            f"{planner:>16}{loader:>16}{each['kib_a_connection']:>12.1f}{each['connect_s']:>11.1f}{each['step_s']:>9.2f}"
        )
        if each["errors"]:
            print(f"  ! {each['errors']} errors")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="nodes, small, connections; all unless given")
    parser.add_argument("--quick", action="store_true", help="1 and 2 nodes, 256 connections")
    parser.add_argument("--flight", action="store_true", help="simulated trainers connect over TCP, as from other hosts")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, default=1, help="of nodes; the median of each number of nodes is shown")
    parser.add_argument("--measure", type=json.loads, help="one setting, as JSON, in this process")
    parser.add_argument("--read-as", type=json.loads, help="simulated trainers, as JSON, in this process")
    given = parser.parse_args(argv)
    # Read when ray is imported: listen on loopback, and send no statistics.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    if given.measure:
        part, *arguments = given.measure
        measure = {"nodes": measure_nodes, "small": measure_small, "connections": measure_connections}[part]
        print(json.dumps(asdict(measure(*arguments))))
        return 0
    if given.read_as:
        read_as(*given.read_as)
        return 0
    results: dict[str, list[dict[str, Any]]] = {}
    for part in given.parts or ["nodes", "small", "connections"]:
        if part == "nodes":
            sizes = (1, 2) if given.quick else (1, 2, 4, 8)
            seconds = 6.0 if given.quick else given.seconds
            rounds = [[_measure("nodes", size, seconds) for size in sizes] for _ in range(given.rounds)]
            results[part] = [_median_run(runs) for runs in zip(*rounds, strict=True)]
        elif part == "small":
            results[part] = [_measure("small", 4.0 if given.quick else 10.0)]
        elif part == "connections":
            counts = (256,) if given.quick else (1024, 4096)
            results[part] = [_measure("connections", count, 3, given.flight) for count in counts]
        else:
            parser.error(f"no part is called {part}: choose from nodes, small, connections")
        if not given.json:
            {"nodes": _show_nodes, "small": _show_small, "connections": _show_connections}[part](results[part])
    if given.json:
        print(json.dumps(results, indent=1))
    return int(any(each["errors"] for each in results.get("connections", [])))


def _median_run(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    middle = statistics.median_low([run["tokens_per_s"] for run in runs])
    return next(run for run in runs if run["tokens_per_s"] == middle)


if __name__ == "__main__":
    sys.exit(main())
