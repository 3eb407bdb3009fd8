"""`Plan`: which samples make which microbatch of which group. Every strategy returns one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from overlord.arrange.balancing import bin_sums, max_over_mean
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
    """A feature's fields in a built microbatch that differ from rank to rank."""

    def fields_for(self, place: Place, tree: ClientPlaceTree) -> Fields:
        """The fields of one rank, in addition to those that all ranks of its group share."""
        ...


class MicroPart(Protocol):
    """A feature's part of one microbatch. It is sent to the Data Constructor with the plan."""

    @property
    def more_samples(self) -> Samples | None:
        """Samples to fetch in addition to those of the microbatch; None if the feature needs no others."""
        ...

    def build(self, fields: Fields, images: Sequence[NDArray[np.uint8]]) -> tuple[Fields, RankPart]:
        """Add the feature's fields to those of the collated microbatch. `images` are those of `more_samples`."""
        ...


class PlanPart(Protocol):
    """A feature's part of a plan. With it, a new feature needs no change to `Plan`, Planner or Data Constructor."""

    def microbatch(self, plan: Plan, group: int, micro: int, documents: Ints, samples: Samples) -> tuple[Samples, MicroPart]:
        """The samples of one microbatch of `group`, as the feature changes them, and the feature's part of it.

        `micro` is numbered over all groups; `documents` are the indexes of the samples in the plan.
        """
        ...


@record
class PlanStage:
    """What one primitive did to a step, for `explain`. The text is formatted only when it is read."""

    name: str
    text: str
    values: tuple[object, ...] = ()
    """The values for the braces of `text`."""
    bucket_costs: Floats | None = None
    """Total cost per data-parallel group after this stage, where groups exist."""
    micro_costs: Floats | None = None
    """Cost per microbatch after this stage, where microbatches exist."""

    @property
    def detail(self) -> str:
        return self.text.format(*self.values)


@record
class MicroPlan:
    """One microbatch. `samples` are in packing order; `row[i]` is the row of sample i within the microbatch.

    With `row_tokens` > 0 there are exactly `num_rows` rows, each padded to that many tokens; some may be empty. With
    `row_tokens` = 0 there is a single row as long as its samples together, or, where every sample has a row of its own,
    `num_rows` rows as long as the longest sample.
    """

    samples: Samples
    row: Ints
    num_rows: int
    row_tokens: int
    parts: tuple[MicroPart, ...] = ()
    """The parts of features: for example, which ranks attend together to a document that is cut over them."""

    def part(self, kind: type[P]) -> P | None:
        """The part of this class; None if the microbatch has none."""
        return _of_kind(self.parts, kind)


@record
class GroupPlan:
    """The microbatches of one data-parallel group, in the order in which it runs them."""

    step: int
    group: int
    microbatches: tuple[MicroPlan, ...]
    loss_tokens: int | float
    """The number of loss tokens of the whole step, over all groups, or the sum of their weights. Divide the summed loss by
    it."""
    broadcast: frozenset[str]
    """Mesh axes along which the trainer broadcasts: only index 0 of each fetches."""
    counts: tuple[int, ...] | None = None
    """The number of microbatches of each context-parallel rank, which lie rank by rank; None where every context-parallel
    rank has a slice of each microbatch."""
    axis: Bucket = "dp"
    """What the plan is distributed along. With "world", `counts` has all ranks of the group, in their order."""

    def all_samples(self) -> list[Samples]:
        """The samples of each microbatch, and after them those that features need in addition."""
        more = [part.more_samples for micro in self.microbatches for part in micro.parts]
        return [micro.samples for micro in self.microbatches] + [samples for samples in more if samples is not None]


