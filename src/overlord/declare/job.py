"""One declaration of everything that decides the stream and who receives what of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from overlord.declare.cache import Cache
from overlord.declare.evaluation import Eval
from overlord.declare.mesh import Axis, Mesh, StageFields, check_cut
from overlord.declare.mixture import Mixture
from overlord.declare.policies import Skip
from overlord.declare.source import CHOSEN_TOKENS, Source
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

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
    cut: Sequence[Axis] = ("cp", "pp")
    """The axes along which a microbatch is cut: cp gives a rank its slice of the tokens, pp the fields of its stage. `()`
    gives every rank all of it, for frameworks that cut by themselves."""
    strategy: Strategy | None = None
    """How a step's samples are arranged over ranks; `strategies.plain()` unless given."""
    seed: int = 0
    """Of every permutation, and of the random generator of each row."""
    evals: Mapping[str, Eval] = field(default_factory=dict)
    """Evaluations by name: fixed data apart from the stream, for `client.evaluate(name)`. They may change between a stop and
    a resume."""
    skip: Sequence[Skip] = ()
    """Rows, files and sources to leave out, each from a step on. It may change between a stop and a resume."""
    num_workers: int | None = None
    """Threads that read and transform; one less than cores unless given. With 0 the thread that requests a step does all the
    work: this takes the least CPU time and is the easiest to debug, but nothing is prepared in advance."""
    num_processes: int | None = None
    """Worker processes for transforms wrapped in `ol.InProcesses`; one per core unless given."""
    cache: Cache | None = None
    """Keeps what was read and transformed, for later epochs, resumes and other jobs: for all sources without a cache of
    their own."""
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
        self._check_whole()
        if not isinstance(self.stage_fields, StageFields):
            raise SpecError(f"stage_fields is a pipelines.StageFields, got {self.stage_fields!r}")
        self.stage_fields.check_pipeline(self.mesh.pp)
        object.__setattr__(self, "cut", check_cut(self.cut))
        self._check_evals()
        object.__setattr__(self, "skip", tuple(self.skip))
        self._check_skips()
        if self.prefetch < 0:
            raise SpecError(f"prefetch is a number of steps >= 0, got {self.prefetch}")
        if self.mix.feedback is not None and self.mix.feedback.lag <= self.prefetch:
            raise SpecError(f"feedback needs a lag of more than prefetch={self.prefetch} steps, got {self.mix.feedback.lag}")
        if self.cache is not None and not isinstance(self.cache, Cache):
            raise SpecError(f"cache is an ol.Cache, got {self.cache!r}")
        if self.num_workers is not None and self.num_workers < 0:
            raise SpecError(f"num_workers must be at least 0, got {self.num_workers}")
        if self.num_processes is not None and self.num_processes < 1:
            raise SpecError(f"num_processes must be at least 1, got {self.num_processes}")

    def _check_evals(self) -> None:
        for name, declared in self.evals.items():
            if not isinstance(name, str) or not name or not isinstance(declared, Eval):
                raise SpecError(f"evals are names with an overlord.Eval each, got {name!r}: {declared!r}")

    def _check_skips(self) -> None:
        for skip in self.skip:
            if not isinstance(skip, Skip):
                raise SpecError(f"skip is a list of overlord.Skip, got {skip!r}")
            if skip.source not in self.sources:
                raise SpecError(f"skip names the source {skip.source!r}; the job's sources are {_join_names(self.sources)}")

    def _check_whole(self) -> None:
        """Refuse what would cut conversations or preference pairs."""
        whole = [name for name, source in self.sources.items() if source.is_whole]
        if whole and (self.batch.cut_documents or self.batch.document_limits is not None):
            option = "cut_documents=True" if self.batch.cut_documents else "document_limits"
            raise SpecError(
                f"{option} would cut conversations and preference pairs, and train on parts without their prompt: "
                f"{_join_names(whole)} hold such rows. Leave {option.partition('=')[0]} out; steps then hold whole documents"
            )
        paired = [name for name, source in self.sources.items() if source.pairs is not None and source.decode is not None]
        if paired:
            raise SpecError(f"preference pairs are text, but {_join_names(paired)} decode images; leave decode= out")

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
        names = dict.fromkeys(name for source in self.sources.values() for name in source.size_columns)
        return (*names, CHOSEN_TOKENS) if self.has_pairs else tuple(names)

    @property
    def has_pairs(self) -> bool:
        """Whether some samples are preference pairs."""
        return any(source.pairs is not None for source in self.sources.values())

    @property
    def is_masked(self) -> bool:
        """Whether some tokens may be without loss though another follows them."""
        return (
            self.is_weighted
            or self.has_pairs
            or bool(self.batch.special_ids)
            or any(s.loss_mask is not None for s in self.sources.values())
        )


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
