"""Worker processes are forked from a template: a fresh interpreter that has imported what they need, has loaded what a job
says that they will (vocabularies of tokenisers), and does nothing else.

Importing takes half a second of CPU time and 40 MB in every process; copies of the template share both. It has one thread,
and nothing of the user's program, so that forking it is safe; forking the process that started the run would not be. The
template ends with that process, and worker processes end with the template: all of them are replaced then.

Both sides of it are here, and what they tell each other: the template is sent a number and descriptors, and answers with the
descriptor of a process, or why there is none; when a process ends, the template says how.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import threading
import warnings
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from overlord.runtime import liveness
from overlord.runtime.engine import EarlyLoad  # noqa: TC001 - msgspec reads it
from overlord.runtime.interpreters import belong_to, describe_exit, start_interpreter
from overlord.runtime.memory import give_threads_heaps

if TYPE_CHECKING:
    from collections.abc import Sequence

_IMPORTED = (
    "overlord.service.constructor",
    "overlord.roles.loader_host",
    "overlord.runtime.processes.worker",
    "overlord.service.server",
    "overlord.declare.job",
    "numpy.random",
    "pyarrow.parquet",
)
"""What most worker processes import. By name, because the engine knows no roles: one that is missing costs only time."""
_NOTHING_FORKED = -1
_START_S = liveness.PROCESS_STARTING.after_s
_EXIT_S = liveness.WORKER_EXIT.after_s
_MESSAGE_BYTES = 1 << 12


class _Load(Struct, tag="load"):
    """To the template: a call that loads what processes share."""

    call: EarlyLoad


class _Fork(Struct, tag="fork"):
    """To the template. The control connection and the listener of the new process come with it."""

    number: int
    index: int
    folder: str | None


class _Forked(Struct, tag="forked"):
    """The process runs; its pidfd comes with the message."""

    number: int
    pid: int


class _Failed(Struct, tag="failed"):
    number: int
    reason: str


class _Ended(Struct, tag="ended"):
    number: int
    code: int


_TO_TEMPLATE: msgspec.json.Decoder[_Load | _Fork] = msgspec.json.Decoder(_Load | _Fork)
_FROM_TEMPLATE: msgspec.json.Decoder[_Forked | _Failed | _Ended] = msgspec.json.Decoder(_Forked | _Failed | _Ended)


class ForkedProcess:
    """A process that was forked from the template. It has the methods of `subprocess.Popen` that a supervisor needs."""

    def __init__(self, pid: int, descriptor: int, ended: Future[int]) -> None:
        """`descriptor` is its pidfd: whatever is sent there cannot reach another process, as it could by a number."""
        self.pid = pid
        self._descriptor = descriptor
        self._ended = ended

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def poll(self) -> int | None:
        """The exit code, if the process has ended."""
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the process to end; returns the exit code. Raises TimeoutError."""
        return self._ended.result(timeout_s)

    def __del__(self) -> None:
        os.close(self._descriptor)


class Template:
    """The template of a run's worker processes; started when it is needed, also again. Thread-safe."""

    def __init__(self, num_cores: int) -> None:
        """`num_cores` is how many threads a library may keep busy in a worker process."""
        self._num_cores = num_cores
        self._lock = threading.Lock()
        self._now: _Running | None = None
        self._is_closed = False

    def start(self, loads: Sequence[EarlyLoad] = ()) -> None:
        """Start the template, without waiting for it, and let it load what processes share. One that is started again, in
        place of one that has ended, loads nothing: that may be what ended it."""
        self._running().load(loads)

    def fork(self, index: int, control: int, listener: int) -> ForkedProcess:
        """Start a worker process, with descriptors that it gets copies of. OSError where it cannot be started."""
        return self._running().fork(index, control, listener)

    def close(self) -> None:
        """End the template, and with it every process that was forked from it."""
        with self._lock:
            self._is_closed = True
            running, self._now = self._now, None
        if running is not None:
            running.close()

    def _running(self) -> _Running:
        with self._lock:
            if self._is_closed:
                raise ConnectionError("the engine is closed")
            if self._now is None or self._now.has_ended.is_set():
                self._now = _Running(self._num_cores)
            return self._now


