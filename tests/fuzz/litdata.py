"""litData datasets, against a reading of one sample and one value at a time, or by Arrow alone where chunks are tables."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from overlord.errors import SourceError
from overlord.formats import LitData
from tests.fuzz.folders import FolderTarget, change_json, change_number, folder_seed, pack, unpack
from tests.fuzz.mutations import edited
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import LITDATA_KINDS, RECORDED

COLUMNS = ("text", "raw", "number", "flag", "tokens", "grid", "mask", "one")
_TYPES = {
    "text": pa.string(), "raw": pa.binary(), "number": pa.int64(), "flag": pa.bool_(), "tokens": pa.list_(pa.uint16()),
    "grid": pa.list_(pa.list_(pa.list_(pa.int32()))), "mask": pa.list_(pa.bool_()), "one": pa.int64(),
}  # fmt: skip
_TABLE = pa.schema(
    [
        ("extra", pa.float64()),
        ("number", pa.int64()),
        ("text", pa.string()),
        ("turns", pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))),
    ]
)
_DAMAGE = (KeyError, ValueError, TypeError, AttributeError, struct.error, IndexError, pa.ArrowException, OSError)
_INT32, _INT64 = (15, 16), (17, 18)


def make_seeds() -> Sequence[Seed]:
    """As litData wrote them."""
    seeds = []
    for kind in LITDATA_KINDS:
        files = {path.name: path.read_bytes() for path in sorted((RECORDED / "litdata" / kind).iterdir())}
        seeds.append(folder_seed(kind, files))
    return seeds


def source(folder: Path, files: Mapping[str, bytes]) -> LitData:
    """Datasets with other columns than the seeds have are well-formed, and beyond the oracle: they are left alone."""
    try:
        config = _index(files)["config"]
        described = _described_by(config)
    except (KeyError, ValueError, TypeError, AttributeError):
        return LitData(folder)
    if described not in _described():
        raise SourceError(f"{folder} has other columns")
    if "flag" not in config["data_spec"]:
        return LitData(folder)
    try:  # the first sample tells the types of tensors
        if _rows(files, next(entry for entry in _index(files)["chunks"] if entry["chunk_size"]), config)[0] is None:
            raise SourceError(f"{folder} has other columns")
    except (*_DAMAGE, OracleFailed, StopIteration):
        pass
    return LitData(folder, COLUMNS)


def _index(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Texts that are not UTF-8 do not matter where nobody reads them."""
    return json.loads(files["index.json"].decode("latin-1"))


def _described_by(config: dict[str, Any]) -> str:
    names = ("data_format", "data_spec", "types", "item_loader", "compression", "compression_level")
    return json.dumps([config.get(name) for name in names])


@cache
def _described() -> frozenset[str]:
    folders = (RECORDED / "litdata" / kind / "index.json" for kind in LITDATA_KINDS)
    return frozenset(_described_by(json.loads(path.read_text())["config"]) for path in folders)


def change_chunk(rng: random.Random, seed: Seed) -> bytes | None:
    """Another number in a chunk that is compressed again, with its index corrected."""
    files = unpack(seed.data)
    index = _index(files)
    if not seed.name.startswith(("chunk", "tokens_zstd")):
        return None
    entry = rng.choice(index["chunks"])
    raw = bytearray(_decompress(files[entry["filename"]], entry["chunk_bytes"]))
    place = rng.randrange(len(raw) - 4)
    raw[place : place + 4] = struct.pack("<I", rng.choice([0, 1, rng.randrange(256), rng.randrange(1 << 32)]))
    files[entry["filename"]] = pa.Codec("zstd").compress(bytes(raw), asbytes=True)
    return pack(files)


def _decompress(data: bytes, num_bytes: int) -> bytes:
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            return stream.read(num_bytes + (1 << 20))
    except (OSError, ValueError) as error:
        raise OracleFailed(str(error)) from error


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    try:
        index = _index(files)
        config = index["config"]
        entries = [entry for entry in index["chunks"] if entry["chunk_size"]]
        if not entries or len({entry["filename"] for entry in entries}) < len(entries):
            raise OracleFailed("no chunks, or one twice")
        if isinstance(config.get("types"), dict) and "extra" in config["types"]:
            return [answer_of(pa.concat_tables([_table(files, entry) for entry in entries]))]
        rows = [row for entry in entries for row in _rows(files, entry, config)]
    except _DAMAGE as error:
        raise OracleFailed(str(error)) from error
    types = {"tokens": pa.list_(pa.int32())} if config.get("item_loader") == "TokensLoader" else _TYPES
    good = [row for row in rows if row is not None]
    table = pa.table([pa.array([row[name] for row in good], type_) for name, type_ in types.items()], names=list(types))
    answer = answer_of(table)
    kept = iter(answer.rows)
    return [Answer(["bad" if row is None else next(kept) for row in rows], about=answer.about)]


