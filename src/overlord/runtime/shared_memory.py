"""Memory and messages that processes of one machine share.

A `SharedSegment` is anonymous memory of the kernel (a memfd). It has no name and is not in `/dev/shm`, so that file system's
size does not limit it, and it is freed when the last process that maps it ends, even by SIGKILL. Its descriptor travels
with a message over a unix socket. A `SharedObject` is a pickled object whose arrays lie in a segment: sending it costs the
same however large it is, and every receiver's arrays are views of the same memory.

Where the system refuses a segment, a message that is too long for one packet travels in several.

Sockets are of the abstract namespace, which leaves no files, and admit only processes of the same user. They carry pickles:
only processes of one run talk this way.
"""

from __future__ import annotations

import array
import errno
import functools
import itertools
import logging
import mmap
import os
import pickle
import resource
import secrets
import select
import socket
import struct
import sys
import threading
from collections import deque
from contextlib import suppress
from ctypes import CDLL, addressof, c_char, c_int, c_long, c_size_t, c_void_p, get_errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from overlord.errors import OverlordError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

_ALIGNMENT = 64
_IN_BAND_BYTES = 1 << 14
"""Buffers up to this size travel inside the message: a segment costs several system calls."""
_MESSAGE_BYTES = 1 << 16
"""Longer messages travel in a segment, because a packet must fit into the socket's buffer."""
_PROBED_BYTES = 1 << 20
"""What a buffer of a batch may take: a limit on the size of files (RLIMIT_FSIZE) refuses more than a byte."""
_PACKET_S = 30.0
"""How long the next packet of a message may be in coming, or may wait where the sender does not: then the other process
hangs, and the connection is of no use, because the rest would be taken for the next message."""
_INLINE, _IN_SEGMENT, _IN_PACKETS = b"\0", b"\1", b"\2"
_MOST_DESCRIPTORS = 64
_MOST_BUFFERS = 1024
"""That Linux writes at once (IOV_MAX)."""
_RIGHTS_BYTES = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
# As plain integers: flags of an enum cost microseconds.
_SOCKET_LEVEL = int(socket.SOL_SOCKET)
_CLOSE_ON_EXEC, _WITHOUT_WAITING = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_DONTWAIT)
_IS_CUT = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_CREDENTIALS = struct.Struct("3i")  # of a peer: process, user, group
_BACKLOG = 128
_numbers = itertools.count()
_log = logging.getLogger(__name__)

ByteRange: TypeAlias = tuple[int, int]
"""From byte, to byte."""


class SharedSegment:
    """Shared memory, mapped in this process. Arrays over `memory` keep the mapping; the descriptor is closed with the
    segment."""

    __slots__ = ("__weakref__", "address", "descriptor", "is_retired", "memory", "number")

    def __init__(self, descriptor: int, *, writable: bool) -> None:
        """Map a descriptor, which belongs to the segment from now on."""
        self.descriptor = -1
        self.number = next(_numbers)
        """Unique in the process that created the segment."""
        self.is_retired = False
        """True where another process may read this memory for ever: it must not be written to again."""
        size = os.fstat(descriptor).st_size
        try:
            if writable:
                mapped = np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
            else:
                mapped = np.asarray(_ReadOnlyMapping(descriptor, size))
        except OSError as error:
            os.close(descriptor)
            raise with_file_limit(error) from None
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.memory: NDArray[np.uint8] = mapped
        self.address = address_of(self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_segment, (_add_to_message(self),)

    @staticmethod
    def create(num_bytes: int) -> SharedSegment:
        """New memory, zeroed. Raises OSError where the system has none left."""
        descriptor = os.memfd_create("overlord", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, max(num_bytes, 1))
        except BaseException:
            os.close(descriptor)
            raise
        return SharedSegment(descriptor, writable=True)

    @staticmethod
    def of(parts: Sequence[bytes | memoryview], places: Sequence[ByteRange]) -> SharedSegment:
        """New memory with these buffers at their places, which are rising. They are written as to a file, at half the cost
        of copying them into a mapping, page fault by page fault. Raises OSError where the system has none left."""
        descriptor = os.memfd_create("overlord", os.MFD_CLOEXEC)
        try:
            _write(descriptor, parts, places)
        except BaseException:
            os.close(descriptor)
            raise
        return SharedSegment(descriptor, writable=True)

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


_MAP_FAILED = c_void_p(-1).value


@functools.cache
def _system() -> CDLL:
    library = CDLL(None, use_errno=True)
    library.mmap.restype = c_void_p
    return library


class _ReadOnlyMapping:
    """Memory of another process, mapped for as long as numpy arrays over it live. Python's own mappings keep a descriptor
    each, and a trainer that maps the chunks of a thousand sources may open no more files than other programs."""

    __slots__ = ("__array_interface__", "_end")

    def __init__(self, descriptor: int, size: int) -> None:
        system = _system()
        of_file = c_int(mmap.PROT_READ), c_int(mmap.MAP_SHARED), c_int(descriptor), c_long(0)
        address = system.mmap(c_void_p(None), c_size_t(size), *of_file)
        if address is None or address == _MAP_FAILED:
            raise OSError(get_errno(), os.strerror(get_errno()))
        self._end = functools.partial(system.munmap, c_void_p(address), c_size_t(size))
        self.__array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, True), "version": 3}

    def __del__(self) -> None:
        end = getattr(self, "_end", None)  # no global of this module: at interpreter exit globals become None
        if end is not None:
            end()


