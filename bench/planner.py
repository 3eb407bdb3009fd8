"""The load of a planner's process: a real planner with the requests of all groups, as engines encode and send them.

python -m bench planner [--dp 16 128 512 4096] [--steps N] [--groups-per-host 8] [--only far ray] [--strategy long_short]

The planner is alone in a process. The hosts of constructors, 8 groups each, are played by another process: each takes the
plans of its groups step by step, as constructors do, and tells the planner which steps it may still come back for. *near*:
hosts of one machine, which share memory with the planner. *far*: hosts on other machines, so that all bytes of a message
travel; they go over a socket of this machine, without what a network and its library take. *ray*, where it is asked for: the
planner is an actor of a Ray cluster on this machine's loopback, and the hosts are on three other nodes of it, in a process
each: requests and messages are Ray's, and messages to hosts of one process go together. Steps have 65,536 tokens a rank in
documents of about 1,000 tokens, which are cut at the ends of rows (`--whole`: packed whole). The facts of all chunks are
at hand. CPU time is that of the planner's process: planning, and all messages.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from bench.planning import H200_COST
from bench.telling import parser_of
from overlord.arrange.graph import deal_rows
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import GroupPlan
from overlord.arrange.strategies import Strategy, long_short
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.declare.mixture import Mixture
from overlord.roles.plan_requests import HostPlans, PlanRequests
from overlord.roles.plan_window import SharedPlans
from overlord.roles.planner import Planner
from overlord.runtime.peers import Peers
from overlord.runtime.role_table import RAISED, RoleTable, accept_calls
from overlord.runtime.shared_memory import Connection, Listener
from overlord.stream.drawing import Extent
from overlord.stream.facts import ChunkFacts
from overlord.stream.progress import Progress

NUM_SOURCES = 64
CHUNK_TOKENS = 524_288
MEAN_DOCUMENT = 1000
ROW_TOKENS = 8192
RANK_TOKENS = 65_536
PREFETCH = 2
PLANNER, NUM_ADDRESSES = 1, 16
NUM_HOST_NODES = 3
WARM_STEPS = 12
STRATEGIES: dict[str, Strategy] = {"plain": deal_rows, "long_short": long_short(H200_COST)}


@dataclass(frozen=True, slots=True)
class Load:
    """What the planner's process does for one step, on average."""

    dp: int
    hosts: int
    way: str
    strategy: str
    samples: int
    cpu_ms: float
    requests: float
    """Calls and notes of hosts."""
    sent: float
    """Messages with plans."""
    sent_mb: float = float("nan")
    """On Ray these are not counted."""


class ReadyFacts:
    """Loaders that have described every chunk already: all chunks of a source are alike."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._known = [_facts(rng) for _ in range(NUM_SOURCES)]

    def describe_all(self, chunks: Sequence[tuple[int, int, int]]) -> list[ChunkFacts]:
        return [self._known[source] for source, _, _ in chunks]

    def peek(self, source: int, chunk: int, keep_from: int = 0, may_make: bool = True) -> ChunkFacts:
        return self._known[source]

    def prefetch(self, source: int, chunk: int, end: int | None = None) -> None:
        """Nothing is to be read."""

    def note_described(self, source: int, chunk: int, keep_from: int) -> None:
        """Nothing is kept."""


def _facts(rng: np.random.Generator) -> ChunkFacts:
    lengths = np.exp(rng.normal(np.log(MEAN_DOCUMENT) - 0.5, 1.0, CHUNK_TOKENS // MEAN_DOCUMENT))
    tokens = np.clip(lengths, 1, ROW_TOKENS).astype(np.int64)
    return ChunkFacts(tokens, tokens - 1)


def planner_arguments(setting: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the planner, all but how it sends plans."""
    names = tuple(f"source-{number:02}" for number in range(NUM_SOURCES))
    dp = setting["dp"]
    return {
        "start": Progress.start(names),
        "batch": Batch(
            tokens=dp * RANK_TOKENS, sequence_length=ROW_TOKENS, cut_documents=not setting["whole"], micro_tokens=RANK_TOKENS
        ),
        "mixture": Mixture({name: 1.0 for name in names}),
        "strategy": STRATEGIES[setting["strategy"]],
        "place": ClientPlaceTree(Mesh(dp=dp)),
        "extents": [Extent(1 << 30, None)] * NUM_SOURCES,
        "routes": ReadyFacts(),
        "max_lead": PREFETCH + 8,
    }


