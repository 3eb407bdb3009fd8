"""The draws: every row once, in an order that only weights and facts decide, within a bound of the mixture."""

import json
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.errors import DataError
from overlord.stream.chunk_order import UnitRuns, chunks_per_epoch, units_of_chunk
from overlord.stream.drawing import ComputedFacts, Extent
from overlord.stream.facts import ChunkFacts
from overlord.stream.membership import StepDrawer
from overlord.stream.progress import Progress
from tests.stream.streams import Stream, keys, steps, streams, weights

BATCHES = st.sampled_from(
    [
        Batch(samples=7, sequence_length=20),
        Batch(tokens=60, sequence_length=20),
        Batch(tokens=80, sequence_length=20, document_multiple=4),
        Batch(tokens=60, sequence_length=20, cut_documents=True),
    ]
)


def all_rows(stream: Stream) -> Counter:
    """Every row of every source, as often as its epochs say."""
    found: Counter = Counter()
    for source, extent in enumerate(stream.extents):
        for chunk in range(extent.end or 0):
            for row, tokens in enumerate(stream.describe(source, chunk).tokens.tolist()):
                found[source, chunk, row] += tokens
    return found


@given(streams(finite=True), BATCHES, st.data())
def test_a_finite_run_gives_every_token_of_every_row_exactly_once(stream, batch, data):
    mixture = Mixture(data.draw(weights(stream.names)), stop="drop_exhausted")
    drawn: Counter = Counter()
    spans: dict = {}
    for step in steps(stream.drawer(batch, mixture), 10_000):
        for source, chunk, row, start, stop, _ in keys(step):
            drawn[source, chunk, row] += stop - start
            spans.setdefault((source, chunk, row), []).append((start, stop))
    assert drawn == all_rows(stream)
    for parts in spans.values():
        parts.sort()
        assert parts[0][0] == 0
        assert all(a[1] == b[0] for a, b in pairwise(parts)), "parts of a row overlap or leave a gap"


@given(streams(), BATCHES, st.data())
def test_a_run_cut_at_any_step_goes_on_as_if_it_had_not_been_cut(stream, batch, data):
    first, second = data.draw(weights(stream.names)), data.draw(weights(stream.names))
    unit = data.draw(st.sampled_from(["samples", "tokens"]))
    ramp = data.draw(st.sampled_from(["hold", "linear"]))
    stop = data.draw(st.sampled_from(["first_exhausted", "drop_exhausted"]))
    mixture = Mixture({0: first, 4: second}, unit=unit, ramp=ramp, stop=stop)
    uncut = steps(stream.drawer(batch, mixture), 12)
    cut = data.draw(st.integers(0, len(uncut)))
    progress = uncut[cut - 1].after() if cut else Progress.start(stream.names)
    resumed = steps(stream.drawer(batch, mixture, progress), 12 - cut)
    assert [keys(step) for step in resumed] == [keys(step) for step in uncut[cut:]]
    if resumed:
        assert _plain(resumed[-1].after()) == _plain(uncut[-1].after())


def _plain(progress: Progress) -> str:
    arrays = (progress.chunk, progress.row, progress.samples, progress.tokens, progress.since, progress.lead)
    return json.dumps([progress.step, *(array.tolist() for array in arrays), progress.carried.row.tolist()])


@given(streams(finite=False), st.data())
def test_samples_drawn_stay_within_one_sample_of_their_share_of_virtual_time(stream, data):
    asked = data.draw(weights(stream.names))
    total_weight = sum(asked.values())
    n = len(asked)
    drawn = np.zeros(n)
    for step in steps(stream.drawer(Batch(samples=5, sequence_length=20), Mixture(asked)), 40):
        drawn += np.bincount(step.samples.source, minlength=n)
        for i, name in enumerate(stream.names):
            share = asked[name] / total_weight
            # Half a sample for the source itself, and its share of the half samples of the others.
            assert abs(drawn[i] - share * drawn.sum()) <= 0.5 + share * n * 0.5 + 1e-6


