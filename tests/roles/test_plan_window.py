"""How far groups may get ahead of the slowest one."""

from __future__ import annotations

import pytest

import overlord as ol
from overlord.messages import Later
from overlord.roles.plan_window import PlanWindow
from overlord.stream.progress import Progress

USUAL, MOST = 10, 30


class Pace:
    """A window whose two groups take steps of a given length, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.step = 0
        start = Progress.start(("a",))
        place = ol.ClientPlaceTree(ol.Mesh(dp=2))
        self.window = PlanWindow(start, place, MOST, logged={}, usual_lead=USUAL, clock=lambda: self.now_s)

    def take_steps(self, number: int, step_s: float) -> None:
        for _ in range(number):
            self.step += 1
            self.now_s += step_s
            for group in (0, 1):
                self.window.note_request(group, self.step, self.step, is_late=False)


def test_groups_get_further_ahead_only_while_steps_are_short():
    pace = Pace()
    pace.take_steps(40, 1.0)
    assert pace.window.lead == USUAL
    assert not pace.window.is_fast
    pace.take_steps(40, 0.001)
    assert pace.window.lead == MOST
    assert pace.window.is_fast
    assert pace.window.last_for_all() == pace.step + MOST
    pace.take_steps(40, 0.004)
    assert USUAL < pace.window.lead < MOST
    pace.take_steps(40, 0.1)
    assert pace.window.lead == USUAL


@pytest.mark.parametrize(("step_s", "lead"), [(1.0, USUAL), (0.001, MOST)])
def test_no_group_gets_further_than_that(step_s: float, lead: int):
    pace = Pace()
    pace.take_steps(40, step_s)
    assert pace.window.wait_for_slowest(pace.step + lead) is None
    refused = pace.window.wait_for_slowest(pace.step + lead + 1)
    assert isinstance(refused, Later)
    assert f"more than {lead} steps ahead" in refused.reason


def test_a_group_that_goes_back_does_not_count_as_pace():
    pace = Pace()
    pace.take_steps(40, 1.0)
    pace.window.note_request(0, 3, 3, is_late=False)
    pace.window.note_request(0, pace.step, pace.step, is_late=False)  # at once: as if it had taken all those steps
    pace.take_steps(20, 1.0)
    assert pace.window.lead == USUAL
