"""Every test of this folder that asks for `start` runs on each engine."""

from collections.abc import Callable
from typing import Any

import pytest

import overlord as ol

Start = Callable[..., ol.Loader]


@pytest.fixture(params=["embedded", "processes", "ray"])
def start(request: pytest.FixtureRequest) -> Start:
    """`overlord.start` on the engine under test."""
    if request.param == "embedded":
        return ol.start
    if request.param == "processes":
        return on_processes
    request.getfixturevalue("ray_cluster")
    return on_ray


@pytest.fixture(params=["embedded", "processes"])
def start_on_one_machine(request: pytest.FixtureRequest) -> Start:
    """`overlord.start` on each engine but Ray, whose actors take long to start: for errors that cross borders between
    processes as others do that are tested there."""
    return ol.start if request.param == "embedded" else on_processes


def on_processes(job: ol.Job, **options: Any) -> ol.Loader:
    return ol.start(job, engine=ol.Processes(2), **options)


def on_ray(job: ol.Job, **options: Any) -> ol.Loader:
    num_shares = max(source.loaders for source in job.sources.values())
    return ol.start(job, engine=ol.Ray("auto", loader_hosts=num_shares, loaders=ol.scaling.ActorOptions()), **options)


@pytest.fixture
def other_start(start: Start, request: pytest.FixtureRequest) -> Start:
    """`overlord.start` on an engine that is not under test."""
    if start is not ol.start:
        return ol.start
    request.getfixturevalue("ray_cluster")
    return on_ray
