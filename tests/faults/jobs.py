"""The job that is disturbed: several sources on storage that can fail, masks, a schedule, and a transform in processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import overlord as ol

WORLD_SIZE = 2
_ROWS = {"web": 600, "code": 300, "chat": 170}
_COST = ol.TransformerCost(per_token=1.0, per_length_squared=0.1, constant=0.0)
# Storage that is away for seconds is waited for; one request is not.
_RETRY = ol.policies.Retry(deadline_s=90, first_wait_s=0.05, max_wait_s=0.4, request_timeout_s=2)
_WORKER_TIMEOUT_S = 4.0


def write_files(folder: Path) -> None:
    """Parquet files of documents of 1 to 60 tokens, with a loss mask."""
    for seed, (name, rows) in enumerate(_ROWS.items()):
        rng = np.random.default_rng(seed)
        documents = [rng.integers(1, 1000, rng.integers(1, 60)).astype(np.int32) for _ in range(rows)]
        masks = [(tokens % 3 > 0).astype(np.int8) for tokens in documents]
        table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32())), "mask": pa.array(masks, pa.list_(pa.int8()))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=30)


def moved(table: pa.Table) -> pa.Table:
    """What happens in worker processes: every token becomes another one."""
    tokens: Any = table.column("tokens").combine_chunks()
    other = pa.ListArray.from_arrays(tokens.offsets, pc.add(pc.cast(tokens.values, pa.int32()), 1000))
    return table.set_column(table.column_names.index("tokens"), "tokens", other)


def disturbed_job(store: str) -> ol.Job:
    """`store` is the URL of the folder that the files are in."""

    def source(name: str, **options: Any) -> ol.Parquet:
        url = f"{store}/{name}.parquet"
        # Small buffers, so that storage is asked all the time.
        return ol.Parquet(url, loss_mask="mask", retry=_RETRY, buffer_bytes=200_000, **options)

    worked = ol.InProcesses(moved, batch_rows=20, timeout_s=_WORKER_TIMEOUT_S)
    return ol.Job(
        sources={
            "web": source("web", loaders=2, window=2, transform=worked),
            "code": source("code", transform=worked),
            "chat": source("chat"),
        },
        mixture=ol.Mixture({0: {"web": 5, "code": 3}, 40: {"web": 2, "code": 1, "chat": 1}}, unit="tokens"),
        batch=ol.Batch(tokens=512, sequence_length=64, micro_tokens=128),
        mesh=ol.Mesh(dp=WORLD_SIZE),
        strategy=ol.strategies.long_short(_COST),
        num_workers=2,
        num_processes=1,
    )
