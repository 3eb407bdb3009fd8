"""A step that is lent through shared memory: as it went in, without a copy, and its memory comes back."""

from __future__ import annotations

import gc
import os
import socket
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.batches.buffers import Arenas, LendLimit
from overlord.messages import Delivery, Fields
from overlord.runtime.shared_memory import Connection, SharedSegment
from overlord.service import wire
from overlord.service.local_steps import (
    MOST_BYTES,
    LocalMessage,
    NoSharedMemoryError,
    NotLocal,
    StepBorrower,
    StepLender,
    pack_answer,
)
from overlord.service.steps import DamagedStepError
from tests.service.test_steps import MICROBATCHES, all_same


class Pair:
    """A service and a trainer with a socket between them."""

    def __init__(self, arenas: Arenas | None = None, most_lent: int = 4) -> None:
        self.arenas = arenas or Arenas(8, shared=True)
        self.arenas.lend_limit = LendLimit(most_lent)
        self.lender, self.borrower = StepLender(self.arenas), StepBorrower()
        self._ends = [Connection(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]

    def lend(self, delivery: Delivery) -> Delivery:
        self.lender.take_back(self.borrower.take_returned())
        return self.send(self.lender.pack(delivery))

    def send(self, messages: list[LocalMessage]) -> Any:
        answer = None
        for message in messages:
            assert answer is None
            assert len(message.data) <= MOST_BYTES
            self._ends[0].send_raw(message.data, segments=message.segments)
            answer = self.borrower.receive(*self._ends[1].receive_raw(5.0), Arenas(2))
        return answer

    def built(self, *arrays: np.ndarray) -> Delivery:
        """A step whose arrays lie in one buffer of the pool, as collation puts them."""
        memory = self.arenas.lease(sum(array.nbytes for array in arrays))
        fields: Fields = {}
        begin = 0
        for i, array in enumerate(arrays):
            fields[f"f{i}"] = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
            fields[f"f{i}"][...] = array
            begin += array.nbytes
        return Delivery(0, 1, (fields,))


def step_of(pair: Pair, fill: int, num_bytes: int = 200_000) -> Delivery:
    return pair.built(np.full(num_bytes // 8, fill, np.int64))


@given(MICROBATCHES, st.integers(0, 4))
def test_whatever_a_rank_is_given_comes_out_as_it_went_in(microbatches, most_lent):
    pair = Pair(most_lent=most_lent)
    for fields in microbatches:  # some of it where batches are built
        for name, value in list(fields.items())[::2]:
            if isinstance(value, np.ndarray) and value.size:
                lent = pair.arenas.lease(value.nbytes).view(value.dtype).reshape(value.shape)
                lent[...] = value
                fields[name] = lent
    delivery = Delivery(7, 123, tuple(microbatches))
    assert all_same(delivery, pair.lend(delivery))


@pytest.mark.parametrize("most_lent", [0, 4])
def test_long_lists_and_very_many_buffers_fit_into_messages_too(most_lent):
    pair = Pair(most_lent=most_lent)
    images = [np.full((5, 3 + i % 7, 3), i % 256, np.uint8) for i in range(3000)]
    large = [np.full((200, 100, 3), i, np.uint8) for i in range(5)]
    micros = [step_of(pair, i, 1000).microbatches[0] for i in range(150)]
    delivery = Delivery(3, 4, ({"images": images, "large": large}, *micros))
    assert all_same(delivery, pair.lend(delivery))


def test_arrays_are_read_only_views_of_the_memory_that_they_were_built_in():
    pair = Pair()
    delivery = step_of(pair, 5)
    array = pair.lend(delivery).microbatches[0]["f0"]
    assert not array.flags.writeable
    delivery.microbatches[0]["f0"][3] = 77
    assert array[3] == 77


def test_a_tensor_is_a_view_too_and_holds_the_batch():
    from overlord.batches.tensors import to_torch

    pair = Pair()
    delivery = step_of(pair, 5)
    tensor = to_torch(pair.lend(delivery).microbatches[0])["f0"]
    delivery.microbatches[0]["f0"][3] = 77
    assert tensor[3] == 77
    del delivery
    gc.collect()
    assert pair.borrower.take_returned().free == []
    del tensor
    gc.collect()
    assert len(pair.borrower.take_returned().free) == 1


def test_memory_is_used_again_when_every_trainer_has_returned_it_and_not_before():
    arenas = Arenas(4, shared=True)
    pairs = [Pair(arenas), Pair(arenas)]
    delivery = step_of(pairs[0], 1)
    address = delivery.microbatches[0]["f0"].ctypes.data
    steps = [pair.lend(delivery) for pair in pairs]
    del delivery
    for pair in pairs:
        gc.collect()
        assert arenas.num_idle == 0
        view = steps.pop(0).microbatches[0]["f0"][10:20]
        pair.lender.take_back(pair.borrower.take_returned())
        assert arenas.num_idle == 0, "a view holds it"
        del view
        pair.lender.take_back(pair.borrower.take_returned())
    assert arenas.num_idle == 1
    assert step_of(pairs[0], 2).microbatches[0]["f0"].ctypes.data == address


def test_a_trainer_that_keeps_every_step_gets_copies_that_the_service_does_not_keep():
    pair = Pair(most_lent=4)
    kept = [pair.lend(step_of(pair, i)) for i in range(20)]
    gc.collect()
    assert pair.lender.num_lent == 4
    assert pair.lender.num_copied == 16
    assert pair.arenas.shared_bytes < 7 * 262_144
    assert [step.microbatches[0]["f0"][-1] for step in kept] == list(range(20))
    kept.clear()
    gc.collect()
    pair.lend(step_of(pair, 1))
    assert pair.lender.num_copied == 16, "it is served without copies again"


@pytest.mark.parametrize(("most_bytes", "num_lent"), [(0, 2), (3 << 18, 3), (4 << 18, 4), (1 << 30, 6)])
def test_steps_beyond_so_many_bytes_are_copied_but_for_the_first_few(most_bytes, num_lent):
    pair = Pair()
    pair.arenas.lend_limit = LendLimit(6, most_bytes, least_steps=2)
    kept = [pair.lend(step_of(pair, i)) for i in range(10)]  # each in a buffer of 256 KiB
    assert pair.lender.num_lent == num_lent
    assert pair.lender.lent_bytes == num_lent << 18
    assert [lent() for lent in pair.arenas.lenders.values()] == [num_lent << 18]
    assert [step.microbatches[0]["f0"][-1] for step in kept] == list(range(10))
    pair.lender.close()
    assert not pair.arenas.lenders


def test_what_a_trainer_held_when_it_disconnected_is_never_written_to_again():
    pair = Pair()
    held = pair.lend(step_of(pair, 1))
    pair.lender.close()
    gc.collect()
    assert pair.arenas.num_idle == 0
    assert pair.arenas.shared_bytes == 0
    for i in range(5):
        step_of(pair, 100 + i)
    assert (held.microbatches[0]["f0"] == 1).all()


def test_a_segment_that_is_gone_is_unmapped():
    pair = Pair()
    for size in (1 << 18, 1 << 20, 1 << 22, 1 << 24):
        pair.arenas.keep_more(-pair.arenas.most)
        pair.lend(step_of(pair, 1, size))
        gc.collect()
    assert pair.borrower.num_mapped <= 2


def test_without_shared_memory_it_says_so():
    pair = Pair(Arenas(2))
    with pytest.raises(NoSharedMemoryError, match="private memory"):
        pair.lend(step_of(pair, 1))
    answer = pair.send([pack_answer(NotLocal("because"))])
    assert answer == NotLocal("because")


@pytest.mark.strangers
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 50,
        b"\x91" * 5000,
        wire.pack({"loans": [[0, 99]], "body": b"x"}),
        wire.pack({"unmapped": [1]}),
        wire.pack({"body": b"nonsense"}),
        wire.pack({"body_at": [5, 0, 10]}),
        wire.pack({"has_own": True}),
    ],
)
def test_a_message_that_no_service_sends_is_refused(data):
    with pytest.raises(DamagedStepError, match="the message cannot be read"):
        StepBorrower().receive(memoryview(data), [], Arenas(1))


@pytest.mark.strangers
def test_an_array_outside_its_segment_is_refused():
    segment = SharedSegment.create(1000)
    contents = wire.Contents(0, 1, [[wire.Array("odd", "<i8", (126,), 1, 0)]])
    body = wire.pack({"answer": contents})
    data = wire.pack({"has_own": True, "body": body})
    with pytest.raises(DamagedStepError, match=r"field 'odd' .*takes bytes 0 to 1008 of regions that have 1000"):
        StepBorrower().receive(memoryview(data), [os.dup(segment.descriptor)], Arenas(1))
