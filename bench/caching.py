"""Caches: what they save in later epochs, and what they cost where nothing is found.

    python -m bench.caching [--only chunks files listing] [--rounds N] [--json]

Chunks: a BPE job over 32 MB of real text, with and without `Job(cache=...)`, every run in a fresh process, rounds
interleaved. CPU time is that of the process from `start` to its last step; an epoch is one pass over all rows. The first
batch is timed from `start` to the first step, in a process that resumes a state in the middle of the second epoch.

Misses: what a cache costs where nothing is found in it. Two runs of one job in one process, with a cache that is empty and
without one, take turns of a few steps through their first epoch; the ratio of their CPU times does not feel what else the
machine does. With BPE, and with a tokenizer that costs next to nothing.

Files: tokens in Parquet on an object store of loopback that takes 50 ms for a request and has 50 MB/s. A trainer takes a
step of 65,536 tokens every 20 ms; what it waits for a step beyond the first is added up for each of two epochs. And one
takes steps as fast as they come: the seconds of each epoch.

Listing: 100,000 objects of such a store, which answers at once, in pages of 1,000.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import overlord as ol
from bench.corpus import BpeCorpus, TextCorpus
from bench.measure import Spread
from bench.slow_store import OPTIONS, SlowStore
from bench.telling import parser_of, tell
from overlord.runtime.memory import rss_bytes

CORPUS = BpeCorpus(sources=4)
TOKENS = TextCorpus(sources=1, row_group_tokens=500_000, row_groups=24)
TRAINING_S = 0.02
PARTS = ("chunks", "misses", "files", "listing")
WORKS = ("bpe", "bytes")
TURN_STEPS = 4
NUM_LISTED = 100_000
STEP_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class ChunkCaching:
    """Ratios are within a round."""

    spent_on_cache: Spread
    """The part of the first epoch's CPU time that keys, looking up, encoding and writing entries took, by a clock of the
    thread."""
    first_over_second: Spread
    """CPU time of the first epoch over that of the second, with a cache."""
    first_batch_s: Spread
    """Of a run that resumes with a full cache."""
    first_batch_cpu_s: Spread
    first_batch_without_s: Spread


@dataclass(frozen=True, slots=True)
class Misses:
    work: str
    row_us: Spread
    """CPU time of a row without a cache, from the file to the batch."""
    ratio: Spread
    """The same with a cache in which nothing is found, over that."""
    on_cache: Spread
    """What keys, looking up, encoding and writing entries take by a clock of the thread, over all else: less noisy than
    that."""
    kept_mb: float
    """What is in the cache afterwards."""


@dataclass(frozen=True, slots=True)
class Listing:
    num_objects: int
    seconds: float
    cpu_s: float
    grown_mb: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class FileCaching:
    name: str
    first_waited_s: Spread
    second_waited_s: Spread
    first_s: Spread
    second_s: Spread


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--one", help="for processes that this one starts")
    given = parser.parse_args(argv)
    if given.one:
        options = json.loads(given.one)
        runs = {"port": run_files, "listing": run_listing, "work": run_misses}
        run = next((run for name, run in runs.items() if name in options), run_one)
        print(json.dumps(run(**options)))
        return 0
    if "chunks" in given.only:
        CORPUS.make()
        tell([compare_chunks(given.rounds)], _show_chunks, given.json)
    if "misses" in given.only:
        CORPUS.make()
        tell([*compare_misses(given.rounds)], _show_misses, given.json)
    if "listing" in given.only:
        tell([measure_listing()], _show_listing, given.json)
    if "files" in given.only:
        TOKENS.make()
        tell([*compare_files(given.rounds)], _show_files, given.json)
    return 0


def compare_chunks(rounds: int) -> ChunkCaching:
    spent, ratios, first, first_cpu, without = (list[float]() for _ in range(5))
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=CORPUS.folder.parent) as folder:
            kept = _start(cache=folder, epochs=2)
            spent.append(kept["on_cache_s"] / kept["epochs"][0])
            ratios.append(kept["epochs"][0] / kept["epochs"][1])
            resumed = _start(cache=folder, resume=kept["state"])
            first.append(resumed["first_batch_s"])
            first_cpu.append(resumed["cpu_s"])
            without.append(_start(cache=None, resume=kept["state"])["first_batch_s"])
    return ChunkCaching(*map(Spread.of, (spent, ratios, first, first_cpu, without)))


def compare_misses(rounds: int) -> Iterator[Misses]:
    found = [[_start(work=work, turn=number) for work in WORKS] for number in range(rounds)]
    for work, each in zip(WORKS, zip(*found, strict=True), strict=True):
        ratios = [one["kept_s"] / one["bare_s"] for one in each]
        row_us = Spread.of([1e6 * one["bare_s"] for one in each])
        on_cache = Spread.of([one["on_cache"] for one in each])
        yield Misses(work, row_us, Spread.of(ratios), on_cache, each[-1]["kept_mb"])


def run_misses(work: str, turn: int) -> dict[str, float]:
    """CPU seconds of the first epoch with a cache and without, in turns. `turn` says which of them begins."""
    rows, turns, clock = Counter[str](), [""], CacheClock()
    _count_rows(rows, turns)
    with tempfile.TemporaryDirectory(dir=CORPUS.folder.parent) as folder:
        loaders = {name: ol.start(_job(work, cache)) for name, cache in (("bare_s", None), ("kept_s", folder))}
        try:
            clients = {name: loader.client(0) for name, loader in loaders.items()}
            spent = dict.fromkeys(loaders, 0.0)
            began_on_cache = clock.seconds
            order = list(loaders)[:: -1 if turn % 2 else 1]
            for client in clients.values():  # loads the tokenizer, and what else only the first of them pays for
                next(client)
            while all(next(iter(loader.metrics().sources.values())).epochs < 1 for loader in loaders.values()):
                for turns[0] in order:
                    name = turns[0]
                    began = time.process_time()
                    for _ in range(TURN_STEPS):
                        next(clients[name])
                    spent[name] += time.process_time() - began
                order.reverse()
        finally:
            for loader in loaders.values():
                loader.close()
        kept_mb = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6
        on_cache = (clock.seconds - began_on_cache) / (spent["kept_s"] - clock.seconds + began_on_cache)
        a_row = {name: seconds / rows[name] for name, seconds in spent.items()}
        return {**a_row, "on_cache": on_cache, "kept_mb": kept_mb}


def _count_rows(rows: Counter[str], turns: list[str]) -> None:
    """Count the rows that each run tokenises in its turns: one may have made a chunk ahead that the other has not."""
    run_on = ol.Tokenize.run_on

    def counted(self: ol.Tokenize, threads: Any, table: Any) -> Any:
        rows[turns[0]] += table.num_rows
        return run_on(self, threads, table)

    ol.Tokenize.run_on = counted


def _start(**options: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.caching", "--one", json.dumps(options)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def run_one(cache: str | None, epochs: int = 0, resume: str | None = None) -> dict[str, Any]:
    """CPU seconds of each epoch and a state in the middle of the second; or the seconds to the first batch."""
    job = _job("bpe", cache)
    clock = CacheClock()
    start = ol.start  # imports are not timed
    began, began_cpu = time.perf_counter(), time.process_time()
    with start(job, resume=resume) as loader:
        client = loader.client(0)
        next(client)
        first_batch_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        if resume is not None:
            return {"first_batch_s": first_batch_s, "cpu_s": cpu_s}
        seconds: list[float] = []
        state, on_cache_s = "", 0.0
        for epoch in range(epochs):
            began = time.process_time() if epoch else began_cpu
            while next(iter(loader.metrics().sources.values())).epochs < epoch + 1:
                for _ in range(8):
                    next(client)
                if epoch == 1 and not state:
                    state = json.dumps(client.state_dict())
            seconds.append(time.process_time() - began)
            on_cache_s = on_cache_s or clock.seconds
        return {"epochs": seconds, "state": state, "first_batch_s": first_batch_s, "on_cache_s": on_cache_s}


def _job(work: str, cache: str | None) -> ol.Job:
    encoding = CORPUS.tokenizer if work == "bpe" else ol.ByteTokenizer()
    tokenize = ol.Tokenize("text", encoding=encoding, eos=0)
    sources = {Path(path).stem: ol.Parquet(path, transform=tokenize) for path in CORPUS.paths}
    return ol.Job(
        sources=sources,
        batch=ol.Batch(tokens=STEP_TOKENS, sequence_length=8192),
        mixture=ol.Mixture(dict.fromkeys(sources, 1.0), unit="tokens"),
        cache=None if cache is None else ol.Cache(cache, 10**9),
        num_workers=0,
    )


class CacheClock:
    """Adds up the CPU time of all that a run does with its cache."""

    def __init__(self) -> None:
        from overlord.chunks.row_cache import RowCache

        self.seconds = 0.0
        for name in ("_keys_of", "_look_up", "_keep_units"):
            setattr(RowCache, name, self._timed(getattr(RowCache, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **options)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def compare_files(rounds: int) -> Iterator[FileCaching]:
    results: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(rounds):
        for is_kept in results:
            paced, free = (_run_with_store(is_kept, training_s) for training_s in (TRAINING_S, 0.0))
            results[is_kept].append({"waited_s": paced["waited_s"], "epoch_s": free["epoch_s"]})
    for is_kept, found in results.items():
        columns = [[one[name][epoch] for one in found] for name in ("waited_s", "epoch_s") for epoch in (0, 1)]
        yield FileCaching("with a cache" if is_kept else "without a cache", *map(Spread.of, columns))


def _run_with_store(is_kept: bool, training_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.slow_store", str(TOKENS.folder)]
    with (
        tempfile.TemporaryDirectory(dir=TOKENS.folder.parent) as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store,
    ):
        assert store.stdin is not None
        assert store.stdout is not None
        port = int(store.stdout.readline())
        found = _start(port=port, cache=folder if is_kept else None, training_s=training_s)
        store.stdin.close()
        return found


def run_files(port: int, cache: str | None, training_s: float) -> dict[str, Any]:
    """Seconds that a trainer waits for steps in each of two epochs, and seconds of these epochs."""
    options = {**OPTIONS, "endpoint": f"http://127.0.0.1:{port}"}
    source = ol.Parquet("s3://data/*.parquet", storage_options=options)
    kept = None if cache is None else ol.Cache(cache, 10**9)
    job = ol.Job(sources={"a": source}, batch=ol.Batch(tokens=STEP_TOKENS, sequence_length=8192), cache=kept)
    waited_s, epoch_s = [0.0, 0.0], [0.0, 0.0]
    with ol.start(job) as loader:
        client = loader.client(0)
        next(client)
        for epoch in range(2):
            epoch_began = time.perf_counter()
            for _ in range(TOKENS.tokens // STEP_TOKENS):
                began = time.perf_counter()
                next(client)
                waited_s[epoch] += time.perf_counter() - began
                time.sleep(training_s)
            epoch_s[epoch] = time.perf_counter() - epoch_began
    return {"waited_s": waited_s, "epoch_s": epoch_s}


def measure_listing() -> Listing:
    store = SlowStore({}, names=NUM_LISTED)
    try:
        found = _start(listing=store.port)
    finally:
        store.close()
    return Listing(**found)


def run_listing(listing: int) -> dict[str, Any]:
    """List many objects of a store at this port."""
    import obstore  # noqa: F401 - it is not measured

    from overlord.sources.storage import Storage

    storage = Storage(tuple({**OPTIONS, "endpoint": f"http://127.0.0.1:{listing}"}.items()))
    before_bytes, began, began_cpu = rss_bytes(), time.perf_counter(), time.process_time()
    files = storage.list_files(["s3://data/**/*.parquet"])
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "num_objects": len(files),
        "seconds": seconds,
        "cpu_s": cpu_s,
        "grown_mb": (rss_bytes() - before_bytes) / 1e6,
        "peak_mb": (peak_bytes - before_bytes) / 1e6,
    }


def _show_listing(found: Listing) -> None:
    print(
        f"{found.num_objects:,} objects listed in {found.seconds:.1f} s, {found.cpu_s:.1f} CPU s; they take "
        f"{found.grown_mb:.0f} MB, at most {found.peak_mb:.0f} MB meanwhile"
    )


def _show_files(found: FileCaching) -> None:
    print(
        f"{found.name}: a trainer of {TRAINING_S * 1000:.0f} ms a step waited {found.first_waited_s} s in the first epoch "
        f"and {found.second_waited_s} s in the second; at full speed they take {found.first_s} s and {found.second_s} s"
    )


def _show_misses(found: Misses) -> None:
    print(
        f"{found.work}: a row of an epoch in which nothing is found takes {found.ratio.median:.3f} ({found.ratio.low:.3f}-"
        f"{found.ratio.high:.3f}) of its CPU time without a cache ({found.row_us} us); the cache's part is "
        f"{found.on_cache.median:.3f} ({found.on_cache.low:.3f}-{found.on_cache.high:.3f}), {found.kept_mb:.0f} MB are kept"
    )


def _show_chunks(found: ChunkCaching) -> None:
    spent = found.spent_on_cache
    print(f"of the first epoch's CPU time, on the cache: {spent.median:.3f} ({spent.high:.3f} at most)")
    print(f"first epoch over the second: {found.first_over_second}")
    print(
        f"first batch of a resumed run: {found.first_batch_s} s, {found.first_batch_cpu_s} CPU s; without a cache "
        f"{found.first_batch_without_s} s"
    )


if __name__ == "__main__":
    sys.exit(main())
