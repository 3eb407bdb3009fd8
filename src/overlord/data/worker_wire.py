"""Messages between a process pool and its workers: a small pickled head, then an Arrow table, over a socket pair."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

import numpy as np
import pyarrow as pa

_LENGTHS = struct.Struct("<QQ")


def send(connection: socket.socket, head: Any, table: pa.Table | None = None) -> None:
    packed = pickle.dumps(head)
    body = b"" if table is None else _as_stream(table)
    connection.sendall(_LENGTHS.pack(len(packed), len(body)) + packed)
    if table is not None:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[Any, pa.Table | None]:
    """The next message. Raises EOFError when the other side is gone."""
    head_bytes, body_bytes = _LENGTHS.unpack(_exactly(connection, _LENGTHS.size))
    head = pickle.loads(_exactly(connection, head_bytes))
    if not body_bytes:
        return head, None
    return head, pa.ipc.open_stream(pa.py_buffer(_exactly(connection, body_bytes))).read_all()


def _as_stream(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _exactly(connection: socket.socket, num_bytes: int) -> memoryview:
    data = np.empty(num_bytes, np.uint8).data  # not a bytearray: that would be zeroed first
    done = 0
    while done < num_bytes:
        count = connection.recv_into(data[done:])
        if count == 0:
            raise EOFError("the other side of the connection is gone")
        done += count
    return data
