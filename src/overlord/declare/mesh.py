"""The trainer's mesh: the sizes of its parallel dimensions."""

from __future__ import annotations

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
    """Pipeline stages: the first gets tokens, the last labels."""
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
