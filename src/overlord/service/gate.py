"""The gate: what a service takes from a connection that has not shown the token.

Flight reads a whole message before it looks at who sent it, and limits neither a message nor their number: strangers could
fill the memory of a service with gigabytes that are refused afterwards. The gate stands beside the data's way, not in it. It
looks at how many bytes the kernel has received on each connection, and cuts those that send more than `STRANGER_BYTES`, or
take longer than `STRANGER_S`, before a call with the token came through. A connection that has shown the token is left alone
from then on.

What a stranger can make a service hold is thus what arrives until the gate has looked: milliseconds, however many they are.
It needs Linux, where the kernel tells these numbers; elsewhere there is no gate.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

from overlord.runtime.liveness import STRANGER

if TYPE_CHECKING:
    from collections.abc import Callable

STRANGER_BYTES = 32 << 10
"""Ten times what a handshake and the first call take. Compressed messages may unfold to a thousand times as much."""
STRANGER_S = STRANGER.after_s
MOST_STRANGERS = 1024
"""Connections at once that have not shown the token; the oldest are cut beyond that."""

_RECEIVED_AT = 128  # of `tcpi_bytes_received` in the kernel's struct tcp_info
_TCP_INFO_BYTES = 136
_LOOK_S = 0.5  # a connection that was accepted without being noticed is found after so long
_ACCEPT_S = 0.002  # what it takes from a connection's arrival until it is accepted, on a machine with nothing else to do
_ALERT_S = 1.0  # and on a busy one
_SHARE = 10  # looking through all connections takes a tenth of the time, at most
_log = logging.getLogger(__name__)

Peer = tuple[str, int]


@dataclass(slots=True)
class _Stranger:
    """A connection that has not shown the token: the server's own socket, by another descriptor."""

    socket: socket.socket
    peer: Peer
    since: float


