"""The step as a strategy sees it: facts about its samples, and the primitives that arrange them.

    graph.cost(fn).distribute("dp").balance(greedy, max_tokens=12_288).broadcast_at("tp").plan()

Each primitive returns a new graph and leaves a `Stage` behind, so that `explain` can tell what was done.
Which samples a step has is settled before; a strategy decides only where they go. Two ways lead to
microbatches:

- `pack` puts the samples into rows of fixed length first; `deal` or `balance` then hands out whole rows;
- without `pack`, samples are handed out one by one, and microbatches are one row as long as what they hold.

Features are packages of their own with functions that take a graph and return one: `hdp.split`, `images.encode`,
`pipelines.order`. What a feature decides beyond the arrangement is a `GraphPart`, which becomes a part of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from overlord.arrange.balancing import Balancer, greedy, paced, summed, times
from overlord.arrange.cost import CostFunction, costs_of
from overlord.arrange.learned_cost import CostsInForce, LearnedCost, slowness
from overlord.arrange.microbatches import (
    Arrangement,
    Microbatches,
    PackedRows,
    as_many_as_needed,
    as_many_in_each,
    checked_max_tokens,
    group_tokens,
    num_microbatches,
    numbered,
    variable,
)
from overlord.arrange.plan import Plan, PlanPart, PlanStage
from overlord.errors import SpecError
from overlord.stream.facts import Floats, Ints, Samples
from overlord.stream.packing import (
    Pieces,
    SamplesInRows,
    best_fit,
    concat_and_split,
    cut_samples,
    padded,
)

if TYPE_CHECKING:
    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
    from overlord.declare.batch import Batch

RowPacker = Callable[[Ints, int, int], Ints | Pieces]
"""(lengths, num_rows, capacity) to the row of each sample (-1: nowhere), or to pieces of samples with their
rows."""


class GraphPart(Protocol):
    """What a feature has decided about a step, before the order of its samples is known."""

    def in_plan(self, arrangement: Arrangement, order: Ints) -> PlanPart:
        """The same for a plan that runs the samples in `order`."""
        ...


@dataclass(frozen=True)
class DGraph:
    """A step's samples with what has been decided about them so far. Immutable.

    `reference_rows[i]` is the row in which sample i was placed when the step's samples were chosen, a packing
    that is known to fit; None for steps counted in samples or filled by cutting documents. For the latter `in_rows` may
    have the samples as `pack` would cut them.
    """

    samples: Samples
    batch: Batch
    place: ClientPlaceTree
    reference_rows: Ints | None = None
    in_rows: SamplesInRows | None = None
    cost_function: CostFunction | None = None
    costs: Floats | None = None
    num_groups: int = 0
    axis: Bucket = "dp"
    group_size: int = 1
    rows: PackedRows | None = None
    arrangement: Arrangement | None = None
    extra: Ints | None = None
    """Tokens that each sample takes up beside those of its text."""
    parts: tuple[GraphPart, ...] = ()
    broadcast: frozenset[str] = frozenset()
    stages: tuple[PlanStage, ...] = ()
    in_force: CostsInForce | None = None
    declared_cost: CostFunction | None = None
    """The cost function as the strategy gave it; `cost_function` is that with what was learned since."""

    @property
    def lengths(self) -> Ints:
        """The tokens each sample takes up: its own, with those of its images, padded to document_multiple."""
        tokens = self.samples.tokens if self.extra is None else self.samples.tokens + self.extra
        return padded(tokens, self.batch.document_multiple)

    def mix(self, weights: Floats, unit: str = "samples") -> DGraph:
        """Note how the step was drawn: by these weights, one per source, which share out samples or tokens."""
        return self.change(PlanStage("mix", "share of {} asked/drawn: {}", (unit, Shares(weights, self.samples, unit))))

    def cost(self, function: CostFunction) -> DGraph:
        """Say what each sample costs. Costs by module ({'encoder': ..., 'backbone': ...}) are added up."""
        declared = function
        if isinstance(function, LearnedCost):
            function = function.as_learned(self.in_force)
        costs = costs_of(function, self.samples)
        stage = PlanStage("cost", "total {:.6g}, costliest sample {:.6g}", (costs.sum(), costs.max(initial=0.0)))
        return self.change(stage, cost_function=function, costs=costs, declared_cost=declared)

    def pack(self, tokens: int | None = None, method: RowPacker | None = None) -> DGraph:
        """Put the samples into rows of exactly `tokens` (sequence_length unless given), the rest of a row is
        padding.

        Without `method`: the rows found when the step was drawn; one sample a row for padded batches;
        concatenated and cut at row ends where the batch cuts documents; best fit otherwise.
        """
        if self.arrangement is not None:
            raise SpecError("pack puts samples into rows before they are handed out: call it before deal or balance")
        tokens = self.batch.sequence_length if tokens is None else tokens
        if method is None and self.batch.layout == "padded":
            return self._in_rows("one sample a row", np.arange(len(self.samples)), len(self.samples), tokens)
        if method is None and self.reference_rows is not None and tokens == self.batch.sequence_length:
            return self._in_rows("as drawn", self.reference_rows, self.batch.num_rows or 1, tokens)
        is_known = tokens == self.batch.sequence_length and self.batch.document_multiple == 1 and self.extra is None
        if method is None and is_known and self.in_rows is not None:
            samples, row = self.in_rows
            costs = None if self.cost_function is None else costs_of(self.cost_function, samples)
            rows = PackedRows(row, self.batch.num_rows or 1, tokens)
            return self.change(_packed("concat and split", rows), samples=samples, costs=costs, rows=rows)
        if method is None:
            method = concat_and_split if self.batch.cut_documents else best_fit
        return self._packed_by(method, tokens)

    def distribute(self, axis: Bucket = "dp", group_size: int = 1) -> DGraph:
        """Choose who shares the step: groups along dp, dp x cp ("cp") or all ranks ("world")."""
        num_groups = self.place.num_groups(axis, group_size)
        costs = None
        if self.costs is not None:
            blind = np.arange(len(self.samples)) if self.reference_rows is None else self.reference_rows
            # Along cp, as a static mesh would: dealt over dp, every document cut over all cp ranks of its group.
            cut = self.place.mesh.cp if axis == "cp" and group_size == 1 else 1
            costs = np.repeat(summed(blind % (num_groups // cut), self.costs / cut, num_groups // cut), cut)
        stage = PlanStage("distribute", "{} groups along {}; costs as if dealt blindly", (num_groups, axis), costs)
        return self.change(stage, num_groups=num_groups, axis=axis, group_size=group_size)

    def deal(self) -> DGraph:
        """Hand out rows (or samples) in turn, blind to cost, the same number to each group."""
        self.check_distributed("deal")
        if self.rows is not None:
            row = self.rows.row
            if self.num_groups == 1:
                return self.hand_out(self._rows_to(np.zeros(len(row), np.int64), row), "deal", "rows in turn")
            return self.hand_out(self._rows_to(row % self.num_groups, row // self.num_groups), "deal", "rows in turn")
        n, groups = len(self.samples), self.num_groups
        number = np.arange(n)
        group, turn = number % groups, number // groups
        count = num_microbatches(self.batch, self.lengths, groups)
        held = np.maximum(1, (n - group + groups - 1) // groups)  # samples in the group
        micro = Microbatches(group, turn * count // held, np.full(groups, count))
        return self.hand_out(variable(micro), "deal", "samples in turn")

    def balance(self, method: Balancer = greedy, *, max_tokens: int | None = None, equal_counts: bool = True) -> DGraph:
        """Even out cost over groups by `method`, and then over each group's microbatches.

        Packed rows are handed out whole, the same number to each group. Samples go one by one into
        microbatches of up to `max_tokens` (one and a half times the batch's microbatch unless given); with
        `equal_counts` each group runs the same number of them, otherwise as many as its samples need.
        """
        self.check_distributed("balance")
        if self.costs is None:
            raise SpecError("balance needs to know what samples cost: call cost(fn) before it")
        method = paced(method, self._slowness)
        if self.rows is not None:
            return self._balanced_rows(method, self.rows, self.costs)
        batch, lengths, groups = self.batch, self.lengths, self.num_groups
        cap = checked_max_tokens(batch, lengths, max_tokens)
        group = method(self.costs, groups, lengths, group_tokens(batch, lengths, groups, cap) if equal_counts else None)
        graph = self.change(PlanStage("balance", "{} over {} groups", (_name(method), groups), self._group_costs(group)))
        filling = batch, lengths, self.costs, group, groups, cap
        found, how = as_many_in_each(*filling, self.reference_rows) if equal_counts else as_many_as_needed(*filling)
        counts = (found.counts.min(), found.counts.max())
        return graph.hand_out(variable(found), "pack", "{}, up to {} tokens, {} to {} a group", how, cap, *counts)

    def broadcast_at(self, *axes: str) -> DGraph:
        """Say that the trainer broadcasts along these axes, so that only the first rank on them fetches."""
        for axis in axes:
            if axis not in ("tp", "cp", "pp"):
                raise SpecError(f"broadcast_at takes tp, cp or pp, not {axis!r}: dp groups hold different samples")
        return self.change(PlanStage("broadcast_at", "{}", (", ".join(axes),)), broadcast=self.broadcast | {*axes})

    def plan(self) -> Plan:
        """The arrangement as a plan: samples sorted by microbatch and row."""
        a = self.arrangement
        if a is None:
            raise SpecError("nothing is handed out yet: call distribute(...) and then deal() or balance(...) before plan()")
        num_micros = sum(a.counts.tolist())
        micro = (np.cumsum(a.counts) - a.counts)[a.group] + a.micro if num_micros > 1 else a.micro
        place = micro * a.rows_per_microbatch + a.row if num_micros > 1 else a.row
        # As rows that were filled in turn are, in a single group.
        in_order = np.count_nonzero(place[1:] < place[:-1]) == 0
        order = np.arange(len(place)) if in_order else place.argsort(kind="stable")
        offsets = np.array([0, len(place)])
        if num_micros > 1:
            offsets = np.zeros(num_micros + 1, np.int64)
            np.cumsum(np.bincount(micro, minlength=num_micros), out=offsets[1:])
        return Plan(
            samples=self.samples,
            counts=a.counts,
            offsets=offsets,
            order=order,
            row=a.row if in_order else a.row[order],
            in_order=in_order,
            rows_per_microbatch=a.rows_per_microbatch,
            row_tokens=a.row_tokens,
            broadcast=self.broadcast,
            stages=self.stages,
            axis=self.axis,
            group_size=self.group_size,
            cost=self.declared_cost,
            parts=tuple(part.in_plan(a, order) for part in self.parts),
        )

    def change(self, stage: PlanStage, **changes: object) -> DGraph:
        """The graph with other values in some of its fields, and a stage that says what was done."""
        if unknown := changes.keys() - _FIELDS:
            raise TypeError(f"a DGraph has no field {', '.join(sorted(unknown))}")
        # What dataclasses.replace does, at a tenth of its cost: this runs several times a step.
        graph = object.__new__(DGraph)
        graph.__dict__.update(self.__dict__)
        graph.__dict__.update(changes, stages=(*self.stages, stage))
        return graph

    def hand_out(self, arrangement: Arrangement, name: str, text: str, *values: object) -> DGraph:
        """The graph with its samples handed out, and a stage `name` that says how; `values` fill the braces of `text`."""
        bucket_costs = micro_costs = None
        if self.costs is not None:
            bucket_costs, micro_costs = self._group_costs(arrangement.group), self.micro_costs(arrangement)
        return self.change(PlanStage(name, text, values, bucket_costs, micro_costs), arrangement=arrangement)

    def micro_costs(self, a: Arrangement) -> Floats:
        """What each microbatch costs, group by group. Samples must have costs."""
        micro = (np.cumsum(a.counts) - a.counts)[a.group] + a.micro
        return summed(micro, cast("Floats", self.costs), int(a.counts.sum()))

    def check_distributed(self, primitive: str) -> None:
        """Raise SpecError unless samples can be handed out now; `primitive` is who wants to."""
        if not self.num_groups:
            raise SpecError(f"{primitive} needs to know over whom: call distribute('dp') before it")
        if self.arrangement is not None:
            raise SpecError("the samples are handed out already: call deal() or balance(...) once")
        if self.rows is None and self.batch.layout == "padded":
            raise SpecError(f"a padded batch has one sample a row: call pack() before {primitive}")

    def _packed_by(self, method: RowPacker, tokens: int) -> DGraph:
        num_rows = len(self.samples) if self.batch.tokens is None else -(-self.batch.tokens // tokens)
        found = method(self.lengths, num_rows, tokens)
        graph = self
        if isinstance(found, Pieces):
            samples = cut_samples(self.samples, found)
            costs = None if self.cost_function is None else costs_of(self.cost_function, samples)
            graph = replace(self, samples=samples, costs=costs, reference_rows=None, in_rows=None)
            found = found.row
        if (found < 0).any():
            raise SpecError(
                f"{(found < 0).sum()} of {len(found)} samples find no room in {num_rows} rows of {tokens} tokens "
                f"by {_name(method)}; pack() without a method keeps the rows that are known to fit"
            )
        if self.batch.tokens is None:
            num_rows = int(found.max(initial=0)) + 1
        return graph._in_rows(_name(method), found, num_rows, tokens)

    def _in_rows(self, how: str, row: Ints, num_rows: int, tokens: int) -> DGraph:
        rows = PackedRows(row, num_rows, tokens)
        return self.change(_packed(how, rows), rows=rows)

    def _rows_to(self, group: Ints, turn: Ints) -> Arrangement:
        """An arrangement of rows, given the group of each sample and its row's number within the group."""
        rows = cast("PackedRows", self.rows)
        if self.batch.layout == "padded" and self.batch.samples is not None and self.batch.micro_tokens is None:
            per_micro = -(-max(self.batch.samples, rows.num_rows) // self.num_groups)  # one microbatch
        else:
            per_micro = max(1, (self.batch.micro_tokens or self.batch.sequence_length) // rows.row_tokens)
        count = max(1, -(-rows.num_rows // (self.num_groups * per_micro)))
        counts = np.array([count] * self.num_groups)
        # Rows of a padded batch hold up to sequence_length tokens, but need not be so wide.
        as_wide_as_longest = self.batch.layout == "padded" and self.batch.pad_to == "longest"
        row_tokens = 0 if as_wide_as_longest and rows.row_tokens == self.batch.sequence_length else rows.row_tokens
        if count == 1:
            return Arrangement(group, np.zeros(len(turn), np.int64), turn, counts, per_micro, row_tokens)
        return Arrangement(group, turn // per_micro, turn % per_micro, counts, per_micro, row_tokens)

    def _balanced_rows(self, method: Balancer, rows: PackedRows, costs: Floats) -> DGraph:
        row_costs = summed(rows.row, costs, rows.num_rows)
        most = -(-rows.num_rows // self.num_groups)
        ones = np.ones(rows.num_rows, np.int64)
        group_of_row = method(row_costs, self.num_groups, ones, most)
        if np.bincount(group_of_row, minlength=self.num_groups).max(initial=0) > most:
            group_of_row = greedy(row_costs, self.num_groups, ones, most)
        turn_of_row = numbered(group_of_row, row_costs, self.num_groups)
        arrangement = self._rows_to(group_of_row[rows.row], turn_of_row[rows.row])
        return self.hand_out(arrangement, "balance", "{}: whole rows over {} groups", _name(method), self.num_groups)

    def _group_costs(self, group: Ints) -> Floats | None:
        return None if self.costs is None else times(summed(group, self.costs, self.num_groups), self._slowness)

    @property
    def _slowness(self) -> Floats | None:
        is_learned = isinstance(self.declared_cost, LearnedCost) and self.axis == "dp"
        return slowness(self.in_force, self.num_groups) if is_learned else None


def _packed(how: str, rows: PackedRows) -> PlanStage:
    return PlanStage("pack", "{}: {} samples in {} rows of {} tokens", (how, len(rows.row), rows.num_rows, rows.row_tokens))


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__).replace("_", " ")


_FIELDS = frozenset(field.name for field in fields(DGraph))


@dataclass(frozen=True, slots=True)
class Shares:
    """Asked and drawn share of each source, both in the mixture's unit; text only when read."""

    asked: Floats
    samples: Samples
    unit: str

    def __str__(self) -> str:
        sizes = self.samples.tokens if self.unit == "tokens" else None
        drawn = np.bincount(self.samples.source, sizes, len(self.asked))
        drawn = drawn / max(1, drawn.sum())
        largest = np.argsort(-self.asked, kind="stable").tolist()
        names = self.samples.source_names
        shown = [f"{names[i]} {self.asked[i]:.3f}/{drawn[i]:.3f}" for i in largest[:12]]
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        return ", ".join(shown) + more
