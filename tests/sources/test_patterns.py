"""Brace ranges and globs."""

import string
from glob import glob
from itertools import product
from os.path import isfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import SpecError
from overlord.sources.storage import expand_braces, glob_regex


def test_a_range_counts_with_the_width_of_its_zeros() -> None:
    assert expand_braces("s-{008..011}.tar") == ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]
    assert expand_braces("s-{8..11}.tar") == ["s-8.tar", "s-9.tar", "s-10.tar", "s-11.tar"]
    assert expand_braces("{2..0}") == ["2", "1", "0"]


def test_choices_and_ranges_multiply_in_the_order_of_a_shell() -> None:
    assert expand_braces("{b,a}/{0..1}") == ["b/0", "b/1", "a/0", "a/1"]


def test_braces_that_are_neither_range_nor_choice_are_refused() -> None:
    with pytest.raises(SpecError, match=r"\{x\} must be a range \{000..099\} or a choice \{a,b\}"):
        expand_braces("a-{x}.tar")


@pytest.mark.strangers
def test_a_brace_in_brackets_stands_for_itself() -> None:
    assert expand_braces("a[{]1..2[}]") == ["a[{]1..2[}]"]
    assert expand_braces("a[{]x}-{0..1}") == ["a[{]x}-0", "a[{]x}-1"]
    assert glob_regex("a[{]x[}]").match("a{x}")


def test_a_range_of_absurd_length_is_refused_before_it_is_made() -> None:
    with pytest.raises(SpecError, match="more than 1,000,000 files"):
        expand_braces("a-{0..99999999999}.tar")


@given(low=st.integers(0, 500), count=st.integers(1, 50), width=st.integers(1, 6))
def test_a_padded_range_names_every_number_once_in_order(low: int, count: int, width: int) -> None:
    first, last = f"{low:0{width}d}", f"{low + count - 1:0{width}d}"
    names = expand_braces(f"{{{first}..{last}}}")
    assert [int(name) for name in names] == list(range(low, low + count))


NAMES = ("a", "b", "ab", "a.b", ".a", "a1", "[", "^")
SEGMENTS = (
    "*",
    "**",
    "?",
    "a*",
    "[ab]",
    "[!a]*",
    "[a-z]?",
    "a",
    "*.b",
    ".*",
    "[^a]",
    "[",
    "[!]]",
    "[]a]",
    "[a\\]",
)


def test_keys_match_a_glob_exactly_when_local_files_would(tmp_path: Path) -> None:
    keys = [*NAMES, *(f"d{a}/{b}" for a in NAMES for b in NAMES), *(f"a.d/{a}/x/{a}" for a in NAMES)]
    for key in keys:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).touch()
    paths = [*product(SEGMENTS), *product(SEGMENTS, repeat=2), *product(SEGMENTS[:5], repeat=3)]
    for pattern in map("/".join, paths):
        found = glob(pattern, root_dir=tmp_path, recursive=True)
        local = {path for path in found if isfile(f"{tmp_path}/{path}")}
        assert {key for key in keys if glob_regex(pattern).match(key)} == local, pattern


@given(st.text(string.printable, max_size=20))
def test_any_text_makes_a_regex_or_is_a_plain_name(text: str) -> None:
    glob_regex(text.replace("[", "")).match("x")
