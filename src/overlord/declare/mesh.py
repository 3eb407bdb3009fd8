"""The trainer's mesh: the sizes of its parallel dimensions, and what each stage of its pipeline needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from overlord.declare.arguments import whole
from overlord.errors import SpecError

Axis = Literal["pp", "dp", "cp", "tp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The sizes of the trainer's parallel dimensions: data, context, tensor and pipeline parallelism.

    A mesh without `dp` has one data-parallel group, unless the size of the world is known: `overlord.trainer.attach` and
    `start(world_size=...)` then set dp to what the other sizes leave of it.
    """

    dp: int = None  # type: ignore[assignment] - to tell 1 from nothing; it is a number once the mesh is made
    """Data-parallel groups: each gets its own samples."""
    cp: int = 1
    """Ranks that share the tokens of a sample."""
    tp: int = 1
    """Ranks that get the same tokens and share the weights of a layer."""
    pp: int = 1
    """Pipeline ranks: see `StageFields` for the fields that each gets."""
    order: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
    """How ranks are numbered, outermost first; the default is Megatron's."""
    is_dp_open: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether dp was left out."""

    def __post_init__(self) -> None:
        if self.dp is None:
            object.__setattr__(self, "is_dp_open", True)
            object.__setattr__(self, "dp", 1)
        for axis in ("dp", "cp", "tp", "pp"):
            object.__setattr__(self, axis, whole(getattr(self, axis), f"mesh size {axis}", least=1))
        if not isinstance(self.order, (tuple, list)) or sorted(map(str, self.order)) != ["cp", "dp", "pp", "tp"]:
            raise SpecError(f"mesh order must name pp, dp, cp and tp once each, got {self.order}")

    @property
    def world_size(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    def for_world(self, world_size: int) -> Mesh:
        """This mesh for a world of that size: with an open dp set to what the other sizes leave, else as it is. SpecError
        when it does not fit."""
        if not self.is_dp_open:
            if self.world_size != world_size:
                raise SpecError(
                    f"the mesh dp={self.dp} x cp={self.cp} x tp={self.tp} x pp={self.pp} has {self.world_size} ranks, "
                    f"but the world has {world_size}; change one of the sizes"
                )
            return self
        model = self.cp * self.tp * self.pp
        if world_size < 1 or world_size % model:
            raise SpecError(
                f"the mesh cp={self.cp} x tp={self.tp} x pp={self.pp} takes {model} ranks for each data-parallel group, "
                f"which does not divide the world of {world_size}; change one of the sizes"
            )
        return Mesh(dp=world_size // model, cp=self.cp, tp=self.tp, pp=self.pp, order=self.order)


def check_cut(cut: Iterable[Axis]) -> tuple[Axis, ...]:
    """The axes along which microbatches are cut, once each."""
    found = tuple([cut] if isinstance(cut, str) else cut)
    if wrong := [axis for axis in found if axis not in ("cp", "pp")]:
        raise SpecError(
            f"cut names the axes along which a microbatch is cut, 'cp' and 'pp' or none, got {wrong[0]!r}: ranks along dp "
            "have samples of their own, those along tp the same arrays"
        )
    return tuple(axis for axis in ("cp", "pp") if axis in found)


Stages = Literal["all"] | tuple[int, ...]
"""All stages of a pipeline, or some by number: 0 is the first, -1 the last."""

_FIRST: Stages = (0,)
_LAST: Stages = (-1,)
_ENDS: Stages = (0, -1)
_BY_DEFAULT: Mapping[str, Stages] = {
    "tokens": _FIRST,
    "images": _FIRST,
    "image_document": _FIRST,
    "image_tokens": _FIRST,
    "image_row": _FIRST,
    "labels": _LAST,
    "loss_mask": _LAST,
    "loss_weights": _LAST,
}


@dataclass(frozen=True, slots=True)
class StageFields:
    """Which fields of a microbatch go to which stages of the trainer's pipeline.

    By default `tokens` and images go to the first stage, `labels`, `loss_mask` and `loss_weights` to the last, Arrow columns
    to both, and everything else to all stages: `position_ids`, because every stage rotates queries and keys by them, and
    `cu_seqlens` and the other facts about shapes. A rank that holds several stages gets the fields of all of them.

    `fields` changes that by name: "all", or stages by number, 0 being the first and -1 the last. With multi-token
    prediction the last stage embeds tokens too: `StageFields({"tokens": (0, -1)})`. `StageFields("all")` cuts nothing.
    """

    fields: Mapping[str, Stages] | Literal["all"] = field(default_factory=dict[str, Stages], hash=False)
    chunks: int = 1
    """Model chunks of a rank, which are stages of their own: the virtual pipeline size of interleaved schedules."""
    placement: Literal["loop", "v"] = "loop"
    """How stages lie on ranks. loop: stage s on rank s % pp (interleaved 1F1B). v: back and forth, so that the first rank of
    two chunks a rank holds the first stage and the last (ZB-V, DualPipeV)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "chunks", whole(self.chunks, "chunks of StageFields", least=1))
        if self.placement not in ("loop", "v"):
            raise SpecError(f"placement is 'loop' or 'v', not {self.placement!r}")
        if self.fields == "all":
            return
        if not isinstance(self.fields, Mapping):
            raise SpecError(f"StageFields takes {{field: stages}} or 'all', got {self.fields!r}")
        checked = {name: _stages(name, stages) for name, stages in self.fields.items()}
        object.__setattr__(self, "fields", checked)

    def check_pipeline(self, pp: int) -> None:
        """Raise SpecError if a stage is named that a pipeline of `pp` ranks does not have."""
        most = pp * self.chunks
        for name, stages in () if self.fields == "all" or pp == 1 else self.fields.items():
            missing = () if stages == "all" else [stage for stage in stages if not -most <= stage < most]
            if missing:
                raise SpecError(
                    f"{name!r} goes to stage {missing[0]}, but pp={pp} ranks of {self.chunks} chunks have stages 0 to "
                    f"{most - 1}; -1 is always the last"
                )

    def stages_of(self, rank: int, pp: int) -> tuple[int, ...]:
        """The stages that pipeline rank `rank` of `pp` holds, of pp x chunks in all."""
        if not 0 <= rank < pp:
            raise SpecError(f"a pipeline of {pp} ranks has ranks 0 to {pp - 1}, not {rank}")
        is_back = [self.placement == "v" and chunk % 2 == 1 for chunk in range(self.chunks)]
        return tuple(chunk * pp + (pp - 1 - rank if back else rank) for chunk, back in enumerate(is_back))

    def goes_to(self, name: str, rank: int, pp: int, *, is_column: bool = False) -> bool:
        """Whether pipeline rank `rank` of `pp` gets the field. `is_column`: it is one of `Batch(columns=...)`."""
        if self.fields == "all":
            return True
        stages = self.fields.get(name, _ENDS if is_column else _BY_DEFAULT.get(name, "all"))
        if stages == "all":
            return True
        num_stages = pp * self.chunks
        wanted = {stage + num_stages if stage < 0 else stage for stage in stages}
        return not wanted.isdisjoint(self.stages_of(rank, pp))


def _stages(name: object, stages: object) -> Stages:
    if not isinstance(name, str):
        raise SpecError(f"StageFields has names of fields as its keys, got {name!r}")
    if stages == "all":
        return "all"
    if isinstance(stages, (str, int)) or not isinstance(stages, Iterable):
        raise SpecError(f"the stages of {name!r} are 'all' or a tuple such as (0, -1), got {stages!r}")
    found = tuple(stages)
    if any(not isinstance(stage, int) or isinstance(stage, bool) for stage in found):
        raise SpecError(f"the stages of {name!r} are whole numbers, 0 for the first and -1 for the last, got {stages!r}")
    return found
