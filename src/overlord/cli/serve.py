"""`overlord serve`: run a job for trainers in other processes until a signal stops it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

from overlord.cli.files import check_writable, read_state, read_token, write_state
from overlord.cli.live import WaitNotes
from overlord.cli.options import add_job_argument, add_options, at_least, option, positive, to_dataclass
from overlord.cli.output import console, printable
from overlord.cli.run_options import add_run_options, read_run_options
from overlord.cli.run_view import summary_line
from overlord.errors import ServiceError, SpecError
from overlord.jobfile.loading import JobFile, load_job
from overlord.runtime.liveness import RANK_SILENT
from overlord.runtime.memory import give_threads_heaps, return_free_memory
from overlord.runtime.whereabouts import node_names
from overlord.service.auth import Address, Listen, Tls
from overlord.service.kept_run import ATTEND_S, Announcement, KeptRun, ServeRequest
from overlord.service.run import start

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from overlord.declare.job import Job
    from overlord.messages import State
    from overlord.runtime.engine import Engine
    from overlord.service.loader import Loader
    from overlord.service.run_options import RunOptions


_LOOK_S = (0.25, 10.0)  # the first and the longest pause between two looks at a run that has just started
_SAY_S = 30.0
_FROM_LOG = Path("log")  # what --resume takes instead of a state


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    add_options(parser, ServeOptions)
    add_run_options(parser)


def execute(options: argparse.Namespace) -> int:
    give_threads_heaps()
    options.run = read_run_options(options)
    return serve(options.job, to_dataclass(options, ServeOptions), options.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen, which clients to accept, and which files to keep."""

    run: RunOptions
    address: str = option(
        "--address",
        "listen here; port 0 picks a free port; other than on loopback a token is required (default: %(default)s)",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
    )
    advertise: str | None = option(
        "--advertise", "tell clients to connect to HOST (default: the host of --address)", metavar="HOST"
    )
    token_file: Path | None = option("--token-file", "require every client to send the token in FILE")
    tls_cert: Path | None = option(
        "--tls-cert", "serve over TLS with the certificate in FILE (PEM)", type=Path, metavar="FILE"
    )
    tls_key: Path | None = option("--tls-key", "use the private key in FILE for --tls-cert", type=Path, metavar="FILE")
    metrics: str | None = option(
        "--metrics",
        "serve metrics for Prometheus here, over HTTP at /metrics; the token, if there is one, is required there too",
        metavar="HOST:PORT",
    )
    page: str | None = option(
        "--page",
        "serve a live page of the run to browsers here (default: 127.0.0.1, any free port); it asks for the token, if there "
        "is one",
        nargs="?",
        const="127.0.0.1:0",
        metavar="HOST:PORT",
    )
    state: Path | None = option("--state", "write the state to FILE when the service stops")
    resume: Path | None = option("--resume", "resume from the state in FILE; the word `log` resumes from the planner's log")
    ray: str | None = option("--ray", "run on the Ray cluster at ADDRESS, or on a local one without it")
    name: str | None = option(
        "--name",
        "call the run NAME in the Ray cluster, where it is found again if this process was killed (default: from the path "
        "of the job file)",
        metavar="NAME",
    )
    num_processes: int | None = option(
        "--processes",
        "spread loading over N worker processes; 0: use only one (default: one per core where there are more than two)",
        type=at_least(0),
    )
    leave_after_s: float = option(
        "--leave-after",
        "continue without a rank that was silent for S seconds (default: %(default)s)",
        default=RANK_SILENT.after_s,
        type=positive,
        metavar="S",
    )
    resize_on_leave: bool = option(
        "--resize-on-leave",
        "shrink dp when ranks are silent for --leave-after, and grow it when they are back; trainers read with "
        "overlord.join",
        default=False,
        action="store_true",
    )
    drain_s: float = option(
        "--drain",
        "when stopping, wait up to S seconds for ranks to take the last step (default: %(default)s)",
        default=30.0,
    )

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SpecError("TLS needs both files: --tls-cert and --tls-key")
        if self.resume == _FROM_LOG and self.run.log is None:
            raise SpecError("--resume log resumes from the planner's log: say where it is with --log")
        if self.ray is not None and self.num_processes is not None:
            raise SpecError("--ray and --processes both say where the job runs: give one of them")
        if self.name is not None and self.ray is None:
            raise SpecError("--name is the name of a run in a Ray cluster: give --ray too")


