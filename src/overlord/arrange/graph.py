"""`DGraph`: one step as a strategy sees it, with the primitives that arrange its samples.

    graph.cost(fn).distribute("dp").balance(greedy, max_tokens=12_288).broadcast_at("tp").plan()

Every primitive returns a new graph and appends a `PlanStage`, which `explain` prints. The samples of a step are fixed before
a strategy runs; the strategy only decides where they go. There are two ways to microbatches:

- With `pack`, samples are first put into rows of fixed length; `deal` or `balance` then assigns whole rows to groups.
- Without `pack`, samples are assigned one by one, and every microbatch is a single row as long as its samples together.

Features live in packages of their own, as functions from a graph to a graph: `hdp.split`, `vision.encode`,
`pipelines.order`. A feature that decides more than the arrangement adds a `GraphPart`, which becomes a part of the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict, Unpack, cast

import numpy as np

from overlord.arrange.balancing import Balancer, bin_sums, bin_times, greedy, in_groups
from overlord.arrange.cost import CostFunction, costs_of
from overlord.arrange.learned_cost import CostsInForce, LearnedCost, slowness
from overlord.arrange.microbatches import (
    Arrangement,
    GroupedSamples,
    Microbatches,
    PackedRows,
    fill_as_needed,
    fill_equal_counts,
    group_tokens,
    microbatch_limit,
    num_microbatches,
    number_in_group,
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
    padded_lengths,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from overlord.arrange.mesh_tree import Bucket, ClientPlaceTree
    from overlord.declare.batch import Batch
    from overlord.stream.membership import DrawnStep

RowPacker = Callable[[Ints, int, int], Ints | Pieces]
"""A function (lengths, num_rows, capacity) that returns the row of each sample (-1: it fits nowhere), or `Pieces` where it
cuts samples."""


class GraphPart(Protocol):
    """A feature's decisions about a step, made before the order of the samples is known."""

    def in_plan(self, arrangement: Arrangement, order: Ints) -> PlanPart:
        """The same decisions for a plan that lists the samples in `order`."""
        ...


class GraphChanges(TypedDict, total=False):
    """The fields of a `DGraph` that a primitive may change; see `DGraph.with_stage`."""

    samples: Samples
    reference_rows: Ints | None
    in_rows: SamplesInRows | None
    cost_function: CostFunction | None
    costs: Floats | None
    num_groups: int
    axis: Bucket
    group_size: int
    rows: PackedRows | None
    arrangement: Arrangement | None
    extra: Ints | None
    parts: tuple[GraphPart, ...]
    broadcast: frozenset[str]
    declared_cost: CostFunction | None


_CHANGEABLE = frozenset(GraphChanges.__annotations__)


