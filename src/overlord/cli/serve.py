"""`overlord serve`: run a job for trainers in other processes, until told to stop."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

from overlord.cli.files import check_writable, load_job, read_state, read_token, write_state
from overlord.errors import ServiceError, SpecError
from overlord.service.auth import Address
from overlord.service.run import Loader, start

if TYPE_CHECKING:
    from types import FrameType

    from overlord.checkpoint.state import State
    from overlord.runtime.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where to listen, whom to let in, and what to keep."""

    address: str
    advertise: str | None
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    state: Path | None
    log: str | None
    resume: str | None
    """A file with a state, or "log" for what the log knows."""
    ray: str | None
    """The address of a Ray cluster, "" for one that is started here, None for no Ray."""
    leave_after_s: float
    drain_s: float

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SpecError("TLS needs both files: --tls-cert and --tls-key")
        if self.resume == "log" and self.log is None:
            raise SpecError("--resume log goes on from a log: say where it is with --log")


def serve(path: Path, options: ServeOptions, as_json: bool) -> int:
    job = load_job(path)
    if options.state is not None:
        check_writable(options.state)
    token = None if options.token_file is None else read_token(options.token_file)
    resume = _resume(options.resume)
    _check_free(Address.parsed(options.address))
    tls = None if options.tls_cert is None or options.tls_key is None else (options.tls_cert, options.tls_key)
    with start(job, engine=_engine(options.ray), resume=resume, log=options.log) as loader:
        stop = _stopped_by_signals()  # not before: Ray puts handlers of its own in place
        address = loader.serve(
            options.address, token=token, tls=tls, advertise=options.advertise, leave_after_s=options.leave_after_s
        )
        _announce(loader, address, as_json)
        stop.wait()
        _finish(loader, options)
    return 0


def _check_free(address: Address) -> None:
    """Said before the job is started, and in our words: gRPC writes some of its own to standard error."""
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


def _stopped_by_signals() -> threading.Event:
    """Set by the first SIGTERM or SIGINT; the second ends the process at once."""
    stop = threading.Event()

    def note(number: int, _: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop.set()

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    return stop


def _announce(loader: Loader, address: str, as_json: bool) -> None:
    """One line, and the only one on standard output."""
    if as_json:
        told = {"address": address, "ranks": loader.tree.world_size, "step": loader.start_step}
        sys.stdout.write(orjson.dumps(told).decode() + "\n")
    else:
        sys.stdout.write(f"{address}\n")
    sys.stdout.flush()


def _finish(loader: Loader, options: ServeOptions) -> None:
    sys.stderr.write(
        f"stopping: waits up to {options.drain_s:g} s for every rank to take the last step that one of them has; a second "
        "signal ends the process at once\n"
    )
    all_came = loader.drain(options.drain_s)
    state = loader.state_dict()
    missing = "" if all_came else ", which not every rank came for"
    kept = ""
    if options.state is not None:
        write_state(options.state, state)
        kept = f"; state saved to {options.state}, go on with --resume {options.state}"
    sys.stderr.write(f"stopped before step {state['step']:,}{missing}{kept}\n")


def _resume(given: str | None) -> State | Literal["log"] | None:
    if given == "log":
        return "log"
    return None if given is None else read_state(Path(given))


def _engine(ray: str | None) -> Engine | None:
    if ray is None:
        return None
    from overlord.runtime.ray import Ray

    return Ray(ray or None)