def serve(file: JobFile, options: ServeOptions, as_json: bool) -> int:
    job = load_job(file)
    if options.state is not None:
        check_writable(options.state)
    token = None if options.token_file is None else read_token(options.token_file)
    tls = None if options.tls_cert is None or options.tls_key is None else Tls(options.tls_cert, options.tls_key)
    listen = Listen(options.address, token, tls, options.advertise)
    metrics = None if options.metrics is None else Listen(options.metrics, token, tls, options.advertise)
    page = None if options.page is None else Listen(options.page, token, tls, options.advertise)
    resume = _read_resume(options.resume)
    if options.ray is not None:
        request = ServeRequest(
            job=job,
            options=options.run,
            listen=listen,
            metrics=metrics,
            page=page,
            leave_after_s=options.leave_after_s,
            resize_on_leave=options.resize_on_leave,
            resume=resume,
            digest=_digest(file, options),
        )
        return _serve_on_ray(options.name or _default_name(file.path), request, options, as_json)
    _check_free(listen.bound)
    engine, where = _make_engine(options, job)
    if engine is not None and listen.bound.is_loopback:
        engine.expect_trainers([node_names()] * job.mesh.dp)
    with (
        WaitNotes(console(stderr=True), f"starting: listing the files of {len(job.sources):,} sources") as notes,
        start(job, engine=engine, resume=resume, **options.run.to_arguments()) as loader,
    ):
        notes.stop()
        loader.reload_job = lambda: load_job(file)
        stop = _install_stop_event()
        address = listen.serve(loader.serve, leave_after_s=options.leave_after_s, resize_on_leave=options.resize_on_leave)
        sys.stderr.write(f"{where or engine}\n")
        url = None if metrics is None else metrics.serve(loader.serve_metrics)
        page_url = None if page is None else page.serve(loader.page)
        _announce(Announcement(address, loader.tree.world_size, loader.start_step, url, page_url), as_json)
        _await_first_steps(loader, stop)
        return_free_memory()
        stop.wait()
        _say_stopping(options)
        drained = loader.drain(options.drain_s)
        sys.stderr.write(f"{summary_line(loader.metrics())}\n")
        _finish(drained, loader.state_dict(), options)
    return 0


def _await_first_steps(loader: Loader, stop: threading.Event) -> None:
    """Say what is waited for until every rank has its first step: ranks that have not come, or what those that came wait
    for."""
    began = said = time.monotonic()
    look_s = _LOOK_S[0]
    while not stop.wait(look_s):
        look_s = min(2 * look_s, _LOOK_S[1])
        ranks = loader.metrics().ranks
        num_missing = sum(rank.step is None and not rank.num_steps for rank in ranks.values())
        if all(rank.num_steps for rank in ranks.values()):
            sys.stderr.write(
                f"every rank has its first step, {time.monotonic() - began:.1f} s after the service was ready\n"
            )
            return
        if time.monotonic() - said >= _SAY_S:
            said = time.monotonic()
            lines = [f"{num_missing:,} of {len(ranks):,} ranks have not come"] if num_missing else []
            causes = "".join(f"\n  - {printable(line)}" for line in [*lines, *loader.status_lines()])
            sys.stderr.write(f"waiting for the first step of every rank for {said - began:.0f} s{causes}\n")


