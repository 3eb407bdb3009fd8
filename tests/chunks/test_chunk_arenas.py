"""The pool of shared memory that chunks are made in."""

from overlord.chunks.shared_rows import ChunkArenas

CHUNK = 1 << 16


def test_buffers_that_are_left_over_while_chunks_are_made_are_given_back():
    """Chunks are dropped in bursts. What a burst leaves is not needed again where they are made one by one."""
    arenas = ChunkArenas()
    burst = [arenas.lease(CHUNK) for _ in range(20)]
    kept = burst[:2]
    del burst
    assert arenas.num_idle == 18
    for _ in range(32):
        kept = [kept[1], arenas.lease(CHUNK)]
    assert arenas.num_idle <= 1
    assert arenas.shared_bytes <= 3 * CHUNK


def test_buffers_that_a_burst_needs_again_stay():
    arenas = ChunkArenas()
    numbers = set()
    for _ in range(32):
        burst = [arenas.lease(CHUNK) for _ in range(8)]
        numbers |= {segment.number for segment in list(arenas._segments)}
        del burst
    assert len(numbers) == 8
    assert arenas.num_idle == 8
