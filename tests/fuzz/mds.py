"""MDS datasets, against a reading of one sample and one value at a time."""

from __future__ import annotations

import bz2
import json
import random
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.errors import SourceError
from overlord.formats import Mds
from tests.fuzz.folders import FolderTarget, change_json, change_number, folder_seed, pack, unpack
from tests.fuzz.mutations import edited
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import MDS_ENCODINGS, MDS_KINDS, RECORDED

COLUMNS = ("any", "grid", "number", "raw", "small", "text", "tokens")
_TYPES = {
    "any": pa.list_(pa.list_(pa.float32())), "grid": pa.list_(pa.list_(pa.int32())), "number": pa.int64(),
    "raw": pa.binary(), "small": pa.uint8(), "text": pa.string(), "tokens": pa.list_(pa.uint16()),
}  # fmt: skip


def make_seeds() -> Sequence[Seed]:
    """As MDSWriter wrote them. Without hashes, which would hide all other damage."""
    seeds = []
    for kind in MDS_KINDS:
        files = {path.name: path.read_bytes() for path in sorted((RECORDED / "mds" / kind).iterdir())}
        index = json.loads(files["index.json"])
        for shard in index["shards"]:
            for each in (shard["raw_data"], shard["zip_data"]):
                if each is not None:
                    each["hashes"] = {}
        seeds.append(folder_seed(kind, {**files, "index.json": json.dumps(index).encode()}))
    return seeds


def source(folder: Path, files: Mapping[str, bytes]) -> Mds:
    """Datasets with other columns than the seeds have are well-formed, and beyond the oracle: they are left alone."""
    try:
        shards = json.loads(files["index.json"])["shards"]
        described = [list(zip(e["column_names"], e["column_encodings"], e["column_sizes"], strict=False)) for e in shards]
    except (KeyError, ValueError, TypeError):
        return Mds(folder, COLUMNS)
    if any(each != _described() for each in described):
        raise SourceError(f"{folder} has other columns")
    return Mds(folder, COLUMNS)


@cache
def _described() -> list[tuple[str, str, int | None]]:
    entry = json.loads((RECORDED / "mds" / "plain" / "index.json").read_text())["shards"][0]
    return list(zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True))


def change_shard(rng: random.Random, seed: Seed) -> bytes | None:
    """Another number in a shard that is packed again, with its index corrected."""
    files = unpack(seed.data)
    index = json.loads(files["index.json"])
    entry = rng.choice(index["shards"])
    codec = entry["compression"]
    if codec not in (None, "gz", "bz2"):
        return None
    stored = entry["raw_data"] if codec is None else entry["zip_data"]
    raw = bytearray(_raw(files[stored["basename"]], codec, entry["raw_data"]["bytes"]))
    at = rng.randrange(len(raw) - 4)
    raw[at : at + 4] = rng.choice((0, 1, 2, 255, 65_535, 1 << 31, (1 << 32) - 1, len(raw))).to_bytes(4, "little")
    packed = bytes(raw) if codec is None else bz2.compress(raw) if codec == "bz2" else _gzip(bytes(raw))
    files[stored["basename"]] = packed
    stored["bytes"] = len(packed)
    files["index.json"] = json.dumps(index).encode()
    return pack(files)


def _gzip(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=31)
    return packer.compress(data) + packer.flush()


def _raw(data: bytes, codec: Any, num_bytes: int) -> bytes:
    if codec is None:
        return data
    if codec == "bz2":
        return bz2.decompress(data)
    if codec == "gz":
        return zlib.decompress(data, 31)
    if codec == "snappy":
        return pa.decompress(data, num_bytes, codec, asbytes=True)
    return pa.CompressedInputStream(pa.BufferReader(data), "brotli" if codec == "br" else codec).read()


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    try:
        rows = [row for entry in json.loads(files["index.json"])["shards"] for row in _rows(files, entry)]
        good = [row for row in rows if row is not None]
        table = pa.table({name: pa.array([row[name] for row in good], _TYPES[name]) for name in COLUMNS})
    except OracleFailed:
        raise
    except Exception as error:  # whatever a damaged file makes of plain Python
        raise OracleFailed(str(error)) from error
    answer = answer_of(table)
    kept = iter(answer.rows)
    return [Answer(["bad" if row is None else next(kept) for row in rows], about=answer.about)]


def _rows(files: Mapping[str, bytes], entry: dict[str, Any]) -> list[dict[str, Any] | None]:
    """None for a row that cannot be read."""
    stored = entry["zip_data"] or entry["raw_data"]
    data = _raw(files[stored["basename"]], entry["compression"], entry["raw_data"]["bytes"])
    (count,) = struct.unpack_from("<I", data)
    if count != entry["samples"] or len(files[stored["basename"]]) != stored["bytes"]:
        raise OracleFailed("the index says otherwise")
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
    if len(data) != entry["raw_data"]["bytes"] or encodings != [MDS_ENCODINGS[name] for name in names]:
        raise OracleFailed("the index says otherwise")
    if list(offsets) != sorted(offsets) or offsets[0] < 8 + 4 * count or offsets[-1] > len(data):
        raise OracleFailed("the samples are in disorder")
    rows: list[dict[str, Any] | None] = []
    for begin, end in pairwise(offsets):
        try:
            rows.append(_row(data[begin:end], names, sizes))
        except (OracleFailed, struct.error, ValueError, IndexError):
            rows.append(None)
    return rows


def _row(sample: bytes, names: Sequence[str], sizes: Sequence[int | None]) -> dict[str, Any]:
    variable = [i for i, size in enumerate(sizes) if not size]
    heads = struct.unpack_from(f"<{len(variable)}I", sample)
    lengths = [size or heads[variable.index(i)] for i, size in enumerate(sizes)]
    row, at = {}, 4 * len(variable)
    for name, length in zip(names, lengths, strict=True):
        if name in COLUMNS:
            if at + length > len(sample):
                raise OracleFailed("a value lies outside")
            row[name] = _value(name, sample[at : at + length])
        at += length
    return row


def _value(name: str, value: bytes) -> Any:
    if name == "raw":
        return value
    if name == "text":
        return value.decode()
    if name in ("number", "small"):
        return struct.unpack("<q" if name == "number" else "<B", value)[0]
    if name == "grid":
        return np.frombuffer(value, np.int32).reshape(2, 3).tolist()
    at = 0
    if name == "any":
        if value[0] != 34:
            raise OracleFailed("another type")
        at = 1
    num_levels, width = value[at] >> 2, 1 << (value[at] & 3)
    shape = np.frombuffer(value[at + 1 : at + 1 + num_levels * width], f"<u{width}").tolist()
    if num_levels != (2 if name == "any" else 1) or len(shape) != num_levels:
        raise OracleFailed("another shape")
    values = np.frombuffer(value[at + 1 + num_levels * width :], np.float32 if name == "any" else np.uint16)
    return values.reshape(shape).tolist()


TARGET = FolderTarget(
    "mds", make_seeds, source, oracle, (change_shard, change_shard, change_number, change_json("index.json", edited))
)
