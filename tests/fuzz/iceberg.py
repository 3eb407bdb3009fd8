"""Metadata and manifests of Iceberg tables, against a reading of Avro that knows no more than the specification."""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.formats import Iceberg
from overlord.sources.storage import StoredFile
from tests.fuzz.folders import change_number, folder_seed
from tests.fuzz.lake import TableTarget, change_lines, recorded_files
from tests.fuzz.tables import answer_of
from tests.fuzz.targets import Answer, OracleFailed, Seed
from tests.sources.recording import RECORDED

_METADATA = ".metadata.json"
_DELETED = 2


def make_seeds() -> Sequence[Seed]:
    return [folder_seed("table", recorded_files("iceberg", (_METADATA, ".avro")))]


@dataclass(frozen=True)
class MovedIceberg(Iceberg):
    """A table whose files all lie beside its metadata, whatever the metadata says."""

    def list_beside(self, paths: Sequence[str]) -> tuple[StoredFile, ...]:
        folder = Path(self.patterns[0]).parent
        return super().list_beside([str(folder / path.rpartition("/")[2]) for path in paths])


def source(folder: Path, files: Mapping[str, bytes]) -> Iceberg:
    return MovedIceberg(folder / next((name for name in files if name.endswith(_METADATA)), "none.metadata.json"))


def oracle(files: Mapping[str, bytes]) -> list[Answer]:
    try:
        metadata = json.loads(next(data for name, data in files.items() if name.endswith(_METADATA)))
        snapshot = next(each for each in metadata["snapshots"] if each["snapshot-id"] == metadata["current-snapshot-id"])
        wanted = snapshot.get("schema-id", metadata["current-schema-id"])
        schemas = {each["schema-id"]: each for each in metadata["schemas"]}
        schema = schemas.get(wanted) or schemas[metadata["current-schema-id"]]
        columns = [field["name"] for field in schema["fields"]]
        paths: list[str] = []
        for manifest in _records(_named(files, snapshot["manifest-list"])):
            entries = _records(_named(files, manifest["manifest_path"]))
            paths += [entry["data_file"]["file_path"] for entry in entries if entry["status"] != _DELETED]
        tables = [pq.read_table(RECORDED / "iceberg" / path.rpartition("/")[2], columns=columns) for path in sorted(paths)]
        return [answer_of(pa.concat_tables(tables).replace_schema_metadata(None).cast(_plain(tables[0].schema)))]
    except Exception as error:  # whatever damaged files make of plain Python
        raise OracleFailed(str(error)) from error


def _plain(schema: pa.Schema) -> pa.Schema:
    """Without the numbers of columns that pyiceberg adds."""
    return pa.schema([field.remove_metadata() for field in schema])


def _named(files: Mapping[str, bytes], location: str) -> bytes:
    return files[location.rpartition("/")[2]]


def _records(data: bytes) -> list[Any]:
    """The records of an Avro file, by the schema in its header."""
    stream = io.BytesIO(data)
    if stream.read(4) != b"Obj\x01":
        raise OracleFailed("no Avro")
    head = _value(stream, {"type": "map", "values": "bytes"})
    sync = stream.read(16)
    schema = json.loads(head["avro.schema"])
    found: list[Any] = []
    while stream.tell() < len(data):
        count, size = _long(stream), _long(stream)
        block = stream.read(size)
        block = zlib.decompress(block, -15) if head.get("avro.codec") == b"deflate" else block
        inner = io.BytesIO(block)
        found += [_value(inner, schema) for _ in range(count)]
        if inner.tell() != len(block) or stream.read(16) != sync:
            raise OracleFailed("a block is not whole")
    return found


def _long(stream: io.BytesIO) -> int:
    number = shift = 0
    while True:
        (byte,) = stream.read(1)
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return (number >> 1) ^ -(number & 1)


def _value(stream: io.BytesIO, schema: Any) -> Any:
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(kind, (dict, list)) and not isinstance(schema, list):
        return _value(stream, kind)
    if isinstance(schema, list):
        return _value(stream, schema[_long(stream)])
    if kind == "record":
        return {field["name"]: _value(stream, field["type"]) for field in schema["fields"]}
    if kind in ("int", "long"):
        return _long(stream)
    if kind in ("bytes", "string"):
        data = stream.read(_long(stream))
        return data if kind == "bytes" else data.decode()
    if kind == "boolean":
        return bool(stream.read(1)[0])
    if kind in ("float", "double"):
        return struct.unpack("<f" if kind == "float" else "<d", stream.read(4 if kind == "float" else 8))[0]
    if kind == "fixed":
        return stream.read(schema["size"])
    if kind == "null":
        return None
    if kind in ("array", "map"):
        return _items(stream, schema)
    raise OracleFailed(f"a type {kind}")


def _items(stream: io.BytesIO, schema: Any) -> Any:
    items: list[Any] = []
    while count := _long(stream):
        if count < 0:
            _long(stream)  # the bytes of the block
        for _ in range(abs(count)):
            if schema["type"] == "map":
                key = stream.read(_long(stream)).decode()
                items.append((key, _value(stream, schema["values"])))
            else:
                items.append(_value(stream, schema["items"]))
    return dict(items) if schema["type"] == "map" else items


TARGET = TableTarget(
    "iceberg", make_seeds, source, oracle, (change_number, change_lines(_METADATA), change_lines(_METADATA))
)
