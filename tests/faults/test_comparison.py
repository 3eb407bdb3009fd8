"""The comparison that the fault suite rests on can fail, and the faults of a seed are always the same."""

from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from tests.faults.comparison import compared, undisturbed
from tests.faults.schedule import drawn_faults
from tests.faults.trainers import Taken
from tests.small_sources import Numbered, job_of

JOB = job_of({"a": Numbered(rows=60, first=1)}, mesh=ol.Mesh(dp=2))
STEPS = undisturbed(JOB, 6)


def life(rank: int, *steps: int) -> list[Taken]:
    return [Taken(step, STEPS[step][rank], 0.0) for step in steps]


def test_ranks_that_got_everything_in_order_are_the_same_also_when_one_took_steps_again():
    stream = compared(JOB, [[life(0, 0, 1, 2), life(0, 2, 3)], [life(1, *range(6))]])
    assert stream.is_same
    assert (stream.num_steps, stream.num_taken, stream.num_taken_again) == (6, 11, 1)


def test_a_lost_a_repeated_and_a_changed_step_are_found():
    lost = compared(JOB, [[life(0, 0, 1), life(0, 3)], [life(1, 0)]])
    assert (lost.num_missing, lost.first) == (1, "rank 0 never got step 2")
    repeated = compared(JOB, [[life(0, 0, 1, 1, 2)], [life(1, 0)]])
    assert (repeated.num_out_of_order, repeated.first) == (1, "rank 0 took step 1 after 1")
    other = compared(JOB, [[life(0, 0, 1)], [life(0, 0, 1)]])
    assert (other.num_different, other.first) == (2, "rank 1 got another step 0")
    assert not any(stream.is_same for stream in (lost, repeated, other))


@given(st.integers(0, 1 << 30), st.dictionaries(st.text(min_size=1), st.integers(1, 9), min_size=1), st.integers(0, 60))
def test_a_seed_always_gives_the_same_faults_and_every_kind_if_there_are_enough(seed, weights, more):
    num_faults = len(weights) + more
    faults = drawn_faults(seed, weights, num_faults)
    assert faults == drawn_faults(seed, weights, num_faults)
    assert len(faults) == num_faults