class _Running:
    """A template process. A thread of its own starts it, because the kernel ends a process with the thread that started it,
    and takes its messages."""

    def __init__(self, num_cores: int) -> None:
        self.has_ended = threading.Event()
        self._num_cores = num_cores
        self._lock = threading.Lock()
        self._num_forks = 0
        self._starting: dict[int, Future[ForkedProcess]] = {}
        self._ended: dict[int, Future[int]] = {}
        self._reason = ""
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread = threading.Thread(target=self._run, name="overlord-template", daemon=True)
        self._thread.start()

    def fork(self, index: int, control: int, listener: int) -> ForkedProcess:
        started: Future[ForkedProcess] = Future()
        with self._lock:
            if self.has_ended.is_set():
                raise ConnectionError(self._reason)
            self._num_forks += 1
            number = self._num_forks
            self._starting[number] = started
            self._ended[number] = Future()
        request = msgspec.json.encode(_Fork(number, index, _folder()))
        socket.send_fds(self._socket, [request], [control, listener])
        try:
            return started.result(_START_S)
        except TimeoutError:
            self.close()
            raise OSError(f"the template of worker processes did not answer for {_START_S:.0f} s") from None

    def load(self, calls: Sequence[EarlyLoad]) -> None:
        for message in (msgspec.json.encode(_Load(call)) for call in calls):
            if len(message) <= _MESSAGE_BYTES:
                with suppress(OSError):  # it has ended; the processes of the next one load this themselves
                    self._socket.send(message)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(_EXIT_S)

    def _run(self) -> None:
        threads = str(self._num_cores)
        try:
            process = start_interpreter(
                "overlord.runtime.processes.template",
                self._theirs.fileno(),
                descriptors=[self._theirs.fileno()],
                # All processes together have a thread per core, unless the environment says otherwise. Arrow's allocator
                # starts a thread otherwise, which would be lost in a fork.
                environment={
                    "OMP_NUM_THREADS": threads,
                    "RAYON_NUM_THREADS": threads,
                    "JE_ARROW_MALLOC_CONF": "background_thread:false",
                },
            )
        except OSError as error:
            return self._end(f"an interpreter could not be started: {error}")
        finally:
            self._theirs.close()
        with suppress(OSError):
            while self._take_message():
                pass
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_S)
        process.kill()
        self._end(f"the template of worker processes ended with {describe_exit(process.wait())}")

    def _take_message(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MESSAGE_BYTES, 1)
        if not data:
            return False
        message = _FROM_TEMPLATE.decode(data)
        with self._lock:
            if isinstance(message, _Forked):
                process = ForkedProcess(message.pid, descriptors[0], self._ended[message.number])
                self._starting.pop(message.number).set_result(process)
            elif isinstance(message, _Failed):
                self._starting.pop(message.number).set_exception(OSError(message.reason))
                del self._ended[message.number]
            else:
                self._ended.pop(message.number).set_result(message.code)
        return True

    def _end(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            self.has_ended.set()
            starting, ended = list(self._starting.values()), list(self._ended.values())
            self._starting.clear()
            self._ended.clear()
        self._socket.close()
        for future in starting:
            future.set_exception(ConnectionError(reason))
        for future in ended:
            future.set_result(-signal.SIGKILL)  # by the kernel, because the template is gone


def _folder() -> str | None:
    with suppress(FileNotFoundError):  # it was removed
        return os.getcwd()
    return None


# In the template


def main(requests_number: int, parent: int) -> None:
    """Fork processes until the parent is gone."""
    belong_to(parent, "overlord-fork", in_one_thread=True)
    give_threads_heaps()  # so will the processes that are forked
    warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)  # see JE_ARROW_MALLOC_CONF
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would write to every object, and no page would stay shared
    requests = socket.socket(fileno=requests_number)
    poll, forked = select.poll(), dict[int, tuple[int, int]]()  # by pidfd
    poll.register(requests, select.POLLIN)
    with suppress(OSError):
        while True:
            for descriptor, _ in poll.poll():
                if descriptor != requests_number:
                    poll.unregister(descriptor)
                    _reap(requests, descriptor, *forked.pop(descriptor))
                elif (found := _take_request(requests, forked)) is None:
                    os._exit(0)
                elif found >= 0:
                    poll.register(found, select.POLLIN)
    os._exit(0)


def _take_request(requests: socket.socket, forked: dict[int, tuple[int, int]]) -> int | None:
    """Do what is asked; returns the pidfd of a process that was forked, -1 if none was, None if nobody asks any more."""
    data, descriptors, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
    if not data:
        return None
    request = _TO_TEMPLATE.decode(data)
    if isinstance(request, _Load):
        _load(request.call)
        return _NOTHING_FORKED
    try:
        pid = os.fork()
        if pid == 0:
            _become_worker(request, requests, [*forked], descriptors)
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        requests.send(msgspec.json.encode(_Failed(request.number, str(error))))
        return _NOTHING_FORKED
    finally:
        for number in descriptors:
            os.close(number)
    forked[descriptor] = request.number, pid
    socket.send_fds(requests, [msgspec.json.encode(_Forked(request.number, pid))], [descriptor])
    return descriptor


def _load(call: EarlyLoad) -> None:
    with suppress(Exception):  # the process that needs it says what is wrong
        getattr(importlib.import_module(call.module), call.function)(*call.arguments)
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(1)  # processes that are forked beside another thread may inherit its locks: another template forks them
    gc.collect()
    gc.freeze()


def _reap(requests: socket.socket, descriptor: int, number: int, pid: int) -> None:
    os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    requests.send(msgspec.json.encode(_Ended(number, os.waitstatus_to_exitcode(status))))


def _become_worker(request: _Fork, requests: socket.socket, siblings: list[int], descriptors: list[int]) -> None:
    """Never returns."""
    from overlord.runtime.processes import worker

    try:
        requests.close()
        for descriptor in siblings:
            os.close(descriptor)
        if request.folder is not None:
            with suppress(OSError):
                os.chdir(request.folder)
        control, listener = descriptors
        worker.main(control, listener, request.index, os.getppid())
    except BaseException:  # noqa: BLE001 - nothing of the template may run in this process
        import traceback

        traceback.print_exc()
        os._exit(1)
