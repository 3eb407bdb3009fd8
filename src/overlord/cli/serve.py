"""`overlord serve`: run a job for trainers in other processes until a signal stops it."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

from overlord.cli.files import check_writable, load_job, read_state, read_token, write_state
from overlord.cli.options import add_job_argument, at_least, positive, to_dataclass, zero_or_more
from overlord.cli.run_options import add_run_options, read_run_options
from overlord.errors import ServiceError, SpecError
from overlord.runtime.liveness import RANK_SILENT
from overlord.service.auth import Address, Listen, Tls
from overlord.service.kept_run import ATTEND_S, Announcement, KeptRun, ServeRequest
from overlord.service.run import start

if TYPE_CHECKING:
    import argparse
    from types import FrameType

    from overlord.declare.job import Job
    from overlord.messages import State
    from overlord.runtime.engine import Engine
    from overlord.service.run_options import RunOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_argument(parser)
    parser.add_argument(
        "--address",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help="listen here; port 0 picks a free port; other than on loopback a token is required (default: %(default)s)",
    )
    parser.add_argument(
        "--advertise", metavar="HOST", help="tell clients to connect to HOST (default: the host of --address)"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="require every client to send the token in FILE")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve over TLS with the certificate in FILE (PEM)")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="use the private key in FILE for --tls-cert")
    parser.add_argument("--state", type=Path, metavar="FILE", help="write the state to FILE when the service stops")
    parser.add_argument(
        "--resume", metavar="FILE", help="resume from the state in FILE; the word `log` resumes from the planner's log"
    )
    parser.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on the Ray cluster at ADDRESS, or on a local one without it",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        help="call the run NAME in the Ray cluster, where it is found again if this process was killed (default: from the "
        "path of the job file)",
    )
    parser.add_argument(
        "--processes",
        dest="num_processes",
        type=at_least(0),
        metavar="N",
        help="spread loading over N worker processes; 0: use only one (default: one per core where there are more than two)",
    )
    parser.add_argument(
        "--leave-after",
        dest="leave_after_s",
        type=positive,
        default=RANK_SILENT.after_s,
        metavar="S",
        help="continue without a rank that was silent for S seconds (default: %(default)s)",
    )
    parser.add_argument(
        "--drain",
        dest="drain_s",
        type=zero_or_more,
        default=30.0,
        metavar="S",
        help="when stopping, wait up to S seconds for ranks to take the last step (default: %(default)s)",
    )

    add_run_options(parser)


def execute(options: argparse.Namespace) -> int:
    options.run = read_run_options(options)
    return serve(options.job, to_dataclass(options, ServeOptions), options.json)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen, which clients to accept, and which files to keep."""

    address: str
    advertise: str | None
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    state: Path | None
    run: RunOptions
    resume: str | None
    """The path of a state, or "log" for the planner's log."""
    ray: str | None
    """The address of a Ray cluster, "" to start a local one, None to run without Ray."""
    name: str | None
    """What the run is called in the Ray cluster."""
    num_processes: int | None
    """Worker processes; 0 for none, None for one for each core."""
    leave_after_s: float
    drain_s: float

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SpecError("TLS needs both files: --tls-cert and --tls-key")
        if self.resume == "log" and self.run.log is None:
            raise SpecError("--resume log resumes from the planner's log: say where it is with --log")
        if self.ray is not None and self.num_processes is not None:
            raise SpecError("--ray and --processes both say where the job runs: give one of them")
        if self.name is not None and self.ray is None:
            raise SpecError("--name is the name of a run in a Ray cluster: give --ray too")


def serve(path: Path, options: ServeOptions, as_json: bool) -> int:
    job = load_job(path)
    if options.state is not None:
        check_writable(options.state)
    token = None if options.token_file is None else read_token(options.token_file)
    tls = None if options.tls_cert is None or options.tls_key is None else Tls(options.tls_cert, options.tls_key)
    listen = Listen(options.address, token, tls, options.advertise)
    resume = _read_resume(options.resume)
    if options.ray is not None:
        request = ServeRequest(
            job=job,
            options=options.run,
            listen=listen,
            leave_after_s=options.leave_after_s,
            resume=resume,
            digest=_digest(path, options),
        )
        return _serve_on_ray(options.name or _default_name(path), request, options, as_json)
    _check_free(listen.bound)
    engine, where = _make_engine(options, job)
    with start(job, engine=engine, resume=resume, **options.run.to_arguments()) as loader:
        stop = _install_stop_event()
        address = loader.serve(
            options.address,
            token=token,
            tls=None if tls is None else (tls.certificate, tls.key),
            advertise=options.advertise,
            leave_after_s=options.leave_after_s,
        )
        sys.stderr.write(f"{where or engine}\n")
        _announce(Announcement(address, loader.tree.world_size, loader.start_step), as_json)
        stop.wait()
        _say_stopping(options)
        drained = loader.drain(options.drain_s)
        _finish(drained, loader.state_dict(), options)
    return 0


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
            _announce(run.announcement(), as_json)
            while not stop.wait(ATTEND_S):
                run.attend()
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
    found = "taken back: it went on without a driver; it was started" if was_found else "started"
    return f"on Ray as {name!r}, {found}: if this process is killed, the run goes on, and the same command takes it back\n"


def _default_name(path: Path) -> str:
    """The name of a run in its cluster: the same for the same job file."""
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"


def _digest(path: Path, options: ServeOptions) -> str:
    """Differs when another job, or the same with other options, is to be served."""
    given = (options.address, options.advertise, options.leave_after_s, options.run)
    return hashlib.sha256(path.read_bytes() + repr(given).encode()).hexdigest()


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
        sys.stdout.write(orjson.dumps(announcement).decode() + "\n")
    else:
        sys.stdout.write(f"{found.address}\n")
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


def _read_resume(given: str | None) -> State | Literal["log"] | None:
    if given == "log":
        return "log"
    return None if given is None else read_state(Path(given))


def _make_engine(options: ServeOptions, job: Job) -> tuple[Engine | None, str]:
    """The engine, and where it runs the job in words, unless it says that itself."""
    from overlord.runtime.processes.engine import Processes, default_engine

    if options.num_processes == 0:
        return None, "one process, as --processes 0 says"
    if options.num_processes is not None:
        return Processes(options.num_processes), ""
    engine, reason = default_engine(job.num_workers)
    return engine, "" if engine is not None else f"one process: {reason}"