class ServedPlanner:
    """The planner's process: answers hosts near, and those far away, whose messages are bytes, and counts."""

    def __init__(self, setting: dict[str, Any]) -> None:
        self._setting = setting
        self._peers = Peers()
        self._num_requests = self._num_sent = self._sent_bytes = 0
        self._planner = Planner(**planner_arguments(setting), send=self._send)

    def _send(self, group: int, plans: SharedPlans) -> None:
        host = group // self._setting["groups_per_host"]
        self._num_sent += 1
        value: Any = plans
        if self._setting["way"] == "far":
            value = pickle.dumps(plans, protocol=5)
            self._sent_bytes += len(value)
        with suppress(BlockingIOError):  # as engines do: it is requested then
            self._peers.tell(self._setting["addresses"][host % NUM_ADDRESSES], host + 1, ("receive", (value,), {}))

    def ask(self, method: str, args: Any) -> Any:
        """A call of a host: its arguments as they are, or as bytes from far away."""
        self._num_requests += 1
        if not isinstance(args, bytes):
            return getattr(self._planner, method)(*args)
        answer = pickle.dumps(getattr(self._planner, method)(*pickle.loads(args)), protocol=5)
        self._sent_bytes += len(answer)
        return answer

    def reached(self) -> int:
        return self._planner.status().reached

    def used(self) -> dict[str, float]:
        return {
            "cpu_ms": time.process_time() * 1e3,
            "requests": self._num_requests,
            "sent": self._num_sent,
            "sent_mb": self._sent_bytes / 1e6,
        }


def serve() -> None:
    """The planner's process: reads what to plan from standard input, and ends when that is closed."""
    table, listener = RoleTable(), Listener()
    table.hold(PLANNER, "planner", ServedPlanner(json.loads(sys.stdin.readline())))
    threading.Thread(target=accept_calls, args=(listener, table), daemon=True).start()
    print(listener.address, flush=True)
    sys.stdin.read()


class PlannerHandle:
    """What a host knows of the planner: like a handle of an engine."""

    name = "planner"

    def __init__(self, address: str, is_far: bool) -> None:
        self.engine = self
        self._address = address
        self._is_far = is_far
        self._peers = Peers()

    def shares_memory_with(self, name: str) -> bool:
        del name
        return not self._is_far

    def call(self, method: Any, *args: Any) -> PlannerReply:
        return PlannerReply(self, self._send("ask", method.__name__, self._encoded(args)))

    def tell(self, method: Any, *args: Any) -> None:
        with suppress(BlockingIOError):
            self._peers.tell(self._address, PLANNER, ("ask", (method.__name__, self._encoded(args)), {}))

    def ask(self, method: str) -> Any:
        """Ask the planner's process about itself."""
        return PlannerReply(self, self._send(method)).result()

    def receive(self, connection: Connection) -> Any:
        kind, value = connection.receive()
        self._peers.give_back(self._address, connection)
        if kind == RAISED:
            raise value.open()
        return pickle.loads(value) if isinstance(value, bytes) else value

    def _encoded(self, args: tuple[Any, ...]) -> Any:
        return pickle.dumps(args, protocol=5) if self._is_far else args

    def _send(self, method: str, *args: Any) -> Connection:
        return self._peers.send(self._address, (True, PLANNER, method, args, {}))


