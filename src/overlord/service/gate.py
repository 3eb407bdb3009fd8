"""The gate: limits what a service receives from a connection that has not shown the token (a stranger).

Flight reads a whole message before it authenticates the sender, and limits neither the size of messages nor their number:
strangers could fill the memory of a service with gigabytes that are refused afterwards. The gate is not in the data path. It
reads from the kernel how many bytes each connection has received, and closes a connection that sends more than
`STRANGER_BYTES`, or takes longer than `STRANGER_S`, before its first call with the token. A connection that has shown the
token is not watched any more.

So strangers, however many they are, can make a service buffer only the bytes that arrive between two scans: milliseconds,
or as long as a busy machine keeps the gate's thread from running.
The gate needs Linux, where `TCP_INFO` counts received bytes; on other systems there is none.
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
"""Ten times the size of a handshake and the first call. A compressed message may expand to a thousand times its size."""
STRANGER_S = STRANGER.after_s
MOST_STRANGERS = 1024
"""The most connections at once that have not shown the token. Beyond that the oldest are closed."""

_RECEIVED_AT = 128  # of `tcpi_bytes_received` in the kernel's struct tcp_info
_TCP_INFO_BYTES = 136
_SCAN_S = 0.5  # between two scans when no connection arrives; a scan finds those that no event announced
_ACCEPT_S = 0.002  # from a connection's arrival until the server accepts it, on an idle machine
_ALERT_S = 1.0  # the same, on a busy machine
_SCAN_PAUSE = 10  # between two scans: ten times the duration of the first, so scans take at most a tenth of a core
_log = logging.getLogger(__name__)

Peer = tuple[str, int]


@dataclass(slots=True)
class _Stranger:
    """A connection that has not shown the token. `socket` is a duplicate descriptor of the server's own socket."""

    socket: socket.socket
    peer: Peer
    since: float


def has_gate() -> bool:
    """Whether this system counts the bytes received on a connection."""
    return sys.platform == "linux" and hasattr(socket, "TCP_INFO")