def _table(files: Mapping[str, bytes], entry: dict[str, Any]) -> pa.Table:
    data = files[entry["filename"]]
    (count,), (size,) = struct.unpack_from("<I", data), struct.unpack_from("<I", data, len(data) - 12)
    if data[-8:] != b"LDARW01\0" or count != entry["chunk_size"] or size > len(data) - 12 or not _has_size(entry, data):
        raise OracleFailed("the index says otherwise")
    table = pa.ipc.open_file(pa.BufferReader(data[-12 - size : -12])).read_all()
    if table.num_rows != count or {"number", "text", "turns"} - set(table.column_names):
        raise OracleFailed("the index says otherwise")
    if "extra" not in table.column_names:
        table = table.append_column("extra", pa.nulls(count, pa.float64()))
    if not table.select(_TABLE.names).schema.equals(_TABLE):
        table.validate(full=True)
    return pa.table([table.column(field.name).cast(field.type) for field in _TABLE], schema=_TABLE)


def _has_size(entry: dict[str, Any], data: bytes) -> bool:
    return len(data) in (entry["chunk_bytes"], entry["chunk_bytes"] + 8 + 4 * entry["chunk_size"])


def _rows(files: Mapping[str, bytes], entry: dict[str, Any], config: dict[str, Any]) -> list[dict[str, Any] | None]:
    """None for a row that cannot be read."""
    data, count = files[entry["filename"]], entry["chunk_size"]
    is_whole = config.get("compression") is not None and not config.get("compression_level")
    if is_whole and ".zstd." in entry["filename"]:
        data = _decompress(data, entry["chunk_bytes"])
    if not _has_size(entry, data):
        raise OracleFailed("the index says otherwise")
    items = _frames(data, count) if config.get("compression_level") == "batch" else _items(data, count)
    rows: list[dict[str, Any] | None] = []
    for item in items:
        try:
            if config.get("compression_level") == "sample":
                item = _decompress(item, 1 << 20)
            rows.append(_row(item, config))
        except (OracleFailed, struct.error, ValueError, IndexError):
            rows.append(None)
    return rows


def _items(data: bytes, count: int) -> list[bytes]:
    (found,) = struct.unpack_from("<I", data)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    if found != count or list(offsets) != sorted(offsets) or offsets[0] < 8 + 4 * count or offsets[-1] > len(data):
        raise OracleFailed("the samples are in disorder")
    return [data[begin:end] for begin, end in pairwise(offsets)]


def _frames(data: bytes, count: int) -> list[bytes]:
    magic, version, _, found, _, num_frames = struct.unpack_from("<8sHHIII", data)
    if magic != b"LDFZ01\0\0" or version != 1 or found != count:
        raise OracleFailed("the index says otherwise")
    offsets = struct.unpack_from(f"<{count + 1}I", data, 24)
    raw, items = b"", 0
    for frame in range(num_frames):
        first, num, start, size, num_bytes = struct.unpack_from("<IIQII", data, 24 + 4 * (count + 1) + 24 * frame)
        part = _decompress(data[start : start + size], num_bytes)
        if first != items or offsets[first] != len(raw) or len(part) != num_bytes or start + size > len(data):
            raise OracleFailed("the batches are in disorder")
        raw, items = raw + part, items + num
    if items != count or offsets[-1] != len(raw) or list(offsets) != sorted(offsets):
        raise OracleFailed("the batches are in disorder")
    return [raw[begin:end] for begin, end in pairwise(offsets)]


def _row(item: bytes, config: dict[str, Any]) -> dict[str, Any]:
    if config.get("item_loader") == "TokensLoader":
        return {"tokens": np.frombuffer(item, "<i4").tolist()}
    formats = config["data_format"]
    names = ("text", "raw", "number", "ratio", "flag", "tokens", "grid", "mask", "lang", "parts", "picture", "half", "one")
    sizes = struct.unpack_from(f"<{len(formats)}I", item)
    row, at = {}, 4 * len(formats)
    for name, size in zip(names, sizes, strict=True):
        if name in COLUMNS:
            if at + size > len(item):
                raise OracleFailed("a value lies outside")
            row[name] = _value(name, item[at : at + size])
        at += size
    return row


def _value(name: str, value: bytes) -> Any:
    if name in ("raw", "text"):
        return value if name == "raw" else value.decode()
    if name in ("number", "flag"):
        return struct.unpack("<q" if name == "number" else "?", value)[0]
    if name in ("tokens", "mask"):
        return np.frombuffer(value, "<u2" if name == "tokens" else "?").astype(bool if name == "mask" else int).tolist()
    order = ">" if value[:1] == b"\0" else "<"
    code, rank = struct.unpack_from(f"{order}II", value)
    if rank != (3 if name == "grid" else 0) or code not in (_INT32 if name == "grid" else _INT64):
        raise OracleFailed("another type")
    shape = struct.unpack_from(f"{order}{rank}I", value, 8)
    values = np.frombuffer(value[8 + 4 * rank :], "<i4" if name == "grid" else "<i8")
    return values.reshape(shape).tolist()


TARGET = FolderTarget(
    "litdata", make_seeds, source, oracle, (change_chunk, change_number, change_number, change_json("index.json", edited))
)
