"""Thrift's compact protocol: what is written is read again, and any bytes end in an answer or an error."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.sources.thrift import (
    Encoded,
    binary,
    boolean,
    i32,
    i64,
    read_structure,
    sequence,
    structure,
)

NUMBERS = st.integers(-(2**31), 2**31 - 1).map(lambda n: (i32(n), n))
LARGE = st.integers(-(2**63), 2**63 - 1).map(lambda n: (i64(n), i64(n)))  # only numbers of 32 bits are decoded
BOOLEANS = st.booleans().map(lambda b: (boolean(b), b))
BINARIES = st.binary(max_size=200).map(lambda b: (binary(b), b))
LISTS = st.lists(NUMBERS, min_size=1, max_size=14).map(
    lambda items: (sequence(*(e for e, _ in items)), [n for _, n in items])
)


def nested(inner: st.SearchStrategy) -> st.SearchStrategy:
    """Structures whose field numbers are at most 15 apart."""
    steps = st.lists(st.tuples(st.integers(1, 15), inner), max_size=5)
    return steps.map(_structure)


def _structure(steps: list[tuple[int, tuple[Encoded, object]]]) -> tuple[Encoded, dict[int, object]]:
    numbers = [sum(step for step, _ in steps[: i + 1]) for i in range(len(steps))]
    encoded = {number: value[0] for number, (_, value) in zip(numbers, steps, strict=True)}
    return structure(encoded), {number: value[1] for number, (_, value) in zip(numbers, steps, strict=True)}


VALUES = st.one_of(NUMBERS, LARGE, BOOLEANS, BINARIES, LISTS)


@given(nested(st.one_of(VALUES, nested(VALUES))), st.binary(max_size=5))
def test_what_is_written_is_read_again(pair: tuple[Encoded, dict[int, object]], after: bytes) -> None:
    encoded, value = pair
    assert read_structure(encoded.data + after, 0) == (value, len(encoded.data))


@given(st.binary(max_size=300))
def test_any_bytes_end_in_an_answer_or_an_error(data: bytes) -> None:
    with contextlib.suppress(ValueError, IndexError, RecursionError):
        assert read_structure(data, 0)[1] > 0


def test_a_list_of_no_end_stops_with_the_bytes() -> None:
    with pytest.raises(IndexError):
        read_structure(bytes([0x19, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F, 1, 1, 1]), 0)
