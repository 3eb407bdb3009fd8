"""Levels by their runs: the same as one by one."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.sources import parquet_lists as levels
from overlord.sources.thrift import varint

RUNS = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.integers(1, 20), st.integers(100, 40_000)), st.booleans()), max_size=12
)


def encoded(runs: list[tuple[int, int, bool]], width: int) -> tuple[bytes, list[int]]:
    """Runs as bytes, and the levels they stand for. Packed runs hold their level in groups of eight; the last differs."""
    parts, plain = [], list[int]()
    for level, count, is_packed in runs:
        level &= (1 << width) - 1
        if not is_packed:
            parts.append(varint(count << 1) + bytes([level]))
            plain += [level] * count
            continue
        groups = count % 5 + 1
        values = [level] * (8 * groups)
        values[count % len(values)] ^= 1
        bits = sum(value << width * i for i, value in enumerate(values))
        parts.append(varint(groups << 1 | 1) + bits.to_bytes(groups * width, "little"))
        plain += values
    return b"".join(parts), plain


@given(RUNS, st.integers(0, 7), st.integers(0, 1000))
def test_zeros_are_found_where_they_are(runs: list[tuple[int, int, bool]], dropped: int, first: int) -> None:
    data, plain = encoded(runs, 1)
    dropped = dropped if runs and runs[-1][2] else 0  # only a group may be longer than what is needed
    plain = plain[: len(plain) - dropped]
    assert levels.zero_levels(data, len(plain), first) == [first + i for i, level in enumerate(plain) if level == 0]


@given(RUNS, st.integers(0, 7), st.sampled_from([1, 3]))
def test_others_are_all_but_the_usual(runs: list[tuple[int, int, bool]], dropped: int, usual: int) -> None:
    data, plain = encoded(runs, usual.bit_length())
    dropped = dropped if runs and runs[-1][2] else 0
    plain = plain[: len(plain) - dropped]
    assert levels.other_levels(data, len(plain), usual) == [(i, level) for i, level in enumerate(plain) if level != usual]


@given(st.binary(max_size=40), st.integers(0, 10_000))
def test_any_bytes_end_in_an_answer_or_an_error(data: bytes, num_values: int) -> None:
    for read in (lambda: levels.zero_levels(data, num_values), lambda: levels.other_levels(data, num_values, 3)):
        with contextlib.suppress(ValueError, IndexError):
            assert len(read()) <= num_values


def test_too_few_levels_are_an_error() -> None:
    with pytest.raises(ValueError, match="16 levels for 30 values"):
        levels.zero_levels(varint(16 << 1) + b"\1", 30)


@pytest.mark.strangers
def test_a_level_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ValueError, match="a level of 3, where the most is 1"):
        levels.zero_levels(varint(16 << 1) + b"\3", 16)
