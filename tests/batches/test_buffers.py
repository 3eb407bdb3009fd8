"""Batch memory: used again when nobody looks into it, and never while somebody does."""

import gc
import resource
import tempfile

import numpy as np

from overlord.batches.buffers import Arenas, segment_of
from overlord.runtime import shared_memory


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


def test_no_more_is_kept_than_allowed():
    arenas = Arenas(most=2)
    leases = [arenas.lease(1 << 20) for _ in range(4)]
    del leases
    gc.collect()
    assert arenas.num_idle == 2


def test_sizes_in_turn_are_both_kept_and_one_that_is_out_of_use_goes():
    arenas = Arenas(most=2)
    arenas.lease(1 << 22)
    large, small = (arenas.lease(size).ctypes.data for size in (1 << 20, 1000))
    for _ in range(3):
        assert (arenas.lease(1 << 20).ctypes.data, arenas.lease(1000).ctypes.data) == (large, small)
    assert arenas.num_idle == 2


def test_a_pool_that_is_shared_later_makes_its_next_buffers_in_shared_memory():
    arenas = Arenas(most=2)
    arenas.lease(1000)
    assert arenas.share()
    array = arenas.lease(1000)
    assert segment_of(array[10:].view(np.int16)) is not None
    assert segment_of(np.lib.stride_tricks.as_strided(array, (10, 10), (10, 1))) is segment_of(array)
    assert arenas.shared_bytes == 1 << 16


def test_where_the_system_refuses_shared_memory_buffers_are_private_and_the_log_says_why_once(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arenas = Arenas(most=2, shared=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        leases = [arenas.lease(2 << 20) for _ in range(2)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for lease in leases:
        lease[:] = 7
        assert segment_of(lease) is None
    (line,) = caplog.messages
    assert "private memory" in line
    assert "2,097,152 bytes of shared memory: [Errno 27] File too large" in line


def test_while_a_process_has_few_descriptors_left_buffers_are_private_and_the_log_says_the_limit_once(caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    arenas = Arenas(most=2, shared=True)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared_memory._warn_of_file_limit.cache_clear()
    with tempfile.TemporaryFile() as lowest:
        most = lowest.fileno() + 2
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        try:
            leases = [arenas.lease(1000) for _ in range(2)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    after = arenas.lease(1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [segment_of(lease) for lease in leases] == [None, None]
    assert segment_of(after) is not None
    (line,) = caplog.messages
    assert f"a process may have {most:,} open files here (hard limit {hard:,})" in line
    assert "Raise the hard limit" in line


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
