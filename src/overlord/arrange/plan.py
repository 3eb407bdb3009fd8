"""A plan: which samples make which microbatch of which data-parallel group. The output of every strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from overlord.arrange.balancing import max_over_mean, summed
from overlord.errors import SpecError
from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from overlord.arrange.cost import CostFunction
    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree, Place
    from overlord.messages import Fields
    from overlord.stream.facts import Floats, Ints, Samples

P = TypeVar("P")


class RankPart(Protocol):
    """What a feature adds to a built microbatch, rank by rank."""

    def fields_for(self, place: Place, tree: ClientPlaceTree) -> Fields:
        """Fields for one rank of the group, beside those that all of its ranks share."""
        ...


class MicroPart(Protocol):
    """What a feature adds to one microbatch of a group. It travels with the plan to the Data Constructor."""

    @property
    def more_samples(self) -> Samples | None:
        """Samples to fetch beside those of the microbatch; None for a feature that needs no others."""
        ...

    def build(self, fields: Fields, images: Sequence[NDArray[np.uint8]]) -> tuple[Fields, RankPart]:
        """The fields of the collated microbatch with the feature's own. `images` are those of `more_samples`."""
        ...


class PlanPart(Protocol):
    """What a feature adds to a plan. A package that has one needs no change to `Plan`, planner or constructor."""

    def microbatch(self, plan: Plan, group: int, micro: int, documents: Ints, samples: Samples) -> tuple[Samples, MicroPart]:
        """The samples of a microbatch of `group` as the feature leaves them, and its part of the microbatch. `micro` is
        numbered over all groups; `documents` are the indexes of the samples in the plan."""
        ...


@record
class PlanStage:
    """What one primitive did to a step, for `explain`. The words are put together only when they are read."""

    name: str
    text: str
    values: tuple[object, ...] = ()
    """What goes into the braces of `text`."""
    bucket_costs: Floats | None = None
    """Total cost per data-parallel group after this stage, where groups exist."""
    micro_costs: Floats | None = None
    """Cost per microbatch after this stage, where microbatches exist."""

    @property
    def detail(self) -> str:
        return self.text.format(*self.values)


@record
class MicroPlan:
    """One microbatch. `samples` are in packing order; `row[i]` is the row of the microbatch sample i lies in.

    With `row_tokens` > 0 every row is padded to that many tokens and there are exactly `num_rows` rows, some
    of which may be empty; with 0 there is one row as long as its samples, or, where each has a row of its own, `num_rows`
    as long as the longest of them.
    """

    samples: Samples
    row: Ints
    num_rows: int
    row_tokens: int
    parts: tuple[MicroPart, ...] = ()
    """What features add: who runs the microbatch together where documents are cut over ranks, for example."""

    def part(self, kind: type[P]) -> P | None:
        """The part of a kind, where the microbatch has one."""
        return _of_kind(self.parts, kind)


@record
class GroupPlan:
    """The part of a plan that one data-parallel group carries out."""

    step: int
    group: int
    microbatches: tuple[MicroPlan, ...]
    loss_tokens: int | float
    """Loss tokens of the whole step, over all groups, or the sum of their weights: divide the summed loss by this."""
    broadcast: frozenset[str]
    """Mesh axes along which the trainer broadcasts, so that only index 0 of them fetches."""
    counts: tuple[int, ...] | None = None
    """How many of the microbatches each context-parallel rank has, one rank after the other; None where all have a slice of
    each."""


