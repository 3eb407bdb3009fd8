"""Steps that are requested ahead without a thread: how many at a time, and what happens when they are refused."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from overlord.messages import AHEAD_BYTES, MOST_AHEAD, Delivery
from overlord.service.prefetch import _FORGIVEN, _STEADY, RequestedSteps

MOST_TOGETHER = MOST_AHEAD // 2


class Service:
    """Answers every request in turn; `refused` steps are not ready, once."""

    def __init__(self, num_bytes: int = 100) -> None:
        self.requests: list[tuple[int, int]] = []
        self.answers: list[int | None] = []
        self.refused: set[int] = set()
        self.num_opened = 0
        self._fields = {"tokens": np.zeros(num_bytes, np.uint8)}

    def origin(self) -> str:
        return "here"

    def open_pipeline(self, rank: int) -> Service:
        self.num_opened += 1
        return self

    def request(self, step: int, num_steps: int) -> None:
        self.requests.append((step, num_steps))
        steps: list[int | None] = list(range(step, step + num_steps))
        begin = next((i for i, number in enumerate(steps) if number in self.refused), num_steps)
        self.refused -= set(range(step, step + num_steps))
        self.answers += steps[:begin] + [None] * (num_steps - begin)

    def receive(self, timeout_s: float | None) -> Delivery | None:
        step = self.answers.pop(0)
        return None if step is None else Delivery(step, 1, (self._fields,))

    def stop_receiving(self) -> None: ...

    def close(self) -> None: ...


class Unplaced:
    def place(self, microbatches: Any) -> Any:
        return microbatches


class Trainer:
    """Takes steps as a client does: those that do not come ahead it fetches itself."""

    def __init__(self, service: Service) -> None:
        self.ahead = RequestedSteps(cast("Any", service), 0, 2)
        self.next = 0
        self.num_own = 0

    def take(self, num_steps: int) -> None:
        for _ in range(num_steps):
            found = None if self.ahead.is_paused else self.ahead.pop(self.next, 1.0)
            if found is None:
                self.num_own += 1
                self.next += 1
                self.ahead.follow(self.next, cast("Any", Unplaced()))
            else:
                assert found.number == self.next
                self.next += 1
                self.ahead.advance(self.next)


def test_small_steps_are_requested_several_at_a_time_after_a_while():
    service, trainer = Service(), None
    trainer = Trainer(service)
    trainer.take(200)
    sizes = [size for _, size in service.requests]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert sizes[-1] == MOST_TOGETHER
    assert trainer.num_own == 1, "the first"
    requested = [step for begin, size in service.requests for step in range(begin, begin + size)]
    assert requested == list(range(1, len(requested) + 1)), "each once, in order"
    assert MOST_TOGETHER <= len(service.answers) <= MOST_AHEAD, "those of one request are always on their way"


def test_large_steps_are_requested_one_at_a_time_and_middling_ones_two():
    for num_bytes, most in [(AHEAD_BYTES // 3, 1), (AHEAD_BYTES // 5, 2)]:
        service = Service(num_bytes)
        Trainer(service).take(100)
        assert max(size for _, size in service.requests) == most


def test_after_a_refusal_fewer_are_requested_and_none_is_lost_or_comes_twice():
    service = Service()
    trainer = Trainer(service)
    trainer.take(100)
    assert service.requests[-1][1] == MOST_TOGETHER
    last = service.requests[-1][0] + MOST_TOGETHER
    service.refused = {last + 1}
    trainer.take(4 * MOST_TOGETHER)
    after = [size for begin, size in service.requests if begin > last]
    assert 1 in after
    assert trainer.num_own == 2
    trainer.take(10 * _STEADY)
    assert service.requests[-1][1] == MOST_TOGETHER // 2, "no more than were not refused"
    trainer.take(_FORGIVEN)
    assert service.requests[-1][1] == MOST_TOGETHER
    assert trainer.num_own == 2
    assert service.num_opened == 1
