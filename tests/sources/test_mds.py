"""MDS datasets, as Mosaic's MDSWriter wrote them and as they should not be."""

import hashlib
import io
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

import overlord as ol
from overlord.errors import BadRowError, BufferTooSmallError, SchemaError, SourceError
from overlord.formats import Mds
from tests.sources.recording import MDS_ENCODINGS, MDS_KINDS, NUM_SAMPLES, RECORDED, mds_sample

FOLDER = RECORDED / "mds"


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def write_shard(folder: Path, columns: dict[str, str], rows: list[dict[str, bytes]], **entry: Any) -> None:
    """An independent writer. Values are given as the bytes that they are stored as, all of variable size."""
    names = sorted(columns)
    samples = [
        np.array([len(row[name]) for name in names], "<u4").tobytes() + b"".join(row[name] for name in names) for row in rows
    ]
    offsets = np.cumsum([8 + 4 * len(rows), *map(len, samples)]).astype("<u4")
    data = np.uint32(len(rows)).tobytes() + offsets.tobytes() + b"".join(samples)
    folder.mkdir(exist_ok=True)
    (folder / "shard.00000.mds").write_bytes(data)
    raw = {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {"sha1": hashlib.sha1(data).hexdigest()}}
    shard = {
        "column_encodings": [columns[name] for name in names], "column_names": names, "column_sizes": [None] * len(names),
        "compression": None, "format": "mds", "hashes": ["sha1"], "raw_data": raw, "samples": len(rows),
        "version": 2, "zip_data": None, **entry,
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"shards": [shard], "version": 2}))


def edit_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0].update(changes)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", MDS_KINDS)
def test_every_encoding_and_compression_is_read_as_it_was_written(kind: str) -> None:
    source = Mds(FOLDER / kind)
    ol.testing.assert_source_keeps_its_promises(source)
    table = read_all(source)
    assert table.column_names == sorted(MDS_ENCODINGS)
    assert [str(table.schema.field(name).type) for name in ("tokens", "grid", "any", "half")] == [
        "list<item: uint16>", "list<item: list<item: int32>>", "list<item: list<item: float>>", "halffloat",
    ]  # fmt: skip
    assert table.num_rows == NUM_SAMPLES
    for row, found in enumerate(table.to_pylist()):
        wrote = mds_sample(row)
        for name in ("text", "raw", "number", "small", "half", "double", "digits", "float"):
            assert found[name] == wrote[name]
        for name in ("tokens", "grid", "any"):
            assert found[name] == wrote[name].tolist()
        assert found["exact"] == str(wrote["exact"])
        assert json.loads(found["data"]) == wrote["data"]
        assert found["photos"] == wrote["photos"]
        picture = wrote["picture"]
        assert found["picture"] == {
            "width": picture.width, "height": picture.height, "mode": "RGB", "data": picture.tobytes(),
        }  # fmt: skip
        for data in (found["png"], *found["pictures"]):
            assert Image.open(io.BytesIO(data)).tobytes() == picture.tobytes()
        assert len(found["pictures"]) == row % 3
        assert b"row" in found["object"]  # a pickle, as it is stored


def test_a_chosen_column_is_all_that_is_decoded_and_checked(tmp_path: Path) -> None:
    rows = [{"a": b"good", "b": b"\xff\xfe", "c": b"12"}, {"a": b"fine", "b": b"", "c": b"x"}]
    write_shard(tmp_path, {"a": "str", "b": "str", "c": "str_int"}, rows)
    assert read_all(Mds(tmp_path, ["a"]))["a"].to_pylist() == ["good", "fine"]
    write_shard(tmp_path, {"a": "str", "b": "some_day"}, [{"a": b"x", "b": b""}])
    assert read_all(Mds(tmp_path, ["a"]))["a"].to_pylist() == ["x"]
    with pytest.raises(SchemaError, match="the column 'b' of the encoding 'some_day', which is not known; leave it out"):
        Mds(tmp_path).units()


