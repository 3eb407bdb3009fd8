"""Whole streams as values that can be compared byte for byte, and files for jobs that every engine can read."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol


def stream(loader: ol.Loader, steps: int) -> list[list[Any]]:
    """Every field of every microbatch of every rank, for up to that many steps; ranks are read in turn."""
    clients = [loader.client(rank, timeout_s=60) for rank in range(loader.job.mesh.world_size)]
    found = []
    for _ in range(steps):
        taken = [next(client, None) for client in clients]
        if taken[0] is None:
            assert taken == [None] * len(taken), "ranks must end together"
            break
        found.append([part(step) for step in taken])
    return found


def part(step: ol.Step | None) -> Any:
    assert step is not None, "ranks must end together"
    return step.number, step.loss_tokens, [{name: as_value(field) for name, field in micro.items()} for micro in step]


def as_value(field: Any) -> Any:
    if isinstance(field, np.ndarray):
        return field.dtype.str, field.shape, field.tobytes()
    if isinstance(field, (pa.Array, pa.ChunkedArray)):
        return str(field.type), field.to_pylist()
    return [as_value(entry) for entry in field] if isinstance(field, list) else field


def text_file(path: Path, rows: int, seed: int, row_group: int = 20) -> str:
    """A Parquet file of documents of 1 to 60 tokens, with a loss mask and a title."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(1, 1000, rng.integers(1, 60)).astype(np.int32) for _ in range(rows)]
    table = pa.table(
        {
            "tokens": pa.array(documents, pa.list_(pa.int32())),
            "mask": pa.array([(tokens % 3 > 0).astype(np.int8) for tokens in documents], pa.list_(pa.int8())),
            "title": [f"{path.stem} {i}" for i in range(rows)],
        }
    )
    pq.write_table(table, path, row_group_size=row_group)
    return str(path)


def picture_file(path: Path, count: int) -> str:
    """A tar of JPEG pictures of two sizes, each with a caption."""
    import simplejpeg

    with tarfile.open(path, "w") as archive:
        for number in range(count):
            pixels = np.full((24 + 8 * (number % 2), 32, 3), 10 * number, np.uint8)
            for name, content in (("jpg", simplejpeg.encode_jpeg(pixels)), ("txt", f"picture {number}".encode())):
                member = tarfile.TarInfo(f"{number:04}.{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return str(path)


def text_job(folder: Path, loaders: int = 1, **fields: Any) -> ol.Job:
    """Three Parquet sources mixed by tokens, with masks and a column; `loaders` share the first."""
    options: dict[str, Any] = {"loss_mask": "mask", "repeat": fields.pop("repeat", True)}
    sources = {
        "web": ol.Parquet(text_file(folder / "web.parquet", 200, 1), loaders=loaders, window=2, **options),
        "code": ol.Parquet(text_file(folder / "code.parquet", 90, 2), **options),
        "chat": ol.Parquet(text_file(folder / "chat.parquet", 41, 3), **options),
    }
    mixture = ol.Mixture({0: {"web": 5, "code": 3}, 3: {"web": 2, "code": 1, "chat": 1}}, unit="tokens")
    batch = fields.pop("batch", ol.Batch(tokens=512, sequence_length=64, micro_tokens=128, columns=("title",)))
    return ol.Job(sources=sources, mixture=mixture, batch=batch, **fields)
