"""Small steps that are fetched ahead in a row are built together, and each comes out as if it had been built alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import pytest

from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.plan import GroupPlan
from overlord.batches.buffers import Arenas
from overlord.batches.payload import Payload
from overlord.declare.mesh import Mesh
from overlord.errors import DataError
from overlord.messages import AHEAD_BYTES, MOST_AHEAD, Delivery, Later
from overlord.roles.data_constructor import DataConstructor
from overlord.runtime.threads import CallerRuns
from overlord.stream.facts import Samples
from tests.batches.microbatches import microbatch

ROW = 16
PREFETCH = 2


class Plans:
    """The plans of a group, of which those up to `last` are here."""

    def __init__(self, last: int = 100, num_tokens: int = ROW) -> None:
        self.last = last
        self._num_rows = num_tokens // ROW

    def _plan(self, step: int) -> GroupPlan:
        lengths = [1 + step % (ROW - 1), ROW - 1 - step % (ROW - 1)] * self._num_rows
        rows = np.repeat(np.arange(self._num_rows), 2)
        return GroupPlan(
            step, 0, (microbatch(lengths, rows=rows, num_rows=self._num_rows, row_tokens=ROW).micro,), 9, frozenset()
        )

    def plan(self, step: int, oldest: int, is_late: bool) -> GroupPlan | Later | None:
        return self._plan(step)

    def peek(self, step: int) -> GroupPlan | None:
        return self._plan(step) if step <= self.last else None

    def receive(self, found: Any) -> None: ...

    def reset(self) -> None: ...


class Rows:
    """Rows made of their lengths. `requests` has the number of samples of each request."""

    def __init__(self, broken: int | None = None) -> None:
        self.requests: list[int] = []
        self._broken = broken
        """The length of a document that cannot be read."""

    def has(self, samples: Samples) -> bool:
        return True

    def fetch_each(self, parts: Sequence[Samples]) -> Iterator[Payload]:
        for part in parts:
            self.requests.append(len(part))
            lengths = part.tokens.tolist()
            if self._broken in lengths:
                raise DataError("this row has changed")
            yield Payload([np.arange(100 * n, 101 * n) for n in lengths], np.full(len(lengths), -100))


class NoPlanner:
    def call(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("no request reaches the planner here")


def constructor(plans: Plans, rows: Rows, most_ahead: int = MOST_AHEAD) -> DataConstructor:
    made = microbatch([ROW], num_rows=1, row_tokens=ROW)
    return DataConstructor(
        0,
        made.batch,
        ClientPlaceTree(Mesh()),
        planner=cast("Any", NoPlanner()),
        plans=plans,
        rows=rows,
        prefetch=PREFETCH,
        threads=CallerRuns(),
        arenas=Arenas(),
        most_ahead=most_ahead,
    )


def taken(found: Delivery | Later | None) -> dict[str, Any]:
    assert isinstance(found, Delivery)
    return dict(found.microbatches[0])


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def alone(step: int) -> dict[str, Any]:
    return taken(constructor(Plans(), Rows()).fetch(step, 0, 1.0))


def test_steps_fetched_in_a_row_are_built_with_one_request_for_rows():
    rows = Rows()
    built = constructor(Plans(), rows)
    assert_same(taken(built.fetch(0, 0, 1.0)), alone(0))
    for step in (1, 2, 3, 4):
        assert_same(taken(built.fetch(step, 0, 1.0, ahead=5 - step)), alone(step))
    assert rows.requests == [2, 8]


def test_steps_whose_plans_are_not_here_are_built_alone():
    rows = Rows()
    built = constructor(Plans(last=2), rows)
    built.fetch(0, 0, 1.0)
    for step in (1, 2, 3, 4):
        assert_same(taken(built.fetch(step, 0, 1.0, ahead=5 - step)), alone(step))
    assert rows.requests == [2, 4, 2, 2]


def test_an_error_of_a_later_step_is_raised_for_that_step_alone():
    rows = Rows(broken=4)  # of step 3
    built = constructor(Plans(), rows)
    built.fetch(0, 0, 1.0)
    for step in (1, 2):
        assert_same(taken(built.fetch(step, 0, 1.0, ahead=5 - step)), alone(step))
    with pytest.raises(DataError, match="this row has changed") as caught:
        built.fetch(3, 0, 1.0, ahead=2)
    assert caught.value.__notes__ == ["while data-parallel group 0 built step 3"]
    assert_same(taken(built.fetch(4, 0, 1.0, ahead=1)), alone(4))


def test_small_steps_are_fetched_further_ahead_than_large_ones():
    small = constructor(Plans(), Rows())
    small.fetch(0, 0, 1.0)
    assert isinstance(small.fetch(MOST_AHEAD, 0, 1.0, ahead=1), Delivery)
    assert isinstance(small.fetch(MOST_AHEAD + 1, 0, 1.0, ahead=1), Later)

    large = constructor(Plans(num_tokens=AHEAD_BYTES // 22 // 3 // ROW * ROW), Rows())
    large.fetch(0, 0, 1.0)
    assert isinstance(large.fetch(3, 0, 1.0, ahead=1), Delivery), "three of them fit"
    refused = large.fetch(4, 0, 1.0, ahead=1)
    assert isinstance(refused, Later)
    assert refused.reason == "step 4 is more than 3 steps ahead of rank 0"

    strict = constructor(Plans(), Rows(), most_ahead=0)
    strict.fetch(0, 0, 1.0)
    assert isinstance(strict.fetch(PREFETCH + 1, 0, 1.0, ahead=1), Later)
