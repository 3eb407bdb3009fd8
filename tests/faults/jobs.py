"""The job that is disturbed: several sources on storage that can fail, masks, a schedule, and a transform in processes."""

from __future__ import annotations

import hashlib
import json
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
RETRY = ol.policies.Retry(deadline_s=90, first_wait_s=0.05, max_wait_s=0.4, request_timeout_s=2)
_WORKER_TIMEOUT_S = 4.0


def write_files(folder: Path) -> None:
    """Documents of 1 to 60 tokens with a loss mask: Parquet files, shards of MDS for "chat", and litData's for "code"."""
    for seed, (name, rows) in enumerate(_ROWS.items()):
        rng = np.random.default_rng(seed)
        documents = [rng.integers(1, 1000, rng.integers(1, 60)).astype(np.int32) for _ in range(rows)]
        masks = [(tokens % 3 > 0).astype(np.int8) for tokens in documents]
        if name != "web":
            (_write_mds if name == "chat" else _write_litdata)(folder, documents, masks)
            continue
        table = pa.table({"tokens": pa.array(documents, pa.list_(pa.int32())), "mask": pa.array(masks, pa.list_(pa.int8()))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=30)


def _write_mds(folder: Path, documents: list[Any], masks: list[Any]) -> None:
    """Three shards of `tokens` and `mask`, as MDSWriter lays them out: sizes, then values, each with its shape."""
    names = {"column_names": ["mask", "tokens"], "column_encodings": ["ndarray:int8", "ndarray:int32"]}
    shards = []
    for number, first in enumerate(range(0, len(documents), 60)):
        pairs = zip(masks[first : first + 60], documents[first : first + 60], strict=True)
        rows = [[bytes([4, len(value)]) + value.tobytes() for value in pair] for pair in pairs]
        samples = [np.array([len(value) for value in row], "<u4").tobytes() + b"".join(row) for row in rows]
        offsets = np.cumsum([8 + 4 * len(rows), *map(len, samples)]).astype("<u4")
        data = np.uint32(len(rows)).tobytes() + offsets.tobytes() + b"".join(samples)
        (folder / f"chat.{number}.mds").write_bytes(data)
        raw = {"basename": f"chat.{number}.mds", "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}
        fixed = {"format": "mds", "version": 2, "column_sizes": [None, None], "samples": len(rows), "zip_data": None}
        shards.append({**names, **fixed, "raw_data": raw})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _write_litdata(folder: Path, documents: list[Any], masks: list[Any]) -> None:
    """Ten chunks of `tokens` and `mask`, as litData lays them out: sizes, then values."""
    chunks = []
    for number, first in enumerate(range(0, len(documents), 30)):
        rows = zip(documents[first : first + 30], masks[first : first + 30], strict=True)
        items = [np.array([a.nbytes, b.nbytes], "<u4").tobytes() + a.tobytes() + b.tobytes() for a, b in rows]
        offsets = np.cumsum([8 + 4 * len(items), *map(len, items)]).astype("<u4")
        data = np.uint32(len(items)).tobytes() + offsets.tobytes() + b"".join(items)
        (folder / f"code.{number}.bin").write_bytes(data)
        chunks.append({"filename": f"code.{number}.bin", "chunk_bytes": len(data), "chunk_size": len(items)})
    leaf = {"type": None, "context": None, "children_spec": []}
    spec = [1, {"type": "builtins.dict", "context": '["tokens", "mask"]', "children_spec": [leaf, leaf]}]
    config = {"data_format": ["no_header_numpy:2", "no_header_numpy:0"], "data_spec": json.dumps(spec)}
    (folder / "code.json").write_text(json.dumps({"chunks": chunks, "config": config}))


def moved(table: pa.Table) -> pa.Table:
    """What happens in worker processes: every token becomes another one."""
    tokens: Any = table.column("tokens").combine_chunks()
    other = pa.ListArray.from_arrays(tokens.offsets, pc.add(pc.cast(tokens.values, pa.int32()), 1000))
    return table.set_column(table.column_names.index("tokens"), "tokens", other)


def disturbed_job(store: str) -> ol.Job:
    """`store` is the URL of the folder that the files are in."""

    # Small buffers, so that storage is asked all the time.
    options: dict[str, Any] = {"loss_mask": "mask", "retry": RETRY, "buffer_bytes": 200_000}
    worked = ol.InProcesses(moved, batch_rows=20, timeout_s=_WORKER_TIMEOUT_S)
    return ol.Job(
        sources={
            "web": ol.Parquet(f"{store}/web.parquet", loaders=2, window=2, transform=worked, **options),
            "code": ol.formats.LitData(f"{store}/code.json", transform=worked, **options),
            "chat": ol.formats.Mds(f"{store}/index.json", **options),
        },
        mixture=ol.Mixture({0: {"web": 5, "code": 3}, 40: {"web": 2, "code": 1, "chat": 1}}, unit="tokens"),
        batch=ol.Batch(tokens=512, sequence_length=64, micro_tokens=128),
        mesh=ol.Mesh(dp=WORLD_SIZE),
        strategy=ol.strategies.long_short(_COST),
        num_workers=2,
        num_processes=1,
    )
