"""What job files of tests name as `tests.jobfile.helpers:...`."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import overlord as ol
from tests.small_sources import Numbered as Numbered


@ol.per_row
def clean(row: dict[str, Any]) -> dict[str, Any]:
    return row


def upper(table: Any) -> Any:
    return table


@dataclass(frozen=True)
class Shift:
    """A transform with an option."""

    by: int = 1

    def __call__(self, table: Any) -> Any:
        return table


@dataclass(frozen=True)
class Rows(Numbered):
    """A reader whose option no other has."""

    paths: str = ""


def odd_hints(limit: float, table: dict, kind: Decimal, anything) -> Any:
    def transform(table: Any) -> Any:
        return table

    transform.given = (limit, table, kind, anything)  # type: ignore[attr-defined]
    return transform
