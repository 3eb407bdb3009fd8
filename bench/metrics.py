"""What watching a run costs: CPU time for each step of one process that reads as fast as it can.

python -m bench metrics [--rounds 10] [--seconds 2.0] [--quick] [--json]

One run takes blocks of two seconds in each of four modes in turn, many times: "bare" counts nothing (the counters are
replaced by functions that do nothing), "off" is what every run does, "on" has its live page watched, is scraped every second
and calls `client.metrics()` after each step, "profiled" writes a profile. Who watches and scrapes is another process.

There are two figures. Ratios of neighbouring blocks have all costs in them, but on a shared machine they differ by more than
a per cent. What the threads that watch and scrape take of a core comes from the clocks of the threads, and resolves a
hundredth of a per cent; what is done in the threads that read (counters, `client.metrics()`) is timed alone and added to it.
A process that keeps one core busy loses that part of its throughput, one that uses several cores less. Then one look at a
run of 1,000 ranks and 300 sources.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import overlord as ol
from bench.corpus import TextCorpus
from bench.measure import ROOT, Spread

MODES = ("bare", "off", "on", "profiled")
CORPUS = TextCorpus(8, 1 << 16)
WARM_UP = 40
GOAL = 0.99

WATCHER = """
import sys, threading, time, urllib.request
metrics, page = sys.argv[1:]
watching = threading.Event()
def watch():
    while True:
        watching.wait()
        with urllib.request.urlopen(page + "api/stream", timeout=30) as stream:
            while watching.is_set() and stream.readline():
                pass
def scrape():
    while True:
        watching.wait()
        urllib.request.urlopen(metrics, timeout=30).read()
        time.sleep(1.0)
for work in (watch, scrape):
    threading.Thread(target=work, daemon=True).start()
for line in sys.stdin:
    watching.set() if line.strip() == "on" else watching.clear()
"""


class Watched:
    """A run that is read in blocks, each in a mode."""

    def __init__(self, loader: ol.Loader, folder: Path) -> None:
        self.loader = loader
        self._client = loader.client(0)
        self._profile = folder / "out.json"
        arguments = [sys.executable, "-c", WATCHER, loader.serve_metrics(), loader.page()]
        self._watcher = subprocess.Popen(arguments, stdin=subprocess.PIPE, text=True)
        self._counters = find_counters()
        for _ in range(WARM_UP):
            next(self._client)

    def read(self, mode: str, seconds: float) -> dict[str, float]:
        """CPU microseconds a step, over a block of about so many seconds."""
        if mode == "bare":
            for counter, _ in self._counters:
                counter(_nothing)
        profiler = self.loader._start_profiler(self._profile) if mode == "profiled" else None
        self._say("on" if mode == "on" else "off")
        self._settle(seconds / 4)
        num_steps, began, cpu, reading = 0, time.perf_counter(), time.process_time(), reading_cpu_s()
        while time.perf_counter() - began < seconds:
            for _ in range(8):
                next(self._client)
                if mode == "on":
                    self._client.metrics()
            num_steps += 8
        if profiler is not None:
            profiler.close()
        cpu, reading = time.process_time() - cpu, reading_cpu_s() - reading
        wall = time.perf_counter() - began
        for counter, was in self._counters:
            counter(was)
        return {"cpu_us": cpu / num_steps * 1e6, "steps": num_steps, "other_share": max(cpu - reading, 0.0) / wall}

    def _settle(self, seconds: float) -> None:
        """Read on until who watches is connected and has the past of the run: that is paid once, not every second."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            next(self._client)

    def _say(self, word: str) -> None:
        assert self._watcher.stdin is not None  # it is a pipe
        self._watcher.stdin.write(f"{word}\n")
        self._watcher.stdin.flush()

    def close(self) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.kill()
        self._watcher.wait()


def reading_cpu_s() -> float:
    """CPU seconds of the threads that read, build and plan, by their own clocks; this thread is one of them."""
    names = "MainThread", "overlord-read", "overlord-build", "overlord-plan"
    threads = [thread for thread in threading.enumerate() if thread.name.startswith(names) and thread.ident]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0)) for thread in threads)


def _nothing(*_: object) -> None: ...


def find_counters() -> list[tuple[Callable[[object], None], object]]:
    """Every counter that a step or a chunk passes: how to replace it, and what it is."""
    from overlord.roles import rank_pace
    from overlord.service import client
    from overlord.sources import parquet, storage

    places = [
        (rank_pace.PaceMeter, "note_tokens"),
        (rank_pace._RankMeter, "note_wait"),
        (client._StepMeter, "note"),
        (parquet, "count_local_bytes"),
        (storage, "count_local_bytes"),
    ]
    return [(lambda value, o=owner, n=name: setattr(o, n, value), getattr(owner, name)) for owner, name in places]


def time_counters() -> float:
    """CPU microseconds of all counters of one step, and of `client.metrics()`, by themselves."""
    from overlord.messages import Step
    from overlord.roles.rank_pace import PaceMeter
    from overlord.service.client import _StepMeter

    meter, mine = PaceMeter(), _StepMeter()
    micro: Any = {"num_tokens": 8192}
    rounds = 20_000
    began = time.thread_time()
    for step in range(rounds):
        meter.note_tokens(0, step, sum([each["num_tokens"] for each in [micro] * 8]))
        meter._meter_of(0).note_wait(step, 0.0001)
        mine.note(Step(step, 1, (micro,) * 8), 0.0001, 0.002)
        mine.to_dict()
    return (time.thread_time() - began) / rounds * 1e6


