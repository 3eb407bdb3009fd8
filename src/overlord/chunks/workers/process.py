"""One worker process as its parent sees it: start, request, kill.

A message in either direction is a small pickled head and, where there are rows, an Arrow stream, over a socket pair.
"""

from __future__ import annotations

import pickle
import socket
import struct
import subprocess
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.errors import ClosedError, WorkerDiedError
from overlord.runtime.interpreters import describe_exit, start_interpreter
from overlord.runtime.liveness import WORKER_EXIT, WORKER_STARTING
from overlord.runtime.retry import retry
from overlord.runtime.transport import table_from_stream, table_to_stream

if TYPE_CHECKING:
    from collections.abc import Callable

START_TIMEOUT_S = WORKER_STARTING.after_s


class WorkerGoneError(Exception):
    """The worker died or did not answer in time; the message says how. Never leaves the pool."""


class WorkerProcess:
    """A worker process and the connection to it. One thread at a time may use it."""

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        try:
            self._process = start_interpreter(
                module,
                theirs.fileno(),
                descriptors=[theirs.fileno()],
                # There is one worker per core: none starts threads of its own unless the environment says so.
                environment={"OMP_NUM_THREADS": "1"},
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = ours
        self.loaded: set[int] = set()

    @staticmethod
    def start(
        admit: Callable[[WorkerProcess], bool] = lambda _: True, module: str = "overlord.chunks.workers.worker"
    ) -> WorkerProcess:
        """Start a worker, which runs `main` of a module, and wait until it is ready. Call it from a thread that outlives the
        worker: the kernel kills the worker when that thread ends. `admit` gets each process before it is ready,
        so that it can be killed meanwhile; ClosedError when it returns False."""

        def attempt() -> WorkerProcess:
            worker = WorkerProcess(module)
            if not admit(worker):
                worker.close()
                raise ClosedError("the process pool was closed while a worker was starting")
            try:
                worker._receive(START_TIMEOUT_S)
            except WorkerGoneError:
                worker.close()
                raise
            return worker

        tries = WORKER_STARTING.misses
        try:
            return retry(attempt, on=WorkerGoneError, pauses=repeat(0.0, tries - 1))
        except WorkerGoneError as error:
            raise WorkerDiedError(f"worker processes die before they are ready, {tries} in a row: {error}") from None

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(
        self, head: Any, table: pa.Table | None = None, timeout_s: float | None = None
    ) -> tuple[Any, pa.Table | None]:
        """Send a message and wait for the answer; raises WorkerGoneError."""
        self._connection.settimeout(timeout_s)
        try:
            send(self._connection, head, table)
        except (ConnectionError, TimeoutError):
            raise WorkerGoneError(self._describe_end(timeout_s)) from None
        return self._receive(timeout_s)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Kill the process, wait for its exit and close the connection."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self, timeout_s: float | None) -> tuple[Any, pa.Table | None]:
        self._connection.settimeout(timeout_s)
        try:
            return receive(self._connection)
        except (EOFError, ConnectionError, TimeoutError):
            raise WorkerGoneError(self._describe_end(timeout_s)) from None

    def _describe_end(self, timeout_s: float | None) -> str:
        try:
            # The connection closes a moment before the process can be waited for.
            code = self._process.wait(timeout=WORKER_EXIT.after_s)
        except subprocess.TimeoutExpired:
            return f"no answer within {timeout_s} s" if timeout_s is not None else "it closed its connection"
        return describe_exit(code)


_LENGTHS = struct.Struct("<QQ")


def send(connection: socket.socket, head: Any, table: pa.Table | None = None) -> None:
    packed = pickle.dumps(head)
    body = b"" if table is None else table_to_stream(table)
    connection.sendall(_LENGTHS.pack(len(packed), len(body)) + packed)
    if table is not None:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Any, pa.Table | None]:
    """Wait for the next message; raises EOFError when the other side is gone."""
    head_bytes, body_bytes = _LENGTHS.unpack(_receive_exactly(connection, _LENGTHS.size))
    head = pickle.loads(_receive_exactly(connection, head_bytes))
    if not body_bytes:
        return head, None
    return head, table_from_stream(pa.py_buffer(_receive_exactly(connection, body_bytes)))


def _receive_exactly(connection: socket.socket, num_bytes: int) -> memoryview:
    data = np.empty(num_bytes, np.uint8).data  # not a bytearray: that would be zeroed first
    done = 0
    while done < num_bytes:
        count = connection.recv_into(data[done:])
        if count == 0:
            raise EOFError("the other side of the connection is gone")
        done += count
    return data