class Gate:
    """Watches the connections to a port that this process listens on, in a thread of its own, until `close`."""

    def __init__(self, port: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._port = port
        self._clock = clock
        self._events = select.epoll()
        self._wake, self._woken = socket.socketpair()
        self._events.register(self._woken, select.EPOLLIN)
        self._lock = threading.Lock()
        self._admitted: dict[Peer, float] = {}  # peers that have shown the token, with the time
        self._scanned_at = clock()
        self._inodes: dict[int, Peer] = {}  # of every connection: tells a new one from an old one of the same peer
        self._strangers: dict[int, _Stranger] = {}  # by descriptor
        self._listeners: list[socket.socket] = []
        self._is_closed = False
        self._scan_sockets()
        self._thread = threading.Thread(target=self._watch, name="overlord-gate", daemon=True)
        self._thread.start()

    def admit(self, peer: str) -> None:
        """Note that a call with the token came from a peer, in the notation of gRPC."""
        known = parse_peer(peer)
        if known is not None and known not in self._admitted:
            with self._lock:
                self._admitted[known] = self._clock()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with suppress(OSError):  # the thread may have seen it already, and closed its sockets
                self._wake.send(b"x")
            self._thread.join(5.0)

    def _watch(self) -> None:
        next_scan = alert_until = time.monotonic()
        while not self._is_closed:
            events = dict(self._events.poll(max(next_scan - time.monotonic(), 0.0), 256))
            now = time.monotonic()
            if any(listener.fileno() in events for listener in self._listeners):
                # The server accepts the connection, and a busy one is slow to do so: scan often for a while.
                alert_until, next_scan = now + _ALERT_S, min(next_scan, now + _ACCEPT_S)
            for descriptor, event in events.items():
                stranger = self._strangers.get(descriptor)
                if stranger is not None:
                    self._check_stranger(descriptor, stranger, bool(event & (select.EPOLLHUP | select.EPOLLERR)))
            if now >= next_scan:
                self._scan_sockets()
                took_s = time.monotonic() - now
                next_scan = now + max(_ACCEPT_S if now < alert_until else _SCAN_S, _SCAN_PAUSE * took_s)
        for stranger in self._strangers.values():
            stranger.socket.close()
        for held in (*self._listeners, self._wake, self._woken):
            held.close()
        self._events.close()

    def _check_stranger(self, descriptor: int, stranger: _Stranger, has_ended: bool = False) -> None:
        if has_ended or stranger.peer in self._admitted:
            self._stop_watching(descriptor)
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
        self._stop_watching(descriptor)

    def _stop_watching(self, descriptor: int) -> None:
        stranger = self._strangers.pop(descriptor)
        with suppress(OSError):
            self._events.unregister(descriptor)
        stranger.socket.close()  # only this descriptor; the server has its own

    def _scan_sockets(self) -> None:
        """Scan this process's sockets: watch connections that are new, forget those that are gone."""
        own = {held.fileno() for held in (*self._listeners, self._wake, self._woken)} | set(self._strangers)
        found: dict[int, Peer] = {}
        before, now = set(self._inodes.values()), self._clock()
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            inode = _socket_inode(descriptor)
            if inode is None or descriptor in own or inode in found:  # gRPC may have several descriptors of one connection
                continue
            if inode in self._inodes:
                found[inode] = self._inodes[inode]
            else:
                peer = self._watch_if_ours(descriptor, inode)
                if peer is not None:
                    found[inode] = peer
                    if peer in before:  # a new connection that reuses the port of an old one
                        self._admitted.pop(peer, None)
        with self._lock:
            here = set(found.values())
            for peer in [p for p, since in self._admitted.items() if p not in here and since < self._scanned_at]:
                del self._admitted[peer]  # its connection ended, perhaps between two scans
        self._inodes, self._scanned_at = found, now
        for descriptor, stranger in list(self._strangers.items()):
            self._check_stranger(descriptor, stranger)
        for descriptor in list(self._strangers)[: max(len(self._strangers) - MOST_STRANGERS, 0)]:
            self._cut(descriptor, f"{MOST_STRANGERS} others wait")

    def _watch_if_ours(self, descriptor: int, inode: int) -> Peer | None:
        """Watch a socket if it is one of the server's. Returns the peer if the socket is a connection."""
        with suppress(OSError):  # the server may close it at any moment
            same = socket.socket(fileno=os.dup(descriptor))
            is_tcp = same.type == socket.SOCK_STREAM and same.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and _socket_inode(same.fileno()) == inode and same.getsockname()[1] == self._port:
                return self._register(same)
            same.close()
        return None

    def _register(self, same: socket.socket) -> Peer | None:
        flags = select.EPOLLIN | select.EPOLLET | select.EPOLLRDHUP
        if same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            if all(os.fstat(same.fileno()).st_ino != os.fstat(held.fileno()).st_ino for held in self._listeners):
                # Accepted connections inherit the size of the buffer. Requests are kilobytes, so a small one suffices.
                same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STRANGER_BYTES)
                self._listeners.append(same)
                self._events.register(same, flags)
            else:
                same.close()
            return None
        try:
            peer = _normalize_peer(*same.getpeername()[:2])
        except OSError:
            same.close()
            raise
        self._strangers[same.fileno()] = _Stranger(same, peer, self._clock())
        self._events.register(same, flags)
        return peer


def parse_peer(text: str) -> Peer | None:
    """The address and port of a peer in gRPC's notation: `ipv4:10.0.0.1:5000` or `ipv6:%5B::1%5D:5000`."""
    kind, _, rest = unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _normalize_peer(host.strip("[]"), int(port))


def _normalize_peer(host: str, port: int) -> Peer:
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
    """The bytes that the kernel has received from the peer; 0 on a kernel too old to count them."""
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    except OSError:
        return 0
    return int.from_bytes(info[_RECEIVED_AT : _RECEIVED_AT + 8], sys.byteorder)