def has_gate() -> bool:
    """Whether this system tells what a gate must know."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO")


class Gate:
    """Watches the connections to a port that this process listens on, until it is closed. `clock` says how long each of them
    has had."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self._events = select.epoll()
        self._wake, self._woken = socket.socketpair()
        self._events.register(self._woken, select.EPOLLIN)
        self._lock = threading.Lock()
        self._admitted: dict[Peer, float] = {}  # and when
        self._looked_at = clock()
        self._inodes: dict[int, Peer] = {}  # of every connection, so that a port that is used again is somebody else's
        self._strangers: dict[int, _Stranger] = {}  # by the descriptor
        self._listeners: list[socket.socket] = []
        self._is_closed = False
        self._look()
        self._thread = threading.Thread(target=self._watch, name="overlord-gate", daemon=True)
        self._thread.start()

    def admit(self, peer: str) -> None:
        """Note that a call with the token came from a peer, as gRPC writes it."""
        known = parsed_peer(peer)
        if known is not None and known not in self._admitted:
            with self._lock:
                self._admitted[known] = self._clock()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._wake.send(b"x")
            self._thread.join(5.0)

    def _watch(self) -> None:
        next_look = alert_until = time.monotonic()
        while not self._is_closed:
            events = dict(self._events.poll(max(next_look - time.monotonic(), 0.0), 256))
            now = time.monotonic()
            if any(listener.fileno() in events for listener in self._listeners):
                # It is the server that accepts the connection, and a busy one takes its time.
                alert_until, next_look = now + _ALERT_S, min(next_look, now + _ACCEPT_S)
            for descriptor, event in events.items():
                stranger = self._strangers.get(descriptor)
                if stranger is not None:
                    self._judge(descriptor, stranger, bool(event & (select.EPOLLHUP | select.EPOLLERR)))
            if now >= next_look:
                self._look()
                took_s = time.monotonic() - now
                next_look = now + max(_ACCEPT_S if now < alert_until else _LOOK_S, _SHARE * took_s)
        for stranger in self._strangers.values():
            stranger.socket.close()
        for held in (*self._listeners, self._wake, self._woken):
            held.close()
        self._events.close()

    def _judge(self, descriptor: int, stranger: _Stranger, has_ended: bool = False) -> None:
        if has_ended or stranger.peer in self._admitted:
            self._let_be(descriptor)
            return
        num_bytes = _num_received(stranger.socket)
        if num_bytes > STRANGER_BYTES:
            self._cut(descriptor, f"it sent {num_bytes:,} bytes")
        elif self._clock() - stranger.since > STRANGER_S:
            self._cut(descriptor, f"it had {STRANGER_S:.0f} s")

    def _cut(self, descriptor: int, reason: str) -> None:
        stranger = self._strangers[descriptor]
        _log.warning("cut the connection from %s:%d: %s without showing the token", *stranger.peer, reason)
        with suppress(OSError):  # it may have ended by itself
            stranger.socket.shutdown(socket.SHUT_RDWR)
        self._let_be(descriptor)

    def _let_be(self, descriptor: int) -> None:
        stranger = self._strangers.pop(descriptor)
        with suppress(OSError):
            self._events.unregister(descriptor)
        stranger.socket.close()  # this descriptor of it; the server has its own

    def _look(self) -> None:
        """Go through this process's sockets for connections that are new, and forget those that are gone."""
        own = {held.fileno() for held in (*self._listeners, self._wake, self._woken)} | set(self._strangers)
        found: dict[int, Peer] = {}
        before, now = set(self._inodes.values()), self._clock()
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            inode = _socket_inode(descriptor)
            if inode is None or descriptor in own or inode in found:  # gRPC may have several descriptors of a connection
                continue
            if inode in self._inodes:
                found[inode] = self._inodes[inode]
            else:
                peer = self._greet(descriptor, inode)
                if peer is not None:
                    found[inode] = peer
                    if peer in before:  # the same port, and another connection
                        self._admitted.pop(peer, None)
        with self._lock:
            here = set(found.values())
            for peer in [p for p, since in self._admitted.items() if p not in here and since < self._looked_at]:
                del self._admitted[peer]  # it is gone, or was before it was ever seen
        self._inodes, self._looked_at = found, now
        for descriptor, stranger in list(self._strangers.items()):
            self._judge(descriptor, stranger)
        for descriptor in list(self._strangers)[: max(len(self._strangers) - MOST_STRANGERS, 0)]:
            self._cut(descriptor, f"{MOST_STRANGERS} others wait")

    def _greet(self, descriptor: int, inode: int) -> Peer | None:
        """Begin to watch a socket, if it is one of the server's."""
        with suppress(OSError):  # it may be closed at any moment
            same = socket.socket(fileno=os.dup(descriptor))
            is_tcp = same.type == socket.SOCK_STREAM and same.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and _socket_inode(same.fileno()) == inode and same.getsockname()[1] == self._port:
                return self._begin(same)
            same.close()
        return None

    def _begin(self, same: socket.socket) -> Peer | None:
        flags = select.EPOLLIN | select.EPOLLET | select.EPOLLRDHUP
        if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if all(os.fstat(same.fileno()).st_ino != os.fstat(held.fileno()).st_ino for held in self._listeners):
                # Connections get it from the listener. Requests are kilobytes: no need to let a stranger send faster.
                same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STRANGER_BYTES)
                self._listeners.append(same)
                self._events.register(same, flags)
            else:
                same.close()
            return None
        try:
            peer = _plain(*same.getpeername()[:2])
        except OSError:
            same.close()
            raise
        self._strangers[same.fileno()] = _Stranger(same, peer, self._clock())
        self._events.register(same, flags)
        return peer


def parsed_peer(text: str) -> Peer | None:
    """The address and port in what gRPC calls a peer: `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _plain(host.strip("[]"), int(port))


def _plain(host: str, port: int) -> Peer:
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port


def _socket_inode(descriptor: int) -> int | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _num_received(connection: socket.socket) -> int:
    """The bytes that the kernel has taken from the other side; 0 on one too old to tell."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(info[_RECEIVED_AT : _RECEIVED_AT + 8], sys.byteorder)
