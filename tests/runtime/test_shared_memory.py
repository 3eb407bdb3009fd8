"""Memory and messages between processes of one machine: what is sent arrives as it was, and nothing is left behind."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from overlord.runtime import shared_memory
from overlord.runtime.shared_memory import Connection, Listener, SharedObject, SharedSegment, connect_to, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="needs Linux's memfd")


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends():
    listener = Listener()
    accepted: list[Connection] = []
    thread = threading.Thread(target=lambda: accepted.append(listener.accept()))
    thread.start()
    ours = connect_to(listener.address)
    thread.join()
    yield ours, accepted[0]
    for end in (ours, accepted[0], listener):
        end.close()


ARRAYS = hnp.arrays(
    dtype=st.sampled_from([np.int32, np.float32, np.bool_, np.int64]), shape=hnp.array_shapes(min_side=0, max_dims=2)
)


@given(st.lists(ARRAYS, max_size=4), st.integers(0, 70_000))
def test_an_object_opens_as_it_was(arrays, extra):
    value = {"arrays": arrays, "more": np.arange(extra, dtype=np.uint8), "name": "x"}
    opened = SharedObject.of(value).open()
    assert opened["name"] == "x"
    np.testing.assert_array_equal(opened["more"], value["more"])
    assert len(opened["arrays"]) == len(arrays)
    for got, gave in zip(opened["arrays"], arrays, strict=True):
        assert got.dtype == gave.dtype
        np.testing.assert_array_equal(got, gave)


@pytest.mark.parametrize("most_bytes", [1, 100, 1 << 20])
def test_an_object_of_many_buffers_opens_as_it_was_however_little_the_system_writes_at_once(monkeypatch, most_bytes):
    write = os.writev
    monkeypatch.setattr(os, "writev", lambda descriptor, parts: write(descriptor, [b"".join(parts)[:most_bytes]]))
    monkeypatch.setattr(shared_memory, "_MOST_BUFFERS", 4)
    value = [np.full(number % 7, number) for number in range(20)]
    for got, gave in zip(SharedObject.of(value).open(), value, strict=True):
        np.testing.assert_array_equal(got, gave)


def test_arrays_of_an_opened_object_are_read_only_views(ends):
    ours, theirs = ends
    shared = SharedObject.of(np.arange(100_000))
    first = shared.open()
    assert not first.flags.writeable
    assert np.shares_memory(first, shared.segment.memory)
    ours.send(shared)
    second = theirs.receive(5).open()
    del shared
    shared_base = first[:1]
    assert second[0] == shared_base[0]
    np.testing.assert_array_equal(second, np.arange(100_000))


def test_messages_of_any_size_arrive_in_order(ends):
    ours, theirs = ends
    values = [b"", list(range(10)), b"x" * 200_000, np.arange(1_000_000), pa.table({"a": range(50_000)}), "ä" * 65_536]
    sender = threading.Thread(target=lambda: [ours.send(value) for value in values])
    sender.start()
    for value in values:
        got = theirs.receive(5)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(got, value)
        else:
            assert got == value
    sender.join()


def test_functions_of_the_main_module_and_lambdas_travel_by_value(ends):
    ours, theirs = ends
    ours.send(lambda x: x + 1)
    assert theirs.receive(5)(2) == 3


def test_an_object_in_shared_memory_goes_to_another_machine_by_value():
    shared = SharedObject.of({"numbers": np.arange(3)})
    received = pickle.loads(pickle.dumps(shared, protocol=5))
    np.testing.assert_array_equal(received.open()["numbers"], np.arange(3))


def test_a_segment_goes_to_no_other_machine():
    with pytest.raises(pickle.PicklingError, match="process of this machine"):
        pickle.dumps(SharedSegment.create(4096))


def test_the_end_of_the_other_side_is_noticed(ends):
    ours, theirs = ends
    theirs.close()
    with pytest.raises(EOFError):
        ours.receive(5)
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(1)


def test_a_wait_ends_after_its_timeout(ends):
    with pytest.raises(TimeoutError):
        ends[0].receive(0.01)


def test_nobody_listens_at_an_unknown_address():
    with pytest.raises(ConnectionRefusedError):
        connect_to("overlord-nobody")


def test_no_descriptor_and_no_file_is_left(ends):
    ours, theirs = ends
    before, files = num_descriptors(), os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    for _ in range(20):
        ours.send({"large": np.arange(100_000), "shared": SharedObject.of(np.arange(50_000))})
        got = theirs.receive(5)
        view = got["shared"].open()
        del got
        assert view[-1] == 49_999
        del view
    ours.send(Unloadable())
    with pytest.raises(ZeroDivisionError):
        theirs.receive(5)
    assert num_descriptors() == before
    assert (os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []) == files


class Unloadable:
    """Fails to load after a segment was received with it."""

    def __reduce__(self):
        return _fail, (SharedObject.of(np.arange(9)),)


def _fail(_shared):
    return 1 // 0


SENDER = """
import sys, numpy as np
from overlord.runtime.shared_memory import SharedObject, connect_to
connection = connect_to(sys.argv[1])
connection.send(SharedObject.of(np.arange(1 << 20)))
connection.receive()
"""


def test_memory_outlives_a_process_that_was_killed():
    listener = Listener()
    sender = subprocess.Popen([sys.executable, "-c", SENDER, listener.address])
    try:
        connection = listener.accept()
        shared = connection.receive(30)
        sender.kill()
        sender.wait()
        with pytest.raises(EOFError):
            connection.receive(5)
        np.testing.assert_array_equal(shared.open(), np.arange(1 << 20))
        connection.close()
    finally:
        sender.kill()
        sender.wait()
        listener.close()


def test_a_system_without_shared_memory_says_so(monkeypatch):
    def refuse(*_):
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "not permitted" in (why_unavailable() or "")


def _refuse(*_):
    raise OSError(27, "File too large")


@pytest.fixture
def refused(monkeypatch):
    """A system that has no shared memory left."""
    monkeypatch.setattr(os, "memfd_create", _refuse)


@pytest.mark.parametrize("num_bytes", [1 << 16, (1 << 16) + 1, 3 << 20])
def test_without_shared_memory_a_long_message_travels_in_packets(ends, refused, num_bytes):
    ours, theirs = ends
    value = {"text": "x" * num_bytes, "arrays": [np.arange(num_bytes), np.arange(0), np.arange(20_001)], "name": "y"}
    got: list[dict] = []
    thread = threading.Thread(target=lambda: got.extend([theirs.receive(60), theirs.receive(60)]))
    thread.start()
    ours.send(value)
    ours.send("the next")
    thread.join()
    assert got[1] == "the next"
    assert got[0]["text"] == value["text"]
    for found, array in zip(got[0]["arrays"], value["arrays"], strict=True):
        np.testing.assert_array_equal(found, array)


def test_descriptors_of_a_message_in_packets_arrive_too(ends, monkeypatch):
    ours, theirs = ends
    shared = SharedObject.of(np.arange(50_000))
    monkeypatch.setattr(os, "memfd_create", _refuse)
    ours.send((shared, np.arange(10_000)))
    got, array = theirs.receive(60)
    np.testing.assert_array_equal(got.open(), np.arange(50_000))
    np.testing.assert_array_equal(array, np.arange(10_000))


def test_a_receiver_that_takes_nothing_ends_the_connection_of_a_sender_that_does_not_wait(ends, refused, monkeypatch):
    monkeypatch.setattr(shared_memory, "_PACKET_S", 0)
    ours, theirs = ends
    with pytest.raises(ConnectionAbortedError, match="in the middle of a message the other process took nothing"):
        ours.send(bytes(3 << 20), waits=False)
    with pytest.raises(OSError, match="Broken pipe"):
        ours.send(1)
    with pytest.raises(EOFError):
        theirs.receive(60)


def test_segments_are_freed_with_their_last_view():
    segment = SharedSegment.create(1 << 16)
    view = segment.memory[5:10]
    del segment
    view[:] = 7
    assert view.tolist() == [7] * 5