@record
class Plan:
    """The arrangement of one step: which samples make which microbatch of which group. Strategies return one.

    Microbatches are numbered over all groups, group by group. Microbatch m holds the samples with the indexes
    `order[offsets[m]:offsets[m + 1]]`, and group g runs `counts[g]` microbatches. `explain(plan)` prints how the strategy
    came to it. `group_costs`, `micro_costs` and `max_over_mean` measure it by any cost of its samples.
    """

    samples: Samples
    """The samples of the step; where a strategy cut documents, their pieces."""
    counts: Ints
    """The number of microbatches of each group."""
    offsets: Ints
    order: Ints
    row: Ints
    """The row within its microbatch, for each entry of `order`."""
    rows_per_microbatch: int
    row_tokens: int
    """The tokens that every row is padded to; 0 where a row is as long as its samples."""
    broadcast: frozenset[str]
    """Mesh axes along which the trainer broadcasts: only index 0 of each fetches."""
    stages: tuple[PlanStage, ...] = ()
    axis: Bucket = "dp"
    """The mesh axis of the groups."""
    group_size: int = 1
    """So many neighbours among the groups run the same number of microbatches, and were balanced as one first."""
    parts: tuple[PlanPart, ...] = ()
    """The parts of features: for example, which rank encodes which image."""
    cost: CostFunction | None = None
    """The cost function that the strategy declared."""
    in_order: bool = False
    """True if `order` is known to be 0, 1, 2, ..., so that samples can be sliced instead of gathered."""

    @property
    def num_groups(self) -> int:
        return len(self.counts)

    @property
    def loss_tokens(self) -> int | float:
        """The number of loss tokens of the step; with loss weights, the sum of their weights."""
        return self.samples.total_loss

    def part(self, kind: type[P]) -> P | None:
        """The part of this class; None if the plan has none."""
        return _of_kind(self.parts, kind)

    def micro_of_order(self) -> Ints:
        """The microbatch number of each entry of `order`."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def micro_costs(self, costs: Floats) -> Floats:
        """The cost of each microbatch, given the cost of each of `samples`."""
        return bin_sums(self.micro_of_order(), costs[self.order], len(self.offsets) - 1)

    def group_costs(self, costs: Floats) -> Floats:
        """The cost of each group, given the cost of each of `samples`."""
        group_of_micro = np.repeat(np.arange(self.num_groups), self.counts)
        return bin_sums(group_of_micro, self.micro_costs(costs), self.num_groups)

    def micro_places(self) -> Ints:
        """The tokens of each microbatch with the padding of its rows, but without that to `document_multiple`."""
        micro, tokens, count = self.micro_of_order(), self.samples.tokens[self.order], len(self.offsets) - 1
        if self.row_tokens:
            return np.full(count, self.rows_per_microbatch * self.row_tokens)
        longest = np.zeros(count, np.int64)
        np.maximum.at(longest, micro, tokens)
        return np.maximum(np.bincount(micro, tokens, count).astype(np.int64), self.rows_per_microbatch * longest)

    def max_over_mean(self, costs: Floats) -> float:
        """The costliest group over the mean group, given the cost of each of `samples`: 1.0 is perfectly balanced."""
        return max_over_mean(self.group_costs(costs))

    def for_group(self, step: int, group: int) -> GroupPlan:
        """The microbatches of one group."""
        counts = self.counts[: group + 1].tolist()
        first, last = sum(counts[:-1]), sum(counts)
        offsets = self.offsets[first : last + 1].tolist()
        micros: list[MicroPlan] = []
        for m, begin, end in zip(range(first, last), offsets, offsets[1:], strict=False):
            documents = self.order[begin:end]
            samples = self.samples.take(slice(begin, end) if self.in_order else documents)
            parts: list[MicroPart] = []
            for part in self.parts:
                samples, of_micro = part.microbatch(self, group, m, documents, samples)
                parts.append(of_micro)
            row, num_rows = self.row[begin:end], self.rows_per_microbatch
            micros.append(MicroPlan(samples, row, num_rows, self.row_tokens, tuple(parts)))
        return GroupPlan(step, group, tuple(micros), self.loss_tokens, self.broadcast)

    def has_group(self, dp: int) -> bool:
        """True if the plan has the samples of this data-parallel group: a whole plan has those of all."""
        return dp >= 0

    def for_constructor(self, step: int, dp: int, place: ClientPlaceTree) -> GroupPlan:
        """The microbatches that the Data Constructor of data-parallel group `dp` builds."""
        if self.axis == "dp":
            return self.for_group(step, dp)
        cp = place.mesh.cp
        groups = place.ranks_of(dp) if self.axis == "world" else range(dp * cp, (dp + 1) * cp)
        parts = [self.for_group(step, group) for group in groups]
        micros = tuple(micro for part in parts for micro in part.microbatches)
        counts = tuple(len(part.microbatches) for part in parts)
        return GroupPlan(step, dp, micros, self.loss_tokens, self.broadcast, counts, self.axis)

    def check_equal_counts(self) -> None:
        """Raise SpecError unless all groups run the same number of microbatches. FSDP gathers weights in every microbatch,
        so a rank that runs fewer would leave the others waiting forever: check the plan of a step before such a run."""
        fewest, most = int(self.counts.min()), int(self.counts.max())
        if most != fewest:
            raise SpecError(
                f"FSDP needs the same number of microbatches on every rank, and this plan has {fewest} on group "
                f"{int(self.counts.argmin())} and {most} on group {int(self.counts.argmax())}: give the strategy "
                "equal_counts=True, or use DDP or ZeRO-1"
            )

    def check_groups(self, place: ClientPlaceTree) -> None:
        """Raise SpecError if the Data Constructors, one per data-parallel group, cannot build this plan."""
        groups = place.num_groups(self.axis)
        if self.num_groups != groups:
            raise SpecError(
                f"the strategy distributed the step over {self.num_groups} groups along {self.axis}, of which the mesh has "
                f"{groups}: arrange the graph that the strategy was called with"
            )
        if self.axis == "cp" and "cp" in self.broadcast:
            raise SpecError("along cp every rank has samples of its own: the trainer cannot broadcast them; leave cp out")
        if self.axis == "world" and self.broadcast:
            raise SpecError("along the world every rank has samples of its own: the trainer cannot broadcast them")


def _of_kind(parts: Sequence[object], kind: type[P]) -> P | None:
    return next((part for part in parts if isinstance(part, kind)), None)
