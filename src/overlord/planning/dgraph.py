"""The step as a strategy sees it: facts about its samples, and the primitives that arrange them.

    graph.cost(fn).distribute("dp").balance(greedy, max_tokens=12_288).broadcast_at("tp").plan()

Each primitive returns a new graph and leaves a `Stage` behind, so that `explain` can tell what was done.
Which samples a step has is settled before; a strategy decides only where they go. Two ways lead to
microbatches:

- `pack` puts the samples into rows of fixed length first; `deal` or `balance` then hands out whole rows;
- without `pack`, samples are handed out one by one, and microbatches are one row as long as what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import numpy as np

from overlord.errors import SpecError
from overlord.planning.balancing import Balancer, greedy, summed
from overlord.planning.facts import Floats, Ints, Samples
from overlord.planning.packing import Microbatches, Pieces, best_fit, concat_and_split, even_cost, padded
from overlord.planning.place_tree import Bucket, ClientPlaceTree
from overlord.planning.plan import Plan, Stage
from overlord.spec import Batch

CostFunction = Callable[[Samples], Floats | Mapping[str, Floats]]
"""From facts to the cost of each sample, or of each sample in each module of the model."""

RowPacker = Callable[[Ints, int, int], Ints | Pieces]
"""(lengths, num_rows, capacity) to the row of each sample (-1: nowhere), or to pieces of samples with their
rows."""

# A group may hold nearly what its microbatches can: whole documents never fill them to the last token.
_FILL = 0.97


class Rows(NamedTuple):
    """Rows of fixed length: the row of each sample."""

    row: Ints
    num_rows: int
    row_tokens: int


class Arrangement(NamedTuple):
    """Where each sample goes: its group, its microbatch in the group, its row in the microbatch."""

    group: Ints
    micro: Ints
    row: Ints
    counts: Ints
    rows_per_microbatch: int
    row_tokens: int


@dataclass(frozen=True, slots=True)
class Shares:
    """Asked and drawn share of each source; text only when read."""

    asked: Floats
    samples: Samples

    def __str__(self) -> str:
        drawn = np.bincount(self.samples.source, minlength=len(self.asked)) / max(1, len(self.samples))
        largest = np.argsort(-self.asked, kind="stable").tolist()
        names = self.samples.source_names
        shown = [f"{names[i]} {self.asked[i]:.3f}/{drawn[i]:.3f}" for i in largest[:12]]
        more = f", and {len(largest) - 12} more" if len(largest) > 12 else ""
        return ", ".join(shown) + more


@dataclass(frozen=True)
class DGraph:
    """A step's samples with what has been decided about them so far. Immutable.

    `reference_rows[i]` is the row in which sample i was placed when the step's samples were chosen, a packing
    that is known to fit; None for steps counted in samples or filled by cutting documents.
    """

    samples: Samples
    batch: Batch
    place: ClientPlaceTree
    reference_rows: Ints | None = None
    cost_function: CostFunction | None = None
    costs: Floats | None = None
    num_groups: int = 0
    axis: Bucket = "dp"
    group_size: int = 1
    rows: Rows | None = None
    arrangement: Arrangement | None = None
    broadcast: frozenset[str] = frozenset()
    stages: tuple[Stage, ...] = ()

    @property
    def lengths(self) -> Ints:
        """The tokens each sample takes up: its own, padded to document_multiple."""
        return padded(self.samples.tokens, self.batch.document_multiple)

    def mix(self, weights: Floats) -> DGraph:
        """Note how the step was drawn: by these weights, one per source."""
        return self._with(Stage("mix", "samples asked/drawn: {}", (Shares(weights, self.samples),)))

    def cost(self, function: CostFunction) -> DGraph:
        """Say what each sample costs. Costs by module ({'encoder': ..., 'backbone': ...}) are added up."""
        costs = _costs(function, self.samples)
        stage = Stage("cost", "total {:.6g}, costliest sample {:.6g}", (costs.sum(), costs.max(initial=0.0)))
        return self._with(stage, cost_function=function, costs=costs)

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
        if method is None:
            method = concat_and_split if self.batch.cut_documents else best_fit
        return self._packed_by(method, tokens)

    def distribute(self, axis: Bucket = "dp", group_size: int = 1) -> DGraph:
        """Choose who shares the step: groups along dp, dp x cp ("cp") or all ranks ("world")."""
        num_groups = self.place.num_groups(axis, group_size)
        costs = None
        if self.costs is not None:
            blind = np.arange(len(self.samples)) if self.reference_rows is None else self.reference_rows
            costs = summed(blind % num_groups, self.costs, num_groups)
        stage = Stage("distribute", "{} groups along {}; costs as if dealt blindly", (num_groups, axis), costs)
        return self._with(stage, num_groups=num_groups, axis=axis, group_size=group_size)

    def deal(self) -> DGraph:
        """Hand out rows (or samples) in turn, blind to cost, the same number to each group."""
        self._check_distributed("deal")
        if self.rows is not None:
            row = self.rows.row
            return self._arranged(self._rows_to(row % self.num_groups, row // self.num_groups), "deal", "rows in turn")
        n, groups = len(self.samples), self.num_groups
        number = np.arange(n)
        group, turn = number % groups, number // groups
        count = self._num_microbatches()
        held = np.maximum(1, (n - group + groups - 1) // groups)  # samples in the group
        micro = Microbatches(group, turn * count // held, np.full(groups, count))
        return self._arranged(_variable(micro), "deal", "samples in turn")

    def balance(self, method: Balancer = greedy, *, max_tokens: int | None = None, equal_counts: bool = True) -> DGraph:
        """Even out cost over groups by `method`, and then over each group's microbatches.

        Packed rows are handed out whole, the same number to each group. Samples go one by one into
        microbatches of up to `max_tokens` (one and a half times the batch's microbatch unless given); with
        `equal_counts` each group runs the same number of them, otherwise as many as its samples need.
        """
        self._check_distributed("balance")
        if self.costs is None:
            raise SpecError("balance needs to know what samples cost: call cost(fn) before it")
        if self.rows is not None:
            return self._balanced_rows(method, self.rows, self.costs)
        cap = self._max_tokens(max_tokens)
        group = method(self.costs, self.num_groups, self.lengths, self._group_tokens(cap) if equal_counts else None)
        graph = self._with(Stage("balance", "{} over {} groups", (_name(method), self.num_groups), self._group_costs(group)))
        found, how = graph._microbatches(group, cap, equal_counts)
        counts = (found.counts.min(), found.counts.max())
        return graph._arranged(_variable(found), "pack", "{}, up to {} tokens, {} to {} a group", how, cap, *counts)

    def broadcast_at(self, *axes: str) -> DGraph:
        """Say that the trainer broadcasts along these axes, so that only the first rank on them fetches."""
        for axis in axes:
            if axis not in ("tp", "cp", "pp"):
                raise SpecError(f"broadcast_at takes tp, cp or pp, not {axis!r}: dp groups hold different samples")
        return self._with(Stage("broadcast_at", "{}", (", ".join(axes),)), broadcast=self.broadcast | {*axes})

    def plan(self) -> Plan:
        """The arrangement as a plan: samples sorted by microbatch and row."""
        a = self.arrangement
        if a is None:
            raise SpecError("nothing is handed out yet: call distribute(...) and then deal() or balance(...) before plan()")
        first = np.cumsum(a.counts) - a.counts
        micro = first[a.group] + a.micro
        order = np.argsort(micro * a.rows_per_microbatch + a.row, kind="stable")
        sizes = np.bincount(micro, minlength=int(a.counts.sum()))
        return Plan(
            samples=self.samples,
            counts=a.counts,
            offsets=np.concatenate([[0], np.cumsum(sizes)]),
            order=order,
            row=a.row[order],
            rows_per_microbatch=a.rows_per_microbatch,
            row_tokens=a.row_tokens,
            broadcast=self.broadcast,
            stages=self.stages,
            axis=self.axis,
            group_size=self.group_size,
        )

    def _with(self, stage: Stage, **changes: object) -> DGraph:
        # What dataclasses.replace does, at a tenth of its cost: this runs several times a step.
        graph = object.__new__(DGraph)
        graph.__dict__.update(self.__dict__)
        graph.__dict__.update(changes, stages=(*self.stages, stage))
        return graph

    def _check_distributed(self, primitive: str) -> None:
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
            samples = _cut(self.samples, found)
            costs = None if self.cost_function is None else _costs(self.cost_function, samples)
            graph, found = replace(self, samples=samples, costs=costs, reference_rows=None), found.row
        if (found < 0).any():
            raise SpecError(
                f"{(found < 0).sum()} of {len(found)} samples find no room in {num_rows} rows of {tokens} tokens "
                f"by {_name(method)}; pack() without a method keeps the rows that are known to fit"
            )
        if self.batch.tokens is None:
            num_rows = int(found.max(initial=0)) + 1
        return graph._in_rows(_name(method), found, num_rows, tokens)

    def _in_rows(self, how: str, row: Ints, num_rows: int, tokens: int) -> DGraph:
        stage = Stage("pack", "{}: {} samples in {} rows of {} tokens", (how, len(row), num_rows, tokens))
        return self._with(stage, rows=Rows(row, num_rows, tokens))

    def _rows_to(self, group: Ints, turn: Ints) -> Arrangement:
        """An arrangement of rows, given the group of each sample and its row's number within the group."""
        rows = cast(Rows, self.rows)
        if self.batch.layout == "padded" and self.batch.samples is not None and self.batch.micro_tokens is None:
            per_micro = -(-max(self.batch.samples, rows.num_rows) // self.num_groups)  # one microbatch
        else:
            per_micro = max(1, (self.batch.micro_tokens or self.batch.sequence_length) // rows.row_tokens)
        count = max(1, -(-rows.num_rows // (self.num_groups * per_micro)))
        counts = np.full(self.num_groups, count)
        return Arrangement(group, turn // per_micro, turn % per_micro, counts, per_micro, rows.row_tokens)

    def _balanced_rows(self, method: Balancer, rows: Rows, costs: Floats) -> DGraph:
        row_costs = summed(rows.row, costs, rows.num_rows)
        most = -(-rows.num_rows // self.num_groups)
        ones = np.ones(rows.num_rows, np.int64)
        group_of_row = method(row_costs, self.num_groups, ones, most)
        if np.bincount(group_of_row, minlength=self.num_groups).max(initial=0) > most:
            group_of_row = greedy(row_costs, self.num_groups, ones, most)
        turn_of_row = _numbered(group_of_row, row_costs, self.num_groups)
        arrangement = self._rows_to(group_of_row[rows.row], turn_of_row[rows.row])
        return self._arranged(arrangement, "balance", "{}: whole rows over {} groups", _name(method), self.num_groups)

    def _num_microbatches(self) -> int:
        """Microbatches of each group, when all have the same number and samples are handed out one by one."""
        micro_tokens = self.batch.micro_tokens or self.batch.sequence_length
        tokens = self.batch.tokens if self.batch.tokens is not None else int(self.lengths.sum())
        wanted = -(-tokens // (self.num_groups * micro_tokens))
        most = -(-len(self.samples) // self.num_groups)  # more would leave some empty
        return max(1, min(wanted, most))

    def _max_tokens(self, max_tokens: int | None) -> int:
        micro_tokens = self.batch.micro_tokens or self.batch.sequence_length
        longest = int(self.lengths.max(initial=0))
        if max_tokens is None:
            return max(micro_tokens * 3 // 2, longest)
        if max_tokens < max(micro_tokens, longest):
            raise SpecError(
                f"max_tokens must hold the mean microbatch ({micro_tokens} tokens) and the longest sample "
                f"({longest}), got {max_tokens}; raise it, or lower micro_tokens or sequence_length of the batch"
            )
        return max_tokens

    def _group_tokens(self, max_tokens: int) -> int:
        return int(self._num_microbatches() * max_tokens * _FILL)

    def _group_costs(self, group: Ints) -> Floats | None:
        return None if self.costs is None else summed(group, self.costs, self.num_groups)

    def _microbatches(self, group: Ints, max_tokens: int, equal_counts: bool) -> tuple[Microbatches, str]:
        costs, lengths = cast(Floats, self.costs), self.lengths
        if not equal_counts:
            micro_tokens = self.batch.micro_tokens or self.batch.sequence_length
            held = np.bincount(group, lengths, self.num_groups)
            counts = np.maximum(1, np.rint(held / micro_tokens).astype(np.int64))
            counts = np.minimum(counts, np.maximum(1, np.bincount(group, minlength=self.num_groups)))
            grown = even_cost(costs, lengths, group, counts, max_tokens, grow=True)
            return cast(Microbatches, grown), "even cost"  # no sample is over max_tokens, so growing ends well
        count = self._num_microbatches()
        while True:
            counts = np.full(self.num_groups, count)
            found = even_cost(costs, lengths, group, counts, max_tokens)
            if found is not None:
                return found, "even cost"
            bins = best_fit(lengths, count * self.num_groups, max_tokens)
            if (bins >= 0).all():
                return self._bins_to_groups(bins, count), "best fit"
            if self.reference_rows is not None:
                return self._bins_to_groups(self.reference_rows // self.batch.rows_per_microbatch, count), "as drawn"
            count += 1  # no packing into fewer is known

    def _bins_to_groups(self, bins: Ints, count: int) -> Microbatches:
        """Microbatches that are filled already, `count` to each group by cost."""
        bins = np.unique(bins, return_inverse=True)[1]
        num_bins = count * self.num_groups
        costs = summed(bins, cast(Floats, self.costs), num_bins)
        group = greedy(costs, self.num_groups, np.ones(num_bins, np.int64), count)
        micro = _numbered(group, costs, self.num_groups)
        return Microbatches(group[bins], micro[bins], np.full(self.num_groups, count))

    def _arranged(self, arrangement: Arrangement, name: str, text: str, *values: object) -> DGraph:
        bucket_costs = micro_costs = None
        if self.costs is not None:
            bucket_costs = self._group_costs(arrangement.group)
            first = np.cumsum(arrangement.counts) - arrangement.counts
            micro = first[arrangement.group] + arrangement.micro
            micro_costs = summed(micro, self.costs, int(arrangement.counts.sum()))
        return self._with(Stage(name, text, values, bucket_costs, micro_costs), arrangement=arrangement)


def _costs(function: CostFunction, samples: Samples) -> Floats:
    found = function(samples)
    costs = sum(found.values(), np.zeros(len(samples))) if isinstance(found, Mapping) else np.asarray(found, np.float64)
    if costs.shape != (len(samples),):
        raise SpecError(f"a cost function gives one number per sample: {len(samples)}, got shape {costs.shape}")
    if len(costs) and not (np.isfinite(costs).all() and costs.min() >= 0):
        raise SpecError("a cost function gives finite numbers >= 0; it gave others")
    return costs


def _numbered(group: Ints, costs: Floats, num_groups: int) -> Ints:
    """Each item's number within its group, costliest first."""
    order = np.lexsort((-costs, group))
    held = np.bincount(group, minlength=num_groups)
    number = np.empty(len(group), np.int64)
    number[order] = np.arange(len(group)) - np.repeat(np.cumsum(held) - held, held)
    return number


def _variable(found: Microbatches) -> Arrangement:
    return Arrangement(found.group, found.micro, np.zeros(len(found.group), np.int64), found.counts, 1, 0)


def _cut(samples: Samples, pieces: Pieces) -> Samples:
    """Samples for the pieces. Every token of a cut document but its last predicts the next one, so loss
    tokens are counted from the front and the last piece has the rest."""
    taken = samples.take(pieces.sample)
    loss = np.minimum(pieces.stop, taken.loss_tokens) - np.minimum(pieces.start, taken.loss_tokens)
    return replace(
        taken,
        start=taken.start + pieces.start,
        stop=taken.start + pieces.stop,
        tokens=pieces.stop - pieces.start,
        loss_tokens=loss,
    )


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__).replace("_", " ")
