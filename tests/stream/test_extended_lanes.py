"""A source whose next chunk is at hand is drawn on into it without a halt: nobody may be able to tell."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from overlord.declare.batch import Batch
from overlord.declare.mixture import Mixture
from overlord.planlog.records import same
from overlord.stream.facts import ChunkFacts
from tests.stream.streams import Peek, Stream, keys, steps, streams, weights

BATCHES = st.sampled_from(
    [
        Batch(samples=7, sequence_length=20),
        Batch(tokens=60, sequence_length=20),
        Batch(tokens=60, sequence_length=20, cut_documents=True),
    ]
)
STOPS = st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"])


@given(streams(longest=40), BATCHES, STOPS, st.sampled_from(["samples", "tokens"]), st.integers(0, 99), st.data())
def test_the_steps_and_all_progress_are_the_same(stream, batch, stop, unit, seed, data):
    mixture = Mixture(data.draw(weights(stream.names)), stop=stop, unit=unit)
    coin = random.Random(seed)
    sides = data.draw(st.sampled_from([[True], [True, False]]))

    def peek(source: int, chunk: int) -> ChunkFacts | None:
        return stream.describe(source, chunk) if coin.choice(sides) else None

    halting = steps(stream.drawer(batch, mixture), 25)
    going_on = steps(stream.drawer(batch, mixture, peek=peek), 25)
    assert [keys(step) for step in going_on] == [keys(step) for step in halting]
    assert all(same(a.after(), b.after()) for a, b in zip(going_on, halting, strict=True))


@given(streams(finite=False, longest=40), BATCHES, st.integers(1, 20), st.data())
def test_such_a_run_goes_on_from_any_step(stream, batch, at, data):
    mixture = Mixture(data.draw(weights(stream.names)))
    drawn = steps(stream.drawer(batch, mixture, peek=stream.describe), 25)
    resumed = stream.drawer(batch, mixture, drawn[at - 1].after(), peek=stream.describe)
    assert [keys(step) for step in steps(resumed, 25 - at)] == [keys(step) for step in drawn[at:]]


@given(streams(finite=True, longest=40), STOPS, st.integers(1, 3), st.integers(0, 99), st.data())
def test_a_source_that_grew_since_it_was_read_to_its_end_ends_where_it_does_without(stream, stop, more, seed, data):
    batch, weight = Batch(samples=7, sequence_length=20), data.draw(weights(stream.names))
    before = steps(stream.drawer(batch, Mixture(weight, stop="all_exhausted")), 40)
    at = before[data.draw(st.integers(0, len(before) - 1))].after()
    grown, mixture = replace(stream, epochs=tuple(epochs + more for epochs in stream.epochs)), Mixture(weight, stop=stop)
    coin = random.Random(seed)

    def peek(source: int, chunk: int) -> ChunkFacts | None:
        return grown.describe(source, chunk) if coin.random() < 0.7 else None

    halting = steps(grown.drawer(batch, mixture, at), 200)
    going_on = steps(grown.drawer(batch, mixture, at, peek=peek), 200)
    assert [keys(step) for step in going_on] == [keys(step) for step in halting]


def test_one_block_holds_what_several_chunks_add():
    stream = Stream((50,) * 8, (3,) * 8, (None,) * 8, longest=40)
    mixture = Mixture({name: 1 + i / 10 for i, name in enumerate(stream.names)})

    def num_blocks(peek: Peek | None) -> int:
        drawer, blocks = stream.drawer(Batch(samples=1, sequence_length=40), mixture, peek=peek), []
        for _ in range(3000):
            drawer.next_step()
            block = drawer._queue._blocks[drawer._queue._number]
            if not blocks or blocks[-1] is not block:
                blocks.append(block)
        return len(blocks)

    assert num_blocks(stream.describe) * 3 < num_blocks(None)


def test_no_source_is_known_more_than_a_chunk_ahead():
    stream = Stream((6, 30), (3, 3), (None, None), longest=5)
    asked: dict[int, int] = {0: 0, 1: 0}

    def peek(source: int, chunk: int) -> ChunkFacts:
        asked[source] = max(asked[source], chunk)
        return stream.describe(source, chunk)

    drawer = stream.drawer(Batch(samples=1, sequence_length=8), Mixture({"s0": 9, "s1": 1}), peek=peek)
    for _ in range(300):
        step = drawer.next_step()
        assert step is not None
        at = step.after().chunk
        assert all(asked[source] <= at[source] + 1 for source in asked)
    assert min(asked.values()) > 0