def test_bad_samples_are_reported_one_by_one(tmp_path: Path) -> None:
    array = bytes([1 << 2]) + bytes([2]) + np.array([7, 8], np.uint16).tobytes()
    rows = [
        {"n": b"1", "t": b"one", "x": array},
        {"n": b"no", "t": b"two", "x": array},
        {"n": b"3", "t": b"\xff", "x": array},
        {"n": b"4", "t": b"four", "x": array[:-1]},
        {"n": b"5", "t": b"five", "x": bytes([2 << 2]) + array[1:]},
        {"n": str(2**64).encode(), "t": b"six", "x": array},
        {"n": b"7", "t": b"seven", "x": b""},
        {"n": b"8", "t": b"eight", "x": array},
    ]
    write_shard(tmp_path, {"n": "str_int", "t": "str", "x": "ndarray:uint16"}, rows)
    source = Mds(tmp_path)
    (unit,) = source.units()
    result = source.read_rows(unit)
    assert result.table.to_pylist() == [{"n": n, "t": t, "x": [7, 8]} for n, t in ((1, "one"), (8, "eight"))]
    assert result.row_numbers is not None
    assert result.row_numbers.tolist() == [0, 7]
    assert [bad.row for bad in result.bad] == [1, 2, 3, 4, 5, 6]
    errors = [bad.error for bad in result.bad]
    assert "the value of 'n' is no str_int: invalid literal" in errors[0]
    assert "column 't' is not UTF-8 text" in errors[1]
    assert errors[2] == "the value of 'x' does not have the bytes of its shape"
    assert errors[3] == "the value of 'x' does not have 1 dimensions, as the first sample's has"
    assert "the value of 'n' does not fit int64" in errors[4]
    assert errors[5] == "the value of 'x' has no shape"
    with pytest.raises(BadRowError, match=r"shard\.00000\.mds, sample 1: the value of 'n' is no str_int"):
        source.read(unit)


@pytest.mark.parametrize("kind", ["plain", "zstd"])
def test_a_shard_with_a_wrong_hash_is_an_error_and_says_which(tmp_path: Path, kind: str) -> None:
    shutil.copytree(FOLDER / kind, tmp_path, dirs_exist_ok=True)
    shard = next(iter(tmp_path.glob("shard.00001.*")))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    source = Mds(tmp_path)
    units = source.units()
    assert source.read(units[0]).num_rows == units[0].num_rows
    message = (
        rf"{shard.name} has the sha\w+ \w+, and its index\.json says \w+: the shard was damaged or replaced; copy it again"
    )
    with pytest.raises(SourceError, match=message):
        source.read(units[1])
    if kind == "plain":
        assert Mds(tmp_path, verify=False).read(units[1]).num_rows == units[1].num_rows


def test_hashes_of_unknown_kinds_are_said_to_be_unchecked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_shard(tmp_path, {"a": "str"}, [{"a": b"x"}])
    raw = json.loads((tmp_path / "index.json").read_text())["shards"][0]["raw_data"]
    edit_index(tmp_path, raw_data={**raw, "hashes": {"md77": "00"}})
    with caplog.at_level(logging.WARNING):
        assert read_all(Mds(tmp_path)).num_rows == 1
    assert "has hashes of kinds that are not known here (md77) and is read unchecked" in caplog.text


def test_the_raw_shard_is_read_where_the_compressed_one_is_gone(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "zstd", tmp_path, dirs_exist_ok=True)
    whole = read_all(Mds(tmp_path))
    for shard in tmp_path.glob("*.zstd"):
        raw = pa.CompressedInputStream(pa.OSFile(str(shard), "rb"), "zstd").read()
        shard.with_suffix("").write_bytes(raw)
        shard.unlink()
    assert read_all(Mds(tmp_path)).equals(whole)


