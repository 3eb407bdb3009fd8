"""One competitor, once, as users run it: a tree of fresh processes, one for each trainer and what they need besides.

Overlord is `overlord serve` with default settings and trainers that connect to it, all started at the same moment, or one
trainer that runs the job in its own process. Peers live in every trainer's process, with worker processes of their own.
Prints one JSON line. CPU time and memory are of the whole tree but for this process, which only coordinates; memory is the
sum of the proportional set sizes, so that shared memory counts once. All that it started has ended when it returns.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from bench.process_tree import CpuMeter, adopt_orphans, die_with_parent, end_below, memory_below, tree
from bench.run_one import Work

_PATIENCE = 240.0
_LEAD_S = 0.3
"""From saying when a measurement begins to its begin."""
_GRACE = 5.0
_SAMPLE_EVERY = 0.2
_SAMPLE_SHARE = 0.05
"""Of a core, at most, that samples of memory take while a tree starts: for each the kernel walks all pages."""
_SHORTEST_SLEEP = 0.02
_UNTIMED = 3
"""Steps of a paced trainer that count for nothing: the first may still be in the making."""
_JOB = """\
from bench.peers.overlord_loader import job_of
from bench.run_one import Work

job = job_of(Work(**{work!r}))
"""


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    peer: str
    ranks: int
    cores: int
    units: float
    """Tokens or images, all trainers together."""
    wall_s: float
    cpu_s: float
    first_batch_s: float
    """From the start of the first process until the last trainer has a batch."""
    first_batch_cpu_s: float
    """CPU time of all processes until then, which a busy machine changes less; without the start of a cluster."""
    peak_pss: int
    peak_loader: int
    """Likewise without what trainer processes have for themselves: Python, numpy, the batches that they hold in memory of
    their own. Shared memory is the loader's, whoever maps it."""
    num_processes: int
    step_s: float
    """At full speed."""
    next_us: dict[str, float] | None
    """What a `next` takes for a trainer that sleeps long enough for its step to be ready."""
    paced_at_s: float
    checksums: list[int]
    """By trainer, of all that it touched."""
    first_checksums: list[list[int]]
    """By trainer, of its first steps: equal for all who deliver one stream."""
    cpu_by_process: dict[str, float]
    """CPU time in the window, by what processes are."""
    num_killed: int
    """Processes that had not ended some seconds after they were asked to."""

    def to_dict(self) -> dict[str, Any]:
        speeds = {"units_per_s": self.units / self.wall_s, "units_per_cpu_s": self.units / max(self.cpu_s, 0.01)}
        return {**asdict(self), **speeds, "cores_used": self.cpu_s / self.wall_s}


