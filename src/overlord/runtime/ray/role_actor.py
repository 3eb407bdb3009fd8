"""The Ray actor that hosts one role, and its answer to health checks."""

from __future__ import annotations

import os
import socket
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from overlord.errors import SpecError
from overlord.runtime.engine import Workplace, WorkplaceSize
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.runtime.ray.stored_calls import StoredCall

_RAISED_IN = "raised in role"
HEALTH_CHECKS = "health_checks"
"""The concurrency group of health checks, which are answered while all other threads of the actor are busy."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The answer to a health check: the process, its node, and the status of its role."""

    process: int
    started_at: str
    """The start time, which tells the process from a later one with the same id; empty when it is unknown."""
    node: str
    status_lines: tuple[str, ...]


class RoleActor:
    """Creates its role whenever the actor starts, and forwards calls to it.

    The role is created in its own thread, so that health checks are answered meanwhile: a role that starts slowly must not
    look hung.
    """

    def __init__(self, name: str, stored: StoredCall, size: WorkplaceSize, release: str) -> None:
        """`release` is the one of Overlord in the process that spawned the role."""
        self._name = name
        self._release = release
        self._failed: ErrorEnvelope | None = None
        self._role: Any = None
        self._workplace: Workplace | None = None
        self._made = threading.Event()
        threading.Thread(target=self._make, args=(stored, size), name="overlord-making", daemon=True).start()

    def call(self, method: str, args: tuple, kwargs: dict) -> Any:
        self._made.wait()
        if self._failed is not None:
            return self._failed
        try:
            return getattr(self._role, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again in the caller
            return ErrorEnvelope.pickling(error, _RAISED_IN, self._name)

    def wait_until_made(self) -> ErrorEnvelope | None:
        """Wait until the role is created. Returns the error that creating it raised, if any."""
        self._made.wait()
        return self._failed

    def check_health(self) -> HealthReport:
        """Return the report, even while the role is busy. `status_lines` takes the role's own locks, so that a deadlocked
        role does not answer."""
        import ray

        status_lines = getattr(self._role, "status_lines", None)
        busy = () if status_lines is None else tuple(status_lines())
        return HealthReport(os.getpid(), process_start_time(os.getpid()), ray.get_runtime_context().get_node_id(), busy)

    def close(self) -> None:
        """Close the role. The engine kills the process afterwards."""
        close = getattr(self._role, "close", None)
        if close is not None:
            close()
        if self._workplace is not None:
            self._workplace.close()

    def _make(self, stored: StoredCall, size: WorkplaceSize) -> None:
        try:
            check_release(self._release, f"role {self._name!r}")
            make: Callable[[Workplace], Any] = stored.load()
            self._workplace = Workplace(size)
            self._role = make(self._workplace)
        except Exception as error:  # noqa: BLE001 - raised in every caller; if the actor exited, the cause would be lost
            self._failed = ErrorEnvelope.pickling(error, _RAISED_IN, self._name)
        finally:
            self._made.set()


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
