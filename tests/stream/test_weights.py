"""The mixture in force is what steps are drawn by."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.stream.weights import WeightSchedule, mixture_in_force

NAMES = ("a", "b")
WEIGHTS = st.fixed_dictionaries({name: st.integers(1, 9) for name in NAMES})
SCHEDULES = st.dictionaries(st.integers(1, 30), WEIGHTS, max_size=3)
CHANGES = st.lists(st.tuples(st.integers(0, 40), st.none() | WEIGHTS), max_size=4)


@given(WEIGHTS, SCHEDULES, st.sampled_from(["hold", "linear"]), CHANGES)
def test_every_step_has_the_weights_that_it_is_drawn_by(first, schedule, ramp, changes):
    mixture = ol.Mixture({0: first, **schedule}, ramp=ramp)
    changes = [
        (step, None if weights is None else {name: w / sum(weights.values()) for name, w in weights.items()})
        for step, weights in changes
    ]
    drawn_by = WeightSchedule(mixture, NAMES)
    for step, weights in changes:
        drawn_by.change(step, weights)
    found = mixture_in_force(mixture, changes)
    for step in range(50):
        weights = found.at(step)
        assert np.allclose([weights.get(name, 0.0) for name in NAMES], drawn_by.at(step))
