"""The published length tables, under the name that benchmarks know them by."""

from __future__ import annotations

from overlord.simulate.presets import (
    BYTED,
    GITHUB,
    TABLES,
    LengthTable,
)

__all__ = ["BYTED", "GITHUB", "TABLES", "LengthTable"]
