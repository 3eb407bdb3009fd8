"""One worker process as the process that started the run sees it: started, watched, and started again whenever it ends.

A thread of its own starts the process and takes its messages. The process's listener belongs to this side: callers that
connect while the process is replaced wait in its queue, and its address never changes.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from overlord.errors import SpecError
from overlord.runtime import liveness
from overlord.runtime.interpreters import describe_exit
from overlord.runtime.processes.control import (
    CheckHealth,
    DropRole,
    EndProcess,
    LogLine,
    MakeRoles,
    ProcessHealth,
    ProcessStarted,
    RoleDropped,
    RoleMade,
    Setup,
)
from overlord.runtime.processes.node import Location
from overlord.runtime.recorder import current_recorder
from overlord.runtime.retry import Backoff
from overlord.runtime.shared_memory import Connection, Listener
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from overlord.runtime.engine import Workplace, WorkplaceSize
    from overlord.runtime.processes.template import ForkedProcess, Template

_BACKOFF = Backoff(first_s=0.05, longest_s=5.0)
_EXIT_S = liveness.WORKER_EXIT.after_s
_log = logging.getLogger("overlord.runtime.engine")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """What every worker process of a run is started with."""

    run: str
    size: WorkplaceSize
    num_cores: int
    patience_s: float
    hung_after_s: float | None


@dataclass(slots=True)
class _Ordered:
    """A role that the process is to have."""

    name: str
    make: Callable[[Workplace], Any]
    is_made: bool = False
    error: ErrorEnvelope | None = None


class HostProcess:
    """A worker process and its roles. Thread-safe."""

    def __init__(self, index: int, settings: ProcessSettings, template: Template) -> None:
        self.index = index
        self._settings = settings
        self._template = template
        self._listener = Listener()
        self._changed = threading.Condition()
        self._roles: dict[int, _Ordered] = {}
        self._dropping: set[int] = set()
        self._control: Connection | None = None  # from when the process can take roles until it ends
        self._process: ForkedProcess | None = None
        self._num_failed_starts = 0
        self._ended = ""
        self._is_up = True
        self._is_closed = False
        self._events = current_recorder().events
        self._thread = threading.Thread(target=self._supervise, name=f"overlord-supervisor-{index}", daemon=True)

    def location(self, number: int) -> Location:
        return Location(self._listener.address, number, self._is_up, self._ended)

    @property
    def names(self) -> list[str]:
        """The names under which its roles were spawned."""
        return [role.name for role in list(self._roles.values())]

    @property
    def pid(self) -> int | None:
        """The process, if one runs now."""
        process = self._process
        return None if process is None else process.pid

    def add(self, number: int, name: str, make: Callable[[Workplace], Any]) -> None:
        """Make a role in the process, now and whenever the process is started again. The first role starts the process."""
        with self._changed:
            if self._is_closed:
                return
            self._roles[number] = _Ordered(name, make)
            if self._thread.ident is None:
                self._thread.start()
            elif self._control is not None:
                self._order([number])

    def drop(self, number: int, timeout_s: float) -> None:
        """Close a role, and wait for that up to `timeout_s`; a process that hangs is replaced without the role."""
        with self._changed:
            self._roles.pop(number, None)
            self._changed.notify_all()
            control = self._control
            if control is not None:
                self._dropping.add(number)
                self._send(DropRole(number))
                self._changed.wait_for(lambda: number not in self._dropping or self._control is not control, timeout_s)
                self._dropping.discard(number)

    def wait_until_made(self, number: int, timeout_s: float) -> ErrorEnvelope | str | None:
        """Wait until a role is made. Returns None, or the error that making it raised, or in words why there is no process
        to make it in; TimeoutError after `timeout_s`."""

        def is_settled() -> bool:
            role = self._roles.get(number)
            return role is None or role.is_made or self._num_failed_starts >= liveness.PROCESS_STARTING.misses

        with self._changed:
            if not self._changed.wait_for(is_settled, timeout_s):
                raise TimeoutError
            role = self._roles.get(number)
            if role is None or role.is_made:
                return None if role is None else role.error
            return f"{self._num_failed_starts} in a row, the last with {self._ended}"

    def begin_closing(self) -> None:
        """Tell the process to close its roles and to exit; a process that has not started yet is killed."""
        with self._changed:
            self._is_closed = True
            if self._control is not None:
                self._send(EndProcess())
            elif self._process is not None:
                self._process.kill()
            self._changed.notify_all()

    def finish_closing(self, timeout_s: float) -> None:
        """Wait for the process to exit, and kill it after `timeout_s`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            process = self._process
            if process is not None:
                process.kill()
            self._thread.join(_EXIT_S)
        self._listener.close()

    def _supervise(self) -> None:
        """Start the process, and start it again whenever it ends."""
        pauses = _BACKOFF.pauses()
        while not self._is_closed:
            try:
                ended = self._run_once()
            except OSError as error:
                ended = f"a process that could not be started: {error}"
            with self._changed:
                is_failed_start = not all(role.is_made for role in self._roles.values())
                self._control = self._process = None
                self._is_up, self._ended = False, ended
                for role in self._roles.values():
                    role.is_made, role.error = False, None
                self._num_failed_starts = self._num_failed_starts + 1 if is_failed_start else 0
                self._changed.notify_all()
                if self._is_closed:
                    return
                if not is_failed_start:
                    pauses = _BACKOFF.pauses()
            roles = ", ".join(self.names) or "no roles"
            self._events.note("restart", f"worker process {self.index} ({roles}) ended with {ended}: another is started")
            _log.warning(
                "worker process %d (%s) ended with %s: another is started, and its roles are made again",
                self.index,
                roles,
                ended,
            )
            if is_failed_start:
                self._pause(pauses)

    def _pause(self, pauses: Iterator[float]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, next(pauses))

    def _run_once(self) -> str:
        """Start the process, serve it until it ends, and return how it did."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = self._template.fork(self.index, theirs.fileno(), self._listener.fileno())
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        with self._changed:
            self._process = process
            if self._is_closed:
                process.kill()
        control = Connection(ours)
        try:
            reason = self._serve(process, control)
        finally:
            with self._changed:
                self._control = None
                self._changed.notify_all()
            control.close()
        try:
            code = process.wait(_EXIT_S)  # the connection closes a moment before the process can be waited for
        except TimeoutError:
            process.kill()
            code = process.wait()
        return reason or describe_exit(code)

    def _serve(self, process: ForkedProcess, control: Connection) -> str:
        """Take the messages of the process until it is gone; returns a reason if it was killed here.

        Time in which this thread did not run does not count: after a machine was suspended, the processes that were
        suspended with it must not be killed.
        """
        settings = self._settings
        setup = Setup(
            settings.run,
            settings.size,
            settings.num_cores,
            settings.patience_s,
            logging.getLogger("overlord").getEffectiveLevel(),
        )
        watch = _HealthWatch(settings.hung_after_s)
        try:
            control.send(setup)
            while True:
                silent = watch.look()
                if silent is not None:
                    process.kill()
                    return silent
                if watch.is_check_due:
                    self._send(CheckHealth())
                    watch.note_check()
                try:
                    message = control.receive(watch.wait_s)
                except TimeoutError:
                    if process.poll() is not None:  # a process forked from this one may have inherited its connection
                        return ""
                    continue
                self._take(message, control, watch)
        except (EOFError, ConnectionError):
            return ""

    def _take(self, message: object, control: Connection, watch: _HealthWatch) -> None:
        if isinstance(message, ProcessHealth):
            watch.note_answer(message.status_lines)
        elif isinstance(message, LogLine):
            self._log_line(message)
        elif isinstance(message, ProcessStarted):
            watch.note_start()
            with self._changed:
                self._control, self._is_up = control, True
                if self._is_closed:
                    self._send(EndProcess())
                else:
                    self._order(list(self._roles))
        elif isinstance(message, RoleDropped):
            with self._changed:
                self._dropping.discard(message.number)
                self._changed.notify_all()
        elif isinstance(message, RoleMade):
            with self._changed:
                role = self._roles.get(message.number)
                if role is not None:
                    role.is_made, role.error = True, message.error
                if all(role.is_made for role in self._roles.values()):
                    self._num_failed_starts = 0
                self._changed.notify_all()

    def _log_line(self, line: LogLine) -> None:
        logger = logging.getLogger(line.logger)
        if logger.isEnabledFor(line.level):
            place = f"(worker process {self.index}) %s"
            logger.handle(logger.makeRecord(line.logger, line.level, "", 0, place, (line.text,), None))

    def _order(self, numbers: Collection[int]) -> None:
        """Have roles made. All in one pickle, so that what they share (the job) is sent and kept once."""
        roles = {number: self._roles[number] for number in numbers}
        try:
            pickled = cloudpickle.dumps([role.make for role in roles.values()])
        except Exception as error:  # noqa: BLE001 - pickling calls the user's own code
            if len(numbers) > 1:
                for number in numbers:
                    self._order([number])
                return
            (role,) = roles.values()
            refused = SpecError(f"role {role.name!r} cannot be sent to another process: {type(error).__name__}: {error}")
            role.is_made, role.error = True, ErrorEnvelope.pickling(refused, "while it was pickled")
            self._changed.notify_all()
        else:
            self._send(MakeRoles(tuple((number, role.name) for number, role in roles.items()), pickled))

    def _send(self, message: object) -> None:
        """Send a message if there is a process; one that is gone is noticed by the supervisor."""
        control = self._control
        if control is not None:
            try:
                control.send(message, waits=False)
            except (ConnectionError, BlockingIOError):
                _log.debug("worker process %d does not take %s", self.index, type(message).__name__)


class _HealthWatch:
    """The health checks of one process: when the next is due, and whether it was silent for too long."""

    def __init__(self, hung_after_s: float | None) -> None:
        self._hung_after_s = math.inf if hung_after_s is None else hung_after_s
        self._limit_s = liveness.PROCESS_STARTING.after_s
        self._period_s = (
            liveness.PROCESS_HUNG.after_s if hung_after_s is None else hung_after_s
        ) / liveness.PROCESS_HUNG.checks
        self._has_started = False
        self._is_waiting = True
        self.is_check_due = False
        self._silent_s = 0.0
        self._looked_at = time.monotonic()
        self._status_lines: tuple[str, ...] = ()

    @property
    def wait_s(self) -> float:
        """How long to wait for a message until the next look."""
        return max(self._looked_at + self._period_s - time.monotonic(), 0.0)

    def look(self) -> str | None:
        """Count the silence since the last look, if a period has passed; returns why the process must be replaced."""
        now = time.monotonic()
        if now < self._looked_at + self._period_s:
            return None
        awake_s, self._looked_at = min(now - self._looked_at, 2 * self._period_s), now
        if self._is_waiting:
            self._silent_s += awake_s
        else:
            self.is_check_due = True
        if self._silent_s < self._limit_s:
            return None
        if not self._has_started:
            return f"no sign of life for {self._silent_s:.0f} s after it was started"
        busy = "".join(f"\n  at its last health check: {line}" for line in self._status_lines)
        return f"no answer for {self._silent_s:.1f} s though it was alive (Processes(hung_after_s={self._limit_s:g})){busy}"

    def note_start(self) -> None:
        self._has_started, self._is_waiting, self._silent_s, self._limit_s = True, False, 0.0, self._hung_after_s

    def note_check(self) -> None:
        self._is_waiting, self.is_check_due = True, False

    def note_answer(self, status_lines: tuple[str, ...]) -> None:
        self._is_waiting, self._silent_s, self._status_lines = False, 0.0, status_lines