def look_at_large_run() -> dict[str, float]:
    """CPU milliseconds of one look at a run of 1,000 ranks and 300 sources in one process, and what the page makes of it."""
    from overlord.service.auth import Listen
    from overlord.service.page.server import PageServer
    from tests.service.large_feed import NUM_RANKS, NUM_SOURCES, LargeRun
    from tests.small_sources import Numbered, job_of

    sources = {f"s{i}": Numbered(rows=40, first=1 + 100 * i) for i in range(NUM_SOURCES)}
    job = job_of(sources, ol.Batch(samples=NUM_RANKS, sequence_length=16), mesh=ol.Mesh(dp=NUM_RANKS // 8, tp=8))
    with ol.start(job) as loader:
        next(loader.client(0))
        collecting = _cpu_ms(loader.metrics)
    server = PageServer(Listen(), LargeRun(), None)  # type: ignore[arg-type] - nobody asks for a step
    try:
        telling = _cpu_ms(server._watcher.look)
    finally:
        server.close()
    return {"collecting_ms": collecting, "telling_ms": telling}


def time_spans(folder: Path, num_spans: int = 10_000) -> dict[str, float]:
    """CPU microseconds of writing a span to a file, and of making one for OpenTelemetry where that is installed."""
    from overlord.runtime.recorder import SpanBatch
    from overlord.service.profile import ProfileWriter, SpanWriter
    from overlord.service.telemetry import TelemetryWriter

    writers: dict[str, SpanWriter] = {"file": ProfileWriter(folder / "spans.json")}
    if find_spec("opentelemetry.sdk") is not None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter(), max_queue_size=num_spans))
        writers["otel"] = TelemetryWriter(provider)
    spans = SpanBatch(1, "n", [(f"build step {n} of group 0", "t", n, 0.5, {"rows": 3}) for n in range(num_spans)], 0)
    found: dict[str, float] = {}
    for name, writer in writers.items():
        began = time.thread_time()
        writer.add("constructor/0", spans)
        found[name] = (time.thread_time() - began) / num_spans * 1e6
        writer.close()
    return found


def _cpu_ms(call: Callable[[], object], times: int = 20) -> float:
    call()
    began = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - began) / times * 1e3


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, from the order of the values."""
    ordered, n = sorted(values), len(values)
    reach = int(n / 2 - 0.98 * n**0.5)
    return ordered[max(reach, 0)], ordered[min(n - 1 - reach, n - 1)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--tokens", type=int, default=1 << 16)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(argv)
    CORPUS.make()
    rounds, seconds = (3, 0.2) if given.quick else (given.rounds, given.seconds)
    sources = {f"s{number}": ol.Parquet(path) for number, path in enumerate(CORPUS.paths)}
    job = ol.Job(sources=sources, batch=ol.Batch(tokens=given.tokens, sequence_length=8192))
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory(dir=ROOT / "bench") as folder, ol.start(job) as loader:
        watched = Watched(loader, Path(folder))
        try:
            for number in range(rounds):
                for mode in MODES if number % 2 else reversed(MODES):
                    found[mode].append(watched.read(mode, seconds))
        finally:
            watched.close()
        span_us = time_spans(Path(folder))
    counting_us, large = time_counters(), look_at_large_run()
    if given.json:
        print(json.dumps({**found, "large": large, "counting_us": counting_us, "span_us": span_us}, indent=1))
        return 0
    print(f"  {'':<10}{'CPU us a step':>26}{'throughput against off, per CPU time':>44}")
    for mode in MODES:
        ratios = [off["cpu_us"] / own["cpu_us"] for own, off in zip(found[mode], found["off"], strict=True)]
        low, high = interval(ratios)
        ratio = f"{statistics.median(ratios):.4f} (95 %: {low:.4f}-{high:.4f})"
        print(f"  {mode:<10}{Spread.of([one['cpu_us'] for one in found[mode]])!s:>26}{ratio:>44}")
    shares = {mode: statistics.median(one["other_share"] for one in found[mode]) for mode in MODES}
    step_us = statistics.median(one["cpu_us"] for one in found["off"])
    cost = max(shares["on"] - shares["off"], 0.0) + counting_us / step_us
    print(
        f"  other threads, of a core: {shares['on']:.2%} on, {shares['off']:.2%} off, {shares['profiled']:.2%} profiled; ",
        end="",
    )
    print(f"counters and client.metrics(): {counting_us:.1f} us a step ({counting_us / step_us:.2%})")
    print(f"  a span of the profile: {', '.join(f'{us:.1f} us to {name}' for name, us in span_us.items())}")
    said = "reached" if 1 - cost >= GOAL else "missed"
    print(f"  throughput with page and metrics on, by these costs: {1 - cost:.4f} of off (the goal of {GOAL} is {said})")
    print(
        f"  1,000 ranks and 300 sources: {large['collecting_ms']:.1f} ms of CPU time to collect, "
        f"{large['telling_ms']:.1f} ms to tell the page, once a second or, where that is more, every hundredfold"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
