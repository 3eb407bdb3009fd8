"""How a run stands, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from overlord.engine import StoreUse
from overlord.planning.outliers import Delay
from overlord.roles.planner import Mix
from overlord.roles.source_loader import BufferUse


@dataclass(frozen=True, slots=True)
class StepDocument:
    """A document (or a piece of one) of a step: where it was read, and who trains on it."""

    source: str
    file: str
    """The file, and after a # the number of the unit in it, where it has several."""
    row: int
    """The row in that unit; -1 where a transform dropped the column `__origin__`."""
    tokens: int
    microbatch: int
    """Its number on each of these ranks."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """How a run stands: what each source was asked for and gave, what was set aside, and the buffers."""

    step: int
    mix: dict[str, Mix]
    documents: dict[str, dict[str, int]]
    bad_rows: dict[str, int]
    buffers: dict[str, BufferUse]
    loaders: dict[str, int]
    """How many loaders each source is dealt to now."""
    shadows: dict[str, str]
    """The loader hosts that have a shadow, with its name."""
    store: StoreUse | None
    """What is in Ray's object store; None on the embedded engine, which has none."""

    @property
    def delay(self) -> Delay | None:
        """How much later documents came by `Batch(outliers=...)`, in the steps planned so far; None without it."""
        return Delay.of(self.documents)
