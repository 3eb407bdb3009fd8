"""Megatron's .bin and .idx files, as megatron-core wrote them and as they should not be."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import overlord as ol
from overlord.errors import BufferTooSmallError, SchemaError, SourceError, SpecError
from overlord.formats import MegatronBin
from tests.sources.damage import rewrite
from tests.sources.recording import MEGATRON_TYPES, NUM_DOCUMENTS, RECORDED, megatron_sequences

FOLDER = RECORDED / "megatron"


def write_pair(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], code: int = 4, dtype: str = "int32") -> None:
    """An independent writer: the arrays of the index one after the other."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    sizes = [len(each) * each.dtype.itemsize for each in sequences]
    boundaries = np.cumsum([0, *(len(document) for document in documents)])
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(boundaries))
    index += np.array([len(each) for each in sequences], np.int32).tobytes()
    index += np.cumsum([0, *sizes])[:-1].astype(np.int64).tobytes() + boundaries.astype(np.int64).tobytes()
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(each.tobytes() for each in sequences))
    prefix.with_name(f"{prefix.name}.idx").write_bytes(index)


def read_all(source: ol.Source) -> pa.Table:
    return pa.concat_tables([source.read(unit) for unit in source.units()])


@pytest.mark.parametrize("dtype", MEGATRON_TYPES)
def test_every_type_of_token_is_read_as_megatron_wrote_it(dtype: str) -> None:
    source = MegatronBin(FOLDER / dtype, columns=("tokens", "sequence_lengths"), unit_bytes=40)
    ol.testing.assert_source_keeps_its_promises(source, most_units=100)
    table = read_all(source)
    documents = [megatron_sequences(d, dtype) for d in range(NUM_DOCUMENTS)]
    assert table.schema.field("tokens").type == pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))
    assert table["tokens"].to_pylist() == [[token for sequence in document for token in sequence] for document in documents]
    assert table["sequence_lengths"].to_pylist() == [[len(each) for each in sequences] for sequences in documents]


def test_a_row_is_a_sequence_on_request_and_modes_come_with_it() -> None:
    source = MegatronBin(FOLDER / "int32_modes.idx", columns=("modes", "tokens"), rows="sequences", unit_bytes=16)
    ol.testing.assert_source_keeps_its_promises(source, most_units=100)
    table = read_all(source)
    documents = [megatron_sequences(d, "int32") for d in range(NUM_DOCUMENTS)]
    assert table["tokens"].to_pylist() == [sequence for document in documents for sequence in document]
    assert table["modes"].to_pylist() == [[number] for document in documents for number in range(len(document))]
    both = read_all(MegatronBin(FOLDER / "int32_modes.bin", columns=("modes",)))
    assert both["modes"].to_pylist() == [list(range(len(document))) for document in documents]


def test_units_follow_the_bytes_and_a_long_document_is_whole(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[i] * 10] for i in range(20)] + [[[7] * 500]] + [[[1]]])
    units = MegatronBin(tmp_path / "a", unit_bytes=200).units()
    assert [unit.num_rows for unit in units] == [5, 5, 5, 5, 1, 1]
    assert [unit.num_bytes for unit in units] == [200, 200, 200, 200, 2000, 4]


def test_sequences_in_any_order_in_the_bin_are_found(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2, 3], [4]], [[5, 6]]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    at = 34 + 4 * 3
    assert np.frombuffer(index, np.int64, 3, at).tolist() == [0, 12, 16]
    index[at : at + 24] = np.array([12, 8, 0], np.int64).tobytes()
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(np.array([5, 6, 4, 1, 2, 3], np.int32).tobytes())
    assert read_all(MegatronBin(tmp_path / "a"))["tokens"].to_pylist() == [[1, 2, 3, 4], [5, 6]]


def test_columns_that_are_not_asked_for_are_not_read(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2]]])
    source = MegatronBin(tmp_path / "a", columns=("sequence_lengths",))
    (unit,) = source.units()
    (tmp_path / "a.bin").unlink()
    assert source.read(unit)["sequence_lengths"].to_pylist() == [[2]]


def damaged(prefix: Path, place: int, data: bytes) -> None:
    content = bytearray(prefix.with_name(f"{prefix.name}.idx").read_bytes())
    content[place : place + len(data)] = data
    prefix.with_name(f"{prefix.name}.idx").write_bytes(content)


