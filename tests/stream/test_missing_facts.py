"""A step whose facts are not known yet is drawn once they are, as if they had always been known."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.chunks.chunk import Chunk, Lineage
from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.declare.policies import OutlierDelay
from overlord.planlog.records import same
from overlord.stream.drawing import FactsMissing
from overlord.stream.facts import ChunkFacts, LossCount, Losses, TokenSpans
from overlord.stream.membership import DrawnStep, StepDrawer
from overlord.stream.progress import Progress
from tests.stream.streams import Stream, keys, steps, streams, weights

BATCHES = st.sampled_from(
    [
        Batch(samples=7, sequence_length=40),
        Batch(samples=7, sequence_length=40, outliers=OutlierDelay((20,), together=2)),
        Batch(tokens=80, sequence_length=40, outliers=OutlierDelay((20,), together=2)),
        Batch(tokens=80, sequence_length=40),
        Batch(tokens=400, sequence_length=40, document_limits={0: 11, 3: 23}),
        Batch(tokens=80, sequence_length=40, cut_documents=True),
        Batch(tokens=400, sequence_length=40, cut_documents=True, document_limits={0: 11, 3: 23}),
    ]
)
STOPS = st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"])


class LearnedFacts:
    """Facts that are known once they were asked for in vain, and forgotten now and then."""

    def __init__(self, stream: Stream, seed: int, forgets: float) -> None:
        self._stream = stream
        self._coin = random.Random(seed)
        self._forgets = forgets
        self._known: dict[tuple[int, int], ChunkFacts] = {}
        self._losses: dict[bytes, Losses] = {}
        self.num_expected = 0

    def learn(self, missing: FactsMissing) -> None:
        if self._coin.random() < self._forgets:
            self._known.clear()
        for source, chunk in missing.chunks:
            assert (source, chunk) not in self._known
            self._known[source, chunk] = self._stream.describe(source, chunk)
        if missing.spans is not None:
            self._losses[missing.spans.table.tobytes()] = loss_of(missing.spans)

    def find(self, source: int, chunk: int) -> ChunkFacts | None:
        return self._known.get((source, chunk))

    def peek(self, source: int, chunk: int) -> ChunkFacts | None:
        return self._stream.describe(source, chunk) if self._coin.random() < 0.3 else None

    def expect(self, source: int, chunk: int) -> None:
        """Nothing is prepared."""

    def count_losses(self, spans: TokenSpans) -> Losses:
        found = self._losses.get(spans.table.tobytes())
        if found is None and len(spans):
            raise FactsMissing(spans=spans)
        return loss_of(spans) if found is None else found


class KnownFacts(LearnedFacts):
    def find(self, source: int, chunk: int) -> ChunkFacts | None:
        return self._stream.describe(source, chunk)

    def count_losses(self, spans: TokenSpans) -> Losses:
        return loss_of(spans)


def loss_of(spans: TokenSpans) -> Losses:
    """Made up: every third token of a row has no loss."""
    _, _, row, start, stop = spans.table
    tokens = (stop - start) - ((stop + row) // 3 - (start + row) // 3)
    return Losses(tokens, tokens * 5)


def drawn_steps(drawer: StepDrawer, facts: LearnedFacts, most: int) -> list[DrawnStep]:
    found: list[DrawnStep] = []
    while len(found) < most:
        try:
            step = drawer.next_step()
        except FactsMissing as missing:
            facts.learn(missing)
            continue
        if step is None:
            break
        found.append(step)
    return found


@settings(deadline=None)
@given(streams(longest=40), BATCHES, STOPS, st.sampled_from(["samples", "tokens"]), st.booleans(), st.data())
def test_the_steps_and_all_progress_are_the_same(stream, batch, stop, unit, has_loss_masks, data):
    mixture = Mixture(data.draw(weights(stream.names)), stop=stop, unit=unit)
    seed = data.draw(st.integers(0, 99))

    def drawer(facts: LearnedFacts) -> StepDrawer:
        start = Progress.start(stream.names)
        return StepDrawer(start, batch, mixture, stream.extents, facts, has_loss_masks=has_loss_masks)

    known, learned = KnownFacts(stream, seed, 0), LearnedFacts(stream, seed, data.draw(st.sampled_from([0, 0.1])))
    expected, found = steps(drawer(known), 20), drawn_steps(drawer(learned), learned, 20)
    assert [keys(step) for step in found] == [keys(step) for step in expected]
    assert all(same(a.after(), b.after()) for a, b in zip(found, expected, strict=True))


def one_by_one(chunk: Chunk, row: int, start: int, stop: int) -> LossCount:
    """The loss of a part of a row, looked up token by token."""
    begin = int(chunk.begin[row]) + start
    end = min(int(chunk.begin[row]) + stop + 1, int(chunk.document_end[row]))
    assert chunk.mask is not None
    predicted = chunk.mask[begin + 1 : end].tolist()
    is_weighted = chunk.mask.dtype.kind == "f"
    extra = sum(round((weight - 1) * 2**32) for weight in predicted if weight) if is_weighted else 0
    return LossCount(sum(bool(weight) for weight in predicted), extra)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=8), st.booleans(), st.data())
def test_the_losses_of_many_parts_are_those_of_each(rows, is_weighted, data):
    lengths, gaps = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    begin = np.cumsum(lengths + gaps) - lengths - gaps
    num_tokens = int((lengths + gaps).sum())
    values = data.draw(st.lists(st.sampled_from([0, 1, 1]), min_size=num_tokens, max_size=num_tokens))
    mask = np.array(values, np.float32) * np.float32(0.75) if is_weighted else np.array(values, np.int8)
    # A row may end before its document does: its last token then has a label.
    chunk = Chunk(
        facts=ChunkFacts(lengths, lengths),
        table=None,  # pyright: ignore[reportArgumentType]
        table_row=np.arange(len(rows)),
        origin=np.arange(len(rows)),
        lineage=Lineage((), np.zeros(0, np.int64), ()),
        values=np.zeros(num_tokens, np.int32),
        begin=begin,
        document_end=np.minimum(begin + lengths + np.minimum(gaps, 1), num_tokens),
        mask=mask,
    )
    parts = data.draw(st.lists(st.tuples(st.integers(0, len(rows) - 1), st.integers(0, 8), st.integers(0, 8)), max_size=12))
    parts = [(row, min(a, b, int(lengths[row])), min(max(a, b), int(lengths[row]))) for row, a, b in parts]
    columns = np.array(parts, np.int64).reshape(-1, 3).T
    found = chunk.count_losses(*columns)
    expected = [one_by_one(chunk, *part) for part in parts]
    assert found.tokens.tolist() == [loss.tokens for loss in expected]
    assert found.extra.tolist() == [loss.extra for loss in expected]
