"""Small datasets that were written by the libraries whose formats they are in, and how they were made.

Some of these libraries are too heavy to be installed for tests (Megatron-core and Mosaic's streaming bring or expect
gigabytes), so what they wrote is kept here. Each `write_*` function runs where its library is installed:

    python -m tests.sources.recording megatron mds huggingface litdata iceberg delta lance

`megatron`: megatron-core 0.16.1 (`pip install --no-deps`). `mds`: mosaicml-streaming 0.13.0.
`huggingface`: datasets 5.2.0. `prepared`: Overlord itself.
`iceberg`: pyiceberg 0.12.0. `delta`: deltalake 1.6.6. `lance`: pylance 14.0.2.
`litdata`: litdata 0.2.76 and zstd (`pip install --no-deps litdata lightning-utilities zstd`);
`litdata/old` was written by `write_litdata_old` with 0.2.50.

The rows are functions of their number, so tests know them without reading what was written.
"""

from __future__ import annotations

import shutil
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

RECORDED = Path(__file__).parent / "recorded"
MEGATRON_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")


def megatron_sequences(document: int, dtype: str) -> list[list[Any]]:
    """The sequences of a document: none to three of them, some empty."""
    sequences = []
    for s in range(document % 4):
        length = (document * 5 + s * 3) % 7
        sequences.append(np.arange(document + s, document + s + length).astype(dtype).tolist())
    return sequences


NUM_DOCUMENTS = 11


def write_megatron(folder: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # pyright: ignore[reportMissingImports]

    for dtype in MEGATRON_TYPES:
        for multimodal in (False, True) if dtype == "int32" else (False,):
            prefix = folder / f"{dtype}{'_modes' if multimodal else ''}"
            builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype), multimodal=multimodal)
            for document in range(NUM_DOCUMENTS):
                for number, sequence in enumerate(megatron_sequences(document, dtype)):
                    values = torch.from_numpy(np.array(sequence, dtype))
                    builder.add_item(values, mode=number) if multimodal else builder.add_item(values)
                builder.end_document()
            builder.finalize(f"{prefix}.idx")


MDS_ENCODINGS = {
    "text": "str", "raw": "bytes", "number": "int", "small": "uint8", "half": "float16", "double": "float64",
    "digits": "str_int", "float": "str_float", "exact": "str_decimal", "tokens": "ndarray:uint16",
    "grid": "ndarray:int32:2,3", "any": "ndarray", "data": "json", "picture": "pil", "png": "png", "object": "pkl",
    "photos": "jpeg_array", "pictures": "list[png]",
}  # fmt: skip
NUM_SAMPLES = 23
MDS_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"hashes": ["sha1", "xxh64"]},
    **{codec: {"compression": codec, "hashes": ["sha256"]} for codec in ("zstd", "gz", "bz2", "br", "snappy")},
}


def mds_sample(row: int) -> dict[str, Any]:
    """What is written; images are single-coloured."""
    from PIL import Image

    picture = Image.new("RGB", (2 + row % 3, 2), (row, 2 * row, 3 * row))
    return {
        "text": f"text {row} é" * (row % 4),
        "raw": bytes(range(row)),
        "number": row - 5,
        "small": np.uint8(row),
        "half": np.float16(row / 2),
        "double": np.float64(row / 3),
        "digits": row * 10**12,
        "float": row / 7,
        "exact": Decimal(row) / 8,
        "tokens": np.arange(1 + row * 20 % 270, dtype=np.uint16),
        "grid": np.arange(6, dtype=np.int32).reshape(2, 3) + row,
        "any": np.full((1 + row % 3, 2), row, np.float32),
        "data": {"row": row, "list": [1, None]},
        "picture": picture,
        "png": picture,
        "object": {"row": row},
        "photos": [bytes([row]), b"second"],
        "pictures": [picture] * (row % 3),
    }


