"""`overlord doctor`: looks at this machine and, if given, at a job, and says what is missing, slow or too small."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from overlord.cli import describe_error
from overlord.cli.options import add_job_argument
from overlord.cli.output import console, printable, size, table, write_json
from overlord.errors import OverlordError
from overlord.jobfile.loading import load_job
from overlord.roles.assembly import list_units
from overlord.runtime.cores import num_usable_cores
from overlord.runtime.shared_memory import why_unavailable
from overlord.service.run import start

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from overlord.declare.job import Job
    from overlord.declare.source import Unit

T = TypeVar("T")

_PACKAGES = {
    "overlord-dataloader": "overlord itself",
    "numpy": "",
    "pyarrow": "",
    "torch": "extra torch: tensors, overlord.trainer",
    "simplejpeg": "extra images: JPEG",
    "obstore": "extra object-stores: s3://, gs://, az://",
    "ray": "extra ray: roles on a cluster",
    "tiktoken": "extra tokenizers",
    "prometheus-client": "extra metrics: /metrics",
    "opentelemetry-sdk": "extra otel: --profile otel",
    "starlette": "extra page: the live page",
    "uvicorn": "extra page",
}
_ENOUGH_FILES = 4096
_ENOUGH_SHM = 1 << 30
_LITTLE_MEMORY = 2 << 30
_SLOW_BYTES_PER_S = 50e6
_SLOW_LISTING_S = 10.0
_SLOW_FIRST_STEP_S = 30.0
_READ_BYTES = 64 << 20  # of each source, at most, to see how fast its storage is
_SAMPLED_SOURCES = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    found: str
    advice: str = ""
    """What to do; empty where all is well."""
    is_error: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser, nargs="?", help="a job to look at, too: its storage, and a first step by stage")


def execute(options: argparse.Namespace) -> int:
    findings = list(look_at_machine())
    if options.job is not None:
        findings += look_at_job(load_job(options.job))
    failed = any(finding.is_error for finding in findings)
    if options.json:
        write_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
        return int(failed)
    out = console()
    out.print(table("", "<found", rows=[(finding.what, finding.found) for finding in findings]))
    advice = [finding for finding in findings if finding.advice]
    for finding in advice:
        kind = "error" if finding.is_error else "advice"
        out.print(f"{kind}: {printable(finding.what)}: {printable(finding.advice)}", markup=False, soft_wrap=True)
    if not advice:
        out.print("Nothing to say: all is well.")
    return int(failed)


def look_at_machine() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    for package, use in _PACKAGES.items():
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            yield Finding(package, f"not installed ({use})" if use else "not installed")
    usable, count = num_usable_cores(), os.cpu_count() or 1
    few = f"this process may use {usable} of {count}: taskset, a cpuset or a container limits it" if usable < count else ""
    yield Finding("cores", f"{usable} of {count} usable", few)
    yield _memory()
    yield _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    advice = f"raise it (`ulimit -n {min(hard, 65_536)}`): every trainer and every remote file takes some"
    yield Finding("open files", f"at most {soft:,} (hard limit {hard:,})", advice if soft < _ENOUGH_FILES else "")
    yield _ports()
    yield _clock()


def _memory() -> Finding:
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(lines[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return Finding("memory", "unknown on this system")
    limit = _cgroup_limit()
    shown = f"{size(available)} available of {size(total)}"
    if limit is not None and limit < total:
        shown, available = f"{shown}; this container may use {size(limit)}", min(available, limit)
    advice = "little is free: lower buffer_bytes of sources and Job(prefetch=), or stop other programs"
    return Finding("memory", shown, advice if available < _LITTLE_MEMORY else "")


def _cgroup_limit() -> int | None:
    try:
        text = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _shared_memory() -> Finding:
    reason = why_unavailable()
    if reason is not None:
        return Finding("shared memory", "unavailable", f"{reason}; trainers on this host get copies over Flight instead")
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("shared memory", "memfd works; there is no /dev/shm")
    advice = "Ray's object store and torch's workers need more: start the container with --shm-size=8g, or mount a tmpfs"
    return Finding("shared memory", f"memfd works; /dev/shm has {size(free)} free", advice if free < _ENOUGH_SHM else "")


def _ports() -> Finding:
    try:
        with socket.socket() as tried:
            tried.bind(("127.0.0.1", 0))
            port = tried.getsockname()[1]
    except OSError as error:
        return Finding("ports", "none", f"cannot listen on 127.0.0.1: {error.strerror}", is_error=True)
    proxies = [
        name for name in ("http_proxy", "https_proxy", "grpc_proxy") if os.environ.get(name) or os.environ.get(name.upper())
    ]
    advice = f"{', '.join(proxies)} is set, and gRPC obeys it: put the hosts of the service into no_proxy" if proxies else ""
    return Finding("ports", f"can listen on 127.0.0.1 (got {port})", advice)


def _clock() -> Finding:
    """Compares the clocks over a moment: a wall clock that jumps spoils times in logs and TLS."""
    wall, steady = time.time(), time.monotonic()
    time.sleep(0.05)
    drift_s = abs((time.time() - wall) - (time.monotonic() - steady))
    year = time.gmtime().tm_year
    advice = "the wall clock jumps or is wrong: synchronise it (NTP); certificates and the times of events depend on it"
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return Finding("clock", shown, advice if drift_s > 0.02 or year < 2024 else "")


def look_at_job(job: Job) -> list[Finding]:
    findings: list[Finding] = []
    units: dict[str, Sequence[Unit]] = {}
    for name, source in job.sources.items():
        try:
            seconds, listed = _timed(lambda source=source, name=name: list_units({name: source})[name])
        except OverlordError as error:
            findings.append(Finding(f"source {name!r}", "cannot be listed", describe_error(error), is_error=True))
            continue
        units[name] = listed
        slow = "listing is slow: name fewer, larger files, or a narrower pattern" if seconds > _SLOW_LISTING_S else ""
        files = len({unit.path for unit in listed})
        findings.append(
            Finding(f"source {name!r}", f"{files:,} files, {len(listed):,} units, listed in {seconds:.2f} s", slow)
        )
    for name in list(units)[:_SAMPLED_SOURCES]:
        findings.append(_read_some(job, name, units[name]))
    if not any(finding.is_error for finding in findings):
        findings += _first_step(job)
    return findings


def _read_some(job: Job, name: str, units: Sequence[Unit]) -> Finding:
    """How fast the storage and the reader of a source are, without its transforms."""
    num_bytes, began = 0, time.monotonic()
    what = f"reading {name!r}"
    try:
        for unit in units:
            num_bytes += job.sources[name].read(unit.whole or unit).nbytes
            if num_bytes >= _READ_BYTES or time.monotonic() - began > 5.0:
                break
    except OverlordError as error:
        return Finding(what, "failed", describe_error(error), is_error=True)
    per_s = num_bytes / max(time.monotonic() - began, 1e-9)
    is_slow = per_s < _SLOW_BYTES_PER_S and num_bytes >= 1 << 20
    advice = "slow for one thread: more loaders (Source(loaders=), autoscale=) read side by side; is the storage near?"
    return Finding(what, f"{size(per_s)}/s decoded, one thread, {size(num_bytes)} read", advice if is_slow else "")


def _first_step(job: Job) -> Iterator[Finding]:
    """The first step, stage by stage."""
    total = 0.0
    try:
        seconds, loader = _timed(lambda: start(job))
        total += seconds
        yield Finding("first step: start", f"{seconds:.2f} s: files listed, roles made")
        with loader:
            seconds, _ = _timed(lambda: loader.plan(loader.start_step))
            total += seconds
            yield Finding("first step: plan", f"{seconds:.2f} s: chunks read and transformed, samples drawn, arranged")
            clients = [loader.client(rank) for rank in range(loader.tree.world_size)]
            seconds, _ = _timed(lambda: [next(client, None) for client in clients])
            total += seconds
            yield Finding("first step: build", f"{seconds:.2f} s: rows fetched and packed for {len(clients):,} ranks")
            metrics = loader.metrics()
            name, source = max(metrics.sources.items(), key=lambda item: item[1].make_s)
            shown = (
                f"source {name!r} took most: {source.make_s:.2f} s for {source.num_chunks} chunks, {size(source.num_bytes)}"
            )
            yield Finding("first step: chunks", shown)
    except OverlordError as error:
        yield Finding("first step", "failed", describe_error(error), is_error=True)
        return
    advice = "a chunk is large or a transform slow: lower window, write smaller row groups, or use InProcesses(transform)"
    yield Finding("first step: in all", f"{total:.2f} s", advice if total > _SLOW_FIRST_STEP_S else "")


def _timed(call: Callable[[], T]) -> tuple[float, T]:
    began = time.monotonic()
    result = call()
    return time.monotonic() - began, result
