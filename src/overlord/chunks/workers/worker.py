"""What runs inside a worker process: receive functions and tables, send tables back, until the parent is gone."""

from __future__ import annotations

import os
import pickle
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from overlord.chunks.transforms.apply import TransformCall
from overlord.chunks.transforms.outcome import Context, RowError, one_line
from overlord.chunks.workers.process import receive, send
from overlord.runtime.interpreters import belong_to
from overlord.runtime.transport import ErrorEnvelope

if TYPE_CHECKING:
    from overlord.stream.facts import Ints

_PLACE = "in a worker process"


@dataclass(frozen=True, slots=True)
class Load:
    """Request: keep this pickled function under a number."""

    number: int
    pickled: bytes


@dataclass(frozen=True, slots=True)
class RunSlice:
    """Request: run a function over the table that follows. `stop_at_error`: raise rather than leave bad rows out."""

    number: int
    context: Context
    origin: Ints
    stop_at_error: bool


@dataclass(frozen=True, slots=True)
class Done:
    """Answer: the table that follows, where its rows came from, and the (origin, error) of rows left out."""

    origin: Ints | None
    bad: list[tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Failed:
    """Answer: the exception that the function raised, and the row it is about where that is known."""

    error: ErrorEnvelope
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Answer: a function could not be unpickled here."""

    error: str


def main(file_number: int, parent: int) -> None:
    belong_to(parent)
    pa.set_cpu_count(1)  # there is a worker per core already
    connection = socket.socket(fileno=file_number)
    try:
        _serve(connection)
    except (EOFError, ConnectionError):
        os._exit(0)  # the pool was closed or its process is gone: there is nobody to clean up for


def _serve(connection: socket.socket) -> None:
    functions: dict[int, TransformCall] = {}
    send(connection, "ready")
    while True:
        request, table = receive(connection)
        if isinstance(request, Load):
            try:
                functions[request.number] = TransformCall(pickle.loads(request.pickled))
            except Exception as error:  # noqa: BLE001 - unpickling runs the user's own imports
                send(connection, NotLoaded(one_line(error)))
            else:
                send(connection, "loaded")
        else:
            answer, result = _run(functions[request.number], request, table)
            send(connection, answer, result)


def _run(function: TransformCall, request: RunSlice, table: pa.Table | None) -> tuple[Done | Failed, pa.Table | None]:
    assert table is not None  # every RunSlice carries one
    bad: list[tuple[int, str]] = []
    on_bad = None if request.stop_at_error else lambda origin, error: bad.append((origin, error))
    try:
        outcome = function.run(table, np.asarray(request.origin), request.context, on_bad)
    except RowError as error:
        return Failed(ErrorEnvelope.pickling(error.cause, _PLACE), error.origin), None
    except Exception as error:  # noqa: BLE001 - the user's function may raise anything
        return Failed(ErrorEnvelope.pickling(error, _PLACE)), None
    return Done(outcome.origin, bad), outcome.table
