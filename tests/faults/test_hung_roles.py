"""A role that hangs is told from one that is busy, and made anew; whoever waits for it does not notice but by the clock."""

import logging
import os
import re
import threading
from collections.abc import Iterator
from functools import partial

import pytest

import overlord as ol
from overlord.runtime.engine import Workplace, WorkplaceSize
from tests.faults.disturbance import pause
from tests.runtime.roles import Counter, make_counter

pytestmark = pytest.mark.usefixtures("ray_cluster")
HUNG_AFTER_S = 1.0
PATIENT_S = 2.5  # where nothing hangs: a loaded machine must not make it seem so


class Knotted(Counter):
    """Can be brought to hold a lock for ever that it needs to say what it is doing."""

    def __init__(self) -> None:
        super().__init__()
        self._own = threading.Lock()

    def knot(self) -> int:
        self._own.acquire()
        return self.pid()

    def status_lines(self) -> list[str]:
        with self._own:
            return ["counting"]


def make_knotted(workplace: Workplace) -> Knotted:
    return Knotted()


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[ol.Ray]:
    hung_after_s = getattr(request, "param", HUNG_AFTER_S)
    engine = ol.Ray("auto", others=ol.scaling.ActorOptions(max_concurrency=4), patience_s=60, hung_after_s=hung_after_s)
    engine.open(WorkplaceSize(1, 1))
    yield engine
    engine.close()


@pytest.mark.second_try(reason="an actor that Ray starts slowly seems to hang for longer than a second")
def test_a_stopped_role_is_replaced_told_of_and_asked_again(engine: ol.Ray, caplog: pytest.LogCaptureFixture):
    counter = engine.spawn("counter", partial(make_counter, 5))
    stopped = counter.call(Counter.pid).result()
    with caplog.at_level(logging.WARNING, "overlord.runtime.engine"):
        pause(stopped)
        assert counter.call(Counter.add, 2).result(60) == 7
    assert counter.call(Counter.pid).result() != stopped
    told = rf"role 'counter' has not answered for 1\.\d s, though its process {stopped} on node \w+ is alive"
    assert re.search(told, caplog.text)
    assert "the process is killed and the role is restarted" in caplog.text


@pytest.mark.second_try(reason="an actor that Ray starts slowly seems to hang for longer than a second")
def test_a_role_whose_own_locks_are_in_a_knot_is_replaced(engine: ol.Ray):
    role = engine.spawn("knotted", make_knotted)
    knotted = role.call(Knotted.knot).result()
    assert role.call(Knotted.status_lines).result(60) == ["counting"]
    assert role.call(Knotted.pid).result() != knotted


@pytest.mark.second_try(reason="a starved actor seems to hang")
@pytest.mark.parametrize("engine", [PATIENT_S], indirect=True)
def test_neither_a_busy_role_nor_one_that_takes_long_to_make_is_taken_for_hung(engine: ol.Ray):
    def make(workplace: Workplace) -> Counter:
        threading.Event().wait(2 * PATIENT_S)  # killed before its end, it would never be made
        return Counter(1)

    slow = engine.spawn("slow", make)
    counter = engine.spawn("counter", partial(make_counter, 0))
    before = counter.call(Counter.pid).result()
    busy = [counter.call(Counter.hang) for _ in range(4)]  # as many as it answers side by side
    with pytest.raises(ol.errors.WaitTimeoutError):
        busy[0].result(2 * PATIENT_S)
    assert os.path.exists(f"/proc/{before}"), "nobody has killed it"
    assert slow.call(Counter.add, 0).result(60) == 1
