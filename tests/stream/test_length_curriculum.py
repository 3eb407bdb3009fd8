"""Length curricula: documents in parts that grow with the steps. No token is lost or comes twice, and any cut is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from overlord.declare.policies import limit_at
from overlord.stream.facts import Samples
from overlord.stream.membership import DrawnStep
from overlord.stream.progress import Progress
from tests.small_sources import Numbered, documents_of, job_of, length_of, read_all, same
from tests.stream.streams import Stream, keys, steps, streams

LIMITS = st.dictionaries(st.integers(1, 12), st.integers(1, 20), max_size=3)


@st.composite
def batches(draw: st.DrawFn) -> ol.Batch:
    limits = {0: draw(st.integers(1, 20)), **draw(LIMITS)}
    multiple = draw(st.sampled_from([1, 1, 2]))
    if multiple > 1:
        limits = {step: -(-tokens // multiple) * multiple for step, tokens in limits.items()}
    return ol.Batch(
        sequence_length=20,
        tokens=20 * draw(st.integers(2, 5)),
        cut_documents=multiple == 1 and draw(st.booleans()),
        document_multiple=multiple,
        document_limits=limits,
    )


def mixture_of(stream: Stream) -> ol.Mixture:
    return ol.Mixture(dict.fromkeys(stream.names, 1.0), unit="tokens")


def tokens_of(found: list[DrawnStep], source: int) -> list[tuple[int, int, int]]:
    """(chunk, row, place) of every token of a source."""
    return sorted(
        (chunk, row, place)
        for step in found
        for of, chunk, row, start, stop, _ in keys(step)
        if of == source
        for place in range(start, stop)
    )


@settings(max_examples=30)
@given(streams(finite=True), batches())
def test_every_token_of_a_finite_run_comes_once_and_no_part_is_over_its_limit(stream, batch):
    found = steps(stream.drawer(batch, mixture_of(stream)), 10_000)
    for step in found:
        assert step.samples.tokens.max() <= limit_at(batch.document_limits or {}, step.number)
        assert (step.samples.stop - step.samples.start == step.samples.tokens).all()
    for source in range(len(stream.names)):
        expected = sorted(
            (chunk, row, place)
            for chunk in range(stream.extents[source].end)
            for row, length in enumerate(stream.describe(source, chunk).tokens.tolist())
            for place in range(length)
        )
        assert tokens_of(found, source) == expected
    drawn = Samples.concatenate([step.samples for step in found])
    whole = [stream.describe(s, c).loss_tokens.sum() for s, e in enumerate(stream.extents) for c in range(e.end)]
    assert drawn.loss_tokens.sum() == sum(whole)


@settings(max_examples=30)
@given(streams(finite=False), batches(), st.integers(1, 14))
def test_a_curriculum_that_is_cut_anywhere_goes_on_as_if_it_had_not_been(stream, batch, cut):
    uncut = steps(stream.drawer(batch, mixture_of(stream)), 18)
    state = uncut[cut - 1].after().to_plain()
    resumed = steps(stream.drawer(batch, mixture_of(stream), Progress.from_plain(state)), 18 - cut)
    assert [keys(step) for step in resumed] == [keys(step) for step in uncut[cut:]]


def test_a_curriculum_runs_on_any_mesh_and_with_loss_masks():
    source = Numbered(rows=40, first=1, longest=16, with_mask=True, loss_mask="mask", repeat=False)
    limits = {0: 3, 2: 8, 5: 16}
    batch = ol.Batch(tokens=64, sequence_length=16, document_limits=limits)
    found, _ = read_all(job_of({"a": source}, batch), 1000)
    assert sum(len(step) for step in found) == sum(documents_of(source).values())
    for mesh in (ol.Mesh(dp=3), ol.Mesh(dp=2, cp=2)):
        assert same(read_all(job_of({"a": source}, batch, mesh=mesh), 1000)[0], found)
    with ol.start(job_of({"a": source}, batch)) as loader:
        for step in loader.client(0):
            held = sum(int((micro["labels"] != -100).sum()) for micro in step)
            assert held == step.loss_tokens
            longest = max(micro["document_lengths"].max(initial=0) for micro in step)
            assert longest <= limit_at(limits, step.number)


def test_the_last_token_of_a_part_predicts_the_first_of_the_next():
    source = Numbered(rows=1, unit_rows=1, first=1, longest=16, repeat=False)
    length = length_of(1, 16)
    batch = ol.Batch(tokens=16, sequence_length=16, document_limits={0: 3})
    with ol.start(job_of({"a": source}, batch)) as loader:
        (micro,) = next(loader.client(0))
    assert micro["document_lengths"].tolist() == [3] * (length // 3) + ([length % 3] if length % 3 else [])
    order = np.argsort(micro["tokens"][:length])
    assert micro["labels"][:length][order].tolist() == [*range(1001, 1000 + length), -100]
    assert micro["position_ids"][:length][order].tolist() == [place % 3 for place in range(length)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"document_limits": {}}, "begins at step 0"),
        ({"document_limits": {5: 8}}, "begins at step 0"),
        ({"document_limits": {0: 0}}, "from 1 to sequence_length"),
        ({"document_limits": {0: 32}}, "from 1 to sequence_length"),
        ({"document_limits": {0: 6}, "document_multiple": 4}, "multiples of document_multiple"),
        ({"document_limits": {0: 8}, "tokens": None, "samples": 4}, "count steps in tokens"),
        (
            {"document_limits": {0: 8}, "outliers": ol.policies.OutlierDelay((8,), 2)},
            "does not go with cut_documents or document_limits",
        ),
    ],
)
def test_a_curriculum_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ol.errors.SpecError, match=message):
        ol.Batch(**{"tokens": 64, "sequence_length": 16, **fields})
