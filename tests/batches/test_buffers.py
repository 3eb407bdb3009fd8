"""Batch memory: used again when nobody looks into it, and never while somebody does."""

import gc

import numpy as np

from overlord.batches.buffers import Arenas


def test_memory_that_nobody_looks_into_is_used_again():
    arenas = Arenas(most=2)
    first = arenas.lease(100_000)
    address = first.ctypes.data
    del first
    gc.collect()
    assert arenas.num_idle == 1
    assert arenas.lease(99_000).ctypes.data == address


def test_memory_that_a_view_looks_into_is_left_alone():
    arenas = Arenas(most=2)
    whole = arenas.lease(100_000)
    view = whole[10:20].view(np.int16)
    view[:] = 7
    del whole
    gc.collect()
    other = arenas.lease(100_000)
    other[:] = 1
    assert not np.shares_memory(view, other)
    assert (view == 7).all()


def test_a_tensor_keeps_its_memory_too():
    import torch

    arenas = Arenas(most=2)
    tensor = torch.from_numpy(arenas.lease(100_000))
    tensor.fill_(3)
    gc.collect()
    arenas.lease(100_000)[:] = 1
    assert int(tensor.sum()) == 300_000


def test_no_more_is_kept_than_allowed_and_another_size_replaces_the_old():
    arenas = Arenas(most=2)
    leases = [arenas.lease(1 << 20) for _ in range(4)]
    del leases
    gc.collect()
    assert arenas.num_idle == 2
    small = arenas.lease(1000)
    assert len(small) == 1000
    assert arenas.num_idle == 0


def test_those_who_share_arenas_come_and_go():
    arenas = Arenas()
    arenas.keep_more(2)
    arenas.keep_more(1)
    leases = [arenas.lease(1 << 20) for _ in range(4)]
    del leases
    gc.collect()
    assert arenas.num_idle == 3
    arenas.keep_more(-2)
    assert arenas.num_idle == 1
