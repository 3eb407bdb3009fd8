"""Microbatches for tests of collation and delivery, drawn by hypothesis or made from lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from overlord.arrange.plan import MicroPlan
from overlord.batches.payload import Payload
from overlord.declare.batch import Batch
from overlord.stream.facts import Samples


class Microbatch(NamedTuple):
    micro: MicroPlan
    payload: Payload
    batch: Batch


def documents(lengths, first_token: int = 1000) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that no token can stand in for another."""
    ends = np.cumsum(lengths)
    everything = np.arange(first_token, first_token + int(ends[-1]) if len(ends) else first_token, dtype=np.int32)
    return [everything[end - n : end] for end, n in zip(ends, lengths, strict=True)]


def microbatch(lengths, *, rows=None, num_rows: int = 1, row_tokens: int = 0, **batch) -> Microbatch:
    samples = Samples.of_lengths(np.asarray(lengths, np.int64))
    row = np.asarray(rows if rows is not None else [0] * len(lengths), np.int64)
    payload = Payload(tokens=documents(lengths), following=np.full(len(lengths), -100, np.int64))
    declared = Batch(sequence_length=row_tokens or 1 << 20, samples=1, pad_token=7, **batch)
    return Microbatch(MicroPlan(samples, row, num_rows, row_tokens), payload, declared)


@st.composite
def microbatches(draw, layout: str = "packed") -> Microbatch:
    """Any microbatch a plan may hold: documents of any length, empty ones and empty rows among them."""
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    num_rows = draw(st.integers(1, 4)) if layout == "packed" else draw(st.integers(1, 8))
    most = 1 if layout == "padded" else 6
    by_row = draw(st.lists(st.lists(st.integers(0, 40), max_size=most), min_size=num_rows, max_size=num_rows))
    needed = max(sum(-(-n // multiple) * multiple for n in row) for row in by_row)
    if draw(st.booleans()):
        row_tokens = max(needed, multiple) + multiple * draw(st.sampled_from([0, 1, 300]))
    else:
        row_tokens = 0
        if layout == "packed":
            by_row, num_rows = [[n for row in by_row for n in row]], 1
    lengths = [n for row in by_row for n in row]
    rows = [r for r, row in enumerate(by_row) for _ in row]
    shuffled = draw(st.permutations(range(len(lengths))))
    made = microbatch(
        [lengths[i] for i in shuffled],
        rows=[rows[i] for i in shuffled],
        num_rows=num_rows,
        row_tokens=row_tokens,
        document_multiple=multiple,
        layout=layout,
    )
    return _with_loss(draw, made)


def _with_loss(draw, made: Microbatch) -> Microbatch:
    """Some documents go on after their piece, some have loss masks."""
    count = len(made.micro.samples)
    goes_on = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), bool)
    following = np.where(goes_on, np.arange(count) + 90_000, -100)
    masks = None
    if draw(st.booleans()):
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        given = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        lengths = made.micro.samples.tokens
        masks = [rng.integers(0, 2, n + 1).astype(np.uint8) if g else None for g, n in zip(given, lengths, strict=True)]
    return made._replace(payload=replace(made.payload, following=following, loss_masks=masks))
