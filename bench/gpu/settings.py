"""Which steps are run: length tables, contexts and meshes, and the arrangements that are compared on the same documents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.gpu.work import Fit, Ranks, of_hdp_plan, of_plan
from bench.length_tables import BYTED, GITHUB, LengthTable
from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.arrange.strategies import hdp, long_short, plain
from overlord.declare.batch import Batch
from overlord.declare.mesh import Mesh
from overlord.stream.facts import Samples
from overlord.stream.packing import best_fit, in_drawn_order


@dataclass(frozen=True, slots=True)
class Setting:
    """`rows` sequences of `context` tokens for each of `dp` groups; a sequence is shared by `cp` ranks."""

    table: LengthTable
    context: int
    dp: int
    cp: int = 1
    rows: int = 1

    def __str__(self) -> str:
        cp = f" x cp {self.cp}" if self.cp > 1 else ""
        return f"{self.table.name}, {self.context // 1024}k, dp {self.dp}{cp}, {self.rows} a rank"

    sampled: int = 0
    """How many ranks are run, where not all: the costliest half by prediction, and others evenly over the rest."""
    repeats: int = 1
    """How often a rank is run; the quickest counts, because short runs wait for memory now and then."""

    @property
    def tokens(self) -> int:
        return self.dp * self.rows * self.context

    @property
    def arrangements(self) -> tuple[str, ...]:
        return ("blind", "equal", "unequal", "hdp") if self.cp == 1 else ("blind", "hdp")

    def graph(self, seed: int) -> DGraph:
        """The step as the planner draws it: documents in drawn order, and the rows that are known to hold them."""
        batch = Batch(tokens=self.tokens, sequence_length=self.context)
        lengths = self.table.documents(self.tokens, self.context, seed)
        rows = in_drawn_order(best_fit(lengths, self.dp * self.rows, self.context))
        kept = rows >= 0
        return DGraph(Samples.of_lengths(lengths[kept]), batch, ClientPlaceTree(Mesh(dp=self.dp, cp=self.cp)), rows[kept])


SETTINGS = [
    setting
    for table in (BYTED, GITHUB)
    for setting in (
        Setting(table, 8 << 10, 8, rows=4, repeats=3),
        Setting(table, 8 << 10, 64, rows=4, sampled=24, repeats=3),
        Setting(table, 32 << 10, 8, rows=4, repeats=2),
        Setting(table, 32 << 10, 64, rows=2, sampled=24, repeats=2),
        Setting(table, 128 << 10, 8, rows=2),
        Setting(table, 128 << 10, 64, sampled=12),
        Setting(table, 512 << 10, 8, cp=8, sampled=16),
        Setting(table, 2 << 20, 32, cp=32, sampled=12),
    )
]
QUICK = [Setting(GITHUB, 32 << 10, 8, rows=2), Setting(BYTED, 128 << 10, 2, cp=4)]

Arrange = Callable[[DGraph, Fit], Ranks]


def blind(graph: DGraph, fit: Fit) -> Ranks:
    """Rows dealt in turn, every document cut over the cp ranks of its group: what loaders do."""
    return of_plan(plain()(graph), graph.place.mesh.cp)


def equal(graph: DGraph, fit: Fit) -> Ranks:
    """Balanced, the same number of microbatches on every rank."""
    return of_plan(long_short(fit.document_cost)(graph), graph.place.mesh.cp)


def unequal(graph: DGraph, fit: Fit) -> Ranks:
    """Balanced, as many microbatches as a rank's documents need."""
    return of_plan(long_short(fit.document_cost, equal_counts=False)(graph), graph.place.mesh.cp)


def pooled(graph: DGraph, fit: Fit) -> Ranks:
    """HDP: dp x cp ranks as one pool, each with room for what a rank holds when rows are dealt."""
    capacity = graph.batch.sequence_length // graph.place.mesh.cp
    return of_hdp_plan(hdp(fit.document_cost, capacity=capacity)(graph))


ARRANGEMENTS: dict[str, Arrange] = {"blind": blind, "equal": equal, "unequal": unequal, "hdp": pooled}
