"""Steps that cut documents are drawn several at once: nobody may be able to tell."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.planlog.records import same
from overlord.stream.drawing import ComputedFacts
from overlord.stream.membership import StepDrawer
from overlord.stream.packing import concat_and_split, cut_samples
from overlord.stream.progress import Progress
from overlord.stream.weights import WeightSchedule
from tests.stream.streams import Stream, keys, steps, streams, weights

BATCH = Batch(tokens=60, sequence_length=20, cut_documents=True)
MANY_ROWS = Stream((200, 300, 250), (2, 3, 2), (None, None, None), longest=90)


def test_with_rows_enough_several_steps_come_of_one_draw():
    drawer = MANY_ROWS.drawer(BATCH, Mixture({"s0": 1.0, "s1": 2.0, "s2": 1.0}))
    drawer.next_step()
    assert drawer.is_ready
    assert len(drawer._drawn) > 2


@given(streams(longest=90), st.data())
def test_they_are_what_steps_drawn_one_by_one_are(stream, data):
    mixture = Mixture(data.draw(weights(stream.names)), stop="drop_exhausted")
    progress = Progress.start(stream.names)
    for together in steps(stream.drawer(BATCH, mixture), 12):
        alone = stream.drawer(BATCH, mixture, progress).next_step()
        assert alone is not None
        assert keys(together) == keys(alone)
        assert together.number == alone.number
        progress = together.after()
        assert same(progress, alone.after())


@given(streams(longest=90), st.data())
def test_their_rows_are_those_that_packing_would_make(stream, data):
    mixture = Mixture(data.draw(weights(stream.names)), stop="drop_exhausted")
    for step in steps(stream.drawer(BATCH, mixture), 12):
        assert step.in_rows is not None
        pieces = concat_and_split(step.samples.tokens, 3, 20)
        assert np.array_equal(step.in_rows.row, pieces.row)
        assert np.array_equal(step.in_rows.samples.table, cut_samples(step.samples, pieces).table)


@given(st.integers(1, 12), st.data())
def test_weights_that_change_meanwhile_hold_from_the_step_they_were_given_for(at, data):
    first, then = data.draw(weights(MANY_ROWS.names)), data.draw(weights(MANY_ROWS.names))
    mixture = Mixture(first)
    schedule = WeightSchedule(mixture, MANY_ROWS.names)
    drawer = StepDrawer(
        Progress.start(MANY_ROWS.names),
        BATCH,
        mixture,
        MANY_ROWS.extents,
        ComputedFacts(MANY_ROWS.describe),
        schedule=schedule,
    )
    before = steps(drawer, at)
    schedule.change(at, then)
    after = steps(drawer, 5)
    # Known from the beginning, the change leaves nothing that was drawn too far.
    told = WeightSchedule(mixture, MANY_ROWS.names)
    told.change(at, then)
    start = Progress.start(MANY_ROWS.names)
    planned = StepDrawer(start, BATCH, mixture, MANY_ROWS.extents, ComputedFacts(MANY_ROWS.describe), schedule=told)
    assert [keys(step) for step in before + after] == [keys(step) for step in steps(planned, at + 5)]
