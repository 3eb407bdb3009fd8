"""Small sources made in memory, the way a user brings their own, and ways to look at what came out of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

import overlord as ol
from overlord.roles.planner import Planned


@dataclass(frozen=True)
class Numbered(ol.Source):
    """`rows` documents in units of `unit_rows`. Every token says which document of which source it belongs to, and
    where in it: document * 1000 + place, so that a batch tells exactly what it was made of."""

    rows: int = 40
    unit_rows: int = 5
    longest: int = 12
    first: int = 0
    with_mask: bool = False
    window: int | None = field(default=1, kw_only=True)

    def units(self) -> list[ol.Unit]:
        return [
            ol.Unit("numbered", index, min(self.unit_rows, self.rows - start), 4000)
            for index, start in enumerate(range(0, self.rows, self.unit_rows))
        ]

    def read(self, unit: ol.Unit) -> pa.Table:
        start = unit.index * self.unit_rows
        documents = range(start, min(start + self.unit_rows, self.rows))
        tokens = [np.arange(length_of(self.first + d, self.longest)) + (self.first + d) * 1000 for d in documents]
        columns: dict[str, pa.Array] = {"tokens": pa.array([t.astype(np.int32) for t in tokens], pa.list_(pa.int32()))}
        if self.with_mask:
            columns["mask"] = pa.array([(t % 3 > 0).astype(np.int8) for t in tokens], pa.list_(pa.int8()))
        columns["document"] = pa.array([self.first + d for d in documents], pa.int64())
        return pa.table(columns)

    def identity(self) -> str:
        return f"Numbered({self.rows}, {self.unit_rows}, {self.longest}, {self.first})"


def length_of(document: int, longest: int) -> int:
    return 1 + (document * 7919 + 13) % longest


def documents_of(source: Numbered) -> dict[int, int]:
    """document to its length."""
    return {source.first + d: length_of(source.first + d, source.longest) for d in range(source.rows)}


def planned(loader: ol.Loader, step: int) -> Planned:
    """The plan of a step that the run has."""
    found = loader.plan(step)
    assert found is not None
    return found


def tokens_of(step: ol.Step) -> np.ndarray:
    """All real tokens of a rank's part of a packed step (documents from 1 on, so that padding is told apart)."""
    found = [np.asarray(micro["tokens"]).ravel() for micro in step]
    tokens = np.concatenate(found) if found else np.zeros(0, np.int32)
    return tokens[tokens > 0]


def read_all(
    job: ol.Job, steps: int, resume: Mapping[str, Any] | str | None = None, **start: Any
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Read up to `steps` steps on every rank, in turn. Gives the sorted tokens of each step, over one rank of each slice,
    and the state after."""
    with ol.start(job, resume=resume, **start) as loader:
        ranks = _distinct_ranks(loader.tree)
        clients = [loader.client(rank, timeout_s=30) for rank in ranks]
        found = []
        for _ in range(steps):
            parts = [tokens_of(step) for step in (next(client, None) for client in clients) if step is not None]
            if not parts:
                break
            assert len(parts) == len(clients), "ranks must end together"
            found.append(np.sort(np.concatenate(parts)))
        return found, loader.state_dict()


def _distinct_ranks(tree: ol.ClientPlaceTree) -> list[int]:
    mesh = tree.mesh
    return [tree.rank_of(dp=dp, cp=cp) for dp in range(mesh.dp) for cp in range(mesh.cp)]


def same(left: Iterable[np.ndarray], right: Iterable[np.ndarray]) -> bool:
    return [a.tolist() for a in left] == [b.tolist() for b in right]


def job_of(sources: Mapping[str, ol.Source], batch: ol.Batch | None = None, **fields: Any) -> ol.Job:
    return ol.Job(sources=sources, batch=batch or ol.Batch(tokens=64, sequence_length=16), **fields)
