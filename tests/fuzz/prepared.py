"""Prepared corpora: their manifest above all, against a reading of it by JSON and of their rows by Arrow alone."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ol
from tests.fuzz.folders import FolderTarget, change_number, folder_seed, pack, unpack
from tests.fuzz.mutations import edited
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import RECORDED

_DAMAGE = (KeyError, ValueError, TypeError, AttributeError, IndexError, MemoryError, pa.ArrowException, OSError)
_NUMBERS = ("format", "num_units", "num_rows", "num_bad_rows", "units_checksum")
_TEXTS = ("source", "fingerprint", "reader")


def make_seeds() -> Sequence[Seed]:
    """As Overlord wrote it, and as an earlier release did, without a checksum of the manifest."""
    files = {path.name: path.read_bytes() for path in sorted((RECORDED / "prepared").iterdir())}
    early = {name: value for name, value in json.loads(files["manifest.json"]).items() if name != "checksum"}
    earlier = {**files, "manifest.json": json.dumps(early).encode()}
    return [folder_seed(name, made, aim=["manifest.json"]) for name, made in (("now", files), ("earlier", earlier))]


def source(folder: Path, files: Mapping[str, bytes]) -> ol.Prepared:
    return ol.Prepared(folder)


def checksum_of(content: Mapping[str, Any]) -> int:
    plain = {name: value for name, value in content.items() if name != "checksum"}
    return zlib.crc32(json.dumps(plain, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass"))


def change_manifest(rng: random.Random, seed: Seed) -> bytes | None:
    """Another value in the manifest, with its checksum corrected."""
    files = unpack(seed.data)
    content: Any = edited(rng, json.loads(files["manifest.json"]))
    if isinstance(content, dict) and seed.name == "now" and rng.random() < 0.9:
        content["checksum"] = checksum_of(content)
    return pack({**files, "manifest.json": json.dumps(content).encode()})


def change_schema(rng: random.Random, seed: Seed) -> bytes | None:
    """Another byte in the schema of a manifest, with its checksum corrected."""
    files = unpack(seed.data)
    content = json.loads(files["manifest.json"])
    schema = bytearray(base64.b64decode(content["schemas"][0]))
    schema[rng.randrange(len(schema))] = rng.randrange(256)
    content["schemas"] = [base64.b64encode(schema).decode()]
    if seed.name == "now":
        content["checksum"] = checksum_of(content)
    return pack({**files, "manifest.json": json.dumps(content).encode()})


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    try:
        manifest = json.loads(files["manifest.json"])
        if any(type(manifest[name]) is not int for name in _NUMBERS) or manifest["format"] != 1:
            raise OracleFailed("the manifest is damaged")
        if manifest.get("checksum") not in (None, checksum_of(manifest)) or any(
            type(manifest[n]) is not str for n in _TEXTS
        ):
            raise OracleFailed("the manifest is damaged")
        if zlib.crc32(files["units.parquet"]) != manifest["units_checksum"]:
            raise OracleFailed("the units are damaged")
        (part,) = manifest["parts"]
        if len(files[part["file"]]) != part["num_bytes"] or part["schema"] != 0 or len(manifest["schemas"]) != 1:
            raise OracleFailed("the part is damaged")
        parquet = pq.ParquetFile(pa.BufferReader(files[part["file"]]))
        units = pq.read_table(pa.BufferReader(files["units.parquet"])).to_pylist()
        tables = [parquet.read_row_group(unit["group"], use_threads=False) for unit in units]
        return [answer_of(pa.concat_tables(tables).replace_schema_metadata(None))]
    except _DAMAGE as error:
        raise OracleFailed(str(error)) from error


TARGET = FolderTarget(
    "prepared", make_seeds, source, oracle, (change_manifest, change_manifest, change_schema, change_number)
)
