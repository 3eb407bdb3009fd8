"""The mark that sends a transform to worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from overlord.chunks.transforms.invoke import Invoke, name_of
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa

    from overlord.chunks.transforms.outcome import Context


@dataclass(frozen=True, slots=True)
class InProcesses:
    """Run `fn` on worker processes, `batch_rows` rows at a time: for functions that hold the interpreter's lock.

    `fn` must pickle, and must treat rows independently of each other: it sees slices. A worker that dies is
    replaced and its slice tried again; a row that kills workers twice is a bad row. A slice that takes
    longer than `timeout_s` counts as a death. Columns of views arrive as plain binary or text.
    """

    fn: Callable[..., pa.Table]
    batch_rows: int = 256
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fn, InProcesses):
            raise SpecError("InProcesses is already around this function; wrap it once")
        if not callable(self.fn):
            raise SpecError(f"InProcesses needs a function, got {type(self.fn).__name__}")
        if self.batch_rows < 1:
            raise SpecError(f"batch_rows must be at least 1, got {self.batch_rows}")
        if self.timeout_s is not None and self.timeout_s <= 0:
            raise SpecError(f"timeout_s must be positive, got {self.timeout_s}")

    def __call__(self, table: pa.Table, context: Context) -> pa.Table:
        """Called directly, it runs here."""
        return Invoke(self.fn).call(table, context)

    def __repr__(self) -> str:
        return f"InProcesses({name_of(self.fn)})"
