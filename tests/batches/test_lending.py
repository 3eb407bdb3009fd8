"""Memory that is lent to another process is not written to before the last view of it is gone."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.batches.buffers import Arenas, segment_of
from overlord.batches.lending import Borrower, Lender
from overlord.runtime.shared_memory import SharedSegment, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason="needs Linux's memfd")


class Pair:
    """A lender and its borrower, as over a connection."""

    def __init__(self) -> None:
        self.lender, self.borrower = Lender(), Borrower()

    def hand_over(self, *arrays):
        """The borrower's views of arrays; None for one that is not in shared memory."""
        lent = self.lender.lend(arrays)
        self.borrower.unmap(self.lender.take_gone())
        for segment in lent.unmapped:
            self.borrower.map(segment.number, SharedSegment(os.dup(segment.descriptor), writable=False))
        memory = [self.borrower.borrow(loan) for loan in lent.loans]
        views = []
        for array, place in zip(arrays, lent.places, strict=True):
            if place is None:
                views.append(None)
                continue
            part = memory[place[0]][place[1] : place[1] + array.nbytes]
            views.append(part.view(array.dtype).reshape(array.shape))
        return views

    def settle(self) -> None:
        returned, kept = self.borrower.take_returned()
        self.lender.take_back(returned)
        self.lender.retire(kept)


def leased(arenas: Arenas, fill: int, n: int = 1000):
    memory = arenas.lease(4 * n).view(np.int32)
    memory[:] = fill
    return memory


def test_a_borrower_sees_the_same_memory_and_cannot_write_to_it():
    pair, arenas = Pair(), Arenas(4, shared=True)
    ours = leased(arenas, 3)
    (theirs,) = pair.hand_over(ours)
    np.testing.assert_array_equal(ours, theirs)
    ours[5] = 8
    assert theirs[5] == 8
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1


def test_private_and_strided_arrays_are_not_lent():
    pair = Pair()
    assert pair.hand_over(np.arange(5), leased(Arenas(4, shared=True), 1)[::2]) == [None, None]
    assert segment_of(np.arange(5)) is None


def test_arrays_of_one_segment_make_one_loan():
    pair = Pair()
    memory = leased(Arenas(4, shared=True), 1)
    views = pair.hand_over(memory[:10], memory[10:30])
    assert [len(view) for view in views] == [10, 20]
    assert pair.lender.num_lent == 1


@given(st.lists(st.sampled_from(["lend", "drop", "settle", "copy", "private"]), max_size=60), st.integers(0, 3))
def test_no_view_ever_changes(actions, most):
    pair, arenas = Pair(), Arenas(most, shared=True)
    held: list[tuple[int, np.ndarray]] = []
    for number, action in enumerate(actions):
        if action == "lend":
            held.append((number, pair.hand_over(leased(arenas, number, 100 + 50_000 * (number % 2)))[0]))
        elif action == "copy" and held:
            held.append((held[0][0], held[0][1][3:]))
        elif action == "drop" and held:
            held.pop(number % len(held))
        elif action == "private":
            leased(arenas, -number)
        elif action == "settle":
            pair.settle()
        assert all((view == fill).all() for fill, view in held)
    held.clear()
    pair.settle()
    assert pair.lender.num_lent == 0
    pair.borrower.unmap(pair.lender.take_gone())
    gc.collect()
    pair.borrower.unmap(pair.lender.take_gone())
    assert pair.borrower.num_mapped <= most + 1


def test_memory_is_reused_after_it_was_returned():
    pair, arenas = Pair(), Arenas(2, shared=True)
    for fill in range(10):
        view = pair.hand_over(leased(arenas, fill))[0]
        assert view[0] == fill
        del view
        pair.settle()
    assert pair.borrower.num_mapped == 1
    assert arenas.shared_bytes == 1 << 16


def test_memory_of_a_lost_borrower_is_not_reused():
    pair, arenas = Pair(), Arenas(2, shared=True)
    view = pair.hand_over(leased(arenas, 1))[0]
    pair.lender.close()
    assert pair.lender.num_lent == 0
    for fill in range(2, 6):
        leased(arenas, fill)
    assert (view == 1).all()


class Chain(Pair):
    """A lender, its borrower, and a second borrower to whom that one lends the memory on."""

    def __init__(self) -> None:
        super().__init__()
        self.borrower = Borrower(lends_on=True)
        self.last = Pair()

    def hand_on(self, array):
        (ours,) = self.hand_over(array)
        (theirs,) = self.last.hand_over(ours)
        return theirs

    def freed(self) -> bool:
        gc.collect()
        self.last.settle()
        returned, kept = self.borrower.take_returned()
        assert not kept
        return bool(returned)


def test_memory_that_is_lent_on_is_returned_when_the_last_borrower_has_returned_it():
    chain, arenas = Chain(), Arenas(4, shared=True)
    theirs = chain.hand_on(leased(arenas, 3))
    np.testing.assert_array_equal(theirs, np.full(1000, 3))
    assert not chain.freed()
    del theirs
    assert chain.freed()


def test_memory_that_was_lent_on_to_a_lost_process_is_not_used_again():
    chain, arenas = Chain(), Arenas(4, shared=True)
    theirs = chain.hand_on(leased(arenas, 3))
    chain.last.lender.close()
    gc.collect()
    assert chain.borrower.take_returned() == ([], [0])
    chain.lender.retire([0])
    gc.collect()
    assert arenas.num_idle == 0
    np.testing.assert_array_equal(theirs, np.full(1000, 3))


def test_a_borrower_in_the_process_of_its_lender_keeps_no_memory_that_the_lender_drops():
    lender, borrower, arenas = Lender(), Borrower(lends_on=True), Arenas(0, shared=True)
    memory = leased(arenas, 3)
    lent = lender.lend([memory])
    (segment,) = lent.unmapped
    borrower.map(segment.number, segment)
    view = borrower.borrow(lent.loans[0])
    assert segment_of(view) is segment_of(memory)
    number = lent.loans[0].segment
    del view, memory, lent, segment
    lender.take_back(borrower.take_returned()[0])
    gc.collect()
    assert lender.take_gone() == [number]


def test_memory_that_a_fork_may_read_is_not_reused():
    pair, arenas = Pair(), Arenas(2, shared=True)
    view = pair.hand_over(leased(arenas, 1))[0]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has used the pool again
        os._exit(0 if (view == 1).all() else 1)
    os.close(read)
    del view
    pair.settle()
    for fill in range(2, 6):
        leased(arenas, fill)
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_pool_falls_back_to_private_memory_and_says_so(monkeypatch, caplog):
    def refuse(*_):
        raise OSError("no space left")

    arenas = Arenas(2, shared=True)
    monkeypatch.setattr(os, "memfd_create", refuse)
    array = leased(arenas, 7)
    assert (array == 7).all()
    assert segment_of(array) is None
    assert not arenas.is_shared
    assert "no space left" in caplog.text
    assert caplog.text.count("copied to trainers") == 1