def write_mds(folder: Path) -> None:
    from streaming import MDSWriter  # pyright: ignore[reportMissingImports]

    for name, options in MDS_KINDS.items():
        with MDSWriter(out=str(folder / name), columns=MDS_ENCODINGS, size_limit=12_000, **options) as writer:
            for row in range(NUM_SAMPLES):
                writer.write(mds_sample(row))


def huggingface_rows(split: str) -> dict[str, list[Any]]:
    rows = range(25 if split == "train" else 5)
    return {"id": list(rows), "text": [f"{split} {row}" for row in rows], "tokens": [list(range(row % 4)) for row in rows]}


def write_huggingface(folder: Path) -> None:
    import datasets  # pyright: ignore[reportMissingImports]

    splits = {name: datasets.Dataset.from_dict(huggingface_rows(name)) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(folder / "splits", num_shards={"train": 3, "test": 1})
    splits["train"].save_to_disk(folder / "one")


LITDATA_KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{level: {"compression": "zstd", "compression_level": level} for level in ("chunk", "sample")},
    "batch": {"compression": "zstd", "compression_batch_size": 4},
    "tokens": {},
    "tokens_zstd": {"compression": "zstd", "compression_level": "chunk"},
    "table": {},
    "table_zstd": {"compression": "zstd"},
}


def litdata_sample(row: int) -> dict[str, Any]:
    """What is written to all kinds but `tokens` and `table`."""
    from PIL import Image

    return {
        "text": f"text {row} é" * (row % 4),
        "raw": bytes(range(row)),
        "number": row - 5,
        "ratio": row / 8,
        "flag": row % 3 == 0,
        "tokens": np.arange(row % 5, dtype=np.uint16),
        "grid": np.arange(6 * (row % 3), dtype=np.int32).reshape(row % 3, 3, 2),
        "mask": np.arange(row % 4) % 2 == 0,
        "meta": {"lang": "en" if row % 2 else "fr", "parts": [{"id": row, "name": None if row % 2 else "x"}] * (row % 3)},
        "picture": Image.new("RGB", (2 + row % 3, 2), (row, 2 * row, 3 * row)),
    }


def litdata_tokens(row: int) -> list[int]:
    return list(range(row, row + row % 7))


def litdata_table_row(row: int) -> dict[str, Any]:
    """What is written to `table`. Whether a sample has "extra" is another matter for each chunk."""
    return {
        "text": f"text {row} é" * (row % 4),
        "number": row,
        "turns": [{"role": "user", "content": f"{row}"}] * (row % 3),
        **({"extra": row / 4} if row > 15 else {}),
    }


def write_litdata(folder: Path) -> None:
    import torch
    from litdata.streaming.item_loader import TokensLoader  # pyright: ignore[reportMissingImports]
    from litdata.streaming.writer import BinaryWriter  # pyright: ignore[reportMissingImports]

    def tensors(sample: dict[str, Any]) -> dict[str, Any]:
        """Some arrays as tensors: both have layouts of their own."""
        more = {"half": torch.arange(4).reshape(2, 2).half(), "one": torch.tensor(sample["number"])}
        return {**sample, "grid": torch.from_numpy(sample["grid"]), "mask": torch.from_numpy(sample["mask"]), **more}

    for name, options in LITDATA_KINDS.items():
        loader = TokensLoader() if name.startswith("tokens") else None
        size = {"chunk_size": 10} if loader is None else {"chunk_bytes": 120}
        writer = BinaryWriter(str(folder / name), item_loader=loader, **size, **options)
        for row in range(NUM_SAMPLES):
            if loader is not None:
                writer[row] = torch.tensor(litdata_tokens(row), dtype=torch.int32)
            else:
                writer[row] = litdata_table_row(row) if name.startswith("table") else tensors(litdata_sample(row))
        writer.done()
        writer.merge()


def litdata_old_sample(row: int) -> dict[str, Any]:
    return {"text": f"text {row}", "grid": litdata_sample(row)["grid"], "one": np.array(row - 5)}