@given(streams(finite=False), st.data())
def test_tokens_drawn_stay_within_the_longest_documents_of_their_share(stream, data):
    asked = data.draw(weights(stream.names))
    total_weight = sum(asked.values())
    n = len(asked)
    drawn = np.zeros(n)
    batch = Batch(samples=5, sequence_length=20)
    for step in steps(stream.drawer(batch, Mixture(asked, unit="tokens")), 40):
        drawn += np.bincount(step.samples.source, weights=step.samples.tokens, minlength=n)
        for i, name in enumerate(stream.names):
            share = asked[name] / total_weight
            bound = stream.longest * (0.5 + share * n * 0.5) + 1e-6
            assert abs(drawn[i] - share * drawn.sum()) <= bound


@given(streams(finite=False), BATCHES, st.data())
def test_changing_weights_neither_loses_nor_repeats_a_row(stream, batch, data):
    schedule = {0: data.draw(weights(stream.names)), 3: data.draw(weights(stream.names))}
    last = steps(stream.drawer(batch, Mixture(schedule, ramp="linear")), 6)[-1].after()
    changed = stream.drawer(batch, Mixture(data.draw(weights(stream.names))), last)
    seen: dict[int, list] = {}
    again = steps(stream.drawer(batch, Mixture(schedule, ramp="linear")), 6) + steps(changed, 6)
    for step in again:
        for source, chunk, row, start, stop, _ in keys(step):
            seen.setdefault(source, []).append((chunk, row, start, stop))
    for source, rows in seen.items():
        parts = sorted(rows)
        assert len(set(parts)) == len(parts)
        _assert_a_prefix(stream, source, parts)


def _assert_a_prefix(stream: Stream, source: int, parts: list) -> None:
    """The rows drawn are the first of the source; only carried ones may be missing."""
    whole = [(chunk, row) for chunk in range(parts[-1][0] + 1) for row in range(stream.describe(source, chunk).num_rows)]
    drawn = {(chunk, row) for chunk, row, _, _ in parts}
    missing = [row for row in whole[: whole.index(max(drawn)) + 1] if row not in drawn]
    assert len(missing) <= 20, missing  # what the last step could not hold


@given(streams(finite=False))
def test_sources_added_and_removed_on_resume_leave_the_others_where_they_were(stream):
    batch = Batch(samples=6, sequence_length=20)
    before = steps(stream.drawer(batch, Mixture({name: 1 for name in stream.names})), 5)
    progress = before[-1].after()
    kept = stream.names[1:]
    names = ("new", *kept)
    moved = progress.for_sources(names)
    for name in kept:
        old, new = stream.names.index(name), names.index(name)
        assert (moved.chunk[new], moved.row[new]) == (progress.chunk[old], progress.row[old])
    assert moved.chunk[0] == moved.row[0] == 0
    assert moved.step == progress.step


def test_a_source_that_gets_weight_later_does_not_rush_to_catch_up():
    stream = Stream((50, 50), (4, 4), (None, None), 1)
    mixture = Mixture({0: {"s0": 1}, 10: {"s0": 1, "s1": 1}})
    drawn = steps(stream.drawer(Batch(samples=10, sequence_length=20), mixture), 12)
    assert np.count_nonzero(drawn[10].samples.source == 1) == 5


@pytest.mark.parametrize(("stop", "expected"), [("first_exhausted", 8), ("drop_exhausted", 24), ("all_exhausted", 40)])
def test_the_three_ways_to_end_a_finite_mixture(stop, expected):
    stream = Stream((4, 20), (1, 1), (1, 1), 1)
    mixture = Mixture({"s0": 1, "s1": 1}, stop=stop)
    drawn = steps(stream.drawer(Batch(samples=4, sequence_length=20), mixture), 100)
    total = sum(len(step.samples) for step in drawn)
    assert abs(total - expected) <= 1, "a source ends when its last row is drawn; ties may add one of the other"