@pytest.mark.parametrize(
    ("place", "data", "message"),
    [
        (0, b"X", r"a\.idx is not the index of a Megatron dataset \(it begins with b'XMIDIDX"),
        (9, b"\x02", r"a\.idx has version 2 of Megatron's index, and only version 1 is known"),
        (17, b"\x63", r"a\.idx is damaged: it names the type 99 of tokens, and there are 1 to 8; copy or write it again"),
        (18, b"\x09", r"a\.idx is damaged: it has 94 bytes, and 9 sequences in 2 documents take 166 \(or 175 with modes\)"),
        (34, b"\xff\xff\xff\xff", r"a\.idx is damaged: a sequence has a length or a place below 0"),
        (34 + 36, b"\x01", r"a\.idx is damaged: its document boundaries do not cover its sequences in order"),
    ],
)
def test_a_damaged_index_is_an_error_that_says_what_is_wrong(tmp_path: Path, place: int, data: bytes, message: str) -> None:
    write_pair(tmp_path / "a", [[[1, 2], [3]], [[4]]])
    damaged(tmp_path / "a", place, data)
    with pytest.raises(SourceError, match=message):
        MegatronBin(tmp_path / "a").units()


def test_a_bin_that_is_shorter_than_its_index_says_is_an_error(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2, 3]], [[4]]])
    (tmp_path / "a.bin").write_bytes(bytes(10))
    message = r"a\.bin has 10 bytes and its index, .*a\.idx, names tokens up to byte 16: it was cut off, or belongs to"
    with pytest.raises(SourceError, match=message):
        MegatronBin(tmp_path / "a").units()


def test_missing_files_and_files_that_change_are_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.idx does not exist"):
        MegatronBin(tmp_path / "none").units()
    write_pair(tmp_path / "a", [[[1, 2, 3]]])
    source = MegatronBin(tmp_path / "*.idx")
    (unit,) = source.units()
    (tmp_path / "a.bin").write_bytes(bytes(12))
    with pytest.raises(SourceError, match=r"a\.bin has changed since it was listed"):
        source.read(unit)
    (tmp_path / "a.bin").unlink()
    with pytest.raises(SourceError, match=r"a\.bin does not exist"):
        source.units()
    (tmp_path / "b.idx").write_bytes(b"MMIDIDX\0\0")
    (tmp_path / "b.bin").touch()
    with pytest.raises(SourceError, match=r"b\.idx is damaged: it has 9 bytes, less than its header"):
        MegatronBin(tmp_path / "b").units()


def test_an_index_without_documents_is_read_by_sequences(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2], [3]]])
    content = bytearray((tmp_path / "a.idx").read_bytes()[:-8])
    content[26:34] = struct.pack("<Q", 1)
    (tmp_path / "a.idx").write_bytes(content)
    with pytest.raises(SourceError, match=r"a\.idx has 2 sequences and no document, .*rows='sequences' reads each"):
        MegatronBin(tmp_path / "a").units()
    assert read_all(MegatronBin(tmp_path / "a", rows="sequences"))["tokens"].to_pylist() == [[1, 2], [3]]


def test_pairs_of_two_types_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1]]])
    write_pair(tmp_path / "b", [[[1]]], 8, "uint16")
    with pytest.raises(SchemaError, match=r"b\.bin has the column 'tokens' as list<item: uint16>, but .*a\.bin has it as"):
        MegatronBin(tmp_path / "{a,b}").units()


def test_wrong_declarations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has the columns tokens, sequence_lengths, modes, not 'text'"):
        MegatronBin("a", columns=("text",))
    with pytest.raises(SpecError, match="rows must be 'documents' or 'sequences', not 'lines'"):
        MegatronBin("a", rows="lines")  # pyright: ignore[reportArgumentType]
    write_pair(tmp_path / "a", [[[1]]])
    with pytest.raises(SchemaError, match=r"a\.bin has no column 'modes'; it has \('tokens', 'sequence_lengths'\)"):
        MegatronBin(tmp_path / "a", columns=("modes",)).units()
    write_pair(tmp_path / "long", [[range(9 << 20)]])
    source = MegatronBin(tmp_path / "long", buffer_bytes=1)
    with pytest.raises(BufferTooSmallError, match=r"long\.bin has 37,748,736 bytes of tokens.*a document is never cut"):
        source.read(source.units()[0])


def test_an_index_that_rots_after_listing_makes_no_wild_reads(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2, 3]], [[4]]])
    source = MegatronBin(tmp_path / "a")
    (unit,) = source.units()
    content = bytearray((tmp_path / "a.idx").read_bytes())
    content[34:38] = struct.pack("<i", 1 << 30)
    rewrite(tmp_path / "a.idx", bytes(content))
    with pytest.raises(SourceError, match=r"a\.idx is damaged: it names other sequences than when it was listed"):
        source.read(unit)
