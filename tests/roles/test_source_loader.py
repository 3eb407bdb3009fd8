"""A Source Loader's buffer: right answers in any order, each chunk made once while it fits, never over its bytes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.chunks.chunk import Chunk, Lineage
from overlord.errors import BufferTooSmallError, ClosedError
from overlord.roles.source_loader import SourceLoader
from overlord.runtime.threads import CallerRuns, Threads
from overlord.stream.facts import ChunkFacts, ImageSizes


def chunk_of(number: int, tokens: int = 100) -> Chunk:
    values = np.full(tokens, number, np.int32)
    facts = ChunkFacts(np.array([tokens]), np.array([tokens - 1]))
    at = np.array([0])
    lineage = Lineage((), np.zeros(0, np.int64), ())
    table = pa.table({"tokens": pa.array([values], pa.list_(pa.int32()))})
    return Chunk(facts, table, at, at, lineage, values, at, np.array([tokens]))


SIZE = chunk_of(0).num_bytes


@pytest.fixture
def threads():
    pool = Threads(2, "test")
    yield pool
    pool.shutdown()


def loader_of(threads, buffer_bytes: int, make=chunk_of) -> SourceLoader:
    return SourceLoader("s", make, lambda number: SIZE, buffer_bytes=buffer_bytes, threads=threads)


def give(loader: SourceLoader, number: int, amount: int) -> None:
    loader.get(number).left -= amount
    loader.release_if_empty(number)


@given(
    st.lists(st.tuples(st.sampled_from(["describe", "chunk", "prefetch", "given"]), st.integers(0, 6)), max_size=30),
    st.integers(1, 4),
)
def test_any_order_of_asks_gets_right_answers_within_the_bytes(asks, room):
    threads = Threads(2, "test")
    loader = loader_of(threads, room * SIZE)
    try:
        for what, number in asks:
            if what == "describe":
                assert loader.describe(number, max(0, number - 2)).num_rows == 1
            elif what == "chunk":
                values = loader.get(number).values
                assert values is not None
                assert values[0] == number
            elif what == "prefetch":
                loader.prefetch(range(number, number + 9))
            else:
                give(loader, number, 40)
            use = loader.buffer_use()
            assert use.num_bytes <= use.peak_bytes <= use.limit_bytes
    finally:
        loader.close()
        threads.shutdown()


def test_a_loader_makes_a_whole_run_while_others_have_their_turn(threads):
    made = threading.Semaphore(0)
    expected = list(range(10, 16))

    def make(number: int) -> Chunk:
        made.release()
        return chunk_of(number)

    loader = SourceLoader(
        "s",
        make,
        lambda number: SIZE,
        buffer_bytes=20 * SIZE,
        ahead_bytes=2 * SIZE,
        threads=threads,
        last_of_run=lambda number: number // 20 * 20 + 15,
    )
    loader.prefetch([*expected, *range(30, 36)])
    for _ in expected:
        assert made.acquire(timeout=60)
    assert loader.chunks_held() == expected
    loader.describe(15)  # and its next run, once it has had its turn
    for _ in expected:
        assert made.acquire(timeout=60)
    assert loader.chunks_held() == [*expected, *range(30, 36)]
    loader.close()


def test_what_a_reader_holds_leaves_less_for_reading_ahead(threads):
    held = 3 * SIZE
    loader = SourceLoader(
        "s", chunk_of, lambda number: SIZE, buffer_bytes=6 * SIZE, threads=threads, held_bytes=lambda: held
    )
    for number in range(9):
        values = loader.get(number).values
        assert values is not None
        assert values[0] == number
        use = loader.buffer_use()
        assert held < use.num_bytes <= use.limit_bytes
        assert use.num_chunks <= 3
    loader.close()


def test_a_chunk_is_kept_until_both_its_text_and_its_images_were_given(threads):
    def with_images(number: int) -> Chunk:
        chunk = chunk_of(number)
        return replace(chunk, facts=replace(chunk.facts, images=ImageSizes.of([[(8, 8), (9, 9)]])))

    loader = loader_of(threads, 4 * SIZE, with_images)
    loader.get(0)
    give(loader, 0, 100)
    give(loader, 0, 1)
    assert loader.buffer_use().num_chunks == 1
    give(loader, 0, 1)
    assert loader.buffer_use().num_chunks == 0


def test_a_chunk_wanted_by_many_threads_at_once_is_made_once(threads):
    made = []
    gate = threading.Event()

    def make(number: int) -> Chunk:
        gate.wait(10)
        made.append(number)
        return chunk_of(number)

    loader = loader_of(threads, 10 * SIZE, make)
    loader.prefetch([3])
    with ThreadPoolExecutor(8) as askers:
        pending = [askers.submit(loader.describe, 3) for _ in range(8)]
        gate.set()
        assert all(future.result(10).num_rows == 1 for future in pending)
    assert made == [3]


def test_a_chunk_is_dropped_when_all_of_it_was_given(threads):
    loader = loader_of(threads, 10 * SIZE)
    loader.get(0)
    give(loader, 0, 60)
    assert loader.buffer_use().num_chunks == 1
    give(loader, 0, 40)
    assert loader.buffer_use().num_chunks == 0


def test_a_chunk_dropped_for_room_is_made_again_when_asked_for(threads):
    loader = loader_of(threads, SIZE)
    for number in (0, 1, 0, 1):
        values = loader.get(number).values
        assert values is not None
        assert values[0] == number
    assert loader.buffer_use().chunks_made >= 4


def test_describing_ahead_does_not_push_out_what_is_still_needed(threads):
    loader = loader_of(threads, SIZE)
    loader.get(0)
    loader.describe(1)
    made = loader.buffer_use().chunks_made
    loader.get(0)
    assert loader.buffer_use().chunks_made == made


def test_an_error_is_raised_to_the_asker_and_the_next_ask_tries_again(threads):
    failures = iter([True, False])

    def make(number: int) -> Chunk:
        if next(failures):
            raise OSError("storage is away")
        return chunk_of(number)

    loader = loader_of(threads, 10 * SIZE, make)
    with pytest.raises(OSError, match="storage is away"):
        loader.describe(0)
    assert loader.describe(0).num_rows == 1


def test_a_chunk_over_the_whole_buffer_is_an_error(threads):
    loader = loader_of(threads, SIZE - 1)
    with pytest.raises(BufferTooSmallError, match="chunk 0 takes"):
        loader.get(0)


class Clock:
    """Says what it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def paced_loader(
    threads, clock: Clock, *, make_s: float, interval_s: float, room: int, make=chunk_of, inline_s: float = 0.0
) -> SourceLoader:
    """Of which the chunks 0 to 2 were made in `make_s` each, and requested in these intervals."""

    def timed(number: int) -> Chunk:
        if number > 2:
            return make(number)
        clock.now += make_s
        return chunk_of(number)

    loader = SourceLoader(
        "s", timed, lambda number: SIZE, buffer_bytes=room * SIZE, threads=threads, inline_s=inline_s, clock=clock
    )
    for number in range(3):
        clock.now = number * interval_s
        loader.describe(number)
        give(loader, number, 100)
    return loader


