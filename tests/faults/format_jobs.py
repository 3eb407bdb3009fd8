"""Jobs with a source of every format: files on storage that can fail, datasets that are Python objects, and tables with
versions, whose libraries open files themselves."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import overlord as ol
from overlord import formats
from tests.faults.jobs import RETRY, WORLD_SIZE
from tests.sources.recording import RECORDED, lake_table

_LINES = 200


def write_formats(folder: Path) -> None:
    """What the libraries of the formats wrote, and lines, CSV and a folder that Energon prepared."""
    for name in ("megatron", "mds/plain", "litdata/plain", "huggingface/splits", "prepared"):
        shutil.copytree(RECORDED / name, folder / name)
    lines = [f"line {number} of many" for number in range(_LINES)]
    (folder / "lines.txt").write_text("\n".join(lines))
    (folder / "table.csv").write_text("\n".join(["id,text", *(f"{n},{line}" for n, line in enumerate(lines))]))
    (folder / "energon" / ".nv-meta").mkdir(parents=True)
    for shard in range(3):
        with tarfile.open(folder / "energon" / f"shard_{shard}.tar", "w") as archive:
            for line in lines[shard * 20 : shard * 20 + 20]:
                info = tarfile.TarInfo(f"{line.split()[1]}.txt")
                info.size = len(line)
                archive.addfile(info, io.BytesIO(line.encode()))
    parts = "exclude: []\nsplit_parts:\n  train:\n  - shard_{0..2}.tar\n"
    (folder / "energon" / ".nv-meta" / "split.yaml").write_text(parts)


class Numbers:
    """A map-style dataset."""

    def __len__(self) -> int:
        return 150

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"tokens": list(range(row, row + 1 + row % 30))}


class Counted:
    """An iterable that says where it is, and can start there."""

    def __init__(self) -> None:
        self._row = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self._row < len(Numbers()):
            self._row += 1
            yield Numbers()[self._row - 1]

    def state_dict(self) -> dict[str, int]:
        return {"row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._row = state["row"]


def formats_job(store: str, folder: str) -> ol.Job:
    """`store` is the URL of the folder that the files are in; indexes are kept in `folder`."""
    # Small units and buffers, so that storage is asked all the time.
    options: dict[str, Any] = {"retry": RETRY, "buffer_bytes": 200_000}
    encoded = ol.Tokenize(encoding=ol.ByteTokenizer())
    parts = formats.energon(
        f"{store}/energon",
        columns={"txt": pa.string()},
        transform=ol.Tokenize("txt", encoding=ol.ByteTokenizer()),
        **options,
    )
    return _job(
        {
            "megatron": formats.MegatronBin(f"{store}/megatron/int32", unit_bytes=40, **options),
            "mds": formats.Mds(f"{store}/mds/plain", ["tokens"], **options),
            "litdata": formats.LitData(f"{store}/litdata/plain", ["tokens"], **options),
            "saved": formats.HuggingFaceFiles(f"{store}/huggingface/splits", ["tokens"], split="train", **options),
            "prepared": ol.Prepared(f"{store}/prepared", **options),
            "lines": formats.TextLines(f"{store}/lines.txt", unit_bytes=1000, transform=encoded, **options),
            "csv": formats.Csv(f"{store}/table.csv", ["text"], unit_bytes=1000, transform=encoded, **options),
            "energon": parts.sources["energon"],
            "rows": formats.MapDataset(Numbers, unit_rows=20),
            "counted": formats.Iterated(Counted, folder=f"{folder}/states", unit_rows=20),
            "kept": formats.Iterated(Counted, folder=f"{folder}/rows", unit_rows=20, keep="rows"),
        }
    )


def write_tables(folder: Path) -> None:
    """By the libraries of the formats, with rows that were deleted."""
    import deltalake  # pyright: ignore[reportMissingImports]
    import lance  # pyright: ignore[reportMissingImports]
    from pyiceberg.catalog.sql import SqlCatalog  # pyright: ignore[reportMissingImports]

    lance.write_dataset(lake_table(), str(folder / "lance"), max_rows_per_file=25).delete("id < 5")
    deltalake.write_deltalake(str(folder / "delta"), lake_table())
    deltalake.DeltaTable(str(folder / "delta")).delete("id < 5")
    catalog = SqlCatalog("local", uri="sqlite:///:memory:", warehouse=f"file://{folder}")
    catalog.create_namespace("db")
    table = catalog.create_table("db.web", lake_table().schema, location=f"file://{folder}/iceberg")
    table.append(lake_table())
    table.delete("id < 5")
    catalog.close()


def tables_job(folder: str) -> ol.Job:
    """`folder` is where the tables were written."""
    return _job(
        {
            "lance": formats.Lance(f"{folder}/lance", ["tokens"], unit_rows=10),
            "delta": formats.Delta(f"{folder}/delta", ["tokens"]),
            "iceberg": formats.Iceberg(f"{folder}/iceberg", ["tokens"]),
        }
    )


def _job(sources: dict[str, ol.Source]) -> ol.Job:
    return ol.Job(
        sources=sources,
        mixture=ol.Mixture(dict.fromkeys(sources, 1.0), unit="tokens"),
        batch=ol.Batch(tokens=1024, sequence_length=64, micro_tokens=128),
        mesh=ol.Mesh(dp=WORLD_SIZE),
        num_workers=2,
    )
