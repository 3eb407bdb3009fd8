"""Warnings ahead of epochs: once a source, before its end changes the run, or before it is read very often."""

import logging
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.stream.drawing import Extent
from overlord.stream.epoch_watch import EpochWatch
from overlord.stream.progress import Progress
from tests.small_sources import Numbered, job_of, read_all

NAMES = ("web", "books")


def at(step: int, *chunks: int, tokens: int = 10**9) -> Progress:
    n = len(chunks)
    return replace(
        Progress.start(NAMES[:n]),
        step=step,
        chunk=np.array(chunks),
        tokens=np.full(n, tokens),
        samples=np.full(n, 50),
        weights=np.full(n, 1 / n),
    )


def watch(epochs: int | None, stop: Any = "drop_exhausted", warn: bool | int = True, first: int = 0) -> EpochWatch:
    return EpochWatch(at(0, 0, first), [Extent(10, None), Extent(10, epochs)], stop, [False, warn])


@pytest.mark.parametrize(
    ("stop", "consequence"),
    [
        ("drop_exhausted", "the other sources share its weight (stop='drop_exhausted')"),
        ("first_exhausted", "the run ends (stop='first_exhausted')"),
        ("all_exhausted", "it is read again until every source has been (stop='all_exhausted')"),
    ],
)
def test_a_cap_is_told_in_its_last_tenth_once_with_what_follows(stop, consequence):
    watched = watch(4, stop)
    assert watched.look(at(350, 0, 35)) == []
    expected = f"source 'books' will reach its cap of 4 epochs in about 30 steps; it is at 3.70 epochs. Then {consequence}"
    assert watched.look(at(370, 0, 37)) == [expected]
    assert watched.look(at(380, 0, 38)) == []
    assert watch(4, stop).look(at(400, 0, 40)) == [f"source 'books' has reached its cap of 4 epochs. Then {consequence}"]
    assert watch(4, stop, first=40).look(at(410, 1, 40)) == [], "it ended before this run was started"
    assert watch(4, stop, warn=False).look(at(370, 0, 37)) == []


def test_where_nothing_else_is_left_a_run_simply_ends():
    alone = EpochWatch(at(0, 0), [Extent(10, 4)], "drop_exhausted", [True])
    assert alone.look(at(370, 37)) == []
    both = EpochWatch(at(0, 0, 0), [Extent(10, 1), Extent(10, 4)], "drop_exhausted", [False, True])
    assert both.look(at(370, 10, 37)) == []


def test_an_endless_source_is_told_before_its_fifth_reading_if_it_is_large():
    watched = watch(None)
    assert watched.look(at(380, 0, 38)) == []
    (text,) = watched.look(at(390, 0, 39))
    assert text.startswith("source 'books' will be read for the 5th time in about 10 steps; it is at 3.90 epochs. repeat=4")
    assert watched.look(at(900, 0, 90)) == []
    assert watch(None).look(at(390, 0, 39, tokens=3_000_000)) == []
    assert watch(None, first=41).look(at(500, 0, 50)) == [], "it was told before"
    assert watch(None, warn=False).look(at(390, 0, 39)) == []
    (text,) = watch(None, warn=2).look(at(215, 0, 21, tokens=5))
    assert text.startswith("source 'books' is being read for the 3rd time. repeat=2")


def test_a_thousand_sources_say_no_more_than_five_lines():
    names = tuple(f"s{i}" for i in range(1000))
    start = replace(Progress.start(names), weights=np.full(1000, 0.001))
    watched = EpochWatch(start, [Extent(10, 2)] * 1000, "drop_exhausted", [True] * 1000)
    found = watched.look(replace(start, step=190, chunk=np.full(1000, 19)))
    assert len(found) == 5
    assert found[-1] == "996 more sources come to their last epochs: `overlord status` shows them"


@given(st.integers(1, 30), st.integers(1, 5) | st.none(), st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_each_source_is_told_at_most_once_and_never_before_its_last_tenth(per_epoch, epochs, moves):
    watched = EpochWatch(at(0, 0, 0), [Extent(10, None), Extent(per_epoch, epochs)], "drop_exhausted", [False, 3])
    limit = per_epoch * (epochs or 3)
    chunk = told = 0
    for step, move in enumerate(moves, 1):
        chunk += move
        found = watched.look(at(step, 0, chunk))
        told += len(found)
        span = limit if epochs else per_epoch
        assert not found or chunk >= limit - max(1, -(-span // 10))
        assert told == (chunk >= max(1, limit - max(1, -(-span // 10))))


class Caught(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines():
    caught, logger = Caught(), logging.getLogger("overlord.roles.planner")
    logger.addHandler(caught)
    yield caught.lines
    logger.removeHandler(caught)


def test_a_run_tells_of_a_cap_in_its_log_and_events_and_nothing_else_does(lines):
    sources = {"web": Numbered(rows=40, first=1), "books": Numbered(rows=40, first=100, repeat=3)}
    evals = {"val": ol.Eval(sources={"a": Numbered(rows=90, first=500), "b": Numbered(rows=50, first=900)})}
    job = job_of(sources, ol.Batch(samples=2, sequence_length=16), evals=evals)
    with ol.start(job) as loader:
        client = loader.client(0)
        for _ in range(110):
            next(client)
        metrics = loader.metrics()
        assert len(list(client.evaluate("val"))) > 5
        text = next(event.text for event in metrics.events if event.kind == "epochs")
        for _ in range(40):
            next(client)
    assert lines == [text]
    assert re.fullmatch(
        r"source 'books' will reach its cap of 3 epochs in about \d+ steps; it is at 2.\d\d epochs. Then the other sources "
        r"share its weight \(stop='drop_exhausted'\)",
        text,
    )
    assert metrics.sources["books"].epoch_limit == 3
    assert metrics.sources["web"].epoch_limit is None
    assert metrics.sources["web"].left_s is not None
    assert metrics.event_counts["epochs"] == 1


def test_counting_the_steps_of_a_run_says_nothing(lines):
    sources = {"a": Numbered(rows=40, first=1, repeat=3), "b": Numbered(rows=40, first=100, repeat=6)}
    job = job_of(sources, ol.Batch(samples=2, sequence_length=16))
    with ol.start(job) as loader:
        assert len(loader.client(0)) == 180
    assert lines == []
    steps, _ = read_all(job, 1000)
    assert len(steps) == 180
    assert len(lines) == 1, "the other one ends with the run"


def test_a_large_source_that_repeats_for_ever_is_told_of(lines):
    class Long(ol.Source):
        def units(self) -> list[ol.Unit]:
            return [ol.Unit("long", index, 4, 4 * 65_536 * 4) for index in range(4)]

        def read(self, unit: ol.Unit) -> pa.Table:
            return pa.table({"tokens": [np.full(65_536, 1 + unit.index, np.int32)] * 4})

        def identity(self) -> str:
            return "long"

    with ol.start(job_of({"long": Long(window=1)}, ol.Batch(samples=1, sequence_length=65_536))) as loader:
        client = loader.client(0)
        for _ in range(90):
            next(client)
    assert [line.partition(" in about")[0].partition(". repeat")[0] for line in lines] in (
        ["source 'long' will be read for the 5th time"],
        ["source 'long' is being read for the 5th time"],
    )


@pytest.mark.parametrize("value", [0, -1, 1.5, "2"])
def test_a_number_of_epochs_that_is_none_is_refused(value):
    with pytest.raises(ol.errors.SpecError, match="warn_epochs"):
        Numbered(warn_epochs=value)
