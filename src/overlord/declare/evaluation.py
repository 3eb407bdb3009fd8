"""Evaluations of a job: fixed data that is read again and again while training goes on, apart from its stream."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overlord.declare.arguments import whole
from overlord.declare.source import Source
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from overlord.declare.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """Data to evaluate a model on, for `Job(evals={name: Eval(...)})`. `client.evaluate(name)` iterates over its steps.

    Every evaluation has the same samples in the same steps: each source is read once, in the order of its files. All ranks
    end with the same step. Nothing of it is part of the training stream or of its state.
    """

    sources: Mapping[str, Source]
    """Name to source, as in a job; `repeat` and `shuffle` of a source do not count here."""
    batch: Batch | None = None
    """What one step of the evaluation holds; the job's batch unless given, without its curricula and delays."""
    every: int | None = None
    """Training steps between two evaluations: `client.evals_due(step)` names those that follow a step."""
    limit: int | None = None
    """The most steps of one evaluation; all samples unless given."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise SpecError("an Eval needs at least one source")
        for name, source in self.sources.items():
            if not isinstance(name, str) or not name or not isinstance(source, Source):
                raise SpecError(f"the sources of an Eval are names with an overlord.Source each, got {name!r}: {source!r}")
        for option in ("every", "limit"):
            value = getattr(self, option)
            if value is not None:
                object.__setattr__(self, option, whole(value, option, least=1))

    def read_once(self) -> dict[str, Source]:
        """The sources as an evaluation reads them."""
        return {name: _read_once(source) for name, source in self.sources.items()}

    def batch_for(self, of_job: Batch) -> Batch:
        """The batch of an evaluation: every sample comes, so the last step may be partial."""
        given = replace(of_job, outliers=None, document_limits=None, warm_up=None) if self.batch is None else self.batch
        return replace(given, drop_last=False)


def _read_once(source: Source) -> Source:
    copied = source.without_warnings()
    object.__setattr__(copied, "repeat", False)
    object.__setattr__(copied, "shuffle", False)
    return copied
