"""What a length curriculum costs the planner's process where a source has a loss mask: the loss of every part of a document
that is cut has to be counted.

python -m bench.document_limits
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

import overlord as ol

STEPS, DP, ROW_TOKENS, RANK_TOKENS = 8, 16, 8192, 65_536


@dataclass(frozen=True)
class Masked(ol.Source):
    """512 documents of about 1,000 tokens a unit, of which 7 in 10 have a loss."""

    number: int = 0

    def units(self) -> list[ol.Unit]:
        return [ol.Unit("masked", index, 512, 4_000_000) for index in range(8)]

    def read(self, unit: ol.Unit) -> pa.Table:
        rng = np.random.default_rng([self.number, unit.index])
        lengths = np.clip(np.exp(rng.normal(np.log(1000) - 0.5, 1, 512)), 1, ROW_TOKENS).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens, mask = np.ones(offsets[-1], np.int32), (rng.random(offsets[-1]) < 0.7).astype(np.int8)
        lists = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values)) for values in (tokens, mask)]
        return pa.table(lists, names=["tokens", "mask"])

    def identity(self) -> str:
        return f"masked {self.number}"


def measured(limits: dict[int, int] | None) -> float:
    """CPU milliseconds of the process with the planner, for a step."""
    batch = ol.Batch(tokens=DP * RANK_TOKENS, sequence_length=ROW_TOKENS, micro_tokens=RANK_TOKENS, document_limits=limits)
    sources = {f"source-{number}": Masked(number, loss_mask="mask") for number in range(4)}
    with ol.start(ol.Job(sources=sources, batch=batch, mesh=ol.Mesh(dp=DP)), engine=ol.Processes(2)) as loader:
        loader.plan(0)
        began = time.process_time()
        loader.plan(STEPS)
        return (time.process_time() - began) / STEPS * 1e3


def main() -> None:
    for limits in (None, {0: 256}):
        print(f"document_limits={limits}: {measured(limits):.1f} CPU ms a step in the planner's process")


if __name__ == "__main__":
    main()
