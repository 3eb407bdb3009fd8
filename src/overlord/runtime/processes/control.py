"""What the process that started a run and each of its worker processes tell each other, besides calls of roles."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from overlord.runtime.engine import WorkplaceSize
    from overlord.runtime.transport import ErrorEnvelope


# To a worker process


@dataclass(frozen=True, slots=True)
class Setup:
    """The first message: what the process may use, and where the directory of the run is."""

    run: str
    """The address of the process that started the run."""
    size: WorkplaceSize
    num_cores: int
    """How many threads a library may keep busy here."""
    patience_s: float
    log_level: int


@dataclass(frozen=True, slots=True)
class MakeRoles:
    """Make these roles: (number, name) of each, and the pickled list of the functions that make them."""

    roles: tuple[tuple[int, str], ...]
    pickled: bytes


@dataclass(frozen=True, slots=True)
class DropRole:
    """Forget a role, close it, and answer with a `RoleDropped`."""

    number: int


@dataclass(frozen=True, slots=True)
class CheckHealth:
    """Answer with a `ProcessHealth`."""


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Close every role and exit."""


# From a worker process


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The process waits for its roles."""


@dataclass(frozen=True, slots=True)
class RoleMade:
    """A role is made, or could not be."""

    number: int
    error: ErrorEnvelope | None


@dataclass(frozen=True, slots=True)
class RoleDropped:
    """A role is closed."""

    number: int


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """The process answers; its roles are busy with this."""

    status_lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LogLine:
    """A record of a logger, for the handlers of the process that started the run."""

    logger: str
    level: int
    text: str


class LogSender(logging.Handler):
    """Sends every record to the process that started the run."""

    def __init__(self, send: Callable[[object], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(LogLine(record.name, record.levelno, self.format(record)))
        except OSError:
            self.handleError(record)