def write_litdata_old(folder: Path) -> None:
    """With a release that wrote the headers of tensors in the order of the machine."""
    import torch
    from litdata.streaming.writer import BinaryWriter  # pyright: ignore[reportMissingImports]

    writer = BinaryWriter(str(folder.parent / "litdata" / "old"), chunk_size=12)
    for row in range(NUM_SAMPLES):
        sample = litdata_old_sample(row)
        arrays = {name: torch.from_numpy(sample[name]) for name in ("grid", "one")}
        writer[row] = {**sample, **arrays, "array": sample["grid"]}
    writer.done()
    writer.merge()


def prepared_rows(row: int) -> dict[str, Any]:
    """What is prepared: the bytes of the texts."""
    return {"id": row, "text": f"text {row}" * (row % 3)}


def write_prepared(folder: Path) -> None:
    """By Overlord itself, so that a release reads what earlier ones prepared."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    import overlord as ol

    path = "/tmp/overlord-recorded-texts.parquet"
    pq.write_table(pa.Table.from_pylist([prepared_rows(row) for row in range(NUM_SAMPLES)]), path, row_group_size=5)
    source = ol.Parquet(path, transform=ol.Tokenize(encoding=ol.ByteTokenizer()), on_bad_row="skip")
    job = ol.Job(sources={"texts": source}, batch=ol.Batch(tokens=64, sequence_length=32))
    ol.prepare(job, folder.parent / "prepared-new", num_processes=1)
    for made in (folder.parent / "prepared-new" / "texts").iterdir():
        made.replace(folder / made.name)


LAKE_ROWS = 60
ICEBERG_PLACE = "/tmp/overlord-recorded-iceberg"
"""Where the table was written: its metadata says so, and nothing else may."""


def lake_table(first: int = 0, stop: int = LAKE_ROWS) -> Any:
    import pyarrow as pa

    rows = range(first, stop)
    tokens = pa.array([list(range(1, 2 + i % 9)) for i in rows], pa.list_(pa.int32()))
    return pa.table({"id": pa.array(rows, pa.int64()), "tokens": tokens, "text": [f"row {i}" for i in rows]})


def write_iceberg(folder: Path) -> None:
    """Two appends and a delete, which writes a file anew; metadata, manifests and data in one folder."""
    from pyiceberg.catalog.sql import SqlCatalog  # pyright: ignore[reportMissingImports]

    catalog = SqlCatalog("local", uri="sqlite:///:memory:", warehouse=f"file://{ICEBERG_PLACE}")
    catalog.create_namespace("db")
    table = catalog.create_table("db.web", lake_table().schema, location=f"file://{ICEBERG_PLACE}")
    table.append(lake_table(0, 40))
    table.append(lake_table(40))
    table.delete("id < 5")
    newest = table.metadata_location.rpartition("/")[2]
    for path in sorted(Path(ICEBERG_PLACE).rglob("*")):
        if path.is_file() and (not path.name.endswith(".metadata.json") or path.name == newest):
            shutil.copy(path, folder / path.name)
    shutil.rmtree(ICEBERG_PLACE)


def write_delta(folder: Path) -> None:
    """Two appends and a delete."""
    import deltalake  # pyright: ignore[reportMissingImports]

    deltalake.write_deltalake(str(folder), lake_table(0, 40))
    deltalake.write_deltalake(str(folder), lake_table(40), mode="append")
    deltalake.DeltaTable(str(folder)).delete("id < 5")


def write_lance(folder: Path) -> None:
    """Two appends and a delete."""
    import lance  # pyright: ignore[reportMissingImports]

    lance.write_dataset(lake_table(0, 40), str(folder), mode="overwrite")
    lance.write_dataset(lake_table(40), str(folder), mode="append").delete("id < 5")


def main(names: list[str]) -> None:
    for name in names:
        folder = RECORDED / name
        folder.mkdir(parents=True, exist_ok=True)
        globals()[f"write_{name}"](folder)


if __name__ == "__main__":
    main(sys.argv[1:])
