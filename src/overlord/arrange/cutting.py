"""Plans cut for Data Constructors: the columns of a plan are sorted by group once, so that the part of any groups is a slice
of each column. To cut a step for thousands of groups costs as much as to sort it, and to send it to a host of several groups
one message of plain arrays."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import numpy as np

from overlord.arrange.plan import GroupPlan, MicroPlan, Plan
from overlord.records import record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
    from overlord.stream.facts import Ints, Samples


class ConstructorPlans(Protocol):
    """The plan of a step, at least for some data-parallel groups."""

    def has_group(self, dp: int) -> bool: ...

    def for_constructor(self, step: int, dp: int, place: ClientPlaceTree) -> GroupPlan:
        """The microbatches that the Data Constructor of data-parallel group `dp` builds."""
        ...


@record
class CutPlan:
    """The microbatches of some data-parallel groups, group after group. The groups of a plan along cp or the world are the
    members of a data-parallel group."""

    groups: tuple[int, ...]
    """The data-parallel groups, rising."""
    first: Ints
    """The first microbatch of every member of every group, and the end of the last."""
    offsets: Ints
    """The first sample of every microbatch, and the end of the last."""
    samples: Samples
    row: Ints
    rows_per_microbatch: int
    row_tokens: int
    loss_tokens: int | float
    """Of the whole step."""
    broadcast: frozenset[str]
    axis: Bucket

    def has_group(self, dp: int) -> bool:
        at = bisect_left(self.groups, dp)
        return at < len(self.groups) and self.groups[at] == dp

    def for_constructor(self, step: int, dp: int, place: ClientPlaceTree) -> GroupPlan:  # noqa: ARG002 - of the protocol
        """The microbatches that the Data Constructor of data-parallel group `dp` builds: views of the columns."""
        members = (len(self.first) - 1) // len(self.groups)
        at = bisect_left(self.groups, dp) * members
        first: list[int] = self.first[at : at + members + 1].tolist()
        offsets: list[int] = self.offsets[first[0] : first[-1] + 1].tolist()
        micros = tuple(
            MicroPlan(self.samples.take(slice(begin, end)), self.row[begin:end], self.rows_per_microbatch, self.row_tokens)
            for begin, end in pairwise(offsets)
        )
        if self.axis == "dp":
            return GroupPlan(step, dp, micros, self.loss_tokens, self.broadcast)
        counts = tuple(end - begin for begin, end in pairwise(first))
        return GroupPlan(step, dp, micros, self.loss_tokens, self.broadcast, counts, self.axis)

    def take(self, groups: Sequence[int]) -> CutPlan:
        """The part of some of the groups, which are given in rising order. Copies it, so that it can travel alone."""
        members = (len(self.first) - 1) // len(self.groups)
        at = np.array([bisect_left(self.groups, dp) for dp in groups], np.int64)
        each = (at[:, None] * members + np.arange(members)).ravel()
        begin, counts = self.first[each], self.first[each + 1] - self.first[each]
        micros = _ranges(begin, counts)
        starts, ends = self.offsets[micros], self.offsets[micros + 1]
        are_neighbours = bool((at[1:] - at[:-1] == 1).all())
        where = slice(int(starts[0]), int(ends[-1])) if are_neighbours else _ranges(starts, ends - starts)
        samples = self.samples.take(where)
        images = None if samples.images is None else samples.images.compact()
        return replace(
            self,
            groups=tuple(groups),
            first=_bounds(counts),
            offsets=_bounds(ends - starts),
            samples=replace(samples, table=np.ascontiguousarray(samples.table), images=images),
            row=self.row[where],
        )


@record
class CutGroups:
    """The plans of some data-parallel groups, cut one by one: for plans with parts of features."""

    plans: Mapping[int, GroupPlan]

    def has_group(self, dp: int) -> bool:
        return dp in self.plans

    def for_constructor(self, step: int, dp: int, place: ClientPlaceTree) -> GroupPlan:  # noqa: ARG002 - of the protocol
        return self.plans[dp]


def cut_plan(plan: Plan, place: ClientPlaceTree) -> CutPlan | Plan:
    """The plan for all groups, sorted by group; the plan itself, without what only people read, where features have parts of
    it: they cut them from the whole."""
    if plan.parts:
        return replace(plan, stages=(), cost=None)
    num_groups = place.mesh.dp
    bounds, order, row = _bounds(plan.counts), plan.order, plan.row
    offsets, in_order = plan.offsets, plan.in_order
    if plan.axis == "world":
        members = np.array([place.ranks_of(dp) for dp in range(num_groups)], np.int64).ravel()
        if (members[1:] < members[:-1]).any():
            micros = _ranges(bounds[members], plan.counts[members])
            lengths = np.diff(offsets)[micros]
            where = _ranges(offsets[micros], lengths)
            bounds, offsets = _bounds(plan.counts[members]), _bounds(lengths)
            order, row, in_order = order[where], row[where], False
    return CutPlan(
        groups=tuple(range(num_groups)),
        first=bounds,
        offsets=offsets,
        samples=plan.samples if in_order else plan.samples.take(order),
        row=row,
        rows_per_microbatch=plan.rows_per_microbatch,
        row_tokens=plan.row_tokens,
        loss_tokens=plan.loss_tokens,
        broadcast=plan.broadcast,
        axis=plan.axis,
    )


def part_of(whole: CutPlan | Plan, step: int, groups: Sequence[int], place: ClientPlaceTree) -> ConstructorPlans:
    """What the constructors of some groups, given in rising order, need of a plan that `cut_plan` returned."""
    if isinstance(whole, CutPlan):
        return whole.take(groups)
    return CutGroups({dp: whole.for_constructor(step, dp, place) for dp in groups})


def _bounds(counts: Ints) -> Ints:
    """The beginning of each of some ranges that lie one after the other, and the end of the last."""
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    return bounds


def _ranges(begin: Ints, counts: Ints) -> Ints:
    """The numbers of all ranges, one range after the other."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(begin - before, counts)