def test_a_source_that_requests_wait_for_gets_several_chunks_in_the_making():
    threads, clock, begun, four = Threads(4, "test"), Clock(), [], threading.Event()

    def make(number: int) -> Chunk:
        begun.append(number)
        if len(begun) == 4:
            four.set()
        assert four.wait(10), "no chunk is ready before four are in the making"
        return chunk_of(number)

    loader = paced_loader(threads, clock, make_s=3, interval_s=1, room=20, make=make)
    try:
        for _ in range(100):  # as each step does: a thread that has just ended a chunk may not be idle yet
            loader.prefetch(range(3, 40))
            if four.wait(0.1):
                break
        assert four.is_set(), "and nobody has requested one yet"
        assert sorted(begun[:4]) == [3, 4, 5, 6]
        assert loader.describe(3).num_rows == 1
    finally:
        loader.close()
        threads.shutdown()


@pytest.mark.parametrize("inline_s", [0.5, 2.0])
def test_chunks_that_take_little_time_are_left_to_whoever_requests_them(inline_s):
    threads, clock, made = Threads(4, "test"), Clock(), []

    def make(number: int) -> Chunk:
        made.append(threading.current_thread())
        return chunk_of(number)

    loader = paced_loader(threads, clock, make_s=1, interval_s=1, room=20, make=make, inline_s=inline_s)
    try:
        loader.prefetch(range(3, 40))
        if inline_s > 1:
            assert loader.chunks_held() == []
            loader.get(3)
            assert made == [threading.current_thread()]
        else:
            assert 3 in loader.chunks_held()
    finally:
        loader.close()
        threads.shutdown()


