"""How far ahead a loader reads: as far as the run needs, and no further."""

from hypothesis import given
from hypothesis import strategies as st

from overlord.roles.reading_ahead import ChunkPace, Lookout

SECONDS = st.floats(0.001, 100)


def pace_of(make_s: float, interval_s: float, num_requests: int = 9) -> ChunkPace:
    pace = ChunkPace().with_chunk(make_s / 2, make_s / 2)
    for number in range(num_requests):
        pace = pace.with_request(number * interval_s)
    return pace


@given(SECONDS, SECONDS, st.integers(0, 64))
def test_as_many_chunks_are_made_as_are_requested_meanwhile_and_half_as_many_again(make_s, interval_s, most):
    found = pace_of(make_s, interval_s).num_ahead(most)
    assert 0 <= found <= most
    assert found == most or 1.5 * make_s / interval_s - 1.001 <= found <= 1.5 * make_s / interval_s + 0.001


def test_nothing_is_made_early_before_the_pace_is_known():
    assert ChunkPace().num_ahead(9) == 0
    assert ChunkPace().with_request(0).with_request(1).num_ahead(9) == 0
    assert ChunkPace().with_chunk(5, 0).with_request(0).num_ahead(9) == 0
    assert pace_of(5, 0.0).num_ahead(9) == 9


@given(SECONDS, st.floats(0.1, 40), st.integers(1, 64))
def test_a_source_that_is_too_slow_gets_threads_until_it_is_quick_enough(make_s, needed, num_threads):
    """Of a run that could use `needed` chunks in the time that one takes. In the making are those ahead, and the one that is
    waited for; so many come in that time."""
    pace, now, ahead = ChunkPace().with_chunk(make_s / 2, make_s / 2), 0.0, 0
    for _ in range(200):
        ahead = pace.num_ahead(num_threads)
        now += make_s / min(1 + ahead, needed)
        pace = pace.with_request(now)
    assert 1 + ahead >= min(needed, num_threads)
    assert ahead <= 1.5 * needed + 0.001


@given(SECONDS, st.integers(2, 64))
def test_a_source_that_holds_the_gil_gets_no_more_threads_than_help(cpu_s, num_threads):
    """Its chunks come one after the other, however many are in the making; all others wait for the GIL meanwhile."""
    pace, now, ahead = ChunkPace(), 0.0, 0
    for _ in range(100):
        pace = pace.with_chunk(cpu_s, cpu_s * ahead * 0.9 if ahead > 1 else 0.0)
        now += cpu_s
        pace = pace.with_request(now)
        ahead = pace.num_ahead(num_threads)
    assert ahead <= 2


@given(SECONDS, SECONDS, st.integers(2, 8))
def test_a_pause_of_the_trainers_changes_nothing(make_s, interval_s, before):
    pace = pace_of(make_s, interval_s, before)
    paused = pace.with_request(pace.requests[-1] + 1000 * interval_s)
    assert abs(paused.num_ahead(50) - pace.num_ahead(50)) <= 1


def test_more_sources_are_announced_after_a_wait_and_fewer_after_a_while_without_one():
    found, sizes = Lookout(), []
    for _ in range(8):
        found = found.after_facts(0.5)
        sizes.append(found.num_sources)
    assert sizes == [12, 18, 27, 40, 60, 64, 64, 64]
    for _ in range(16 * 80):
        found = found.after_facts(0.0)
    assert found.num_sources == 8