def address_of(array: NDArray[Any]) -> int:
    """Where the memory of a contiguous array begins."""
    try:
        # A tenth of the time of `__array_interface__`.
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type] - an array is a buffer
    except (TypeError, ValueError):  # it is read-only, or empty
        return array.__array_interface__["data"][0]


def describe_file_limit() -> str:
    """The limit on open files of this process, and how to raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"a process may have {soft:,} open files here (hard limit {hard:,}), and memory that it shares takes one or two for "
        "each chunk and batch. Raise the hard limit (ulimit -Hn, LimitNOFILE= of a service, --ulimit nofile= of a "
        "container), or let a run have fewer sources"
    )


def with_file_limit(error: OSError) -> OSError:
    """The error; one that says that too many files are open says also how many may be, and the way out."""
    if error.errno != errno.EMFILE:
        return error
    return OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: {describe_file_limit()}")


def may_share_more(part: float) -> bool:
    """False while this part of the descriptors that this process may have is in use, which is logged once: files and
    connections need the others."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return True
    try:
        lowest = os.eventfd(0, os.EFD_CLOEXEC)  # the system gives the lowest number that is free
    except OSError:
        lowest = soft
    else:
        os.close(lowest)
    if lowest < soft * part:
        return True
    _warn_of_file_limit()
    return False


@functools.cache  # once
def _warn_of_file_limit() -> None:
    _log.warning("chunks and batches are copied between processes, because many files are open: %s", describe_file_limit())


def why_unsupported() -> str | None:
    """Why processes of this machine cannot talk to each other this way; None where they can."""
    if sys.platform != "linux":
        return f"shared memory between processes needs Linux, and this is {sys.platform}"
    return None


def why_unavailable() -> str | None:
    """Why processes of this machine cannot share memory; None where they can."""
    reason = why_unsupported()
    if reason is not None:
        return reason
    try:
        SharedSegment.create(_PROBED_BYTES)
    except (OSError, AttributeError) as error:
        return f"the system refuses shared memory (memfd_create): {error}"
    return None


@dataclass(frozen=True, slots=True)
class SharedObject:
    """A pickled object whose large buffers lie in a segment. It can be sent over any number of connections."""

    segment: SharedSegment
    places: tuple[ByteRange, ...]
    """Where the pickle and each of its buffers lie in the segment."""

    def __reduce__(self) -> tuple[Any, ...]:
        if getattr(_message, "outgoing", None) is not None:
            return SharedObject, (self.segment, self.places)
        # To another machine: the bytes travel.
        return _copy_received, (pickle.PickleBuffer(self.segment.memory.data), self.places)

    @staticmethod
    def of(value: Any) -> SharedObject:
        """Copy an object into shared memory. Raises OSError where the system has none left."""
        head, buffers = _pickle(value, in_band_bytes=0)
        parts = [head, *buffers]
        places = _places_of(parts)
        return SharedObject(SharedSegment.of(parts, places), places)

    @property
    def num_bytes(self) -> int:
        return self.segment.num_bytes

    def open(self) -> Any:
        """Return the object. Its arrays are read-only views of the shared memory, and keep it mapped."""
        memory = self.segment.memory.data.toreadonly()
        head, *buffers = (memory[begin:end] for begin, end in self.places)
        return pickle.loads(head, buffers=buffers)


def _copy_received(received: Any, places: tuple[ByteRange, ...]) -> ReceivedObject:
    return ReceivedObject(memoryview(received).toreadonly(), places)


