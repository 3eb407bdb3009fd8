"""The Ray actor that hosts roles, and its answer to health checks."""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.errors import SpecError
from overlord.runtime.engine import Workplace, WorkplaceSize
from overlord.runtime.ray.names import HostedRole, find_names
from overlord.runtime.role_table import RoleTable, accept_calls, run_call
from overlord.runtime.shared_memory import Listener, why_unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from overlord.runtime.peers import RoleCall
    from overlord.runtime.transport import ErrorEnvelope

HEALTH_CHECKS = "health_checks"
"""The concurrency group of health checks, which are answered while all other threads of the actor are busy."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The answer to a health check: the process, its node, and the status of its roles."""

    process: int
    started_at: str
    """The start time, which tells the process from a later one with the same id; empty when it is unknown."""
    node: str
    status_lines: tuple[str, ...]


class RoleActor:
    """Makes its roles whenever the actor starts, and runs calls to them: actor calls, and those of processes of its node,
    which come over sockets.

    Roles are made in threads of their own, so that health checks are answered meanwhile: a role that starts slowly must not
    look hung.
    """

    def __init__(
        self,
        actor: str,
        namespace: str,
        patience_s: float,
        size: WorkplaceSize,
        num_cores: int,
        *,
        release: str,
        folder: str | None = None,
        watched: tuple[str, float] | None = None,
    ) -> None:
        """`release` is the one of Overlord in the process that spawned the actor, and `folder` the one that its relative
        paths begin in. `watched` is the namespace of a detached role that this process watches, and how long that may be
        silent."""
        self._release = release
        _enter(folder)
        pa.set_cpu_count(num_cores)
        self._names = find_names(namespace, patience_s)  # kept, because handles find it by the namespace
        self._workplace = Workplace(size)
        self._table = RoleTable()
        roles = self._names.listed_roles(actor)
        for role in roles:
            self._table.announce(role.number, role.name)
        self._names.host(actor, self._table, self._listen())
        for role in roles:
            self._start_thread(self._make, role)
        if watched is not None:
            from overlord.runtime.ray.detached import watch_detached

            self._watch = watch_detached(*watched, patience_s)

    def add_role(self, role: HostedRole) -> ErrorEnvelope | None:
        """Make another role, unless it was made when the actor was started again, and wait for it. Returns the error that
        making it raised, if any."""
        if not self._table.name_of(role.number):
            self._table.announce(role.number, role.name)
            self._start_thread(self._make, role)
        return self._table.wait_until_made(role.number)

    def drop_role(self, number: int) -> None:
        """Forget a role and close it."""
        self._table.forget(number)()

    def forget_role(self, number: int) -> None:
        """Send the callers of a role to the job's table, without closing it: its actor is about to be killed."""
        self._table.forget(number)

    def call(self, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, Any]:
        """Run a call to a role; returns what kind of answer it is, and the answer."""
        return run_call(self._table, number, method, args, kwargs)

    def run_told(self, calls: Sequence[tuple[int, RoleCall]]) -> None:
        """Run calls that nobody waits for, one after the other."""
        for number, call in calls:
            run_call(self._table, number, *call)

    def wait_until_made(self, number: int) -> ErrorEnvelope | None:
        """Wait until a role is made. Returns the error that making it raised, if any."""
        return self._table.wait_until_made(number)

    def check_health(self) -> HealthReport:
        """Return the report, even while roles are busy. `status_lines` takes the roles' own locks, so that an actor with a
        deadlocked role does not answer."""
        import ray

        busy = tuple(self._table.status_lines())
        return HealthReport(os.getpid(), process_start_time(os.getpid()), ray.get_runtime_context().get_node_id(), busy)

    def close(self) -> None:
        """Close the roles. The engine kills the process afterwards."""
        self._table.close()
        self._workplace.close()

    def _listen(self) -> str | None:
        """Run the calls of processes of this node; returns the address for them, None where there is no shared memory."""
        reason = why_unavailable()
        if reason is not None:
            _log.warning("roles of this node call each other through Ray: %s", reason)
            return None
        _allow_many_files()
        listener = Listener()
        self._start_thread(accept_calls, listener, self._table)
        return listener.address

    def _make(self, role: HostedRole) -> None:
        try:
            check_release(self._release, f"role {role.name!r}")
            make = role.make.load()
        except Exception as error:  # noqa: BLE001 - loading imports the user's own modules; raised in every caller
            self._table.fail(role.number, error)
        else:
            self._table.make(role.number, make, self._workplace)

    def _start_thread(self, call: Any, *args: Any) -> None:
        threading.Thread(target=call, args=args, name=f"overlord-{call.__name__}", daemon=True).start()


def working_folder() -> str | None:
    """Where relative paths of this process begin; None if the folder was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _enter(folder: str | None) -> None:
    """Let relative paths mean what they do where the run was started, if this node has the folder. Ray starts processes
    where its own daemon was started, unless a runtime environment brings a folder of its own."""
    import ray

    if folder is not None and not ray.get_runtime_context().runtime_env.get("working_dir"):
        with suppress(OSError):
            os.chdir(folder)


def _allow_many_files() -> None:
    """Raise the limit on open files: every connection and every piece of shared memory on its way here is one."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def own_release() -> str:
    """The release of Overlord that this process runs."""
    try:
        return version("overlord-dataloader")
    except PackageNotFoundError:
        return "one that is not installed as a package"


def check_release(expected: str, what: str) -> None:
    """SpecError if this process runs another release than the one that spawned it: what they send each other may differ."""
    own = own_release()
    if own != expected:
        raise SpecError(
            f"{what} is on node {socket.gethostname()}, which has overlord {own}, and the run was started with {expected}: "
            "install the same release on every node of the cluster"
        )


def process_start_time(process: int) -> str:
    """The start time of a process of this machine, in kernel ticks; empty on systems without /proc."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