class PlannerReply:
    """The answer of the planner, to come."""

    def __init__(self, handle: PlannerHandle, connection: Connection) -> None:
        self._handle = handle
        self._connection = connection

    def result(self) -> Any:
        return self._handle.receive(self._connection)


class PlayedHost:
    """The constructors of some groups, as far as the planner sees them."""

    def __init__(self, handle: Any, place: ClientPlaceTree, groups: range) -> None:
        self._plans = HostPlans(handle, place, self)
        self._groups: list[PlanRequests] = [self._plans.of_group(group) for group in groups]

    def note_plans(self, plans: Any, first_chunks: Any) -> None:
        """No chunks are borrowed."""

    def receive(self, plans: Any) -> None:
        self._plans.receive(pickle.loads(plans) if isinstance(plans, bytes) else plans)

    def take(self, step: int) -> int:
        """Take a step for every group; returns how many samples it has."""
        num_samples = 0
        for group in self._groups:
            while not isinstance(plan := group.plan(step, max(0, step - PREFETCH), False), GroupPlan):
                time.sleep(0.01)
            num_samples += sum(len(micro.samples) for micro in plan.microbatches)
        return num_samples


def measured(dp: int, way: str, args: Any) -> Load:
    num_hosts = -(-dp // args.groups_per_host)
    tables = [RoleTable() for _ in range(min(NUM_ADDRESSES, num_hosts))]
    listeners = [Listener() for _ in tables]
    for table, listener in zip(tables, listeners, strict=True):
        threading.Thread(target=accept_calls, args=(listener, table), daemon=True).start()
    setting = {
        "dp": dp,
        "way": way,
        "strategy": args.strategy,
        "whole": args.whole,
        "groups_per_host": args.groups_per_host,
        "addresses": [listener.address for listener in listeners],
    }
    command = [sys.executable, "-m", "bench.planner", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(setting) + "\n")
        process.stdin.flush()
        address = process.stdout.readline().strip()
        place = ClientPlaceTree(Mesh(dp=dp))
        hosts: list[PlayedHost] = []
        for number in range(num_hosts):
            first = number * args.groups_per_host
            handle = PlannerHandle(address, way == "far")
            hosts.append(PlayedHost(handle, place, range(first, min(first + args.groups_per_host, dp))))
            tables[number % NUM_ADDRESSES].hold(number + 1, f"host-{number}", hosts[-1])
        asking = PlannerHandle(address, is_far=False)
        before: dict[str, float] = {}
        num_samples = 0
        for step in range(WARM_STEPS + args.steps):
            while step and asking.ask("reached") <= step + PREFETCH:  # trainers take longer than the planner
                time.sleep(0.02)
            if step == WARM_STEPS:
                before = asking.ask("used")
            num_samples = sum(host.take(step) for host in hosts)
        after = asking.ask("used")
        process.stdin.close()
    for listener in listeners:
        listener.close()
    each = {name: round((after[name] - before[name]) / args.steps, 3) for name in after}
    return Load(dp, num_hosts, way, args.strategy, num_samples, **each)


class CountedPlanner(Planner):
    """A planner in an actor, which tells what its process has used. Everything in the process counts, Ray's threads too."""

    sent = 0
    requests = 0

    def plans_for_host(self, request: Any) -> Any:
        self.requests += 1
        return super().plans_for_host(request)

    def note_oldest(self, noted: Any) -> None:
        self.requests += 1
        super().note_oldest(noted)

    def used(self) -> dict[str, float]:
        return {"cpu_ms": time.process_time() * 1e3, "requests": self.requests, "sent": self.sent}

    def reached(self) -> int:
        return self.status().reached


def make_planner_actor(setting: dict[str, Any], engine: Any, workplace: Any) -> CountedPlanner:
    del workplace

    def send(group: int, plans: SharedPlans) -> None:
        host = group // setting["groups_per_host"]
        planner.sent += 1
        engine.tell(f"constructor/{host % setting['processes']}", HostProcess.receive, host, plans)

    planner = CountedPlanner(**planner_arguments(setting), send=send)
    return planner


class HostProcess:
    """The hosts of a process: each has plans of its own, as if it were alone on its node."""

    def __init__(self, setting: dict[str, Any], planner: Any, number: int) -> None:
        place, each, dp = ClientPlaceTree(Mesh(dp=setting["dp"])), setting["groups_per_host"], setting["dp"]
        hosts = range(number, -(-dp // each), setting["processes"])
        self._hosts = {host: PlayedHost(planner, place, range(host * each, min((host + 1) * each, dp))) for host in hosts}

    def receive(self, host: int, plans: Any) -> None:
        self._hosts[host].receive(plans)

    def take(self, step: int) -> int:
        return sum(host.take(step) for host in self._hosts.values())


def make_host_process(setting: dict[str, Any], planner: Any, number: int, workplace: Any) -> HostProcess:
    del workplace
    return HostProcess(setting, planner, number)


def measured_on_ray(dp: int, args: Any) -> Load:
    import os

    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}  # read when ray is imported
    import ray

    import overlord as ol
    from bench.cluster import running_cluster
    from overlord.runtime.engine import WorkplaceSize

    num_hosts = -(-dp // args.groups_per_host)
    setting = {"dp": dp, "strategy": args.strategy, "whole": args.whole, "groups_per_host": args.groups_per_host}
    setting["processes"] = num_processes = min(NUM_HOST_NODES, num_hosts)
    with running_cluster(1 + num_processes):
        here = ray.get_runtime_context().get_node_id()
        others = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
        engine = ol.Ray("auto", hung_after_s=None, near=others[:num_processes])
        engine.open(WorkplaceSize(None, None))
        try:
            planner = engine.spawn("planner", partial(make_planner_actor, setting, engine))
            hosts = [
                engine.spawn(f"constructor/{number}", partial(make_host_process, setting, planner, number))
                for number in range(num_processes)
            ]
            engine.wait_until_started()
            before: dict[str, float] = {}
            num_samples = 0
            for step in range(WARM_STEPS + args.steps):
                while step and planner.call(CountedPlanner.reached).result() <= step + PREFETCH:
                    time.sleep(0.05)
                if step == WARM_STEPS:
                    before = planner.call(CountedPlanner.used).result()
                taken = [host.call(HostProcess.take, step) for host in hosts]
                num_samples = sum(each.result() for each in taken)
            after = planner.call(CountedPlanner.used).result()
        finally:
            engine.close()
    each = {name: round((after[name] - before[name]) / args.steps, 3) for name in after}
    return Load(dp, num_hosts, "ray", args.strategy, num_samples, **each)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dp", type=int, nargs="*", default=[16, 128, 512, 4096])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--groups-per-host", type=int, default=8)
    parser.add_argument("--only", choices=["near", "far", "ray"], nargs="*", default=["near", "far"])
    parser.add_argument("--strategy", choices=STRATEGIES, default="plain")
    parser.add_argument("--whole", action="store_true", help="pack whole documents instead of cutting them at row ends")
    parser.add_argument("--serve", action="store_true", help="be the planner's process")
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    loads = [measured_on_ray(dp, args) if way == "ray" else measured(dp, way, args) for dp in args.dp for way in args.only]
    if args.json:
        print(json.dumps([asdict(load) for load in loads], indent=1))
        return
    print("a step of the planner's process: CPU milliseconds, requests of hosts, messages with plans, their megabytes")
    for load in loads:
        print(
            f"dp {load.dp:>5,}, {load.hosts:>4,} hosts {load.way:>4}, {load.samples:>8,} samples: {load.cpu_ms:>7.1f} ms, "
            f"{load.requests:>6.1f} requests, {load.sent:>6.1f} messages"
            + ("" if load.way == "ray" else f", {load.sent_mb:>7.2f} MB")
        )


if __name__ == "__main__":
    main()