def test_shards_that_do_not_fit_their_index_are_errors(tmp_path: Path) -> None:
    write_shard(tmp_path, {"a": "str"}, [{"a": b"x"}, {"a": b"y"}])
    shard = tmp_path / "shard.00000.mds"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(SourceError, match=r"shard\.00000\.mds has 25 bytes, and its index\.json says 26: it was cut off"):
        Mds(tmp_path).units()
    shard.unlink()
    with pytest.raises(SourceError, match=r"shard\.00000\.mds does not exist"):
        Mds(tmp_path).units()
    shard.write_bytes(data)
    edit_index(tmp_path, samples=3)
    with pytest.raises(SourceError, match=r"damaged: it has 2 samples in 26 bytes, and its index\.json says 3"):
        read_all(Mds(tmp_path))
    edit_index(tmp_path, samples=2)
    shard.write_bytes(data[:8] + b"\xff" + data[9:])
    with pytest.raises(SourceError, match="its samples do not lie in its 26 bytes in order"):
        read_all(Mds(tmp_path, verify=False))


def test_a_shard_that_unpacks_to_another_size_than_it_should_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "zstd", tmp_path, dirs_exist_ok=True)
    raw = json.loads((tmp_path / "index.json").read_text())["shards"][0]["raw_data"]
    edit_index(tmp_path, raw_data={**raw, "bytes": raw["bytes"] - 1})
    message = (
        rf"shard\.00000\.mds\.zstd has {raw['bytes']:,} bytes decompressed, and its index\.json says {raw['bytes'] - 1:,}"
    )
    with pytest.raises(SourceError, match=message):
        read_all(Mds(tmp_path))
    edit_index(tmp_path, raw_data={**raw, "bytes": 1 << 40})
    with pytest.raises(BufferTooSmallError, match=r"bytes decompressed, and a unit may take .*size_limit of MDSWriter"):
        read_all(Mds(tmp_path))
    shard = tmp_path / "shard.00000.mds.zstd"
    edit_index(tmp_path, raw_data=raw)
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(SourceError, match=r"shard\.00000\.mds\.zstd is not whole zstd data"):
        read_all(Mds(tmp_path, verify=False))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "json"}, r"shard 0 of .*index\.json has the format 'json', and this reads 'mds'; ol\.Jsonl reads"),
        ({"version": 1}, "has version 1 of the format, and only version 2 is known"),
        ({"column_names": []}, "is damaged: it does not describe each of its columns"),
        ({"samples": -1}, "is damaged: it has numbers below 0"),
        (
            {"compression": "lzma", "zip_data": {"basename": "a", "bytes": 1, "hashes": {}}},
            "is compressed by 'lzma'; known are gz, zstd, br, snappy, bz2",
        ),
        ({"samples": "two"}, r"index\.json is not the index of an MDS dataset: Expected `int`, got `str`"),
    ],
)
def test_an_index_that_makes_no_sense_is_an_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_shard(tmp_path, {"a": "str"}, [{"a": b"x"}])
    edit_index(tmp_path, **changes)
    with pytest.raises(SourceError, match=message):
        Mds(tmp_path).units()


def test_an_index_that_was_cut_off_and_a_shard_named_twice_are_errors(tmp_path: Path) -> None:
    write_shard(tmp_path, {"a": "str"}, [{"a": b"x"}])
    text = (tmp_path / "index.json").read_text()
    index = json.loads(text)
    (tmp_path / "index.json").write_text(json.dumps({**index, "shards": index["shards"] * 2}))
    with pytest.raises(SourceError, match="twice: it would be read twice"):
        Mds(tmp_path).units()
    (tmp_path / "index.json").write_text(text[:-20])
    with pytest.raises(SourceError, match=r"index\.json is not the index of an MDS dataset"):
        Mds(tmp_path).units()
    with pytest.raises(SourceError, match=r"none/index\.json does not exist"):
        Mds(tmp_path / "none").units()


def test_shards_with_other_columns_are_refused_unless_they_are_not_used(tmp_path: Path) -> None:
    write_shard(tmp_path / "a", {"a": "str", "b": "int"}, [{"a": b"x", "b": bytes(8)}])
    write_shard(tmp_path / "b", {"a": "str", "b": "str"}, [{"a": b"y", "b": b"z"}])
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(SchemaError, match=r"has the column 'b' as string, but .* has it as int64; leave it out"):
        Mds(folders).units()
    assert read_all(Mds(folders, ["a"]))["a"].to_pylist() == ["x", "y"]
