"""Rows on other machines come for several steps in one request, and are those that single requests return."""

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.batches.payload import Payload
from overlord.roles.routes import Routes
from overlord.roles.rows_ahead import RowsAhead
from overlord.stream.facts import Samples
from tests.small_sources import Numbered, job_of, planned

JOB = job_of({"a": Numbered(first=1, with_mask=True, loss_mask="mask"), "b": Numbered(first=100), "c": Numbered(first=200)})


class FarRoutes:
    """The routes of a run of which some hosts are on another machine; counts the requests for rows."""

    def __init__(self, routes: Routes, far: Iterable[str]) -> None:
        self._routes = routes
        self._far = set(far)
        self.hosts_of = routes.hosts_of
        self.num_requests = 0
        self.is_down = False

    def far_hosts(self) -> set[str]:
        return self._far

    def fetch(self, samples: Samples) -> Payload:
        self.num_requests += 1
        if self.is_down:
            raise ol.errors.WorkerDiedError("the host is gone")
        return self._routes.fetch(samples)


def far_of(routes: FarRoutes, **options: Any) -> RowsAhead:
    return RowsAhead(cast("Routes", routes), **options)


def parts_of(loader: ol.Loader, steps: Iterable[int]) -> list[Samples]:
    return [part for step in steps for part in planned(loader, step).plan.for_group(step, 0).all_samples()]


def content(payload: Payload) -> tuple:
    def plain(arrays: Any) -> Any:
        return None if arrays is None else [None if array is None else array.tolist() for array in arrays]

    return plain(payload.tokens), payload.following.tolist(), plain(payload.loss_masks), payload.ignored


@pytest.fixture(scope="module")
def loader():
    with ol.start(JOB) as started:
        yield started


@given(first=st.integers(0, 20), num_steps=st.integers(1, 8))
def test_rows_of_several_steps_come_in_one_request_and_are_the_same(loader: ol.Loader, first: int, num_steps: int):
    routes = loader._roles.routes
    hosts = list(routes.hosts_of({(source, 0) for source in range(3)}))
    far = FarRoutes(routes, hosts)
    parts = parts_of(loader, range(first, first + num_steps))
    ahead = far_of(far)
    ahead.expect(parts)
    ahead.expect(parts)  # what is on its way is not requested again
    for part in parts:
        found = ahead.take(part)
        assert found is not None
        assert content(found) == content(routes.fetch(part))
    assert far.num_requests == 1
    assert ahead.take(parts[0]) is None, "it was taken"


def test_only_rows_of_other_machines_are_requested(loader: ol.Loader):
    routes = loader._roles.routes
    near = FarRoutes(routes, ())
    parts = parts_of(loader, range(4))
    ahead = far_of(near)
    ahead.expect(parts)
    assert all(ahead.take(part) is None for part in parts)
    assert near.num_requests == 0
    is_near = [part.take(np.flatnonzero(part.source == 0)) for part in parts]
    assert all(ahead.take(part) is None for part in is_near)


def test_a_request_in_vain_is_left_to_whoever_needs_the_rows_and_memory_is_bounded(loader: ol.Loader):
    routes = loader._roles.routes
    hosts = list(routes.hosts_of({(source, 0) for source in range(3)}))
    far, parts = FarRoutes(routes, hosts), parts_of(loader, range(6))
    far.is_down = True
    ahead = far_of(far)
    ahead.expect(parts[:2])
    assert ahead.take(parts[0]) is None
    far.is_down = False
    size = 4 * int(parts[-1].tokens.sum())
    small = far_of(far, most_bytes=size)
    small.expect(parts)
    assert small.take(parts[0]) is None, "the oldest was dropped"
    last = small.take(parts[-1])
    assert last is not None
    assert content(last) == content(routes.fetch(parts[-1]))
