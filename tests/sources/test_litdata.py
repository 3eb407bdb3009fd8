"""litData's optimised datasets, as its own writer wrote them and as they should not be."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import BadRowError, BufferTooSmallError, SchemaError, SourceError
from overlord.formats import LitData
from overlord.lineage.obtaining import open_log
from overlord.sources.litdata_columns import parse_nested
from tests.sources.recording import (
    LITDATA_KINDS,
    NUM_SAMPLES,
    RECORDED,
    litdata_old_sample,
    litdata_sample,
    litdata_table_row,
    litdata_tokens,
)

FOLDER = RECORDED / "litdata"
LEAF = {"type": None, "context": None, "children_spec": []}


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


def write_chunk(folder: Path, formats: dict[str, str], rows: list[dict[str, bytes]], **config: Any) -> None:
    """An independent writer. Values are given as the bytes that they are stored as."""
    items = [struct.pack(f"<{len(row)}I", *map(len, row.values())) + b"".join(row.values()) for row in rows]
    offsets = np.cumsum([8 + 4 * len(rows), *map(len, items)]).astype("<u4")
    data = np.uint32(len(rows)).tobytes() + offsets.tobytes() + b"".join(items)
    folder.mkdir(exist_ok=True)
    (folder / "chunk-0-0.bin").write_bytes(data)
    spec = [1, {"type": "builtins.dict", "context": json.dumps(list(formats)), "children_spec": [LEAF] * len(formats)}]
    chunk = {"chunk_bytes": len(data), "chunk_size": len(rows), "dim": None, "filename": "chunk-0-0.bin"}
    index = {
        "chunks": [chunk],
        "config": {
            "compression": None, "data_format": list(formats.values()), "data_spec": json.dumps(spec), "encryption": None,
            "item_loader": "PyTreeLoader", **config,
        },
    }  # fmt: skip
    (folder / "index.json").write_text(json.dumps(index))


def edit_index(folder: Path, part: str, **changes: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    (index["chunks"][0] if part == "chunk" else index["config"]).update(changes)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["plain", "chunk", "batch", "sample"])
def test_every_format_and_compression_is_read_as_it_was_written(kind: str) -> None:
    source = LitData(FOLDER / kind)
    ol.testing.assert_source_keeps_its_promises(source)
    table = read_all(source)
    assert [str(table.schema.field(name).type) for name in ("tokens", "mask", "half", "one")] == [
        "list<item: uint16>", "list<item: bool>", "list<item: list<item: halffloat>>", "int64",
    ]  # fmt: skip
    assert table.num_rows == NUM_SAMPLES
    for row, found in enumerate(table.to_pylist()):
        wrote = litdata_sample(row)
        for name in ("text", "raw", "number", "ratio", "flag"):
            assert found[name] == wrote[name]
        for name in ("tokens", "grid", "mask"):
            assert found[name] == wrote[name].tolist()
        assert found["half"] == [[0, 1], [2, 3]]
        assert found["one"] == wrote["number"]
        assert found["meta.lang"] == wrote["meta"]["lang"]
        assert json.loads(found["meta.parts"]) == wrote["meta"]["parts"]
        picture = wrote["picture"]
        assert found["picture"] == {
            "width": picture.width, "height": picture.height, "mode": "RGB", "data": picture.tobytes(),
        }  # fmt: skip


@pytest.mark.parametrize("kind", ["tokens", "tokens_zstd"])
def test_tokens_are_the_documents_that_were_written_and_not_blocks(kind: str) -> None:
    source = LitData(FOLDER / kind)
    ol.testing.assert_source_keeps_its_promises(source)
    table = read_all(source)
    assert str(table.schema.field("tokens").type) == "list<item: int32>"
    assert table["tokens"].to_pylist() == [litdata_tokens(row) for row in range(NUM_SAMPLES)]


@pytest.mark.parametrize("kind", ["table", "table_zstd"])
def test_chunks_that_are_arrow_tables_have_one_schema(kind: str) -> None:
    source = LitData(FOLDER / kind)
    ol.testing.assert_source_keeps_its_promises(source)
    rows = [{"extra": None, **litdata_table_row(row)} for row in range(NUM_SAMPLES)]
    assert read_all(source).to_pylist() == [{name: row[name] for name in sorted(row)} for row in rows]
    assert read_all(LitData(FOLDER / kind, ["extra", "text"]))["extra"].to_pylist() == [row["extra"] for row in rows]


def test_tensors_of_earlier_releases_are_read_too() -> None:
    table = read_all(LitData(FOLDER / "old"))
    for row, found in enumerate(table.to_pylist()):
        wrote = litdata_old_sample(row)
        assert found["grid"] == found["array"] == wrote["grid"].tolist()
        assert found["one"] == row - 5


def test_every_recorded_kind_is_tested() -> None:
    tested = {"plain", "chunk", "batch", "sample", "tokens", "tokens_zstd", "table", "table_zstd"}
    assert tested == set(LITDATA_KINDS)
    assert {path.name for path in FOLDER.iterdir()} == {*tested, "old"}


def test_early_releases_did_not_count_offsets(tmp_path: Path) -> None:
    write_chunk(tmp_path, {"a": "str"}, [{"a": b"x"}, {"a": b"y"}])
    edit_index(tmp_path, "chunk", chunk_bytes=10)
    assert read_all(LitData(tmp_path))["a"].to_pylist() == ["x", "y"]


def test_a_chosen_column_is_all_that_is_decoded_and_checked(tmp_path: Path) -> None:
    rows = [{"a": b"good", "b": b"\xff\xfe", "c": b"12"}, {"a": b"fine", "b": b"", "c": b"x"}]
    write_chunk(tmp_path, {"a": "str", "b": "str", "c": "int"}, rows)
    assert read_all(LitData(tmp_path, ["a"]))["a"].to_pylist() == ["good", "fine"]
    write_chunk(tmp_path, {"a": "str", "b": "some_day", "c": "no_header_tensor:10"}, [{"a": b"x", "b": b"", "c": b""}])
    assert read_all(LitData(tmp_path, ["a"]))["a"].to_pylist() == ["x"]
    with pytest.raises(SchemaError, match="the column 'b' of the format 'some_day', which is not known; leave it out"):
        LitData(tmp_path, ["b"]).units()
    with pytest.raises(SchemaError, match="'c' of 'no_header_tensor:10', whose type Arrow does not have"):
        LitData(tmp_path, ["c"]).units()
    with pytest.raises(SchemaError, match=r"has no column 'z'; it has \('a', 'b', 'c'\)"):
        LitData(tmp_path, ["z"]).units()


def test_bad_samples_are_reported_one_by_one(tmp_path: Path) -> None:
    array = struct.pack(">3I", 15, 1, 2) + np.array([7, 8], "<i4").tobytes()
    number, nested = struct.pack("<q", 5), b'[{"a":1}]'
    rows = [
        {"n": number, "t": b"one", "x": array, "j": nested},
        {"n": number[:-1], "t": b"two", "x": array, "j": nested},
        {"n": number, "t": b"\xff", "x": array, "j": nested},
        {"n": number, "t": b"four", "x": array[:-1], "j": nested},
        {"n": number, "t": b"five", "x": struct.pack(">4I", 15, 2, 1, 2) + array[12:], "j": nested},
        {"n": number, "t": b"six", "x": struct.pack(">3I", 17, 1, 1) + array[12:], "j": nested},
        {"n": number, "t": b"seven", "x": b"", "j": nested},
        {"n": number, "t": b"eight", "x": array, "j": b"\x01\x02\x00\x00\x00"},
        {"n": number, "t": b"nine", "x": array, "j": b"\x05\x00\x00\x00\x00"},
    ]
    write_chunk(tmp_path, {"n": "int", "t": "str", "x": "tensor", "j": "json"}, rows)
    source = LitData(tmp_path)
    (unit,) = source.units()
    result = source.read_rows(unit)
    texts = [(row["t"], row["x"], row["j"]) for row in result.table.to_pylist()]
    assert texts == [("one", [7, 8], '[{"a":1}]'), ("nine", [7, 8], "{}")]
    assert [bad.row for bad in result.bad] == [1, 2, 3, 4, 5, 6, 7]
    errors = [bad.error for bad in result.bad]
    assert errors[0] == "the value of 'n' does not have 8 bytes"
    assert "column 't' is not UTF-8 text" in errors[1]
    assert errors[2] == "the value of 'x' does not have the bytes of its shape"
    assert errors[3] == "the value of 'x' does not have 1 dimensions, as the first sample's has"
    assert errors[4] == "the value of 'x' is not of the type int32, as the first sample's is"
    assert errors[5] == "the value of 'x' is cut off in its shape"
    assert errors[6] == "the value of 'j' is no json: it is cut off"
    with pytest.raises(BadRowError, match=r"chunk-0-0\.bin, sample 1: the value of 'n' does not have 8 bytes"):
        source.read(unit)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"\x00\x02\x00\x00\x00[]", []),
        (b"\x02\x01\x00\x00\x00" + struct.pack("<q", -3), [-3]),
        (b"\x03\x01\x00\x00\x00" + struct.pack("<d", 0.5), [0.5]),
        (b"\x04\x02\x00\x00\x00\x01\x00", [True, False]),
        (b"\x05\x01\x00\x00\x00\x01\x00\x00\x00k\x0b", {"k": None}),
        (b"\x07\x01\x00\x00\x00x", "x"),
        (b"\x0a\x01", True),
    ],
)
def test_nested_values_are_what_they_encode(value: bytes, found: object) -> None:
    assert parse_nested(value) == found
    for end in range(len(value)):
        with pytest.raises(ValueError, match=r"cut off|JSON|empty"):
            parse_nested(value[:end])
    with pytest.raises(ValueError, match="it has 1 bytes more than its values"):
        parse_nested(value + b"\0")


def test_chunks_that_do_not_fit_their_index_are_errors(tmp_path: Path) -> None:
    write_chunk(tmp_path, {"a": "str"}, [{"a": b"x"}, {"a": b"y"}])
    chunk = tmp_path / "chunk-0-0.bin"
    data = chunk.read_bytes()
    chunk.write_bytes(data[:-1])
    with pytest.raises(SourceError, match=r"chunk-0-0\.bin has 25 bytes, and its index\.json says 26: it was cut off"):
        LitData(tmp_path).units()
    chunk.unlink()
    with pytest.raises(SourceError, match=r"chunk-0-0\.bin does not exist"):
        LitData(tmp_path).units()
    chunk.write_bytes(data)
    edit_index(tmp_path, "chunk", chunk_size=3)
    with pytest.raises(SourceError, match=r"damaged: it has 2 samples in 26 bytes, and its index\.json says 3"):
        read_all(LitData(tmp_path))
    edit_index(tmp_path, "chunk", chunk_size=2)
    chunk.write_bytes(data[:8] + b"\xff" + data[9:])
    with pytest.raises(SourceError, match="its samples do not lie in its 26 bytes in order"):
        read_all(LitData(tmp_path))


def damage(folder: Path, kind: str, place: int, *, chunk: int = 0) -> Path:
    shutil.copytree(FOLDER / kind, folder, dirs_exist_ok=True)
    path = next(iter(folder.glob(f"chunk-0-{chunk}.*")))
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "place", "message"),
    [
        ("chunk", 0, r"chunk-0-1\.zstd\.bin is not whole zstd data"),
        ("batch", 0, r"does not begin like a chunk of compressed batches"),
        ("batch", 12, r"damaged: it has \d+ samples in .* bytes, and its index\.json says 10"),
        ("batch", 24 + 44, r"its batches do not have its samples in order"),
        ("batch", -3, r"the batch of sample \d is not whole zstd data"),
        ("table", 0, r"damaged: it has \d+ samples, and its index\.json says 10"),
        ("table", -1, r"its samples are empty, and the table that should have them cannot be found"),
        ("table_zstd", -14, r"begins like an Arrow file but has no footer at its end"),
    ],
)
def test_a_damaged_chunk_is_an_error_that_names_it(tmp_path: Path, kind: str, place: int, message: str) -> None:
    path = damage(tmp_path, kind, place, chunk=1)
    source = LitData(tmp_path)
    units = source.units()
    assert source.read(units[0]).num_rows == 10
    with pytest.raises(SourceError, match=message) as caught:
        source.read(units[1])
    assert path.name in str(caught.value)
    assert "copy or write it again" in str(caught.value)


def test_a_damaged_sample_of_its_own_compression_is_one_bad_row(tmp_path: Path) -> None:
    damage(tmp_path, "sample", -3, chunk=2)
    source = LitData(tmp_path)
    unit = source.units()[2]
    result = source.read_rows(unit)
    assert result.table.num_rows == 2
    (bad,) = result.bad
    assert bad.row == 2
    assert "it is not whole zstd data" in bad.error


def test_what_unpacks_to_more_than_a_unit_may_take_is_an_error(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "chunk", tmp_path, dirs_exist_ok=True)
    edit_index(tmp_path, "chunk", chunk_bytes=2385)
    with pytest.raises(SourceError, match=r"it has 2,386 bytes decompressed, and its index\.json says 2,385"):
        read_all(LitData(tmp_path, ["text"]))
    edit_index(tmp_path, "chunk", chunk_bytes=1 << 40)
    with pytest.raises(BufferTooSmallError, match=r"bytes decompressed, and a unit may take .*chunk_bytes of litdata"):
        read_all(LitData(tmp_path, ["text"]))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("config", {"item_loader": "ParquetLoader"}, r"index of Parquet files: ol\.Parquet reads these"),
        ("config", {"item_loader": "TemporalArrayLoader"}, "records of frames are cut by litData's own loader"),
        ("config", {"encryption": {"algorithm": "fernet", "level": "chunk"}}, "chunks are encrypted"),
        ("config", {"compression": "lzma"}, "compressed by 'lzma'; known is zstd"),
        ("config", {"compression": "zstd", "compression_level": "some"}, "compression_level 'some', which is not known"),
        ("config", {"data_format": None}, "it does not describe samples"),
        ("config", {"data_format": ["str", "str"]}, "its data_spec has 1 values and its data_format 2"),
        ("config", {"data_spec": "[2, {}]"}, "its data_spec has version 2"),
        ("chunk", {"chunk_size": -1}, r"chunk 0 of .*index\.json is damaged: it has numbers below 0"),
        ("chunk", {"chunk_size": "two"}, r"index\.json is not the index of a litData dataset: Expected `int`, got `str`"),
    ],
)
def test_an_index_that_makes_no_sense_is_an_error(tmp_path: Path, part: str, changes: dict[str, Any], message: str) -> None:
    write_chunk(tmp_path, {"a": "str"}, [{"a": b"x"}])
    edit_index(tmp_path, part, **changes)
    with pytest.raises(SourceError, match=message):
        LitData(tmp_path).units()


def test_an_index_that_was_cut_off_or_names_a_chunk_twice_or_is_of_mds_is_an_error(tmp_path: Path) -> None:
    write_chunk(tmp_path, {"a": "str"}, [{"a": b"x"}])
    text = (tmp_path / "index.json").read_text()
    index = json.loads(text)
    (tmp_path / "index.json").write_text(json.dumps({**index, "chunks": index["chunks"] * 2}))
    with pytest.raises(SourceError, match="twice: it would be read twice"):
        LitData(tmp_path).units()
    (tmp_path / "index.json").write_text(text[:-20])
    with pytest.raises(SourceError, match=r"index\.json is not the index of a litData dataset"):
        LitData(tmp_path).units()
    with pytest.raises(SourceError, match=r"none/index\.json does not exist"):
        LitData(tmp_path / "none").units()
    with pytest.raises(SourceError, match=r"is not the index of a litData dataset.*ol\.formats\.Mds reads it"):
        LitData(RECORDED / "mds" / "plain").units()


def test_datasets_with_other_columns_are_refused_unless_they_are_not_used(tmp_path: Path) -> None:
    write_chunk(tmp_path / "a", {"a": "str", "b": "int"}, [{"a": b"x", "b": bytes(8)}])
    write_chunk(tmp_path / "b", {"a": "str", "b": "str"}, [{"a": b"y", "b": b"z"}])
    folders = [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(SchemaError, match=r"has the column 'b' as string, but .* has it as int64; leave it out"):
        LitData(folders).units()
    assert read_all(LitData(folders, ["a"]))["a"].to_pylist() == ["x", "y"]


def test_a_chunk_without_a_table_among_tables_has_their_types(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "table", tmp_path, dirs_exist_ok=True)
    other = tmp_path / "other"
    turns = b"\x06\x01\x00\x00\x00\x02\x00\x00\x00\x04\x00\x00\x00role\x07\x00\x00\x00content"
    turns += b"\x11\x01\x00\x00\x00u\x11\x01\x00\x00\x00c"
    formats = {"text": "str", "number": "int", "turns": "json"}
    write_chunk(other, formats, [{"text": b"late", "number": struct.pack("<q", 7), "turns": turns}])
    index = json.loads((tmp_path / "index.json").read_text())
    (entry,) = json.loads((other / "index.json").read_text())["chunks"]
    shutil.copy(other / "chunk-0-0.bin", tmp_path / "chunk-0-9.bin")
    index["chunks"].append({**entry, "filename": "chunk-0-9.bin"})
    (tmp_path / "index.json").write_text(json.dumps(index))
    columns = ["number", "text", "turns"]
    found = read_all(LitData(tmp_path, columns)).to_pylist()[NUM_SAMPLES:]
    assert found == [{"number": 7, "text": "late", "turns": [{"content": "c", "role": "u"}]}]
    with pytest.raises(SchemaError, match=r"chunk-0-9\.bin has no table, unlike other chunks.*'extra'.*leave it out"):
        read_all(LitData(tmp_path))


def test_a_run_resumes_exactly_and_lineage_names_the_chunk_and_the_row(tmp_path: Path) -> None:
    documents = [np.arange(10 * row, 10 * row + 1 + row % 5, dtype="<i4") for row in range(60)]
    for part in range(3):
        rows = [{"tokens": tokens.tobytes()} for tokens in documents[20 * part : 20 * part + 20]]
        write_chunk(tmp_path / f"{part}", {"tokens": "no_header_numpy:2"}, rows)
    source = LitData([tmp_path / f"{part}" for part in range(3)])
    job = ol.Job(sources={"web": source}, batch=ol.Batch(tokens=32, sequence_length=16))
    ol.testing.assert_resumes_exactly(job, 6, 2)
    with ol.start(job, log=tmp_path / "log") as loader:
        client = loader.client(0, timeout_s=60)
        steps = [[list(map(int, micro["tokens"].ravel())) for micro in next(client)] for _ in range(4)]
    found = open_log(job, tmp_path / "log")
    for number, micros in enumerate(steps):
        traced = found.documents(number, 0)
        assert traced
        for document in traced:
            part = int(Path(document.file or "").parent.name)
            assert document.file == str(tmp_path / f"{part}" / "chunk-0-0.bin")
            assert document.file_row is not None
            tokens = micros[document.microbatch][document.place : document.place + document.tokens]
            assert tokens == documents[20 * part + document.file_row][document.start : document.stop].tolist()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # litData's own
def test_what_litdata_writes_and_reads_is_read_the_same(tmp_path: Path) -> None:
    reason = "make test-formats runs this"
    pytest.importorskip("litdata", reason=reason)
    from litdata import StreamingDataset  # pyright: ignore[reportMissingImports]
    from litdata.streaming.writer import BinaryWriter  # pyright: ignore[reportMissingImports]

    torch = pytest.importorskip("torch", reason=reason)
    for level in (None, "chunk", "batch", "sample"):
        folder = tmp_path / f"{level}"
        options = {} if level is None else {"compression": "zstd:3", "compression_level": level}
        writer = BinaryWriter(str(folder), chunk_bytes=50_000, **options)
        rng = np.random.default_rng(3)
        for row in range(700):
            tokens = torch.from_numpy(rng.integers(0, 1000, rng.integers(0, 40)))
            writer[row] = {"tokens": tokens, "text": f"row {row}", "grid": torch.full((2, row % 3), row)}
        writer.done()
        writer.merge()
        source = LitData(folder)
        ol.testing.assert_source_keeps_its_promises(source)
        table = read_all(source)
        rows = [
            {"tokens": item["tokens"].tolist(), "text": item["text"], "grid": item["grid"].tolist()}
            for item in StreamingDataset(str(folder))
        ]
        assert len(source.units()) > 1
        assert table.to_pylist() == rows
        # litData has put decompressed chunks in the places of those that were compressed as files.
        assert read_all(source).equals(table)
