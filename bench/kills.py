"""What a trainer waits when a part of a run on Ray is killed: planner, loader, constructor, or the run's own process.

    python -m bench kills [--json] [--kills N] [--step-s S] [--chunk-s S] [--only PART ...]

A run that `overlord serve --ray` would keep in the cluster, with the default log and shadows, on one local node. Two
trainers connect to it and take a step every half second; the source takes two seconds for a chunk that lasts for eight
steps. A part is killed with SIGKILL, each time at another moment between two steps, and the next kill comes when everything
runs again. Shown is the longest wait for one step, of any trainer, from a kill until the next.

`driver` is the process that has the run: roles go on, and Ray starts another process that takes them over. For `driver, from
log` the record of the run is removed first, so that planner and constructors start again from the log.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from bench.measure import Spread
from bench.telling import parser_of, tell

RANKS = 2
ROLES_STEPS = 14
"""Steps after a kill within which the wait for the part shows: more than are planned ahead."""
NAME = "bench-kills"
PATIENCE_S = 120.0
BARS_S = {"planner": 0.05, "loader": 0.05, "driver": 0.05, "driver, from log": 10.0}
"""What the parts must not exceed."""


@dataclass(frozen=True, slots=True)
class PartKilled:
    part: str
    waits_s: list[float]
    """The longest wait for a step, for each kill."""
    back_s: list[float]
    """The time until another process had the part."""
    quiet_s: float
    """The longest wait for a step that no kill was near."""


class Trainers:
    """Threads that take a step every `step_s`, and note how long each wait was."""

    def __init__(self, address: str, step_s: float) -> None:
        import overlord as ol

        self._clients = [ol.connect(address, rank=rank, timeout_s=PATIENCE_S) for rank in range(RANKS)]
        self._step_s = step_s
        self._is_over = threading.Event()
        self.failed: list[BaseException] = []
        self.waits: list[list[float]] = [[] for _ in self._clients]
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(RANKS)]
        for thread in self._threads:
            thread.start()

    @property
    def steps(self) -> int:
        if self.failed:
            raise self.failed[0]
        return min(map(len, self.waits))

    def wait_for_steps(self, count: int) -> float:
        """Wait until every rank has taken so many more; returns the longest wait of any for one of them."""
        first = [len(waits) for waits in self.waits]
        enough = threading.Event()
        while not all(len(waits) >= at + count for waits, at in zip(self.waits, first, strict=True)):
            enough.wait(0.05)
            _ = self.steps
        return max(max(waits[at : at + count]) for waits, at in zip(self.waits, first, strict=True))

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        for client in self._clients:
            client.close()

    def _train(self, rank: int) -> None:
        try:
            while not self._is_over.wait(self._step_s):
                began = time.perf_counter()
                next(self._clients[rank])
                self.waits[rank].append(time.perf_counter() - began)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits for steps
            self.failed.append(error)


@contextmanager
def cluster() -> Iterator[None]:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # listen on loopback alone
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    from overlord.runtime.ray.cluster import SYSTEM_CONFIG

    ray.init(
        "local",
        num_cpus=8,
        object_store_memory=200 << 20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _system_config=dict(SYSTEM_CONFIG),
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def kept_run(step_s: float, chunk_s: float) -> Iterator[Trainers]:
    import overlord as ol
    from bench.shadow_kill import SAMPLES, TOKENS, Slow
    from overlord.service.auth import Listen
    from overlord.service.kept_run import KeptRun, ServeRequest
    from overlord.service.run_options import RunOptions

    job = ol.Job(
        sources={"slow": Slow(chunk_s=chunk_s, window=1)},
        batch=ol.Batch(samples=SAMPLES, sequence_length=TOKENS),
        mesh=ol.Mesh(dp=RANKS),
        num_workers=2,
    )
    budget = ol.scaling.Budget(cpus=2, memory_bytes=1 << 30)
    request = ServeRequest(
        job=job, options=RunOptions(shadows=budget), listen=Listen(), leave_after_s=60.0, resume=None, digest="bench"
    )
    run, _ = KeptRun.start_or_take_back(NAME, request, "a benchmark", before_start=lambda: None)
    try:
        trainers = Trainers(run.announcement().address, step_s)
        try:
            yield trainers
        finally:
            trainers.close()
    finally:
        run.close()


def process_of(part: str) -> int | None:
    """The process that has a part; None while there is none. A loader only once its shadow is warm."""
    if part.startswith("driver"):
        return _process("run#1", f"overlord-run-{NAME}")
    roles = _named_roles()
    if part != "loader":
        return roles.get(part)
    from overlord.roles.loader_host import LoaderHost
    from overlord.roles.routes import TABLE
    from overlord.runtime.ray.names import find_names

    names = find_names(f"overlord-run-{NAME}-roles", 5.0)
    for host, shadow in names.look_up(TABLE).shadows.items():
        held, mirrored = (names.call(name, LoaderHost.status).result(5.0) for name in (host, shadow))
        if held.copyable.get("slow") and set(held.copyable["slow"]) <= set(mirrored.copyable.get("slow", ())):
            return roles.get(host)
    return None


def _named_roles() -> dict[str, int]:
    from overlord.errors import OverlordError
    from overlord.runtime.ray.detached import find_roles
    from overlord.runtime.ray.names import find_names

    namespace = f"overlord-run-{NAME}-roles"
    names = find_names(namespace, 5.0)
    found: dict[str, int] = {}
    with suppress(OverlordError):
        for role, actor, _ in find_roles(names):
            process = _process(actor, namespace)
            if process is not None:
                found[role.name] = process
    return found


def _process(actor: str, namespace: str) -> int | None:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    from overlord.runtime.ray.role_actor import HEALTH_CHECKS

    try:
        handle: Any = ray.get_actor(actor, namespace=namespace)
        report: Any = ray.get(handle.check_health.options(concurrency_group=HEALTH_CHECKS).remote(), timeout=5.0)
    except (ValueError, RayActorError, GetTimeoutError):
        return None
    return report.process


def wait_for(found: Callable[[], int | None]) -> int:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while time.monotonic() < deadline:
        from overlord.errors import OverlordError

        with suppress(OverlordError):  # a role is being made again
            process = found()
            if process is not None:
                return process
        pause.wait(0.1)
    raise RuntimeError("the run did not come back")


def kill_parts(part: str, trainers: Trainers, kills: int, step_s: float) -> PartKilled:
    pause = threading.Event()
    waits, back, quiet = [], [], 0.0
    for number in range(kills):
        quiet = max(quiet, trainers.wait_for_steps(4))
        process = wait_for(lambda: process_of(part))
        if part == "driver, from log":
            _forget_record()
        pause.wait(step_s * (number + 0.5) / kills)  # at another moment between two steps
        began = time.monotonic()
        os.kill(process, signal.SIGKILL)
        waits.append(trainers.wait_for_steps(ROLES_STEPS))
        wait_for(lambda lost=process: None if (now := process_of(part)) == lost else now)
        back.append(time.monotonic() - began)
    return PartKilled(part, waits, back, quiet)


def _forget_record() -> None:
    from overlord.runtime.ray.names import find_names
    from overlord.service.takeover import RUN

    find_names(f"overlord-run-{NAME}-roles", 5.0).publish(RUN, None)


def show(result: PartKilled) -> None:
    waits = ", ".join(f"{1e3 * wait:,.0f}" for wait in result.waits_s)
    spread = Spread.of(result.waits_s)
    bar = BARS_S.get(result.part)
    print(f"{result.part}: longest wait for a step {spread} s: {waits} ms; no kill near: {1e3 * result.quiet_s:.0f} ms")
    if bar is not None:
        print(f"  bar: {bar:g} s")


PARTS = ("planner", "loader", "constructor/0", "driver", "driver, from log")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--chunk-s", type=float, default=2.0)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    given = parser.parse_args(argv)
    with cluster(), kept_run(given.step_s, given.chunk_s) as trainers:
        trainers.wait_for_steps(12)
        results = [kill_parts(part, trainers, given.kills, given.step_s) for part in given.only]
    tell(results, show, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