@record
class Plan:
    """A whole step. Microbatch m (numbered over all groups, group by group) holds the samples
    `order[offsets[m]:offsets[m + 1]]`; group g owns the `counts[g]` microbatches after those of the groups
    before it.
    """

    samples: Samples
    counts: Ints
    offsets: Ints
    order: Ints
    row: Ints
    """Row within its microbatch, for each entry of `order`."""
    rows_per_microbatch: int
    row_tokens: int
    """Tokens that every row is padded to; 0 when rows are as long as their samples."""
    broadcast: frozenset[str]
    stages: tuple[PlanStage, ...] = ()
    axis: Bucket = "dp"
    """The mesh axis that the groups lie along, `group_size` neighbours on it to a group."""
    group_size: int = 1
    parts: tuple[PlanPart, ...] = ()
    """What features add: which rank encodes which image, or which ranks attend to a document together."""
    cost: CostFunction | None = None
    """The cost that the strategy declared."""
    in_order: bool = False
    """Whether `order` is known to list the samples as they come."""

    @property
    def num_groups(self) -> int:
        return len(self.counts)

    @property
    def loss_tokens(self) -> int | float:
        """Of the whole step: their number, or the sum of their weights where there are loss weights."""
        return self.samples.total_loss

    def part(self, kind: type[P]) -> P | None:
        """The part of a kind, where the plan has one."""
        return _of_kind(self.parts, kind)

    def micro_of_order(self) -> Ints:
        """The microbatch number of each entry of `order`."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def micro_costs(self, costs: Floats) -> Floats:
        """The cost of each microbatch, given the cost of each of `samples`."""
        return summed(self.micro_of_order(), costs[self.order], len(self.offsets) - 1)

    def group_costs(self, costs: Floats) -> Floats:
        """The cost of each group, given the cost of each of `samples`."""
        group_of_micro = np.repeat(np.arange(self.num_groups), self.counts)
        return summed(group_of_micro, self.micro_costs(costs), self.num_groups)

    def micro_places(self) -> Ints:
        """The token places of each microbatch, padding included but for that to document_multiple."""
        micro, tokens, count = self.micro_of_order(), self.samples.tokens[self.order], len(self.offsets) - 1
        if self.row_tokens:
            return np.full(count, self.rows_per_microbatch * self.row_tokens)
        longest = np.zeros(count, np.int64)
        np.maximum.at(longest, micro, tokens)
        return np.maximum(np.bincount(micro, tokens, count).astype(np.int64), self.rows_per_microbatch * longest)

    def max_over_mean(self, costs: Floats) -> float:
        """The straggler: how much longer the slowest group takes than the average one."""
        return max_over_mean(self.group_costs(costs))

    def for_group(self, step: int, group: int) -> GroupPlan:
        counts = self.counts[: group + 1].tolist()
        first, last = sum(counts[:-1]), sum(counts)
        offsets, micros = self.offsets[first : last + 1].tolist(), []
        for m, begin, end in zip(range(first, last), offsets, offsets[1:], strict=False):
            documents = self.order[begin:end]
            samples, parts = self.samples.take(slice(begin, end) if self.in_order else documents), []
            for part in self.parts:
                samples, of_micro = part.microbatch(self, group, m, documents, samples)
                parts.append(of_micro)
            row, num_rows = self.row[begin:end], self.rows_per_microbatch
            micros.append(MicroPlan(samples, row, num_rows, self.row_tokens, tuple(parts)))
        return GroupPlan(step, group, tuple(micros), self.loss_tokens, self.broadcast)

    def for_constructor(self, step: int, dp: int, cp: int) -> GroupPlan:
        """What the Data Constructor of a data-parallel group of `cp` context-parallel ranks carries out."""
        if self.axis == "dp":
            return self.for_group(step, dp)
        parts = [self.for_group(step, rank) for rank in range(dp * cp, (dp + 1) * cp)]
        micros = tuple(micro for part in parts for micro in part.microbatches)
        counts = tuple(len(part.microbatches) for part in parts)
        return GroupPlan(step, dp, micros, self.loss_tokens, self.broadcast, counts)

    def check_groups(self, place: ClientPlaceTree) -> None:
        """Refuse what Data Constructors, one for each data-parallel group, cannot carry out."""
        groups = place.num_groups(self.axis) if self.axis in ("dp", "cp") else None
        if self.num_groups != groups or self.group_size != 1:
            raise SpecError(
                f"the strategy distributed the step over {self.num_groups} groups along {self.axis}, but Data Constructors "
                f"serve {place.mesh.dp} data-parallel groups of {place.mesh.cp} context-parallel ranks: use "
                "distribute('dp'), or distribute('cp') to give every one of these ranks samples of its own"
            )
        if self.axis == "cp" and "cp" in self.broadcast:
            raise SpecError("along cp every rank has samples of its own: the trainer cannot broadcast them; leave cp out")


def _of_kind(parts: Sequence[object], kind: type[P]) -> P | None:
    return next((part for part in parts if isinstance(part, kind)), None)
