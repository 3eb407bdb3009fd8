"""One competitor, once, in this fresh process: prints one JSON line with what it delivered and what that cost.

A peer that users run in every trainer process gets one process per rank here too; one that serves all ranks from one
process runs in this one. Start-up is excluded: the clock and the CPU meter run from when every rank has had its first
batches to when the last rank is done. Batches prefetched before that are paid for by those prefetched at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from bench.process_tree import adopt_orphans, children, cpu_seconds, tree

if TYPE_CHECKING:
    import multiprocessing
    from multiprocessing.context import SpawnProcess
    from multiprocessing.synchronize import Barrier

_PATIENCE = 240.0
_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class Work:
    """What every competitor is asked to do. `batches` > 0 asks for that many a rank instead of `seconds`."""

    benchmark: str
    sources: int
    ranks: int
    seconds: float
    batches: int
    warmup: int
    settings: dict[str, Any]
    micros: int = 1
    """Batches a step, for trainers that accumulate gradients."""
    files: int = 1
    """Of each source, for benchmarks of memory."""

    @property
    def kind(self) -> str:
        return "images" if self.benchmark == "images" else "text"


@dataclass(frozen=True, slots=True)
class Served:
    """What one rank received while the meter ran."""

    batches: int
    units: int
    wall_s: float
    first_batch_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    peer: str
    batches: int
    units: int
    """Tokens or images."""
    wall_s: float
    cpu_s: float
    first_batch_s: float
    """The slowest rank's, imports excluded."""
    peak_pss: int | None

    @property
    def units_per_cpu_s(self) -> float:
        return self.units / self.cpu_s


Batches = Iterator[Any]
Build = Callable[[Work, int], Batches]
"""Makes the iterator of one rank; where one process serves all ranks, of all of them in turn."""
Watch = Callable[[list[int]], Callable[[], int | None]]
"""Begins to watch the memory of this process's tree without some processes; the call that is returned ends that and
gives the peak."""


ONE_PROCESS = frozenset({"bare", "overlord"})
"""Peers that serve all ranks from one process; the others run in every trainer's."""


def find(peer: str, benchmark: str) -> Build:
    """Imports only the peer asked for: the others' libraries must weigh neither on its memory nor on its time."""
    match peer:
        case "bare":
            from bench.peers import bare_loop as module
        case "torch":
            from bench.peers import torch_loader as module
        case "spdl":
            from bench.peers import spdl_loader as module
        case "grain":
            from bench.peers import grain_loader as module
        case "webdataset":
            from bench.peers import webdataset_loader as module
        case "ray_data":
            from bench.peers import ray_data_loader as module
        case "overlord":
            from bench.peers import overlord_loader as module
        case _:
            raise SystemExit(f"no peer is called {peer!r}: bare, torch, spdl, grain, webdataset, ray_data or overlord")
    build = getattr(module, benchmark if benchmark in ("images", "bpe") else "text", None)
    if build is None:
        raise SystemExit(f"{peer} takes no part in the {benchmark} benchmark")
    return build


def run_here(peer: str, work: Work, watch: Watch) -> Outcome:
    """One process for all ranks."""
    build = find(peer, work.benchmark)
    peak = watch([])
    begun = time.perf_counter()
    stream = build(work, 0)
    first = _warm_up(stream, work, begun, work.ranks)
    cpu = cpu_seconds(os.getpid())
    served = _consume(stream, work, first, ranks=work.ranks)
    cpu = cpu_seconds(os.getpid()) - cpu
    return Outcome(peer, served.batches, served.units, served.wall_s, cpu, first, peak())


def run_per_rank(peer: str, work: Work, watch: Watch) -> Outcome:
    """One process for each rank, as a trainer has it."""
    import multiprocessing  # trainers import this module, and their first batch is timed from the start of their process

    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(work.ranks + 1)
    results: multiprocessing.Queue[Served] = spawn.Queue()
    ranks = [spawn.Process(target=_rank, args=(peer, work, rank, together, results)) for rank in range(work.ranks)]
    peak = watch(tree(os.getpid()))  # what is here before the ranks only coordinates them
    for process in ranks:
        process.start()
    together.wait(_PATIENCE)
    cpu = cpu_seconds(os.getpid())
    served = [results.get(timeout=_PATIENCE) for _ in ranks]
    cpu = cpu_seconds(os.getpid()) - cpu
    highest = peak()
    together.wait(_PATIENCE)
    _end(ranks)
    return Outcome(
        peer,
        sum(s.batches for s in served),
        sum(s.units for s in served),
        max(s.wall_s for s in served),
        cpu,
        max(s.first_batch_s for s in served),
        highest,
    )


