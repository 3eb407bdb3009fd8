"""Helpers for the options of verbs: argparse types for numbers and sizes, and options as a checked dataclass."""

from __future__ import annotations

import math
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance

Options = TypeVar("Options", bound="DataclassInstance")

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SUFFIXES = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_job_argument(parser: ArgumentParser) -> None:
    parser.add_argument("job", type=Path, help="the job: a Python file with `job = overlord.Job(...)`")


def to_dataclass(options: Namespace, kind: type[Options]) -> Options:
    """An instance of the dataclass `kind`, each field taken from the option with the same name."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}") from None
        return _check_least(value, least)

    return number


def count_at_least(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number of at least `least`, which may end in k, M or G."""

    def number(text: str) -> int:
        digits, factor = text, 1
        if text[-1:].lower() in _SUFFIXES:
            digits, factor = text[:-1], _SUFFIXES[text[-1].lower()]
        try:
            value = round(float(digits) * factor) if factor > 1 else int(digits)
        except (ValueError, OverflowError):
            raise ArgumentTypeError(f"must be a number such as 4096, 128k or 2M, got {text!r}") from None
        return _check_least(value, least)

    return number


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _float(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def zero_or_more(text: str) -> float:
    """An argparse type: a finite number of at least 0."""
    value = _float(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def num_bytes(text: str) -> int:
    """An argparse type: a size such as 8GiB, 512MiB, 1.5GB, or a number of bytes."""
    found = _SIZE.fullmatch(text.strip())
    if found is not None:
        prefix = (found[2] or "").lower()
        value = int(float(found[1]) * (1024 if prefix.endswith("i") else 1000) ** _POWERS[prefix.removesuffix("i")])
        if value > 0:
            return value
    raise ArgumentTypeError(f"a size is a positive number with a unit, as 8GiB, 512MiB or 20GB, got {text!r}")


def _check_least(value: int, least: int) -> int:
    if value < least:
        raise ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