@dataclass(frozen=True, slots=True)
class ReceivedObject:
    """A `SharedObject` of another machine."""

    memory: memoryview
    places: tuple[ByteRange, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def open(self) -> Any:
        head, *buffers = (self.memory[begin:end] for begin, end in self.places)
        return pickle.loads(head, buffers=buffers)


def _add_to_message(segment: SharedSegment) -> int:
    outgoing: list[SharedSegment] | None = getattr(_message, "outgoing", None)
    if outgoing is None:
        raise pickle.PicklingError("shared memory can only be sent to a process of this machine, over a Connection")
    outgoing.append(segment)
    return len(outgoing) - 1


def _receive_segment(number: int) -> SharedSegment:
    incoming: list[int] = _message.incoming
    descriptor, incoming[number] = incoming[number], -1
    return SharedSegment(descriptor, writable=False)


_message = threading.local()
"""The segments of the message that this thread is packing (`outgoing`), and the descriptors of the one that it is unpacking
(`incoming`)."""


class _QuietSocket(socket.socket):
    """Closes itself when it is collected, without Python's warning: the end of a connection is no leak here."""

    def __del__(self) -> None:
        self.close()


class Connection:
    """One end of a connection between two processes. Any object can be sent that cloudpickle can pickle. One thread at a
    time may send, and one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = _QuietSocket(fileno=end.detach())
        self._timeout_s: float | None = None
        self._socket.settimeout(None)
        self._room = bytearray(1 + _MESSAGE_BYTES)

    def send(self, value: Any, *, waits: bool = True) -> None:
        """Send a message; blocks while the receiver's queue is full, or raises BlockingIOError if it `waits` not. Raises
        OSError when the other side is gone."""
        _message.outgoing = segments = list[SharedSegment]()
        try:
            body, buffers = _pickle(value, _IN_BAND_BYTES)
        finally:
            _message.outgoing = None
        kind, parts = _INLINE, [body, *buffers]
        if buffers or len(body) > _MESSAGE_BYTES:
            places = _places_of(parts)
            try:
                segments.append(SharedSegment.of(parts, places))
                kind = _IN_SEGMENT
            except OSError as error:
                _warn_of_packets(f"the system refuses shared memory: {error}")
                kind = _IN_PACKETS
            body = pickle.dumps(places)
        if len(segments) > _MOST_DESCRIPTORS:
            raise OverlordError(f"a message has {len(segments)} objects in shared memory; at most {_MOST_DESCRIPTORS} fit")
        self.send_raw(kind, body, segments=segments, waits=waits)
        if kind == _IN_PACKETS:
            self._send_packets(parts, waits)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Wait for a message. Raises EOFError when the other side is gone, TimeoutError after `timeout_s`."""
        packet, descriptors = self.receive_raw(timeout_s)
        _message.incoming = descriptors
        try:
            if packet[:1] == _INLINE:
                return pickle.loads(packet[1:])
            if packet[:1] == _IN_PACKETS:
                return self._receive_packets(pickle.loads(packet[1:])).open()
            descriptor, descriptors[-1] = descriptors[-1], -1
            return SharedObject(SharedSegment(descriptor, writable=False), pickle.loads(packet[1:])).open()
        finally:
            _message.incoming = None
            for descriptor in descriptors:
                if descriptor >= 0:
                    os.close(descriptor)

    def _send_packets(self, parts: Sequence[bytes | memoryview], waits: bool) -> None:
        """Send the parts of a message that lie in no segment. Each begins with a packet of its own."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        for packet in _packets_of(parts):
            while True:
                try:
                    self._socket.sendmsg([packet], (), _WITHOUT_WAITING)
                    break
                except (BlockingIOError, TimeoutError):
                    if not poll.poll(None if waits else _PACKET_S * 1000):
                        raise self._broken("took") from None

    def _receive_packets(self, places: tuple[ByteRange, ...]) -> ReceivedObject:
        memory = memoryview(bytearray(places[-1][1]))
        for begin, end in places:
            done = begin
            while done < end:
                try:
                    packet, _ = self.receive_raw(_PACKET_S)
                except TimeoutError:
                    raise self._broken("sent") from None
                memory[done : done + len(packet)] = packet
                done += len(packet)
        return ReceivedObject(memory.toreadonly(), places)

    def _broken(self, did: str) -> ConnectionAbortedError:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        return ConnectionAbortedError(f"in the middle of a message the other process {did} nothing for {_PACKET_S:.0f} s")

    def send_raw(self, *parts: bytes, segments: Sequence[SharedSegment] = (), waits: bool = True) -> None:
        """Send bytes as one message, up to 64 KiB, with the descriptors of segments."""
        descriptors = array.array("i", [segment.descriptor for segment in segments])
        rights = [(_SOCKET_LEVEL, socket.SCM_RIGHTS, descriptors)] if segments else ()
        self._socket.sendmsg(parts, rights, 0 if waits else _WITHOUT_WAITING)

    def receive_raw(self, timeout_s: float | None = None) -> tuple[memoryview, list[int]]:
        """Wait for a message that `send_raw` sent. The bytes are valid until the next call; the descriptors belong to the
        caller."""
        if timeout_s != self._timeout_s:  # a system call
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s
        try:
            length, ancillary, flags, _ = self._socket.recvmsg_into([self._room], _RIGHTS_BYTES, _CLOSE_ON_EXEC)
        except ConnectionResetError as error:
            raise EOFError("the other side of the connection is gone") from error
        except BlockingIOError as error:  # of a timeout of 0
            raise TimeoutError("no message has arrived") from error
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (_SOCKET_LEVEL, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if flags & _IS_CUT:
            for descriptor in descriptors:
                os.close(descriptor)
            raise OSError(errno.EMFILE, f"a message between processes was cut: {describe_file_limit()}")
        if length == 0:
            raise EOFError("the other side of the connection is gone")
        return memoryview(self._room)[:length], descriptors.tolist()

    def fileno(self) -> int:
        return self._socket.fileno()

    def stop_receiving(self) -> None:
        """Receive no more: a thread that waits in `receive` gets EOFError. What was begun can still be answered."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def close(self) -> None:
        """Close the connection; the other side gets EOFError."""
        self._socket.close()

    close_here = close


class Listener:
    """Accepts connections of processes of this user on this machine, at `address`. Nobody else can connect."""

    def __init__(self, inherited: int | None = None, *, address: str | None = None) -> None:
        """A new listener, at any address or a given one, which OSError says is taken; or that of the parent process, by its
        `inherited` descriptor. Both processes may accept then, and only the parent may close it."""
        if inherited is not None:
            self._socket = socket.socket(fileno=inherited)
            self.address: str = self._socket.getsockname()[1:].decode()
            return
        self.address = address or f"overlord-{secrets.token_hex(16)}"
        self._socket = _QuietSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(f"\0{self.address}")
        except OSError:
            self._socket.close()
            raise
        self._socket.listen(_BACKLOG)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> Connection:
        """Wait for the next connection. Raises OSError once the listener is closed."""
        while True:
            end, _ = self._socket.accept()
            _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user == os.geteuid():
                return Connection(end)
            _log.warning("refused a connection of user %d: only processes of user %d may connect", user, os.geteuid())
            end.close()

    def close(self) -> None:
        """Accept no more; a thread that waits in `accept` gets OSError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def close_here(self) -> None:
        """In a forked child, close its copy; the parent goes on listening."""
        self._socket.close()


def connect_to(address: str) -> Connection:
    """Connect to a listener of this user on this machine. Raises ConnectionRefusedError where there is none of that address,
    and BlockingIOError where too many connections wait to be accepted."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end.setblocking(False)
    try:
        end.connect(f"\0{address}")
        _, user, _ = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            raise ConnectionRefusedError(f"the socket {address} is of user {user}; this process is of user {os.geteuid()}")
        end.setblocking(True)
    except BaseException:
        end.close()
        raise
    return Connection(end)


def _pickle(value: Any, in_band_bytes: int) -> tuple[bytes, list[memoryview]]:
    """Pickle an object; its buffers longer than `in_band_bytes` are returned, not copied."""
    buffers: list[memoryview] = []

    def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes <= in_band_bytes:
            return True
        buffers.append(raw)
        return False

    try:
        head = pickle.dumps(value, protocol=5, buffer_callback=keep_in_band)
        if b"__main__" not in head:
            return head, buffers
    except (pickle.PicklingError, AttributeError, TypeError):
        pass  # a lambda or a local class
    # By value: the other process has another main module.
    import cloudpickle

    buffers.clear()
    outgoing: list[SharedSegment] | None = getattr(_message, "outgoing", None)
    if outgoing is not None:
        outgoing.clear()
    return cloudpickle.dumps(value, protocol=5, buffer_callback=keep_in_band), buffers


def _places_of(parts: Sequence[bytes | memoryview]) -> tuple[ByteRange, ...]:
    """The places of buffers that lie together, aligned."""
    places: list[ByteRange] = []
    end = 0
    for part in parts:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + len(part)
        places.append((begin, end))
    return tuple(places)


def _write(descriptor: int, parts: Sequence[bytes | memoryview], places: Sequence[ByteRange]) -> None:
    """Write buffers to their places in an empty file."""
    left: deque[bytes | memoryview] = deque()
    end = 0
    for part, (begin, part_end) in zip(parts, places, strict=True):
        left += (bytes(begin - end), part)
        end = part_end
    if not end:
        os.ftruncate(descriptor, 1)  # nothing cannot be mapped
    while left:
        written = os.writev(descriptor, list(itertools.islice(left, _MOST_BUFFERS)))
        while left and written >= len(left[0]):
            written -= len(left.popleft())
        if written:
            left[0] = memoryview(left[0])[written:]


def _packets_of(parts: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    for part in parts:
        whole = memoryview(part).cast("B")
        for begin in range(0, len(whole), _MESSAGE_BYTES):
            yield whole[begin : begin + _MESSAGE_BYTES]


@functools.cache  # once for each reason
def _warn_of_packets(reason: str) -> None:
    _log.warning("long messages between processes are sent in packets, which takes longer: %s", reason)
