"""One declaration of everything that decides the stream and who receives what of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.declare.mesh import Mesh, StageFields
from overlord.declare.mixture import Mixture
from overlord.declare.source import Source
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from overlord.arrange.strategies import Strategy
    from overlord.declare.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Declares a run: the sources, what a step holds of them, and how it is shared out over ranks.

    Only `sources`, `batch`, `mixture` and `seed` decide which samples a step has. The others may change between a stop
    and a resume.
    """

    sources: Mapping[str, Source]
    """Name to source. The name is part of the stream: shuffling and saved states depend on it."""
    batch: Batch
    """What one global step holds."""
    mixture: Mixture | None = None
    """How much of each source a step holds; equal weights unless given."""
    mesh: Mesh = field(default_factory=lambda: Mesh())
    """The sizes of the trainer's parallel dimensions; one rank unless given."""
    stage_fields: StageFields = field(default_factory=StageFields)
    """Which fields go to which stages of the trainer's pipeline."""
    strategy: Strategy | None = None
    """How a step's samples are arranged over ranks; `strategies.plain()` unless given."""
    seed: int = 0
    """Of every permutation, and of the random generator of each row."""
    num_workers: int | None = None
    """Threads that read and transform; one less than cores unless given. With 0 the thread that requests a step does all the
    work: this takes the least CPU time and is the easiest to debug, but nothing is prepared in advance."""
    num_processes: int | None = None
    """Worker processes for transforms wrapped in `ol.InProcesses`; one per core unless given."""
    prefetch: int = 2
    """Steps that each Data Constructor keeps ready."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise SpecError("a job needs at least one source")
        for name, source in self.sources.items():
            if not isinstance(name, str) or not name:
                raise SpecError(f"a source's name is a non-empty string, got {name!r}")
            if not isinstance(source, Source):
                raise SpecError(f"source {name!r} must be an overlord.Source, got {type(source).__name__}")
        if self.mixture is None:
            object.__setattr__(self, "mixture", Mixture({name: 1.0 for name in self.sources}))
        self._check_mixture()
        if not isinstance(self.stage_fields, StageFields):
            raise SpecError(f"stage_fields is a pipelines.StageFields, got {self.stage_fields!r}")
        self.stage_fields.check_pipeline(self.mesh.pp)
        if self.prefetch < 0:
            raise SpecError(f"prefetch is a number of steps >= 0, got {self.prefetch}")
        if self.mix.feedback is not None and self.mix.feedback.lag <= self.prefetch:
            raise SpecError(f"feedback needs a lag of more than prefetch={self.prefetch} steps, got {self.mix.feedback.lag}")
        if self.num_workers is not None and self.num_workers < 0:
            raise SpecError(f"num_workers must be at least 0, got {self.num_workers}")
        if self.num_processes is not None and self.num_processes < 1:
            raise SpecError(f"num_processes must be at least 1, got {self.num_processes}")

    def _check_mixture(self) -> None:
        unknown = [name for name in self.mix.names if name not in self.sources]
        if unknown:
            raise SpecError(
                f"the mixture gives a weight to {_join_names(unknown)}, but the job's sources are "
                f"{_join_names(self.sources)}"
            )
        finite = [name for name, source in self.sources.items() if source.num_epochs is not None]
        if self.mix.stop == "all_exhausted" and finite and len(finite) < len(self.sources):
            raise SpecError(
                f"stop='all_exhausted' ends when every source has been read, but {_join_names(finite)} are finite and the "
                "others repeat for ever; set repeat=False on all, or use stop='first_exhausted' or 'drop_exhausted'"
            )
        if self.batch.tokens is not None or self.mix.unit == "tokens":
            without = [name for name, source in self.sources.items() if source.tokens is None]
            if without:
                raise SpecError(f"steps are counted in tokens, but {_join_names(without)} have tokens=None; use samples=...")

    @property
    def mix(self) -> Mixture:
        assert self.mixture is not None  # __post_init__ fills it in
        return self.mixture

    @property
    def is_weighted(self) -> bool:
        """Whether batches have loss weights."""
        return any(source.loss_weights is not None for source in self.sources.values())

    @property
    def size_columns(self) -> tuple[str, ...]:
        """The size columns of all sources."""
        return tuple(dict.fromkeys(name for source in self.sources.values() for name in source.size_columns))

    @property
    def is_masked(self) -> bool:
        """Whether some tokens may be without loss though another follows them."""
        return (
            self.is_weighted or bool(self.batch.special_ids) or any(s.loss_mask is not None for s in self.sources.values())
        )


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