def test_a_source_that_nobody_waits_for_makes_the_chunk_that_is_due_and_no_other():
    threads, clock, made = Threads(4, "test"), Clock(), []

    def make(number: int) -> Chunk:
        made.append(number)
        return chunk_of(number)

    loader = paced_loader(threads, clock, make_s=1, interval_s=9, room=20, make=make)
    try:
        loader.prefetch(range(3, 40))
        loader.get(3)
        give(loader, 3, 100)
        assert loader.chunks_held() == []
        assert made == [3]
    finally:
        loader.close()
        threads.shutdown()


def test_chunks_made_early_leave_room_for_the_one_that_is_due():
    threads, clock = Threads(4, "test"), Clock()
    loader = paced_loader(threads, clock, make_s=9, interval_s=1, room=4)
    try:
        loader.prefetch(range(3, 40))
        for number in range(3, 30):
            loader.describe(number, number - 1)
            assert len(loader.chunks_held()) <= 4
            made = loader.buffer_use().chunks_made
            loader.get(number)
            assert loader.buffer_use().chunks_made - made <= 4, "it was still in the buffer"
            use = loader.buffer_use()
            assert use.num_bytes <= use.peak_bytes <= use.limit_bytes
        assert loader.buffer_use().chunks_made <= 37, "none was made twice"
    finally:
        loader.close()
        threads.shutdown()


def test_a_chunk_that_could_not_be_made_early_is_tried_again_when_it_is_requested():
    threads, clock, tried = Threads(1, "test"), Clock(), []

    def make(number: int) -> Chunk:
        tried.append(number)
        if number == 4 and tried.count(4) == 1:
            raise OSError("storage is away")
        return chunk_of(number)

    loader = paced_loader(threads, clock, make_s=3, interval_s=1, room=20, make=make)
    try:
        for _ in range(3):
            loader.prefetch([4])
            while loader.chunks_held():
                pass
        assert tried == [4]
        assert loader.describe(4).num_rows == 1
    finally:
        loader.close()
        threads.shutdown()


def test_without_threads_nothing_is_made_before_it_is_requested():
    loader = paced_loader(CallerRuns(), Clock(), make_s=3, interval_s=1, room=20)
    loader.prefetch(range(3, 40))
    loader.describe(3)
    assert loader.chunks_held() == [3]
    assert loader.buffer_use().chunks_made == 4


def test_chunks_that_moved_to_another_loader_are_not_made_any_more(threads):
    loader = paced_loader(threads, Clock(), make_s=3, interval_s=1, room=20)
    loader.prefetch(())
    loader.describe(3)
    assert loader.chunks_held() == [3]


def test_a_closed_loader_refuses(threads):
    loader = loader_of(threads, SIZE)
    loader.close()
    with pytest.raises(ClosedError):
        loader.get(0)