@dataclass(slots=True)
class Part:
    """A process that this one started, and where it writes its errors."""

    name: str
    process: subprocess.Popen[bytes]
    errors: Path
    unread: bytes = b""
    said: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind, the last that it said."""

    def why(self) -> str:
        """The last lines that it wrote to standard error."""
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return f"{self.name} ended with status {self.process.poll()}: {' | '.join(lines[-3:]) or 'without a word'}"


class Trainers:
    """The tree of processes of one competitor."""

    def __init__(self, peer: str, work: Work, folder: Path) -> None:
        self._peer = peer
        self._work = work
        self._folder = folder
        self._parts: list[Part] = []
        self._trainers: list[Part] = []
        self._selector = selectors.DefaultSelector()
        self.peak_pss = self.peak_loader = 0
        self._no_sample_before = 0.0
        self.meter = CpuMeter(os.getpid())
        self.cpu_before = 0.0
        """Of the cluster, before anything else was started."""

    def start(self) -> float:
        """Starts all processes; returns when that was."""
        if "ray" in self._work.settings:
            self._work = replace(self._work, settings={**self._work.settings, "cluster": self._start_cluster()})
        begun, self.cpu_before = time.monotonic(), self.cpu_s()
        work = self._work
        if self._peer == "ray_data":
            self._run("the dataset", [sys.executable, "-W", "ignore", "-m", "bench.peers.ray_data_loader", _to_json(work)])
        if self._peer == "overlord" and not work.settings.get("in_process"):
            work = replace(work, settings={**work.settings, "address": self._serve()})
        for rank in range(work.ranks):
            command = [sys.executable, "-W", "ignore", "-m", "bench.trainer_process", self._peer, str(rank)]
            part = self._run(f"trainer {rank}", [*command, _to_json(work)])
            self._trainers.append(part)
            self._selector.register(cast(Any, part.process.stdout), selectors.EVENT_READ, part)
        return begun

    def _start_cluster(self) -> str:
        """Starts a Ray cluster with the options of the setting `ray`; returns its address when it is warm."""
        # Of all that connects to it: without these Ray looks for a loopback cluster on another interface.
        os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        part = self._run("the cluster", [sys.executable, "-m", "bench.ray_cluster", *self._work.settings["ray"]])
        assert part.process.stdout is not None
        address = part.process.stdout.readline().decode().strip()
        if not address:
            part.process.wait(_GRACE)
            raise SystemExit(part.why())
        return address

    def _serve(self) -> str:
        # The port is known beforehand, so that trainers start together with the service, as a launcher starts them.
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{found.getsockname()[1]}"
        file = self._folder / "job.py"
        file.write_text(_JOB.format(work=asdict(self._work)))
        options = self._work.settings.get("serve", [])
        if "cluster" in self._work.settings:
            options = ["--ray", self._work.settings["cluster"], *options]
        command = [sys.executable, "-W", "ignore", "-m", "overlord", "serve", str(file), "--address", address, *options]
        self._run("overlord serve", command)
        return f"grpc://{address}"

    def _run(self, name: str, command: Sequence[str]) -> Part:
        errors = self._folder / f"{len(self._parts)}.err"
        with errors.open("wb") as stderr:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, preexec_fn=die_with_parent
            )
        self._parts.append(Part(name, process, errors))
        return self._parts[-1]

    def tell(self, *words: object) -> None:
        line = (" ".join(map(str, words)) + "\n").encode()
        for part in self._trainers:
            assert part.process.stdin is not None
            part.process.stdin.write(line)
            part.process.stdin.flush()

    def await_all(self, kind: str, sample: bool = True) -> list[dict[str, Any]]:
        """Waits for a line of that kind from every trainer, in the order of ranks. Memory is sampled meanwhile."""
        deadline = time.monotonic() + _PATIENCE
        while not all(kind in part.said for part in self._trainers):
            for key, _ in self._selector.select(_SAMPLE_EVERY):
                self._read(key.data)
            self._check(deadline, kind)
            self.meter.look()
            if sample and time.monotonic() > self._no_sample_before:
                self.sample()
        return [part.said[kind] for part in self._trainers]

    def _read(self, part: Part) -> None:
        assert part.process.stdout is not None
        received = os.read(part.process.stdout.fileno(), 1 << 16)
        if not received:
            part.process.wait(_GRACE)
            raise SystemExit(part.why())
        *lines, part.unread = (part.unread + received).split(b"\n")
        part.said |= {said["kind"]: said for said in map(json.loads, lines)}

    def _check(self, deadline: float, kind: str) -> None:
        for part in self._parts:
            if part.process.poll() is not None and part not in self._trainers:
                raise SystemExit(part.why())
        if time.monotonic() > deadline:
            raise SystemExit(f"no {kind!r} from every trainer after {_PATIENCE:.0f} s")

    def cpu_s(self) -> float:
        """CPU time of all processes so far."""
        self.meter.look()
        return sum(seconds for seconds, _ in self.meter.seconds().values())

    def sample(self) -> None:
        begun = time.monotonic()
        memory = memory_below(os.getpid(), {os.getpid()})
        total = sum(each.pss for each in memory.values())
        alone = [memory[part.process.pid] for part in self._trainers if part.process.pid in memory]
        self.peak_pss = max(self.peak_pss, total)
        self.peak_loader = max(self.peak_loader, total - sum(each.pss - each.shared for each in alone))
        now = time.monotonic()
        self._no_sample_before = now + (now - begun) / _SAMPLE_SHARE

    def stop(self) -> int:
        """Asks everything to end, first the trainers; returns how many processes had to be killed."""
        try:
            self.tell("stop")
        except BrokenPipeError:
            return end_below(os.getpid(), _GRACE)
        _await_end(self._trainers)
        others = [part for part in self._parts if part not in self._trainers]
        for part in others[::-1]:  # the cluster last
            part.process.terminate()
            _await_end([part])
        return end_below(os.getpid(), _GRACE)


def _to_json(work: Work) -> str:
    return json.dumps(asdict(work))


def _await_end(parts: Sequence[Part]) -> None:
    end = time.monotonic() + _GRACE
    for part in parts:
        try:
            part.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def run(peer: str, work: Work, pace_s: float) -> TreeOutcome:
    """`pace_s` is how long trainers are paced to time `next`; 0 leaves that out."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        trainers = Trainers(peer, work, Path(folder))
        try:
            begun = trainers.start()
            first = max(said["at"] for said in trainers.await_all("first")) - begun
            first_cpu_s = trainers.cpu_s() - trainers.cpu_before
            trainers.await_all("warm")
            outcome = replace(_measure(peer, work, trainers, first), first_batch_cpu_s=first_cpu_s)
            if pace_s:
                outcome = _pace(outcome, trainers, pace_s)
            else:
                trainers.sample()
            peaks = {"peak_pss": trainers.peak_pss, "peak_loader": trainers.peak_loader}
            return replace(outcome, **peaks, num_killed=trainers.stop())
        finally:
            end_below(os.getpid(), _GRACE)