def _serve_on_ray(name: str, request: ServeRequest, options: ServeOptions, as_json: bool) -> int:
    """Keep the run in the cluster, where it outlives this process; end it when this process is told to stop."""
    from overlord.runtime.ray.cluster import Cluster

    cluster = Cluster(address=options.ray or None)
    cluster.join()
    try:
        stop = _install_stop_event()  # after joining: Ray installs handlers of its own
        driver = f"process {os.getpid()} on {socket.gethostname()}"
        bound = request.listen.bound
        run, was_found = KeptRun.start_or_take_back(name, request, driver, before_start=lambda: _check_free(bound))
        try:
            sys.stderr.write(_describe_kept(name, was_found, is_own=not options.ray))
            announced = run.announcement()
            _announce(announced, as_json)
            address = announced.address
            while not stop.wait(ATTEND_S):
                now = run.attend() or address
                if now != address:  # the machine that had it was lost
                    sys.stderr.write(f"the machine of the run was lost: it is served at {now} now, no longer at {address}\n")
                    address = now
            _say_stopping(options)
            drained, state = run.drain(options.drain_s)
            _finish(drained, state, options)
        finally:
            run.close()
    finally:
        cluster.leave()
    return 0


def _describe_kept(name: str, was_found: bool, is_own: bool) -> str:
    if is_own:
        return "on Ray, in a cluster of its own that ends with this process\n"
    found = "taken back (it had gone on without a driver)" if was_found else "started"
    return f"on Ray as {name!r}, {found}: if this process is killed, the run goes on, and the same command takes it back\n"


def _default_name(path: Path) -> str:
    """The name of a run in its cluster: the same for the same job file."""
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


def _digest(file: JobFile, options: ServeOptions) -> str:
    """Differs when another job, or the same with other options, is to be served."""
    given = (options.address, options.advertise, options.leave_after_s, options.run, options.metrics, options.page)
    given = (*given, options.resize_on_leave)
    return hashlib.sha256(file.path.read_bytes() + repr((file.overrides, given)).encode()).hexdigest()


def _check_free(address: Address) -> None:
    """Fail before the job starts, with a clear error: gRPC would write its own to standard error."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(target)
    except OSError as error:
        raise ServiceError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror}; choose an address of this machine and a "
            "port that is free (port 0: any)"
        ) from error


def _install_stop_event() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets. The second signal kills the process."""
    stop = threading.Event()

    def set_stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGTERM, set_stop)
    signal.signal(signal.SIGINT, set_stop)
    return stop


def _announce(found: Announcement, as_json: bool) -> None:
    """Print the address: the only line on standard output."""
    if as_json:
        announcement = {"address": found.address, "ranks": found.num_ranks, "step": found.step}
        announcement |= {} if found.metrics is None else {"metrics": found.metrics}
        announcement |= {} if found.page is None else {"page": found.page}
        sys.stdout.write(orjson.dumps(announcement).decode() + "\n")
    else:
        sys.stdout.write(f"{found.address}\n")
        if found.metrics is not None:
            sys.stderr.write(f"metrics at {found.metrics}\n")
        if found.page is not None:
            sys.stderr.write(f"page at {found.page}\n")
    sys.stdout.flush()


def _say_stopping(options: ServeOptions) -> None:
    sys.stderr.write(
        f"stopping: waits up to {options.drain_s:g} s for every rank to take the last step that one of them has; a second "
        "signal ends the process at once\n"
    )


def _finish(drained: bool, state: State, options: ServeOptions) -> None:
    """Save the state of a run that was drained."""
    missing = "" if drained else ", which not every rank took"
    kept = ""
    if options.state is not None:
        write_state(options.state, state)
        kept = f"; state saved to {options.state}, resume with --resume {options.state}"
    sys.stderr.write(f"stopped before step {state['step']:,}{missing}{kept}\n")


def _read_resume(given: Path | None) -> State | Literal["log"] | None:
    if given == _FROM_LOG:
        return "log"
    return None if given is None else read_state(given)


def _make_engine(options: ServeOptions, job: Job) -> tuple[Engine | None, str]:
    """The engine, and where it runs the job in words, unless it says that itself."""
    from overlord.runtime.processes.engine import Processes, default_engine

    if options.num_processes == 0:
        return None, "one process, as --processes 0 says"
    if options.num_processes is not None:
        return Processes(options.num_processes), ""
    engine, reason = default_engine(job.num_workers)
    return engine, "" if engine is not None else f"one process: {reason}"
