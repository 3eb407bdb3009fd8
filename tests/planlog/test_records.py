"""A plan log's records: a snapshot and what follows it give back every progress, exactly, or say what is wrong."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ol
from overlord.errors import StateError
from overlord.planlog.records import (
    Header,
    decision_record,
    fold,
    needed_record,
    same,
    snapshot_record,
    step_record,
)
from overlord.steering.decisions import Decision, in_force, mesh_decision
from overlord.stream.facts import ImageSizes, Samples
from overlord.stream.progress import Progress

NAMES = ("a", "b", "c")
COUNTS = st.lists(st.integers(0, 2**40), min_size=3, max_size=3)
FLOATS = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3)
WEIGHTS = st.lists(st.floats(0, 1), min_size=3, max_size=3)
DRAWN = 10**9
"""A chunk that every source has come to: what is carried was drawn before."""
FLAGS = st.lists(st.booleans(), min_size=3, max_size=3)


@st.composite
def carried(draw: st.DrawFn) -> Samples:
    rows = draw(st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, DRAWN - 1)] * 5), max_size=3))
    source, chunk, row, start, tokens, loss = np.array(rows, np.int64).reshape(-1, 6).T
    columns = np.stack([source, chunk, row, start, start + tokens, tokens, np.minimum(tokens, loss)])
    sizes = {"num_images": columns[1] % 7} if draw(st.booleans()) else {}
    return Samples.of_columns(NAMES, *columns, sizes=sizes)


@st.composite
def histories(draw: st.DrawFn) -> list[Progress]:
    first = draw(st.integers(0, 50))
    return [
        Progress(
            step=first + i,
            names=NAMES,
            chunk=np.array(draw(COUNTS), np.int64) + DRAWN,
            **{name: np.array(draw(COUNTS), np.int64) for name in ("row", "samples", "tokens", "since")},
            lead=np.array(draw(FLOATS)),
            weights=np.array(draw(WEIGHTS)),
            read_once=np.array(draw(FLAGS)),
            carried=draw(carried()),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


def through_json(records: list[dict]) -> list[dict]:
    return [orjson.loads(orjson.dumps(record)) for record in records]


def records_of(history: list[Progress], needed: int) -> list[dict]:
    steps = [step_record(old, new, needed) for old, new in pairwise(history)]
    return [snapshot_record(history[0], needed, []), *steps]


@given(histories())
def test_every_progress_comes_back_exactly(history):
    recovered = fold(through_json(records_of(history, history[0].step)))
    assert sorted(recovered.before) == [progress.step for progress in history]
    assert all(same(recovered.before[progress.step], progress) for progress in history)
    assert recovered.reached == history[-1].step


@given(histories(), st.data())
def test_a_log_cut_after_any_record_gives_what_was_written_before_the_cut(history, data):
    records = through_json(records_of(history, history[0].step))
    kept = data.draw(st.integers(1, len(records)))
    recovered = fold(records[:kept])
    assert recovered.reached == history[kept - 1].step
    assert same(recovered.before[recovered.reached], history[kept - 1])


@given(histories(), st.integers(0, 3), st.integers(0, 5))
def test_what_nobody_needs_is_let_go_but_for_a_few_steps(history, keep, taken):
    needed = min(history[0].step + taken, history[-1].step)
    records = [*records_of(history, history[0].step), needed_record(needed)]
    recovered = fold(through_json(records), keep)
    assert recovered.needed == needed
    assert sorted(recovered.before) == [p.step for p in history if p.step >= needed - keep]


def test_a_long_segment_does_not_pile_up_while_it_is_read():
    progress = Progress.start(NAMES)
    records = [snapshot_record(progress, 0, [])]
    for step in range(2000):
        after = replace(progress, step=step + 1, row=progress.row + 1)
        records.append(step_record(progress, after, step))
        progress = after
    recovered = fold(records, keep=4)
    assert len(recovered.before) <= 6
    assert recovered.before[2000].row.tolist() == [2000, 2000, 2000]


def test_of_each_decision_the_latest_holds_and_later_ones_are_kept():
    made = [Decision(0, "cost", 1), Decision(9, "cost", 3), Decision(4, "cost", 2), Decision(4, "mix", {"a": 1})]
    assert set(in_force(made[:3], 5)) == {Decision(4, "cost", 2), Decision(9, "cost", 3)}
    assert in_force([Decision(4, "cost", 1), Decision(4, "cost", 2)], 4) == (Decision(4, "cost", 2),)
    start = Progress.start(NAMES)
    records = [snapshot_record(start, 0, made[:1]), decision_record(made[2]), decision_record(made[3])]
    assert fold(through_json(records)).decisions == (made[0], made[2], made[3])


def test_a_mesh_is_written_down_whole():
    mesh = ol.Mesh(dp=4, cp=2, order=("dp", "pp", "cp", "tp"))
    assert mesh_decision(7, mesh) == Decision(
        7, "mesh", {"pp": 1, "dp": 4, "cp": 2, "tp": 1, "order": ["dp", "pp", "cp", "tp"]}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[1:], "has a snapshot after its header"),
        (lambda r: [], "has a snapshot after its header"),
        (lambda r: [r[0], *r[2:]], r"goes from step -1 to step 1: records are missing"),
        (lambda r: [*r, {"kind": "wish"}], "unknown kind 'wish'"),
        (lambda r: [*r[:2], {**r[2], "moved": {"sources": [0], "colour": [1]}}], "a column 'colour'"),
        (lambda r: [*r[:2], {**r[2], "moved": {"sources": [9], "row": [1]}}], "moved.sources must be .* 0 to 2, it is 9"),
        (lambda r: [*r[:2], {"kind": "step", "step": 1}], "not understood: it lacks 'moved'"),
        (lambda r: [{**r[0], "progress": {"step": 0}}, *r[1:]], "not understood: progress lacks 'sources', 'carried'"),
        (lambda r: [*r, 7], "not understood: a record must be a dict with text for keys, it is 7"),
        (lambda r: [*r, {"kind": "readers"}], "not understood: it lacks 'groups'"),
        (lambda r: [*r, {"kind": "readers", "groups": 1}], "not understood: groups must be a list, it is 1"),
        (lambda r: [*r, {"kind": "readers", "groups": [0, -1]}], r"groups\[1\] must be a whole number from 0, it is -1"),
        (lambda r: [{**r[0], "readers": None}, *r[1:]], "not understood: readers must be a list"),
        (lambda r: [{**r[0], "behind": None}, *r[1:]], "not understood: behind must be a dict"),
        (lambda r: [{**r[0], "behind": {"step": 0}}, *r[1:]], "not understood: behind lacks 'sources', 'carried'"),
        (lambda r: [{**r[0], "behind": r[0]["progress"]}, *r[1:]], "behind must be of an earlier step than 0 .* of step 0"),
        (
            lambda r: [{**r[0], "progress": {**r[0]["progress"], "step": 9}, "behind": Progress.start(("x",)).to_plain()}],
            "behind must be .* of the same sources, .* of 'x'",
        ),
    ],
)
def test_records_that_do_not_follow_from_each_other_are_refused(change, message):
    history = [replace(Progress.start(NAMES), step=i, row=np.full(3, i)) for i in range(3)]
    with pytest.raises(StateError, match=message):
        fold(change(records_of(history, 0)))


def test_a_header_of_another_version_is_refused():
    record = Header("job", 0, "samples", {}).to_record()
    assert Header.from_record(record) == Header("job", 0, "samples", {})
    with pytest.raises(StateError, match="version 7; this release reads version 1"):
        Header.from_record({**record, "version": 7})
    with pytest.raises(StateError, match="begins with a header, this one with 'step'"):
        Header.from_record({"kind": "step"})


def test_sizes_that_are_nought_make_no_difference():
    """Whether carried samples have such columns depends on what else was at hand when they were drawn."""
    samples = Samples.of_columns(NAMES, *np.arange(14).reshape(7, 2) % 3)
    zeros = np.zeros(2, np.int64)
    other = replace(samples, sizes={"num_images": zeros}, images=ImageSizes.none(2))
    start = Progress.start(NAMES)
    assert same(replace(start, carried=samples), replace(start, carried=other))
    moved = replace(samples, sizes={"num_images": zeros + 1})
    assert not same(replace(start, carried=samples), replace(start, carried=moved))