def test_drop_last_leaves_out_the_partial_step():
    stream = Stream((10,), (1,), (1,), 1)
    mixture = Mixture({"s0": 1})
    whole = steps(stream.drawer(Batch(samples=4, sequence_length=20), mixture), 100)
    dropped = steps(stream.drawer(Batch(samples=4, sequence_length=20, drop_last=True), mixture), 100)
    assert [len(step.samples) for step in whole] == [4, 4, 2]
    assert [len(step.samples) for step in dropped] == [4, 4]


def facts_of(tokens: int) -> ChunkFacts:
    return ChunkFacts(np.full(tokens, 4), np.full(tokens, 3))


@pytest.mark.parametrize("num_chunks", [1, 3, 40])
@pytest.mark.parametrize("begin", [0, 1, 2])
def test_a_source_without_a_usable_row_is_an_error_and_not_a_hang(num_chunks, begin):
    progress = Progress.start(("empty",))
    progress.chunk[0] = begin
    batch, mixture = Batch(samples=1, sequence_length=8), Mixture({"empty": 1})
    drawer = StepDrawer(
        progress, batch, mixture, [Extent(num_chunks, None)], ComputedFacts(lambda source, chunk: facts_of(0))
    )
    with pytest.raises(DataError, match=rf"'empty' gave no usable row in a whole epoch \({num_chunks} chunks\)"):
        drawer.next_step()


@pytest.mark.strangers
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "drop_exhausted"])
def test_a_finite_source_that_ends_without_having_given_a_row_is_an_error_too(stop):
    batch, mixture = Batch(samples=2, sequence_length=8), Mixture({"empty": 1, "full": 1}, stop=stop)
    extents = [Extent(3, 1), Extent(3, 1)]
    drawer = StepDrawer(
        Progress.start(("empty", "full")), batch, mixture, extents, ComputedFacts(lambda source, chunk: facts_of(source * 5))
    )
    with pytest.raises(DataError, match="'empty' gave no usable row in a whole epoch"):
        steps(drawer, 100)


@pytest.mark.strangers
@given(st.integers(1, 40), st.integers(1, 5), st.booleans(), st.integers(0, 2**32), st.data())
def test_a_source_in_which_a_single_unit_has_rows_is_read_for_ever(num_units, window, shuffle, seed, data):
    usable = data.draw(st.integers(0, num_units - 1))
    per_epoch = chunks_per_epoch(num_units, window)

    def describe(source: int, chunk: int) -> ChunkFacts:
        units = UnitRuns(num_units)
        return facts_of(int(usable in units_of_chunk(seed, "rare", units, window=window, shuffle=shuffle, chunk=chunk)))

    def drawer(progress: Progress) -> StepDrawer:
        batch, mixture = Batch(samples=1, sequence_length=8), Mixture({"rare": 1})
        return StepDrawer(progress, batch, mixture, [Extent(per_epoch, None)], ComputedFacts(describe))

    begin = Progress.start(("rare",))
    begin.chunk[0] = data.draw(st.integers(0, 3 * per_epoch))  # in the middle of an epoch, as after a change of sources
    drawn = steps(drawer(begin), 12)
    found = [step.samples.chunk.item(0) for step in drawn]
    expected = [chunk for chunk in range(begin.chunk.item(0), 20 * per_epoch) if describe(0, chunk).num_rows]
    assert found == expected[:12]
    assert max(np.diff(found)) <= 2 * per_epoch - 1, "as the bound says"
    cut = data.draw(st.integers(0, 10))
    resumed = drawer(Progress.from_plain(json.loads(json.dumps(drawn[cut].after().to_plain()))))
    assert [step.samples.chunk.item(0) for step in steps(resumed, 11 - cut)] == found[cut + 1 :]


@given(streams(finite=False), st.data())
def test_steps_of_whole_documents_fit_their_rows(stream, data):
    batch = Batch(tokens=100, sequence_length=20)
    for step in steps(stream.drawer(batch, Mixture(data.draw(weights(stream.names)))), 10):
        assert step.rows is not None
        used = np.bincount(step.rows, weights=step.samples.tokens, minlength=5)
        assert used.max() <= 20
        if len(step.after().carried):
            assert np.count_nonzero(used <= 10) <= 1, "best fit leaves at most one row half empty while documents wait"