def _end(ranks: list[SpawnProcess]) -> None:
    """Ranks may leave in order, but the result does not wait for one that cannot: a torch worker sometimes hangs in its
    exit. Only the rank and its workers are ended by force; torch's helper then removes their shared memory."""
    for process in ranks:
        process.join(_GRACE)
        if process.pid is not None and process.is_alive():
            for pid in (process.pid, *children(process.pid)):
                os.kill(pid, signal.SIGKILL)
            process.join(_GRACE)


def _rank(peer: str, work: Work, rank: int, together: Barrier, results: multiprocessing.Queue[Served]) -> None:
    import multiprocessing

    # A spawned process spawns by default; a trainer started by a launcher has the platform's default, and so must we.
    multiprocessing.set_start_method(None, force=True)
    build = find(peer, work.benchmark)
    begun = time.perf_counter()
    stream = build(work, rank)
    first = _warm_up(stream, work, begun)
    together.wait(_PATIENCE)
    results.put(_consume(stream, work, first, ranks=1))
    together.wait(_PATIENCE)  # nobody tears down while the meter still runs
    close = getattr(stream, "close", None)
    if close is not None:
        close()


def _warm_up(stream: Batches, work: Work, begun: float, ranks: int = 1) -> float:
    check_batch(work.kind, next(stream))
    first = time.perf_counter() - begun
    for _ in range(work.warmup * ranks - 1):
        check_batch(work.kind, next(stream))
    return first


def _consume(stream: Batches, work: Work, first: float, ranks: int) -> Served:
    batches = units = 0
    begun = time.perf_counter()
    wanted = work.batches * ranks
    end = begun + work.seconds
    for batch in stream:
        batches += 1
        units += len(batch["images"] if work.benchmark == "images" else batch["tokens"])
        if batches >= wanted if wanted else time.perf_counter() >= end:
            break
    return Served(batches, units, time.perf_counter() - begun, first)


def check_batch(kind: str, batch: Mapping[str, Any]) -> None:
    """Every competitor must deliver the same fields, or the comparison means nothing."""
    if kind == "images":
        _check_images(batch)
    else:
        _check_text(batch)


def _check_text(batch: Mapping[str, Any]) -> None:
    for name, kinds in (("tokens", ("int32",)), ("labels", ("int64",)), ("position_ids", ("int32",))):
        _check_field(batch, name, kinds, (65536,))
    _check_field(batch, "loss_mask", ("bool", "uint8", "float32"), (65536,))
    cuts = batch["cu_seqlens"]
    if int(cuts[0]) != 0 or int(cuts[-1]) != 65536 or len(cuts) < 9:
        raise ValueError(f"cu_seqlens must go from 0 to 65536 and cut at every row end, got {cuts}")


def _check_images(batch: Mapping[str, Any]) -> None:
    _check_field(batch, "images", ("uint8",), (64, 336, 336, 3))
    if len(batch["captions"]) != 64:
        raise ValueError(f"a batch needs 64 captions, got {len(batch['captions'])}")


def _check_field(batch: Mapping[str, Any], name: str, kinds: tuple[str, ...], shape: tuple[int, ...]) -> None:
    field = batch[name]
    kind = str(field.dtype).removeprefix("torch.")
    if tuple(field.shape) != shape or kind not in kinds:
        raise ValueError(f"{name} must be {' or '.join(kinds)} {shape}, got {kind} {tuple(field.shape)}")


def _unwatched(without: list[int]) -> Callable[[], int | None]:
    return lambda: None


def _watched(without: list[int]) -> Callable[[], int | None]:
    command = [sys.executable, "-S", "-m", "bench.process_tree", str(os.getpid()), *map(str, without)]
    watcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def peak() -> int:
        out, _ = watcher.communicate("", timeout=_PATIENCE)
        return int(out)

    return peak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run_one", description=__doc__)
    parser.add_argument("benchmark", choices=["text", "images", "memory"])
    parser.add_argument("peer")
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--warmup", type=int, default=20, help="batches a rank before the meter starts")
    parser.add_argument("--pss", action="store_true", help="sample the memory of the process tree")
    parser.add_argument("--set", type=json.loads, default={}, help="the peer's settings, as JSON")
    given = parser.parse_args()
    work = Work(given.benchmark, given.sources, given.ranks, given.seconds, given.batches, given.warmup, given.set)
    adopt_orphans()
    watch = _watched if given.pss else _unwatched
    run = run_here if given.peer in ONE_PROCESS else run_per_rank
    outcome = run(given.peer, work, watch)
    print(json.dumps({**asdict(outcome), "units_per_cpu_s": outcome.units_per_cpu_s}), flush=True)


if __name__ == "__main__":
    main()
