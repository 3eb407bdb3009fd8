"""The actor that a role plays in, and how what it raises comes back to whoever asked."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.runtime.engine import Workplace, WorkplaceSize
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Callable

_RAISED_IN = "raised in role"
PULSE = "pulse"
"""The group of asks that are answered beside all others."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """A sign of life."""

    process: int
    born: str
    """Tells the process from a later one with the same number; "" where that is not known."""
    node: str
    status_lines: tuple[str, ...]


class Stage:
    """Makes its role when it starts and when it is started again, and answers for it. Runs inside a Ray actor.

    The role is made in a thread of its own: a role that takes long to make must not look like one that hangs.
    """

    def __init__(self, name: str, parcel: Any, size: WorkplaceSize) -> None:
        self._name = name
        self._failed: ErrorEnvelope | None = None
        self._role: Any = None
        self._workplace: Workplace | None = None
        self._made = threading.Event()
        threading.Thread(target=self._make, args=(parcel, size), name="overlord-making", daemon=True).start()

    def ask(self, method: str, args: tuple, kwargs: dict) -> Any:
        self._made.wait()
        if self._failed is not None:
            return self._failed
        try:
            return getattr(self._role, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whoever asks gets it
            return ErrorEnvelope.pickling(error, _RAISED_IN, self._name)

    def started(self) -> ErrorEnvelope | None:
        """Answered once the role is made; what making it raised."""
        self._made.wait()
        return self._failed

    def pulse(self) -> Pulse:
        """Answered whatever the role is busy with. `status_lines` takes the role's own locks, where it has any: a role that
        is deadlocked has no pulse."""
        import ray

        status_lines = getattr(self._role, "status_lines", None)
        busy = () if status_lines is None else tuple(status_lines())
        return Pulse(os.getpid(), born(os.getpid()), ray.get_runtime_context().get_node_id(), busy)

    def close(self) -> None:
        """Close the role as the embedded engine would; the process is killed afterwards."""
        close = getattr(self._role, "close", None)
        if close is not None:
            close()
        if self._workplace is not None:
            self._workplace.close()

    def _make(self, parcel: Any, size: WorkplaceSize) -> None:
        try:
            make: Callable[[Workplace], Any] = parcel.opened()
            self._workplace = Workplace(size)
            self._role = make(self._workplace)
        except Exception as error:  # noqa: BLE001 - whoever asks gets it; dying would only say that an actor died
            self._failed = ErrorEnvelope.pickling(error, _RAISED_IN, self._name)
        finally:
            self._made.set()


def born(process: int) -> str:
    """When a process of this machine was started, as the system counts it; "" where that cannot be told."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
