"""Checks for your own tests: of a source's contract, of a strategy that must lose no token, and of resuming a job exactly.

Each check raises an AssertionError that says what differs and where.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from overlord.arrange.graph import DGraph
from overlord.arrange.mesh_tree import ClientPlaceTree
from overlord.service.run import Loader, start
from overlord.stream.facts import Samples
from overlord.stream.packing import best_fit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from overlord.arrange.plan import Plan
    from overlord.arrange.strategies import Strategy
    from overlord.declare.batch import Batch
    from overlord.declare.job import Job
    from overlord.declare.mesh import Mesh
    from overlord.declare.source import Source
    from overlord.messages import Step

__all__ = ["assert_resumes_exactly", "assert_same_stream", "assert_source_keeps_its_promises", "assert_strategy_conserves"]


def assert_source_keeps_its_promises(source: Source, most_units: int = 8) -> None:
    """Check that units are listed the same twice and pickle, and that reading one twice, also after pickling, returns equal
    tables."""
    first, second = list(source.units()), list(source.units())
    assert first, "units() lists nothing"
    named = [[(unit.path, unit.index, unit.num_rows, unit.num_bytes) for unit in units] for units in (first, second)]
    assert named[0] == named[1], "units() returned two different lists; list in a stable order (sorted, for files)"
    assert len(set(named[0])) == len(named[0]), "two units have the same path, index and sizes; number them with index="
    again = pickle.loads(pickle.dumps(source))
    for unit in first[:most_units]:
        table = source.read(unit)
        assert isinstance(table, pa.Table), f"read({unit}) returned {type(table).__name__}, not a pyarrow.Table"
        assert table.equals(source.read(unit)), f"reading {unit} twice returned two different tables"
        assert table.equals(again.read(pickle.loads(pickle.dumps(unit)))), f"{unit} reads differently in another process"
        promised = unit.num_rows
        assert promised is None or table.num_rows == promised, f"{unit} promised {promised} rows and has {table.num_rows}"


def assert_strategy_conserves(strategy: Strategy, lengths: Sequence[int], batch: Batch, mesh: Mesh) -> Plan:
    """Check that every token of the step is in the plan exactly once, and that two calls return equal plans. Returns one."""
    samples = Samples.of_lengths(np.asarray(lengths, np.int64))
    rows = None
    if batch.num_rows is not None and not batch.cut_documents:
        rows = best_fit(samples.tokens, batch.num_rows, batch.sequence_length)
        assert (rows >= 0).all(), f"these lengths do not fit {batch.num_rows} rows of {batch.sequence_length}: pass fewer"
    graph = DGraph(samples, batch, ClientPlaceTree(mesh), rows)
    plan, again = strategy(graph), strategy(graph)
    assert plan.order.tolist() == again.order.tolist(), "the strategy arranged the same step in two ways"
    assert plan.offsets.tolist() == again.offsets.tolist(), "the strategy arranged the same step in two ways"
    plan.check_groups(graph.place)
    assert np.sort(plan.order).tolist() == list(range(len(plan.samples))), "a sample is missing, or in two microbatches"
    covered: dict[int, list[tuple[int, int]]] = {}
    arranged = plan.samples
    for row, begin, end in zip(arranged.row.tolist(), arranged.start.tolist(), arranged.stop.tolist(), strict=True):
        covered.setdefault(row, []).append((begin, end))
    for row, length in enumerate(lengths):
        at = 0
        for begin, end in sorted(covered.get(row, [])):
            assert begin == at, f"sample {row}: tokens from {min(at, begin)} to {max(at, begin)} are lost or doubled"
            at = end
        assert at == length, f"sample {row}: {length - at} tokens at its end are lost"
    return plan


def assert_same_stream(left: Job, right: Job, steps: int) -> None:
    """Check that each of the first steps holds the same samples in both jobs, whatever their arrangement."""
    _assert_equal_steps(_members(left, steps), _members(right, steps), "the two jobs")


def assert_resumes_exactly(job: Job, steps: int, stop_before: int, mesh: Mesh | None = None) -> None:
    """Check that a run that is stopped before a step and resumed, on another mesh if one is given, holds the same samples as
    a run that is never stopped, and delivers all of them to its ranks."""
    whole = _members(job, steps)
    first = _members(job, min(stop_before, steps))
    with start(job) as loader:
        state = loader.state_before(stop_before)
    moved = job if mesh is None else replace(job, mesh=mesh)
    rest = _members(moved, steps - stop_before, resume=state)
    _assert_equal_steps(whole, [*first, *rest], f"a run stopped before step {stop_before} and one never stopped")


def _members(job: Job, steps: int, resume: Mapping[str, Any] | None = None) -> list[list[tuple[int, ...]]]:
    """The samples of each step as sorted (source, chunk, row, start, stop), of batches that ranks received."""
    found = []
    with start(job, resume=resume) as loader:
        for number, _ in zip(range(loader.start_step, loader.start_step + steps), _read(loader), strict=False):
            planned = loader.plan(number)
            assert planned is not None
            samples = planned.step.samples
            columns = (samples.source, samples.chunk, samples.row, samples.start, samples.stop)
            found.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    return found


def _read(loader: Loader) -> Iterator[list[Step]]:
    clients = [loader.client(rank, timeout_s=120) for rank in range(loader.tree.world_size)]
    while True:
        steps = [step for client in clients if (step := next(client, None)) is not None]
        if not steps:
            return
        assert len(steps) == len(clients), "some ranks ended before others"
        yield steps


def _assert_equal_steps(left: list, right: list, what: str) -> None:
    assert len(left) == len(right), f"{what} have {len(left)} and {len(right)} steps"
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b:
            only = sorted(set(a) ^ set(b))[:3]
            raise AssertionError(
                f"step {number} differs between {what}: {len(a)} and {len(b)} samples, for instance "
                f"(source, chunk, row, start, stop) {only}"
            )
