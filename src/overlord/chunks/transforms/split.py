"""Held-out splits and subsets of rows, by a hash of what is in them."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from overlord.chunks.transforms.outcome import ORIGIN, row_error
from overlord.errors import DataError, SchemaError, SpecError
from overlord.sources.numbers import array_of

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Split:
    """Divides rows by a hash of the column `by`: about `fraction` of them are held out, the others are for training.

    `split.train` and `split.held_out` are transforms, for the sources of the job and of its evaluations; put them first. The
    side of a row depends on its value and the seed alone. So no value is on both sides, duplicates included, and rows stay
    where they are when files are added, renamed or written anew. A larger fraction holds out the same rows and more.
    """

    fraction: float
    seed: int = 0
    _: KW_ONLY
    by: str

    def __post_init__(self) -> None:
        fraction: Any = self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
            raise SpecError(f"the fraction of a Split is a number between 0 and 1, got {fraction!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise SpecError(f"the seed of a Split is a whole number, got {self.seed!r}")
        if not isinstance(self.by, str) or not self.by:
            raise SpecError(f"a Split is by the name of a column, got by={self.by!r}")

    @property
    def train(self) -> SplitSide:
        """A transform that keeps the rows for training."""
        return SplitSide(self, is_held_out=False)

    @property
    def held_out(self) -> SplitSide:
        """A transform that keeps the rows that are held out."""
        return SplitSide(self, is_held_out=True)


@dataclass(frozen=True, slots=True)
class SplitSide:
    """One side of a `Split`, as a transform."""

    split: Split
    is_held_out: bool

    def __call__(self, table: pa.Table) -> pa.Table:
        by = self.split.by
        if by not in table.column_names:
            present = [name for name in table.column_names if name != ORIGIN]
            raise SchemaError(f"Split: no column {by!r}; the columns are {present}. A Split comes before other transforms")
        limit = math.ceil(self.split.fraction * 2**64)
        key = f"split\0{self.split.seed}".encode()[:64]
        kept = []
        # A loop over rows: each is hashed by itself.
        for row, value in enumerate(table.column(by).to_pylist()):
            if value is None:
                raise row_error(table, row, DataError(f"Split: {by!r} is null, so the side of the row is not known"))
            digest = blake2b(_bytes(value), digest_size=8, key=key).digest()
            if (int.from_bytes(digest, "little") < limit) == self.is_held_out:
                kept.append(row)
        return table if len(kept) == table.num_rows else table.take(array_of(np.array(kept, np.int64)))


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    return orjson.dumps(value, default=str, option=orjson.OPT_SORT_KEYS)
