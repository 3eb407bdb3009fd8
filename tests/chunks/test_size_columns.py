"""Costs may go by columns of the data: frames of audio, say, which no token counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ol
from tests.small_sources import Numbered, job_of, planned, read_all, same


@dataclass(frozen=True)
class Audio(Numbered):
    """Documents whose row d has 10 x d frames, every fifth none."""

    kind: str = "int32"
    wrong_at: int = -1

    def read(self, unit: ol.Unit) -> pa.Table:
        table = super().read(unit)
        documents = table["document"].to_pylist()
        frames = [-1 if d == self.wrong_at else None if d % 5 == 0 else 10 * d for d in documents]  # pyright: ignore[reportOptionalOperand, reportOperatorIssue]
        return table.append_column("frames", pa.array(frames, pa.int64()).cast(pa.type_for_alias(self.kind)))  # pyright: ignore[reportArgumentType, reportCallIssue]


AUDIO = Audio(first=1, size_columns=("frames",))
SPEECHLESS = Numbered(first=100)


def by_frames(samples: ol.Samples) -> np.ndarray:
    return 1.0 + samples.sizes["frames"]


def test_a_cost_function_gets_the_column_of_each_sample():
    seen = []

    def cost(samples: ol.Samples) -> dict[str, np.ndarray]:
        seen.append(samples)
        return {"text": samples.tokens.astype(float), "audio": samples.sizes["frames"] * 2.0}

    job = job_of({"audio": AUDIO, "text": SPEECHLESS}, strategy=ol.strategies.long_short(cost), mesh=ol.Mesh(dp=2))
    with ol.start(job) as loader:
        micros = [micro for rank in range(2) for micro in next(loader.client(rank))]
        samples = planned(loader, 0).plan.samples
    documents = [d // 1000 for micro in micros for d in micro["tokens"][micro["document_starts"]].tolist()]
    expected = [0 if d >= 100 or d % 5 == 0 else 10 * d for d in documents]
    assert seen
    assert sorted(samples.sizes["frames"].tolist()) == sorted(expected)
    assert any(expected)


def test_a_step_without_samples_of_that_source_has_the_column_too():
    mixture = ol.Mixture({0: {"text": 1.0}, 2: {"audio": 1.0, "text": 1.0}})
    job = job_of(
        {"audio": AUDIO, "text": SPEECHLESS},
        mixture=mixture,
        strategy=ol.strategies.long_short(by_frames),
        mesh=ol.Mesh(dp=2),
    )
    steps, _ = read_all(job, 4)
    assert len(steps) == 4


@settings(max_examples=20)
@given(st.integers(1, 3), st.booleans(), st.integers(0, 5))
def test_membership_and_resume_do_not_depend_on_size_columns(dp, cut_documents, cut):
    batch = ol.Batch(tokens=64, sequence_length=16, cut_documents=cut_documents)
    bare = Audio(first=1)
    plain, _ = read_all(job_of({"audio": bare, "text": SPEECHLESS}, batch), 6)
    sources = {"audio": AUDIO, "text": SPEECHLESS}
    strategy = ol.strategies.long_short(by_frames)
    before, state = read_all(job_of(sources, batch, strategy=strategy, mesh=ol.Mesh(dp=dp)), cut)
    after, _ = read_all(job_of(sources, batch, strategy=strategy), 6 - cut, resume=state)
    assert same(before + after, plain)
    without, _ = read_all(job_of({"audio": bare, "text": SPEECHLESS}, batch), 6 - cut, resume=state)
    assert same(before + without, plain)  # a state does not depend on the columns


def test_balance_by_frames_is_better_than_by_tokens():
    lengths, frames = np.full(64, 8), np.arange(64) ** 2
    samples = ol.Samples.of_lengths(lengths, sizes={"frames": frames})
    graph = ol.DGraph(samples, ol.Batch(samples=64, sequence_length=16), ol.ClientPlaceTree(ol.Mesh(dp=4)))
    plan = ol.strategies.long_short(by_frames)(graph)
    assert plan.max_over_mean(by_frames(plan.samples)) < 1.02


def test_sources_without_text_have_sizes_too():
    source = Audio(first=1, tokens=None, size_columns=("frames",))
    batch = ol.Batch(samples=8, sequence_length=16, columns=("document",))
    with ol.start(job_of({"audio": source}, batch, strategy=ol.strategies.long_short(by_frames))) as loader:
        documents = [d for micro in next(loader.client(0)) for d in micro["document"].to_pylist()]
        samples = planned(loader, 0).plan.samples
    assert sorted(samples.sizes["frames"].tolist()) == sorted(0 if d % 5 == 0 else 10 * d for d in documents)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Audio(first=1, size_columns=("frame",)), "has no column 'frame', which its size_columns name"),
        (Audio(first=1, size_columns=("frames",), kind="float64"), "is of type double; sizes are whole numbers"),
        (
            Audio(first=1, size_columns=("frames",), wrong_at=3, on_bad_row="skip"),
            "'frames' holds -1; sizes are whole numbers",
        ),
    ],
)
def test_columns_that_are_no_sizes_are_refused(source, message):
    with pytest.raises(ol.errors.DataError, match=message):
        read_all(job_of({"audio": source}), 8)


def test_names_of_planning_are_refused_and_a_cost_that_asks_for_an_unknown_size_is_told():
    with pytest.raises(ol.errors.SpecError, match="'num_images', a size that planning computes itself"):
        Numbered(size_columns=("num_images",))
    job = job_of({"text": SPEECHLESS}, strategy=ol.strategies.long_short(by_frames))
    with ol.start(job) as loader, pytest.raises(ol.errors.SpecError, match=r"no size 'frames'.*size_columns"):
        next(loader.client(0))
