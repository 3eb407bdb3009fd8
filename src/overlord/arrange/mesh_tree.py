"""`ClientPlaceTree`: the ranks of the trainer's mesh, their indexes, and which of them share samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from overlord.declare.mesh import Axis, Mesh, StageFields
from overlord.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

Bucket = Literal["dp", "cp", "world"]
"""What a group of a step is: a dp index, a dp x cp index, or a single rank."""

_DP_NAMES = ("dp", "batch", "dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep")
"""Dimensions of a DeviceMesh along which ranks get samples of their own."""
_JOINED_NAMES = ("dp_shard_cp", "dp_cp", "fsdp", "efsdp", "ep", "etp")
"""Dimensions in which data, context and, with expert parallelism, tensor parallelism are one."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank with its index along each axis of the mesh."""

    rank: int
    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class ClientPlaceTree:
    """The ranks of a trainer's mesh, and which of them share samples.

    Data-parallel groups (dp) get different samples, context-parallel ranks (cp) different slices of the same samples,
    tensor- and pipeline-parallel ranks (tp, pp) the same slice. Make it from a `Mesh`, a torch DeviceMesh or Megatron's
    sizes; `.mesh` is the `Mesh` to declare in a job.
    """

    mesh: Mesh
    stage_fields: StageFields = field(default_factory=StageFields)
    """The fields that each rank of a pipeline gets."""
    cut: tuple[Axis, ...] = ("cp", "pp")
    """The axes along which a microbatch is cut; see `Job.cut`."""
    _places: dict[int, Place] = field(default_factory=dict[int, Place], init=False, repr=False, compare=False)

    @staticmethod
    def from_device_mesh(device_mesh: Any, *, cp: int | None = None, tp: int | None = None) -> ClientPlaceTree:
        """Make it from a torch DeviceMesh of the whole world whose dimensions are named dp, cp, tp and pp.

        The names of torchtitan are known too. `batch`, `dp_replicate`, `dp_shard`, `dp_shard_mod_ep` and `dp_shard_in_ep`
        are parts of dp. `fsdp` (`dp_shard_cp`) is dp and cp in one, so pass `cp`. Expert parallelism (`efsdp`, `ep`, `etp`)
        takes its ranks from dp, cp and tp, so pass `cp` and `tp` unless the mesh has dimensions of these names. torchtitan's
        mesh of pp, batch, cp and tp needs neither.
        """
        names: tuple[str, ...] = tuple(device_mesh.mesh_dim_names or ())
        ranks = np.asarray(device_mesh.mesh)
        if not names:
            raise SpecError("the DeviceMesh has no dimension names; make it with mesh_dim_names=('pp', 'dp', 'cp', 'tp')")
        unknown = [name for name in names if name not in (*_DP_NAMES, *_JOINED_NAMES, "cp", "tp", "pp")]
        if unknown:
            raise SpecError(
                f"the DeviceMesh has dimensions {names}, of which {unknown} are not known; "
                f"known are pp, cp, tp, {', '.join((*_DP_NAMES, *_JOINED_NAMES))}"
            )
        if not np.array_equal(ranks.ravel(), np.arange(ranks.size)):
            raise SpecError(
                f"the DeviceMesh must hold the ranks 0 to {ranks.size - 1} in order, the whole world; got "
                f"{ranks.ravel()[:8].tolist()}...; pass the root mesh, not a part of it"
            )
        at = [i for i, name in enumerate(names) if name in (*_DP_NAMES, *_JOINED_NAMES)]
        if at and at != list(range(at[0], at[-1] + 1)):
            raise SpecError(
                f"the dimensions of data and expert parallelism must be neighbours in the DeviceMesh, got {names}"
            )
        sizes = dict(zip(names, ranks.shape, strict=True))
        block = _data_block({name: sizes[name] for name in names if name not in ("cp", "tp", "pp")}, sizes, cp, tp)
        order: list[str] = []
        for name in names:
            order += [name] if name in ("cp", "tp", "pp") else [axis for axis in block if axis not in order]
        named = {axis: sizes.get(axis, 1) for axis in ("cp", "tp", "pp")}
        return ClientPlaceTree(_mesh(order, {"dp": 1, **named, **block}))

    @staticmethod
    def from_megatron(
        order: str = "tp-cp-ep-dp-pp", *, world_size: int, tp: int = 1, cp: int = 1, pp: int = 1
    ) -> ClientPlaceTree:
        """Make it from Megatron's parallel sizes and rank order, innermost first; dp is what remains of `world_size`.

        Expert parallelism uses the ranks of dp, so `ep` in the order is ignored.
        """
        names = [name for name in order.lower().split("-") if name != "ep"]
        sizes = {"tp": tp, "cp": cp, "pp": pp}
        for name, size in sizes.items():
            if size > 1 and name not in names:
                raise SpecError(f"{name}={size}, but the order {order!r} does not name {name}")
        if len(set(names)) != len(names) or not set(names) <= {"tp", "cp", "dp", "pp"}:
            raise SpecError(f"the order names tp, cp, ep, dp and pp once each, joined by '-', got {order!r}")
        model = tp * cp * pp
        if min(sizes.values()) < 1 or world_size < 1 or world_size % model:
            raise SpecError(
                f"tp={tp} x cp={cp} x pp={pp} is {model} ranks, which does not divide the world of "
                f"{world_size}; change one of the sizes"
            )
        return ClientPlaceTree(_mesh(tuple(reversed(names)), {**sizes, "dp": world_size // model}))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.mesh.world_size

    def coordinates(self, rank: int) -> Place:
        """The index of a rank along each axis."""
        found = self._places.get(rank)
        if found is None:
            found = self._places[rank] = self._place(rank)
        return found

    def _place(self, rank: int) -> Place:
        if not 0 <= rank < self.world_size:
            raise SpecError(f"rank must be from 0 to {self.world_size - 1}, got {rank}")
        at: dict[str, int] = {}
        rest = rank
        for axis in reversed(self.mesh.order):
            rest, at[axis] = divmod(rest, getattr(self.mesh, axis))
        return Place(rank, **at)

    def rank_of(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these indexes: the inverse of `coordinates`."""
        at = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
        rank = 0
        for axis in self.mesh.order:
            size = getattr(self.mesh, axis)
            if not 0 <= at[axis] < size:
                raise SpecError(f"{axis} index must be from 0 to {size - 1}, got {at[axis]}")
            rank = rank * size + at[axis]
        return rank

    def source_of(self, rank: int, broadcast: Collection[str] = ()) -> int:
        """The rank that fetches this rank's batches when the trainer broadcasts along these axes; itself where it
        fetches."""
        place = self.coordinates(rank)
        if not broadcast:
            return rank
        at = {axis: 0 if axis in broadcast else getattr(place, axis) for axis in self.mesh.order}
        return self.rank_of(**at)

    def fetchers(self, broadcast: Collection[str] = ()) -> list[int]:
        """The ranks that fetch batches when the trainer broadcasts along these axes; all others receive from one of them."""
        return [rank for rank in range(self.world_size) if self.source_of(rank, broadcast) == rank]

    def broadcast_groups(self, broadcast: Collection[str]) -> list[list[int]]:
        """The ranks that share a fetching rank when the trainer broadcasts along these axes, which comes first: the process
        groups for `overlord.trainer.receive`."""
        groups: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            groups.setdefault(self.source_of(rank, broadcast), []).append(rank)
        return [sorted(ranks) for _, ranks in sorted(groups.items())]

    def ranks_of(self, dp: int) -> list[int]:
        """The ranks that train on the samples of one data-parallel group."""
        mesh = self.mesh
        return sorted(
            self.rank_of(pp=pp, dp=dp, cp=cp, tp=tp)
            for pp in range(mesh.pp)
            for cp in range(mesh.cp)
            for tp in range(mesh.tp)
        )

    def ranks_of_group(self, axis: Bucket, group: int) -> list[int]:
        """The ranks that train on the samples of a group of a plan along this axis."""
        if axis == "world":
            return [group]
        if axis == "dp":
            return self.ranks_of(group)
        dp, cp = divmod(group, self.mesh.cp)
        return [rank for rank in self.ranks_of(dp) if self.coordinates(rank).cp == cp]

    def group_of(self, rank: int, axis: Bucket) -> int:
        """The group of a plan along this axis that a rank trains with: the inverse of `ranks_of_group`."""
        if axis == "world":
            return rank
        place = self.coordinates(rank)
        return place.dp if axis == "dp" else place.dp * self.mesh.cp + place.cp

    def num_groups(self, axis: Bucket = "dp", group_size: int = 1) -> int:
        """The number of groups when a step is distributed along this axis, `group_size` neighbours to a group."""
        if axis not in ("dp", "cp", "world"):
            raise SpecError(f"a step is distributed along dp, cp or world, not {axis!r}")
        num_places = self.world_size if axis == "world" else self.mesh.dp * (self.mesh.cp if axis == "cp" else 1)
        if group_size < 1 or num_places % group_size:
            raise SpecError(
                f"group_size must divide the {num_places} places along {axis}, got {group_size}; "
                f"1 gives each place its own samples"
            )
        return num_places // group_size


def _data_block(data: dict[str, int], sizes: dict[str, int], cp: int | None, tp: int | None) -> dict[str, int]:
    """How the neighbouring dimensions `data` of a DeviceMesh divide into dp, cp and tp, outermost first; without an axis
    that is a dimension of its own. `sizes` are those of all dimensions."""
    joined = [name for name in data if name in _JOINED_NAMES and data[name] > 1]
    takes_tp = any(name in ("efsdp", "ep", "etp") for name in data)
    inside: dict[str, int] = {}
    for axis, given, may_hold in (("cp", cp, bool(joined)), ("tp", tp, bool(joined) and takes_tp)):
        if axis in sizes:
            if given is not None and given != sizes[axis]:
                raise SpecError(f"the DeviceMesh has {axis}={sizes[axis]}, but {axis}={given} was passed; leave it out")
        elif may_hold:
            if given is None:
                raise SpecError(
                    f"the DeviceMesh has no dimension {axis}, and {joined} may hold it: pass {axis}=..., 1 without it; "
                    "or pass a mesh with the dimensions pp, batch, cp and tp"
                )
            inside[axis] = given
        elif given is not None and given != 1:
            raise SpecError(f"{axis}={given} was passed, but the DeviceMesh {tuple(sizes)} has no dimension that holds it")
    divisor, num_ranks = math.prod(inside.values()), math.prod(data.values())
    within = 1  # ranks of the innermost joined dimensions, which must hold all of cp and tp
    for name in reversed(data):
        if name not in _JOINED_NAMES:
            break
        within *= data[name]
    if divisor < 1 or within % divisor:
        given = " x ".join(f"{axis}={size}" for axis, size in inside.items())
        raise SpecError(f"{given} does not divide the {within} ranks of {joined}; the DeviceMesh has {sizes}")
    return {"dp": num_ranks // divisor, **inside} if data else {}


def _mesh(order: Sequence[str], sizes: dict[str, int]) -> Mesh:
    """The Mesh with this order, outermost first. Axes that the order does not name have size 1 and go outermost."""
    missing = [axis for axis in ("pp", "dp", "cp", "tp") if axis not in order]
    return Mesh(**sizes, order=cast("tuple[Axis, ...]", (*missing, *order)))
