"""Picking and renaming columns."""

from __future__ import annotations

import pyarrow as pa

from overlord.chunks.transforms.outcome import ORIGIN
from overlord.errors import SchemaError, SpecError


class Pick:
    """Keep the columns named, in that order; `new="old"` also renames one.

    Pick("text", "url", tokens="input_ids")
    """

    def __init__(self, *names: str, **renamed: str) -> None:
        new = [*names, *renamed]
        if not new:
            raise SpecError("Pick needs at least one column")
        twice = sorted({name for name in new if new.count(name) > 1})
        if twice:
            raise SpecError(f"Pick names {', '.join(map(repr, twice))} twice")
        self._new = new
        self._old = [*names, *renamed.values()]

    def __call__(self, table: pa.Table) -> pa.Table:
        present = [name for name in table.column_names if name != ORIGIN]
        missing = [name for name in self._old if name not in present]
        if missing:
            raise SchemaError(f"{self!r}: no column {', '.join(map(repr, missing))}; the columns are {present}")
        columns = {new: table.column(old) for new, old in zip(self._new, self._old, strict=True)}
        if ORIGIN in table.column_names:
            columns[ORIGIN] = table.column(ORIGIN)
        return pa.table(columns)

    def identity(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        pairs = zip(self._new, self._old, strict=True)
        return f"Pick({', '.join(repr(new) if new == old else f'{new}={old!r}' for new, old in pairs)})"