def _measure(peer: str, work: Work, trainers: Trainers, first: float) -> TreeOutcome:
    begin = time.monotonic() + _LEAD_S
    end = begin + work.seconds
    trainers.tell("window", begin, end)
    _sleep_until(begin)
    meter = trainers.meter
    meter.look()
    before, begun = meter.seconds(), time.monotonic()
    while (now := time.monotonic()) < end:
        time.sleep(min(_SAMPLE_EVERY, end - now))
        meter.look()
    spent = {key: (s - before.get(key, (0.0, ""))[0], called) for key, (s, called) in meter.seconds().items()}
    cpu = sum(s for s, _ in spent.values())
    lasted = time.monotonic() - begun
    num_processes = len(tree(os.getpid())) - 1
    served = trainers.await_all("window", sample=False)
    for _ in range(3):
        trainers.sample()
        time.sleep(_SAMPLE_EVERY)
    return TreeOutcome(
        peer=peer,
        ranks=work.ranks,
        cores=len(os.sched_getaffinity(0)),
        units=sum(each["units"] for each in served),
        wall_s=work.seconds,
        cpu_s=cpu * work.seconds / lasted,
        first_batch_s=first,
        first_batch_cpu_s=0.0,
        peak_pss=trainers.peak_pss,
        peak_loader=trainers.peak_loader,
        num_processes=num_processes,
        step_s=work.seconds * work.ranks / max(1.0, sum(each["steps"] for each in served)),
        next_us=None,
        paced_at_s=0.0,
        checksums=[each["checksum"] for each in served],
        first_checksums=[each["first_checksums"] for each in served],
        cpu_by_process=_by_kind(spent.values()),
        num_killed=0,
    )


_KINDS = ("bench.trainer_process", "bench.ray_cluster", "bench.peers.ray_data_loader", "overlord serve")
"""What marks the command of a process that this one started. Ray's own are named after their program."""


def _by_kind(cpu_s: Iterable[tuple[float, str]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for spent, command in cpu_s:
        kind = next((kind for kind in _KINDS if kind in command), command.partition(" ")[0].rpartition("/")[2])
        found[kind] = found.get(kind, 0.0) + spent
    return {kind: round(spent, 2) for kind, spent in sorted(found.items(), key=lambda each: -each[1]) if spent >= 0.01}


def _pace(outcome: TreeOutcome, trainers: Trainers, pace_s: float) -> TreeOutcome:
    """Trainers sleep twice as long as a step took at full speed, so that every step is ready when it is asked for."""
    slept = max(_SHORTEST_SLEEP, 2 * outcome.step_s)
    steps = max(_UNTIMED + 5, min(300, int(pace_s / slept)))
    trainers.tell("pace", slept, steps)
    times = [said["next_s"][_UNTIMED:] for said in trainers.await_all("pace")]
    p50, p99, most = (float(each) * 1e6 for each in np.percentile(times, [50, 99, 100]))
    return replace(outcome, next_us={"p50": p50, "p99": p99, "max": most}, paced_at_s=slept)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def _compile_overlord() -> None:
    """Compile its modules, as installing it does: where Python may not keep bytecode, every process would do it."""
    import overlord

    compileall.compile_dir(Path(cast(str, overlord.__file__)).parent, quiet=2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.run_trainers", description=__doc__)
    parser.add_argument("benchmark", choices=["text", "bpe", "images", "memory"])
    parser.add_argument("peer")
    parser.add_argument("--sources", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--micros", type=int, default=1, help="batches a step")
    parser.add_argument("--files", type=int, default=1, help="of a source, where memory is measured")
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to time `next` for, with trainers that sleep")
    parser.add_argument("--warmup", type=int, default=20, help="steps a trainer takes before the meter starts")
    parser.add_argument("--cores", type=int, help="run everything on so many cores; all unless given")
    parser.add_argument("--set", type=json.loads, default={}, help="the peer's settings, as JSON")
    given = parser.parse_args()
    if given.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    work = Work(
        given.benchmark,
        given.sources,
        given.ranks,
        given.seconds,
        batches=0,
        warmup=given.warmup,
        settings=given.set,
        micros=given.micros,
        files=given.files,
    )
    _compile_overlord()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    die_with_parent(signal.SIGTERM)  # ends what it started first
    print(json.dumps(run(given.peer, work, given.pace).to_dict()), flush=True)


if __name__ == "__main__":
    main()