@dataclass(frozen=True)
class DGraph:
    """One step as a strategy sees it: facts about its samples, and every decision made about them so far.

    A strategy is a function from a `DGraph` to a `Plan`. It reads `samples` (lengths, sources, image sizes; never the data
    itself), `batch` and `place` (the mesh), calls primitives, each of which returns a new graph, and ends with `plan()`:

        graph.cost(fn).distribute("dp").balance().plan()

    A graph is immutable. A primitive may cut a sample into pieces; none adds or drops a token.
    """

    samples: Samples
    """The facts about the step's samples, in the order in which they were drawn."""
    batch: Batch
    place: ClientPlaceTree
    """The ranks of the trainer's mesh."""
    reference_rows: Ints | None = None
    """The row of each sample in the packing that was found when the step was drawn, which is known to fit. None for steps
    that are counted in samples, or filled by cutting documents."""
    in_rows: SamplesInRows | None = None
    """For steps filled by cutting documents: the samples as `pack()` would cut them, where that is known already."""
    cost_function: CostFunction | None = None
    costs: Floats | None = None
    num_groups: int = 0
    axis: Bucket = "dp"
    group_size: int = 1
    rows: PackedRows | None = None
    arrangement: Arrangement | None = None
    extra: Ints | None = None
    """Tokens of each sample in addition to its text: those of its images, where the text has no place for them."""
    parts: tuple[GraphPart, ...] = ()
    broadcast: frozenset[str] = frozenset()
    stages: tuple[PlanStage, ...] = ()
    in_force: CostsInForce | None = None
    declared_cost: CostFunction | None = None
    """The cost function that the strategy passed; `cost_function` is the same function with learned coefficients."""

    @property
    def lengths(self) -> Ints:
        """The length of each sample in tokens, `extra` included, padded to `document_multiple`."""
        tokens = self.samples.tokens if self.extra is None else self.samples.tokens + self.extra
        return padded_lengths(tokens, self.batch.document_multiple)

    def mix(self, weights: Floats, unit: str = "samples") -> DGraph:
        """Record the mixture weights that the step was drawn with, one per source, for `explain`. Nothing else changes.

        `unit` says whether the weights are shares of "samples" or of "tokens".
        """
        return self.with_stage(PlanStage("mix", "share of {} asked/drawn: {}", (unit, Shares(weights, self.samples, unit))))

    def cost(self, function: CostFunction) -> DGraph:
        """Compute what each sample costs to train on. `balance` and the features go by these costs.

        `function` takes `Samples` and returns one number per sample, in any unit. It may return a dict of such arrays, one
        for each module of the model ({'encoder': ..., 'backbone': ...}), which are added up.
        """
        declared = function
        if isinstance(function, LearnedCost):
            function = function.as_learned(self.in_force)
        costs = costs_of(function, self.samples)
        stage = PlanStage("cost", "total {:.6g}, costliest sample {:.6g}", (costs.sum(), costs.max(initial=0.0)))
        return self.with_stage(stage, cost_function=function, costs=costs, declared_cost=declared)

    def declare_cost(self, cost: CostFunction) -> DGraph:
        """Say what the costs of the samples are a part or a result of, so that a `LearnedCost` learns from the plan. For
        strategies that compute the costs of samples from several. Nothing else changes."""
        return self.with_stage(PlanStage("declare_cost", "{}", (_name(cost),)), declared_cost=cost)

    def pack(self, tokens: int | None = None, method: RowPacker | None = None) -> DGraph:
        """Pack the samples into rows of exactly `tokens` tokens (default: `sequence_length`), padding the rest of each row.

        Without a `method`, padded batches get one sample per row, batches that cut documents are concatenated and cut at row
        ends, and all others keep the rows found when the step was drawn, or are packed by best fit.
        """
        if self.arrangement is not None:
            raise SpecError("pack puts samples into rows before they are assigned: call it before deal or balance")
        tokens = self.batch.sequence_length if tokens is None else tokens
        num_rows = 1 if self.batch.tokens is None else self.batch.tokens // tokens
        if method is None and self.batch.layout == "padded":
            rows = PackedRows(np.arange(len(self.samples)), len(self.samples), tokens)
            return self.with_stage(_pack_stage("one sample a row", rows), rows=rows)
        if method is None and self.reference_rows is not None and tokens == self.batch.sequence_length:
            rows = PackedRows(self.reference_rows, num_rows, tokens)
            return self.with_stage(_pack_stage("as drawn", rows), rows=rows)
        is_known = tokens == self.batch.sequence_length and self.batch.document_multiple == 1 and self.extra is None
        if method is None and is_known and self.in_rows is not None:
            samples, row = self.in_rows
            costs = None if self.cost_function is None else costs_of(self.cost_function, samples)
            rows = PackedRows(row, num_rows, tokens)
            return self.with_stage(_pack_stage("concat and split", rows), samples=samples, costs=costs, rows=rows)
        if method is None:
            method = concat_and_split if self.batch.cut_documents else best_fit
        return self._pack_with(method, tokens)

    def distribute(self, axis: Bucket = "dp", group_size: int = 1) -> DGraph:
        """Choose the ranks that share the step.

        `axis="dp"` gives every data-parallel index samples of its own, "cp" every dp x cp index, "world" every rank. With
        `group_size`, so many neighbours along the axis form a group: `balance` evens out groups first and then the members
        of each, and all members of a group run the same number of microbatches, whatever other groups run. Such groups are
        the shards of a replica in HSDP, or the ranks of a node. The stage records the costs if samples were dealt
        round-robin, as a baseline for `explain`.
        """
        is_plain = axis == "dp" and group_size == 1
        num_groups = self.place.mesh.dp if is_plain else self.place.num_groups(axis, group_size) * group_size
        costs = None
        if self.costs is not None:
            blind = np.arange(len(self.samples)) if self.reference_rows is None else self.reference_rows
            # Along cp the baseline is a static mesh: dealt over dp, every document cut over all cp ranks of its group.
            cut = self.place.mesh.cp if axis == "cp" and group_size == 1 else 1
            costs = np.repeat(bin_sums(blind % (num_groups // cut), self.costs / cut, num_groups // cut), cut)
        text = "{} groups along {}" + (f", {group_size} neighbours together" if group_size > 1 else "")
        stage = PlanStage("distribute", f"{text}; costs as if dealt blindly", (num_groups, axis), costs)
        return self.with_stage(stage, num_groups=num_groups, axis=axis, group_size=group_size)

    def deal(self) -> DGraph:
        """Assign rows (without `pack`: samples) to groups round-robin, blind to cost, the same number to each."""
        self.check_distributed("deal")
        if self.rows is not None:
            row = self.rows.row
            if self.num_groups == 1:
                return self.assign(self._rows_to(np.zeros(len(row), np.int64), row), "deal", "rows in turn")
            return self.assign(self._rows_to(row % self.num_groups, row // self.num_groups), "deal", "rows in turn")
        n, groups = len(self.samples), self.num_groups
        number = np.arange(n)
        group, turn = number % groups, number // groups
        count = num_microbatches(self.batch, self.lengths, groups)
        held = np.maximum(1, (n - group + groups - 1) // groups)  # samples in the group
        micro = Microbatches(group, turn * count // held, np.full(groups, count))
        return self.assign(micro.to_arrangement(), "deal", "samples in turn")

    def balance(self, method: Balancer = greedy, *, max_tokens: int | None = None, equal_counts: bool = True) -> DGraph:
        """Balance cost over groups with `method`, then over the microbatches of each group.

        Packed rows are assigned whole, the same number to each group. Without `pack`, samples are assigned one by one to
        microbatches of at most `max_tokens` (default: one and a half times the batch's microbatch). With `equal_counts` all
        groups run the same number of microbatches, as FSDP needs; otherwise each runs as many as its samples need, or as
        those of its neighbours need where `distribute` made groups of several.
        """
        self.check_distributed("balance")
        if self.costs is None:
            raise SpecError("balance needs to know what samples cost: call cost(fn) before it")
        method = in_groups(method, self.group_size, self.slowness)
        if self.rows is not None:
            return self._balance_rows(method, self.rows, self.costs)
        batch, lengths, groups = self.batch, self.lengths, self.num_groups
        cap = microbatch_limit(batch, lengths, max_tokens)
        group = method(self.costs, groups, lengths, group_tokens(batch, lengths, groups, cap) if equal_counts else None)
        graph = self.with_stage(PlanStage("balance", "{} over {} groups", (_name(method), groups), self._group_costs(group)))
        grouped = GroupedSamples(lengths, self.costs, group, groups)
        if equal_counts:
            found, how = fill_equal_counts(batch, grouped, cap, self.reference_rows)
        else:
            found, how = fill_as_needed(batch, grouped, cap, self.group_size), "even cost"
        counts = (found.counts.min(), found.counts.max())
        return graph.assign(found.to_arrangement(), "pack", "{}, up to {} tokens, {} to {} a group", how, cap, *counts)

    def broadcast_at(self, *axes: str) -> DGraph:
        """Declare that the trainer broadcasts batches along these axes (tp, cp, pp), so that only index 0 of each
        fetches."""
        for axis in axes:
            if axis not in ("tp", "cp", "pp"):
                raise SpecError(f"broadcast_at takes tp, cp or pp, not {axis!r}: dp groups hold different samples")
        return self.with_stage(PlanStage("broadcast_at", "{}", (", ".join(axes),)), broadcast=self.broadcast | {*axes})

    def plan(self) -> Plan:
        """Return the finished `Plan`, with samples sorted by microbatch and row."""
        a = self.arrangement
        if a is None:
            raise SpecError("nothing is assigned yet: call distribute(...) and then deal() or balance(...) before plan()")
        num_micros = sum(a.counts.tolist())
        micro = (np.cumsum(a.counts) - a.counts)[a.group] + a.micro if num_micros > 1 else a.micro
        place = micro * a.rows_per_microbatch + a.row if num_micros > 1 else a.row
        # True for a single group whose rows were filled one after the other; sorting can then be skipped.
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

    def with_stage(self, stage: PlanStage, **changes: Unpack[GraphChanges]) -> DGraph:
        """Return a copy with `stage` appended and some fields changed. For primitives and features, not for strategies."""
        if unknown := changes.keys() - _CHANGEABLE:
            raise TypeError(f"a primitive cannot change {', '.join(sorted(unknown))}: no such field of DGraph may change")
        # The effect of dataclasses.replace at a tenth of its cost: this runs several times a step.
        graph = object.__new__(DGraph)
        graph.__dict__.update(self.__dict__)
        graph.__dict__.update(changes, stages=(*self.stages, stage))
        return graph

    def assign(self, arrangement: Arrangement, name: str, text: str, *values: object) -> DGraph:
        """Return a copy in which every sample has its place, with a stage `name` that says how it was chosen.

        `values` fill the braces of `text`. For primitives and features, not for strategies.
        """
        bucket_costs = micro_costs = None
        if self.costs is not None:
            bucket_costs, micro_costs = self._group_costs(arrangement.group), self.micro_costs(arrangement)
        return self.with_stage(PlanStage(name, text, values, bucket_costs, micro_costs), arrangement=arrangement)

    def micro_costs(self, a: Arrangement) -> Floats:
        """The cost of each microbatch, group by group. Needs `cost(fn)`."""
        micro = (np.cumsum(a.counts) - a.counts)[a.group] + a.micro
        return bin_sums(micro, cast("Floats", self.costs), int(a.counts.sum()))

    def check_distributed(self, primitive: str) -> None:
        """Raise SpecError unless samples can be assigned to groups now. `primitive` is the caller's name, for the
        message."""
        if not self.num_groups:
            raise SpecError(f"{primitive} needs groups to assign samples to: call distribute('dp') before it")
        if self.arrangement is not None:
            raise SpecError("the samples are assigned already: call deal() or balance(...) once")
        if self.rows is None and self.batch.layout == "padded":
            raise SpecError(f"a padded batch has one sample a row: call pack() before {primitive}")

    def _pack_with(self, method: RowPacker, tokens: int) -> DGraph:
        num_rows = len(self.samples) if self.batch.tokens is None else -(-self.batch.tokens // tokens)
        found = method(self.lengths, num_rows, tokens)
        changes: GraphChanges = {}
        if isinstance(found, Pieces):
            samples = cut_samples(self.samples, found)
            costs = None if self.cost_function is None else costs_of(self.cost_function, samples)
            changes = {"samples": samples, "costs": costs, "reference_rows": None, "in_rows": None}
            found = found.row
        if (found < 0).any():
            raise SpecError(
                f"{(found < 0).sum()} of {len(found)} samples find no room in {num_rows} rows of {tokens} tokens "
                f"by {_name(method)}; pack() without a method keeps the rows that are known to fit"
            )
        if self.batch.tokens is None:
            num_rows = int(found.max(initial=0)) + 1
        rows = PackedRows(found, num_rows, tokens)
        changes["rows"] = rows
        return self.with_stage(_pack_stage(_name(method), rows), **changes)

    def _rows_to(self, group: Ints, turn: Ints) -> Arrangement:
        """The arrangement of packed rows, from each sample's group and the number of its row within the group."""
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

    def _balance_rows(self, method: Balancer, rows: PackedRows, costs: Floats) -> DGraph:
        row_costs = bin_sums(rows.row, costs, rows.num_rows)
        most = -(-rows.num_rows // self.num_groups)
        ones = np.ones(rows.num_rows, np.int64)
        group_of_row = method(row_costs, self.num_groups, ones, most)
        if np.bincount(group_of_row, minlength=self.num_groups).max(initial=0) > most:
            group_of_row = greedy(row_costs, self.num_groups, ones, most)
        turn_of_row = number_in_group(group_of_row, row_costs, self.num_groups)
        arrangement = self._rows_to(group_of_row[rows.row], turn_of_row[rows.row])
        return self.assign(arrangement, "balance", "{}: whole rows over {} groups", _name(method), self.num_groups)

    def _group_costs(self, group: Ints) -> Floats | None:
        return None if self.costs is None else bin_times(bin_sums(group, self.costs, self.num_groups), self.slowness)

    @property
    def slowness(self) -> Floats | None:
        """The time that each group takes for the same work, as a `LearnedCost` has learned it; None where all are equally
        fast."""
        return self.slowness_along(self.axis)

    def slowness_along(self, axis: Bucket) -> Floats | None:
        """As `slowness`, for the groups along another axis."""
        is_learned = isinstance(self.declared_cost, LearnedCost)
        return slowness(self.in_force, self.place, axis) if is_learned else None


def deal_rows(graph: DGraph, broadcast: Collection[str] = ()) -> Plan:
    """The default strategy: rows of `sequence_length`, dealt round-robin to data-parallel groups; see `strategies.plain`."""
    if graph.batch.tokens is not None or graph.batch.layout == "padded":
        graph = graph.pack()
    graph = graph.distribute("dp").deal()
    return (graph.broadcast_at(*broadcast) if broadcast else graph).plan()


def arrange_step(
    step: DrawnStep,
    batch: Batch,
    place: ClientPlaceTree,
    strategy: Callable[[DGraph], Plan],
    *,
    unit: str,
    size_columns: Sequence[str] = (),
    in_force: CostsInForce | None = None,
) -> Plan:
    """Arrange the samples of a step: a function of the step, the mesh, the strategy and the learned costs in force.
    `size_columns`: those that steps without a sample of the sources that have them get too."""
    samples, in_rows = step.samples, step.in_rows
    if size_columns:
        samples = samples.with_sizes(size_columns)
        in_rows = None if in_rows is None else in_rows._replace(samples=in_rows.samples.with_sizes(size_columns))
    batch = batch if batch.warm_up is None else batch.at(step.number)
    graph = DGraph(samples, batch, place, step.rows, in_rows, in_force=in_force)
    try:
        plan = strategy(graph.mix(step.weights, unit))
        plan.check_groups(place)
    except Exception as error:
        error.add_note(f"while the strategy arranged step {step.number}")
        raise
    return plan


def _pack_stage(how: str, rows: PackedRows) -> PlanStage:
    return PlanStage("pack", "{}: {} samples in {} rows of {} tokens", (how, len(rows.row), rows.num_rows, rows.row_tokens))


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__).replace("_", " ")


@dataclass(frozen=True, slots=True)
class Shares:
    """Requested and drawn share of each source, in the mixture's unit. Formatted only when `explain` prints it."""

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
